"""MixedDataset: what it reads, how it draws, and what it refuses."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from semix.data import stored_images
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.images import encode_image, load_square
from semix.data.root import Root
from tests import handmade
from tests.handmade import committed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
COUNT = 4  # images in a series


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Root:
    """Three shards of five series of four images."""
    return handmade.make_root(tmp_path_factory.mktemp("mixed"), 3, 5, count=COUNT)


@pytest.fixture(params=["in memory", "from the shards", "from the shards by threads"])
def mixed(root, request, monkeypatch) -> MixedDataset:
    if request.param == "from the shards by threads":  # otherwise one thread decodes small images
        monkeypatch.setattr(stored_images, "MIN_PIXELS_FOR_THREADS", 0)
    limit = 2**30 if request.param == "in memory" else 0
    dataset = MixedDataset(root.url, memory_limit=limit, threads=2)
    assert dataset.in_memory == (limit > 0)
    return dataset


def stored(group: int) -> torch.Tensor:
    return torch.from_numpy(handmade.pixels(group, COUNT, 8))


def draw(mixed: MixedDataset, targets: torch.Tensor, **options):
    return mixed.draw(targets, rng=torch.Generator().manual_seed(3), **options)


def test_a_file_url_is_read_in_place(root, tmp_path, monkeypatch):
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "cache"))
    mixed = MixedDataset(f"file://{root.url}", memory_limit=0)
    assert torch.equal(mixed.images[14, 1], stored(14)[1])
    assert not (tmp_path / "cache" / "shards").exists()


@pytest.mark.parametrize("memory_limit", [0, 2**30])
def test_images_are_scaled_as_pictures_are(root, tmp_path, memory_limit):
    mixed = MixedDataset(root.url, side=5, memory_limit=memory_limit)
    assert mixed.images.shape == (15, COUNT, 5, 5, 3)
    Image.fromarray(stored(7)[2].numpy()).save(tmp_path / "same.png")
    assert torch.equal(mixed.images[7, 2], torch.tensor(load_square(tmp_path / "same.png", 5)))
    same = MixedDataset(root.url, side=8, memory_limit=memory_limit)
    assert torch.equal(same.images[7, 2], stored(7)[2])


def test_every_group_is_there_with_its_own_pixels_and_labels(mixed):
    assert (len(mixed), mixed.num_classes, mixed.shard_sizes) == (15, 3, [5, 5, 5])
    assert mixed.images.shape == (15, COUNT, 8, 8, 3)
    assert mixed.numbers.tolist() == list(range(15))
    for group, sample in enumerate(mixed[g] for g in range(15)):
        record = handmade.record(group, COUNT)
        assert torch.equal(sample["images"], stored(group))
        expected = torch.zeros(COUNT, 3)
        for position, label in enumerate(record["labels"]):
            for target, probability in label:
                expected[position, target] = probability
        torch.testing.assert_close(sample["labels"], expected, rtol=0, atol=0)
        torch.testing.assert_close(mixed.labels[group], expected, rtol=0, atol=0)
        assert mixed.records([group])[0].names == record["names"]
        assert mixed.classes[group].tolist() == record["classes"]
        torch.testing.assert_close(mixed.weights[group], torch.tensor(record["weights"]))


def test_both_ways_of_reading_draw_the_same(root):
    targets = torch.tensor([0, 1, 2, 2, 1] * 20)
    for matched in (True, False):
        memory, shards = (
            draw(MixedDataset(root.url, memory_limit=limit), targets, class_matched=matched)
            for limit in (2**30, 0)
        )
        assert torch.equal(memory[0], shards[0])
        assert torch.equal(memory[1], shards[1])


def test_a_draw_is_the_papers(mixed):
    """As by a plain loop: sort a series by the class's label, take its end and an inner image."""
    targets = torch.tensor([0, 1, 2] * 50)
    images, labels = draw(mixed, targets)
    assert (images.shape, labels.shape) == ((150, 2, 8, 8, 3), (150, 2, 3))
    group_counts, position_counts = Counter(), Counter()
    for target, pair, label in zip(targets.tolist(), images, labels, strict=True):
        group = next(g for g in range(15) if (stored(g) == pair[0]).flatten(1).all(1).any())
        assert target in mixed.classes[group]
        certainty = mixed.labels[group, :, target]
        order = sorted(range(COUNT), key=lambda a: -certainty[a])
        assert torch.equal(pair[0], stored(group)[order[0]])
        inside = next(a for a in range(COUNT) if torch.equal(pair[1], stored(group)[a]))
        assert inside in order[1:-1]
        assert torch.equal(label, mixed.labels[group, [order[0], inside]])
        group_counts[target, group] += 1
        position_counts[inside] += 1
    # 10 groups contain each class, and each of two inner images is as likely as the other.
    assert len(group_counts) == 30
    assert 50 < position_counts[1] < 100


def test_a_class_without_a_group_is_named(tmp_path):
    cat, dog = handmade.record(0)["classes"], handmade.NAMES[:2]
    samples = [handmade.sample(group, classes=cat, names=dog) for group in (0, 1)]
    mixed = MixedDataset(handmade.root_of(tmp_path, samples, handmade.NAMES).url)
    with pytest.raises(InputError, match=r"url = .*: has no group of class 'fox'"):
        draw(mixed, torch.tensor([0, 2]))


def test_weights_can_be_sharpened_anew(root):
    mixed = MixedDataset(root.url, scale=4.0)
    expected = torch.sigmoid(4 * (mixed.weights[2] - 0.5))
    assert mixed.classes[2].tolist() == [1, 2]
    torch.testing.assert_close(mixed.labels[2, :, 1], expected)
    torch.testing.assert_close(mixed.labels[2].sum(-1), torch.ones(COUNT))


def test_labels_can_be_the_mixing_ratio(root):
    stored = MixedDataset(root.url, scale=4.0)
    mixed = MixedDataset(root.url, rule="mixing_ratio")
    first, second = mixed.classes[2].tolist()
    torch.testing.assert_close(mixed.labels[2, :, first], mixed.alphas[2])
    torch.testing.assert_close(mixed.labels[2, :, second], 1 - mixed.alphas[2])
    torch.testing.assert_close(mixed.labels.sum(-1), torch.ones(len(mixed), COUNT))
    assert not torch.equal(mixed.labels, stored.labels)
    assert torch.equal(mixed.weights, stored.weights)
    with pytest.raises(InputError, match="rule = mixing_ratio: takes no stored labels"):
        MixedDataset(root.url, rule="mixing_ratio", scale=4.0)


def test_an_index_stays_what_it_was_while_the_root_grows(tmp_path):
    root = handmade.make_root(tmp_path, 3, 3)
    for name in ("shards/0000/0000002.json", "index/0.json"):
        root.store.delete(name)
    assert Root(root.url).write_index() == "index/0.json"
    before = MixedDataset(root.url)
    tar = handmade.tar_of(*(handmade.sample(group) for group in (6, 7, 8)))
    handmade.put_shard(root.store, 2, tar, first=6, groups=3, count=2)
    uncommitted = MixedDataset(root.url)
    assert (uncommitted.digest, len(uncommitted)) == (before.digest, 6)
    assert Root(root.url).write_index() == "index/1.json"
    assert len(MixedDataset(root.url)) == 9
    pinned = MixedDataset(root.url, index="index/0.json")
    assert (pinned.digest, pinned.series_digest) == (before.digest, before.series_digest)
    assert torch.equal(pinned.images, before.images)
    with pytest.raises(
        InputError,
        match=r"index = index/7\.json: is not in .*, which has: index/0.json, index/1.json",
    ):
        MixedDataset(root.url, index="index/7.json")


def test_a_root_without_an_index_is_refused(tmp_path):
    root = handmade.make_root(tmp_path, 1, 1)
    root.store.delete("index/0.json")
    with pytest.raises(InputError, match=r"url = .* is not finished; run `semix resume`"):
        MixedDataset(root.url)


def test_exclusion_leaves_groups_out_and_keeps_the_numbers_of_the_rest(tmp_path):
    samples = [handmade.sample(group, COUNT) for group in range(6)]
    samples[4] = handmade.sample(4, COUNT, weights=[0.9, 0.6, 0.4, 0.1])  # runs backwards
    url = handmade.root_of(tmp_path, samples, handmade.NAMES).url
    complete = MixedDataset(url)
    for limit in (2**30, 0):
        mixed = MixedDataset(url, exclude=Exclusion(min_correlation=0.0), memory_limit=limit)
        assert mixed.numbers.tolist() == [0, 1, 2, 3, 5]
        assert mixed.shard_sizes == [5]
        assert torch.equal(mixed[4]["images"], stored(5))
        assert torch.equal(mixed.labels, complete.labels[[0, 1, 2, 3, 5]])
        assert mixed.digest == complete.digest
        assert mixed.series_digest != complete.series_digest


def relabel(root: Root, shards: list[int]) -> str:
    """Commit labels that trust nothing: all weight on the first class; returns the digest."""
    labels = handmade.label_set(root)
    for shard in shards:
        groups = []
        for group in range(5 * shard, 5 * shard + 5):
            first = handmade.record(group)["classes"][0]
            fields = {"weights": [1.0] * COUNT, "labels": [[[first, 1.0]]] * COUNT}
            groups.append(handmade.labels_of(group, **fields))
        labels.commit(shard, images=committed(root)[shard].sha256, groups=groups)
    return labels.digest


def test_a_label_set_takes_the_place_of_the_labels(tmp_path):
    root = handmade.make_root(tmp_path, 2, 5, count=COUNT)
    digest = relabel(root, [0, 1])
    mixed = MixedDataset(root.url, labels=digest[:8])
    assert mixed.label_digest == digest
    assert torch.equal(mixed.labels.argmax(-1), mixed.classes[:, :1].expand(-1, COUNT))
    assert torch.equal(mixed.weights, torch.ones(10, COUNT))
    assert MixedDataset(root.url).label_digest is None


def test_a_label_set_that_lacks_a_shard_or_is_of_other_images_is_refused(tmp_path):
    root = handmade.make_root(tmp_path, 2, 5, count=COUNT)
    digest = relabel(root, [1])
    with pytest.raises(InputError, match=r"no labels for 1 shards of the index, shard 0 first"):
        MixedDataset(root.url, labels=digest)
    name = f"labels/{digest}/0000/0000000.json"
    relabel(root, [0])
    record = json.loads(root.store.get(name))
    root.store.put(name, json.dumps(record | {"images": "0" * 64}).encode())
    with pytest.raises(InputError, match=r"labels = .*run `semix relabel"):
        MixedDataset(root.url, labels=digest)
    with pytest.raises(InputError, match=r"labels = 123456: is no label set here"):
        MixedDataset(root.url, labels="123456")


def tar_path(root: Root, shard: int) -> Path:
    return Path(root.url, committed(root)[shard].tar)


def test_a_damaged_shard_is_named_when_it_is_opened(tmp_path):
    root = handmade.make_root(tmp_path, 2, 3)
    path = tar_path(root, 1)
    tar = path.read_bytes()
    path.write_bytes(tar[:-512])
    with pytest.raises(ValueError, match=rf"{path.name}: .* bytes, its record says .*semix verify"):
        MixedDataset(root.url)
    path.write_bytes(tar[:600] + b"\xff" + tar[601:])  # inside the first image
    for limit in (0, 2**30):
        with pytest.raises(ValueError, match=rf"{path.name}: does not have .*semix verify --full"):
            MixedDataset(root.url, memory_limit=limit)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name} is not in .*semix verify"):
        MixedDataset(root.url)


def test_hostile_shards_are_refused_by_name(tmp_path):
    def check_rejected(name: str, *samples, message: str, image: tuple[int, int] = (0, 0)) -> None:
        root = handmade.make_root(tmp_path / name, 2, 2, tars=[handmade.tar_of(*samples)])
        tar = tar_path(root, 0).name
        with pytest.raises(ValueError, match=rf"{tar}: .*{message}"):
            MixedDataset(root.url, memory_limit=0).images[image]

    valid = [handmade.sample(group) for group in (0, 1)]
    check_rejected("too few", valid[0], message="1 groups, its index says 2")
    other_series = [handmade.sample(group) for group in (4, 5)]
    check_rejected("others", *other_series, message="holds group 4 where 0 belongs")
    longer = [handmade.sample(group, 3) for group in (0, 1)]
    check_rejected("longer", *longer, message="3 images per group, the plan has 2")
    large = handmade.sample(1)
    large.images[1] = encode_image(handmade.pixels(0, 1, 64)[0], "webp")
    check_rejected("large", valid[0], large, message="group 1, image 1: .*64", image=(1, 1))
    small = handmade.sample(1, side=4)
    check_rejected(
        "small", valid[0], small, message="group 1, image 0: 4x4 pixels, .* 8x8", image=(1, 0)
    )
    classes = handmade.sample(1, classes=[0, 9], labels=[[[9, 1.0]], [[0, 1.0]]])
    check_rejected("classes", valid[0], classes, message="a label names class 9, the plan has 3")
    three = {"classes": [0, 1, 2], "names": ["a", "b", "c"], "mixture": [[0.0, 0.5, 0.5]] * 2}
    mixed = handmade.sample(1, **three)
    check_rejected("three", valid[0], mixed, message="series of 2 and of 3 classes")


def test_images_are_read_where_indexing_has_them(mixed):
    groups, positions = torch.tensor([[3], [-1]]), torch.tensor([0, -1])
    images, labels = mixed.read(groups, positions)
    for row, group in enumerate((3, 14)):
        for column, position in enumerate((0, COUNT - 1)):
            assert torch.equal(images[row, column], stored(group)[position])
            assert torch.equal(labels[row, column], mixed[group]["labels"][position])
    assert torch.equal(mixed[-1]["images"], stored(14))
    for group, position in ((15, 0), (0, COUNT), (-16, 0), (0, -COUNT - 1)):
        with pytest.raises(IndexError):
            mixed.read(torch.tensor([group]), torch.tensor([position]))


def load_all(loader: DataLoader) -> dict[str, torch.Tensor]:
    """All samples of a loader of images, in the order of the dataset."""
    batches = list(loader)
    columns = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    order = (columns["group"] * COUNT + columns["position"]).argsort()
    return {key: values[order] for key, values in columns.items()}


@pytest.mark.parametrize("whole", [False, True])
def test_a_loader_shows_every_image_once_with_its_own_label_and_numbers(mixed, whole):
    images = mixed.by_image()
    if whole:
        batches = BatchSampler(RandomSampler(images), 7, drop_last=False)
        columns = load_all(DataLoader(images, batch_size=None, sampler=batches))
    else:
        columns = load_all(DataLoader(images, batch_size=7, shuffle=True))
    stored_images = torch.stack([stored(group) for group in range(15)]).flatten(0, 1)
    assert torch.equal(columns["image"], stored_images)
    assert torch.equal(columns["label"], mixed.labels.flatten(0, 1))
    assert columns["group"].tolist() == [group for group in range(15) for _ in range(COUNT)]
    assert columns["position"].tolist() == list(range(COUNT)) * 15
    for key, values in (("alpha", mixed.alphas), ("weight", mixed.weights)):
        torch.testing.assert_close(columns[key], values.flatten(), rtol=0, atol=0)  # float32


def test_a_single_image_is_a_sample(mixed):
    images = mixed.by_image()
    assert len(images) == 15 * COUNT
    sample = images[-2]
    assert torch.equal(sample["image"], stored(14)[COUNT - 2])
    assert torch.equal(sample["label"], mixed.labels[14, COUNT - 2])
    assert (int(sample["group"]), int(sample["position"])) == (14, COUNT - 2)
    with pytest.raises(IndexError):
        images[len(images)]


def test_a_loader_of_series(mixed):
    batch = next(iter(DataLoader(mixed, batch_size=3, sampler=[4, 0, 2])))
    assert torch.equal(batch["images"], torch.stack([stored(group) for group in (4, 0, 2)]))
    assert torch.equal(batch["labels"], mixed.labels[[4, 0, 2]])
    assert batch["group"].tolist() == [4, 0, 2]


@pytest.mark.process
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_may_be_forked_or_spawned(mixed, context):
    options = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": context}
    columns = load_all(DataLoader(mixed.by_image(), shuffle=True, **options))
    assert torch.equal(columns["image"][9], stored(2)[1])
    assert torch.equal(columns["label"], mixed.labels.flatten(0, 1))
    series = torch.cat([batch["images"] for batch in DataLoader(mixed, **options)])
    assert torch.equal(series, torch.stack([stored(group) for group in range(15)]))


@pytest.mark.process
def test_an_error_in_a_worker_names_the_shard(tmp_path):
    root = handmade.make_root(tmp_path, 2, 2)
    images = MixedDataset(root.url, memory_limit=0).by_image()
    path = tar_path(root, 1)
    content = bytearray(path.read_bytes())
    content[600] ^= 0xFF  # inside the first image
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path.name}: group 2, image 0: .*semix verify --full"):
        list(DataLoader(images, batch_size=2, num_workers=2))


def test_records_are_those_of_the_series_that_remain(tmp_path):
    """Positions are no group numbers where an exclusion leaves series out."""
    backwards = {1: {"weights": [0.9, 0.6, 0.4, 0.1]}}
    samples = [handmade.sample(group, 4, **backwards.get(group, {})) for group in range(4)]
    url = handmade.root_of(tmp_path, samples, handmade.NAMES).url
    mixed = MixedDataset(url, exclude=Exclusion(monotone=True))
    assert [record.group for record in mixed.records([2, 0, 1])] == [3, 0, 2]
