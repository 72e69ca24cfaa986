"""One shard: series from one noise each, labels of stored features, the same bytes again."""

import hashlib
import io
import json
import threading
from importlib.metadata import version
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import expit, softmax

from semix.data.contact_sheet import read_series
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.formats import PROTOTYPES, record_name, tar_name
from semix.data.images import decode_image, encode_image
from semix.data.root import Root
from semix.data.store import Store
from semix.data.tar import read_shard, write_tar
from semix.data.verify import verify
from semix.pipeline.annotate import simplex_projection
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.noise import initial_noise
from semix.pipeline.plan import MixGroup
from semix.pipeline.prompts import prompts
from semix.pipeline.prototypes import read_prototypes
from semix.pipeline.regeneration import compare, regenerate, same_pixels
from semix.pipeline.root import extend_root
from semix.pipeline.shard import (
    Models,
    batches,
    conditions,
    degenerate,
    encode_and_decode,
    encode_series,
    generate_shard,
    load_models,
    mix_groups,
    resized,
)
from tests.command import semix
from tests.handmade import committed
from tests.pipeline.roots import (
    altered,
    contents,
    create_root,
    features,
    made,
    plan_of,
    samples,
    tars,
)


@pytest.fixture(scope="module")
def models(built) -> Models:
    return load_models(plan_of(built), built.store.get(PROTOTYPES), device="cpu")


# What a finished root holds.


def test_a_finished_root_is_complete_and_verifies(built):
    assert built.missing() == []
    assert list(verify(built, full=True)) == []
    state = built.progress()
    assert (state.done, state.groups_done, state.images_done, state.failed) == (8, 45, 180, 0)
    assert built.store.list("leases") == []


def test_a_shard_holds_what_the_plan_says(built):
    plan, series = plan_of(built), samples(built)
    assert list(series) == list(range(45))
    assert committed(built)[7].group_numbers == [42, 43, 44]
    for index, sample in series.items():
        group, record = plan.group(index), sample.record
        assert record.classes == [group.first, group.second]
        assert record.names == [plan.class_names[k] for k in group.classes]
        assert record.seed == group.seed
        assert record.alphas == [0.0, 1 / 3, 2 / 3, 1.0]
        assert decode_image(sample.images[0]).shape == (32, 32, 3)


def test_the_tar_name_carries_its_hash(built):
    for name, sha256 in tars(built).items():
        assert hashlib.sha256(built.store.get(name)).hexdigest() == sha256
        assert name.endswith(f"-{sha256[:8]}.tar")


def test_labels_are_the_sharpened_weights_of_the_stored_features(built):
    vectors, facts = read_prototypes(built)
    record = samples(built)[0].record
    first, second = (vectors[k] for k in record.classes)
    axis = first - second
    weights = (features(built, 0)["features"][0].float() - second) @ axis / (axis @ axis)
    torch.testing.assert_close(weights, torch.tensor(record.weights), atol=0.01, rtol=0.01)
    for weight, label in zip(record.weights, record.labels, strict=True):
        assert [k for k, _ in label] == record.classes
        expected = expit(float(facts["scale"]) * (weight - 0.5))
        np.testing.assert_allclose([p for _, p in label], [expected, 1 - expected], atol=1e-6)


@pytest.mark.parametrize("image_format", ["webp", "jpg"])
def test_clip_sees_the_pixels_that_are_stored(image_format, hasty_config, models, tmp_path):
    config = altered(hasty_config, f"shards.image_format={image_format}")
    root = made(config, tmp_path / "root", "--shards", "3")
    images = [decode_image(image) for sample in samples(root).values() for image in sample.images]
    again = models.annotator.encode(torch.from_numpy(np.stack(images)))["features"]
    stored = features(root, 3)["features"].flatten(0, 1).float()
    torch.testing.assert_close(again, stored, atol=5e-3, rtol=5e-3)


def test_the_same_shard_made_again_has_the_same_bytes(built, root, models):
    plan = plan_of(root)
    for shard in (7, 2):
        root.discard(shard)
        generate_shard(plan.shard(shard), plan, models=models, root=root).publish()
    assert tars(root) == tars(built)


def test_publishing_is_no_part_of_a_shards_wall_seconds_and_waiting_for_it_is(
    root, models, monkeypatch
):
    plan, now = plan_of(root), [0.0]
    root.discard(7)
    publish = Store.publish

    def slow(self, partial, name):
        now[0] += 7
        publish(self, partial, name)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("semix.pipeline.shard_writer.time", clock)
    monkeypatch.setattr(Store, "publish", slow)
    made = generate_shard(plan.shard(7), plan, models=models, root=root)
    now[0] += 5  # until the shard before is published
    record = made.publish()
    assert record.wall_seconds == record.seconds["stall"] == 5
    assert record.seconds["write"] == 7


# Batches of series.


PAIR = ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0))
GROUPS = [MixGroup(7, (0, 1), 11, PAIR), MixGroup(9, (1, 2), 12, PAIR)]
EMBEDDINGS = Conditioning(torch.tensor([[[1.0]], [[10.0]], [[100.0]]]))


class Recorder:
    """A generator whose images are noise plus conditioning, so that its inputs can be read."""

    latent_shape = (1, 2, 2)
    device = torch.device("cpu")
    broken: float | None = None  # the latents of image 1 of the second series

    def sample(self, noise, condition):
        latents = noise + condition.tokens[:, :, :, None]
        if self.broken is not None:
            latents[4] = self.broken
        return latents

    def decode(self, latents):
        rounded = latents.nan_to_num(0).round().clamp(0, 255).to(torch.uint8)
        return rounded.permute(0, 2, 3, 1).expand(-1, -1, -1, 3)


def mixed(generator: Recorder, batch_groups: int) -> tuple[torch.Tensor, dict[int, str]]:
    noise = 3 * initial_noise([group.seed for group in GROUPS], generator.latent_shape)
    return mix_groups(
        GROUPS, noise, embeddings=EMBEDDINGS, generator=generator, batch_groups=batch_groups
    )


def test_rows_come_series_by_series_each_with_its_own_mixture():
    result = conditions(GROUPS, EMBEDDINGS, "linear").tokens.flatten()
    torch.testing.assert_close(result, torch.tensor([10, 5.5, 1, 100, 55, 10]))


def test_padding_is_cut_off_again():
    padded, faults = mixed(Recorder(), 5)
    assert torch.equal(padded, mixed(Recorder(), 2)[0])
    assert (padded.shape, faults) == ((2, 3, 2, 2, 3), {})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "latents 1 has NaN or infinite values; try another dtype"),
        (float("-inf"), "latents 1 has NaN or infinite values; try another dtype"),
        (0.5, "latents 1 is one flat value (0.5)"),
    ],
)
def test_broken_latents_are_a_fault_of_their_series_alone(value, reason):
    generator = Recorder()
    generator.broken = value
    images, faults = mixed(generator, 2)
    assert faults == {1: reason}
    assert torch.equal(images[0], mixed(Recorder(), 2)[0][0])


def test_the_first_image_of_one_colour_is_named():
    images = torch.randint(255, (6, 4, 4, 3), generator=torch.Generator().manual_seed(0))
    images[2] = 0
    images[4:] = 7
    result = degenerate(images.to(torch.uint8), 3, "image")
    assert result == {0: "image 2 is one flat value (0)", 1: "image 1 is one flat value (7)"}


def test_what_is_wrong_with_padding_alone_harms_nobody():
    class Padded(Recorder):
        def sample(self, noise, condition):
            latents = super().sample(noise, condition)
            latents[6:] = torch.nan
            return latents

    assert mixed(Padded(), 3)[1] == {}


def test_all_images_of_a_group_start_from_one_noise(built, models, monkeypatch):
    calls, sample = [], models.generator.sample
    monkeypatch.setattr(
        models.generator, "sample", lambda n, c: (calls.append((n, c)), sample(n, c))[1]
    )
    groups = [plan_of(built).group(index) for index in (44, 3)]
    options = {"embeddings": models.embeddings, "generator": models.generator, "batch_groups": 4}
    images, faults = mix_groups(groups, models.noise(groups)[0], **options)
    ((noise, condition),) = calls
    assert (images.shape, faults) == ((2, 4, 32, 32, 3), {})
    assert len(noise) == 16
    rows = noise.view(4, 4, *noise.shape[1:])
    assert all(torch.equal(rows[g, 0], rows[g, a]) for g in range(4) for a in range(4))
    assert not torch.equal(rows[0, 0], rows[1, 0])
    torch.testing.assert_close(condition.tokens[0], models.embeddings.tokens[groups[0].second])
    torch.testing.assert_close(condition.tokens[3], models.embeddings.tokens[groups[0].first])


def test_the_pipeline_itself_makes_the_same_image(built, models):
    """Against diffusers called as its documentation shows, with text prompts."""
    plan = plan_of(built)
    noise = initial_noise([plan.group(0).seed], models.generator.latent_shape)
    actual = models.generator.decode(models.generator.sample(noise, models.embeddings[:1])).numpy()
    expected = models.generator.denoiser.pipeline(
        prompts(plan.config.generator.prompt, plan.class_names[:1]),
        latents=noise,
        num_inference_steps=3,
        guidance_scale=2.0,
        output_type="np",
    ).images
    assert np.abs(actual[0].astype(int) - np.round(expected[0] * 255)).max() <= 1


def test_scaling_down_takes_the_mean_of_what_a_pixel_covers():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (2, 3, 32, 32, 3), generator=generator, dtype=torch.uint8)
    small = resized(images, 8)
    assert small.shape == (2, 3, 8, 8, 3)
    for image, scaled in zip(images.flatten(0, 1), small.flatten(0, 1), strict=True):
        pillow = Image.fromarray(image.numpy()).resize((8, 8), Image.Resampling.BOX)
        # Pillow rounds after each of its two passes.
        assert np.abs(scaled.numpy().astype(int) - np.array(pillow)).max() <= 1
    blocks = images.double().unflatten(2, (8, 4)).unflatten(4, (8, 4))
    torch.testing.assert_close(small, blocks.mean((3, 5)).round().to(torch.uint8), atol=0, rtol=0)


@pytest.mark.parametrize("size", [None, 8])
def test_no_size_or_the_same_leaves_the_pixels(size):
    images = torch.zeros(1, 1, 8, 8, 3, dtype=torch.uint8)
    assert resized(images, size) is images


# Series other than evenly mixed pairs.


@pytest.fixture
def build(hasty_config, tmp_path):
    """build(*overrides): an indexed root of three series."""

    def run(*overrides: str, name: str = "root") -> Root:
        few = "mixing.pairs={kind: sampled, count: 3}"
        root = made(altered(hasty_config, few, *overrides), tmp_path / name)
        root.write_index()
        return root

    return run


def test_three_classes_are_labelled_on_their_simplex(build):
    three = ("mixing.classes=3", "mixing.grid=random", "mixing.alphas=5", "annotation.rule=simplex")
    root = build(*three, "mixing.pairs={kind: sampled, count: 7}")
    vectors, _ = read_prototypes(root)
    stored = torch.cat([features(root, shard)["features"] for shard in root.done()]).float()
    for rows, sample in zip(stored, samples(root).values(), strict=True):
        record = sample.record
        (expected,) = simplex_projection(rows[None], vectors[record.classes][None])
        labels = torch.tensor([[p for _, p in row] for row in record.labels])
        torch.testing.assert_close(labels, expected, atol=0.02, rtol=0)
        assert [[k for k, _ in row] for row in record.labels] == [record.classes] * 5
        assert record.mixture[:3] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
        assert record.alphas == [row[0] for row in record.mixture]
        assert record.weights == [row[0] for row in record.coordinates]
    mixed = MixedDataset(root.url)
    assert (mixed.classes.shape, mixed.mixtures.shape) == ((7, 3), (7, 5, 3))
    torch.testing.assert_close(mixed.labels.sum(-1), torch.ones(7, 5))
    targets = mixed.classes[:, 2]
    images, labels = mixed.draw(targets, rng=torch.Generator().manual_seed(0))
    assert images.shape == (7, 2, 32, 32, 3)
    end, inner = (labels[:, column].gather(1, targets[:, None]) for column in range(2))
    assert (end >= inner).all()
    with pytest.raises(InputError, match=r"scale = 4.0: .*mixes 3 classes"):
        MixedDataset(root.url, scale=4.0)


def test_similarity_names_every_class_of_the_data(build):
    root = build("annotation.rule=similarity", "annotation.temperature=0.1")
    vectors, _ = read_prototypes(root)
    rows = zip(features(root, 0)["features"].float(), samples(root).values(), strict=True)
    for stored, sample in rows:
        unit = stored / stored.norm(dim=1, keepdim=True)
        cosine = unit @ (vectors / vectors.norm(dim=1, keepdim=True)).T
        labels = np.array([[p for _, p in row] for row in sample.record.labels])
        np.testing.assert_allclose(labels, softmax(cosine / 0.1, axis=1), atol=0.01)
        assert [[k for k, _ in row] for row in sample.record.labels] == [list(range(10))] * 4
        assert len(sample.record.weights) == 4


def test_the_mixing_ratio_is_the_label_and_the_weight_stays_clips(build):
    for sample in samples(build("annotation.rule=mixing_ratio")).values():
        record = sample.record
        first, second = record.classes
        assert record.labels == [[(first, a), (second, 1 - a)] for a in record.alphas]
        assert record.weights != record.alphas


def test_three_classes_want_a_rule_that_knows_three(hasty_config):
    overrides = ("mixing.classes=3", "mixing.grid=random", "mixing.alphas=5")
    message = "`mixing.classes` above 2 wants `annotation.rule: simplex`, similarity or mixing_rat"
    with pytest.raises(InputError, match=message):
        altered(hasty_config, *overrides)
    for rule in ("simplex", "similarity", "mixing_ratio"):
        config = altered(hasty_config, *overrides, f"annotation.rule={rule}")
        assert config.annotation.rule == rule


def test_random_alphas_differ_from_series_to_series(build):
    pairs = "mixing.pairs={kind: named, names: [[one, two], [six, two]]}"
    root = build("mixing.grid=random", pairs)
    first, second = (sample.record for sample in samples(root).values())
    assert (first.names, second.names) == (["one", "two"], ["two", "six"])
    assert first.alphas[1:-1] != second.alphas[1:-1]
    assert MixedDataset(root.url).alphas.tolist()[0] == pytest.approx(first.alphas)


def test_smaller_images_are_stored_and_labelled(build):
    assert MixedDataset(build("shards.store_size=16").url).images.shape[2:] == (16, 16, 3)


def test_a_spherical_path_makes_other_images_between_the_same_ends(build):
    modes = ("spherical", "linear")
    urls = [build(f"mixing.interpolation={mode}", name=mode).url for mode in modes]
    arc, line = (MixedDataset(url).images for url in urls)
    assert torch.equal(arc[:, [0, -1]], line[:, [0, -1]])
    assert not torch.equal(arc[:, 1:-1], line[:, 1:-1])


# A series made anew.


def numbers(root: Root, group: int) -> list[int]:
    """The groups that are generated with this one."""
    plan = plan_of(root)
    shard_batches = batches(plan.shard(plan.layout.shard_of(group)), plan)
    return next(n for n in ([g.index for g in batch] for batch in shard_batches) if group in n)


@pytest.mark.parametrize("group", [0, 3, 5, 44])
def test_a_series_made_anew_is_the_one_that_is_stored(built, group):
    before = contents(built)
    again = regenerate(built, group, device="cpu")
    assert [again] == read_series(built, [group])
    assert contents(built) == before


def test_other_series_have_other_pixels(built):
    result = read_series(built, [0, 22, 44])
    assert not any(same_pixels(*pair) for pair in combinations(result, 2))


def test_a_series_of_a_missing_shard_can_be_looked_at(root):
    root.discard(1)
    assert numbers(root, 11) == [10, 11]
    assert regenerate(root, 11, device="cpu").record.group == 11
    assert root.missing() == [1]
    with pytest.raises(InputError, match=r"group = 11: is not made yet; run .* --shards 1`"):
        read_series(root, [0, 11])


def test_batches_start_anew_with_every_shard_even_behind_a_short_one(root):
    longer = extend_root(root, 2)
    assert numbers(longer, 44) == [42, 43, 44]
    assert numbers(longer, 45) == [45, 46, 47, 48]
    assert numbers(longer, 50) == [49, 50]


def test_series_of_a_root_are_compared_with_those_made_anew(root):
    comparisons = list(compare(root, 3, device="cpu"))
    assert [(c.shard, c.group, c.same, c.changes) for c in comparisons] == [
        (0, 0, True, {}),
        (4, 24, True, {}),
        (7, 42, True, {}),
    ]
    change_pixel(root, 7, by=3)
    assert len(list(compare(root, 99, device="cpu"))) == 8
    *_, comparison = compare(root, 3, device="cpu")
    assert str(comparison) == (
        "group 42: 1 of 4 images differ by up to 3 of 255; "
        f"made with device Abacus, now cpu; torch 0.1, now {version('torch')}"
    )
    status, out, _ = semix("verify", root.url, "--regenerate", "3", "--device", "cpu", "--json")
    assert status == 1
    assert (7, "pixels") in [(problem["shard"], problem["kind"]) for problem in json.loads(out)]


def change_pixel(root: Root, shard: int, *, by: int) -> None:
    """Store other pixels, as another machine would have made them."""
    record = root.record(shard)
    series = list(read_shard(root.store, record))
    pixels = decode_image(series[0].images[1]).copy()
    pixels[0, 0, 0] += by if pixels[0, 0, 0] < 128 else -by
    series[0].images[1] = encode_image(pixels, "webp")
    tar = io.BytesIO()
    write_tar(tar, series)
    digest = hashlib.sha256(tar.getvalue()).hexdigest()
    versions = record.versions | {"torch": "0.1", "device": "Abacus"}
    changed = {"sha256": digest, "tar": tar_name(shard, digest), "bytes": len(tar.getvalue())}
    root.store.put(changed["tar"], tar.getvalue())
    record = record.model_copy(update=changed | {"versions": versions})
    root.store.put(record_name(shard), record.written(indent=1))


def test_lossy_images_are_compared_as_stored(hasty_config, tmp_path):
    config = altered(hasty_config, "shards.image_format=jpg")
    root = made(config, tmp_path / "root", "--shards", "7")
    (stored,) = read_series(root, [43])
    assert same_pixels(regenerate(root, 43, device="cpu"), stored)


def test_what_a_build_would_store_is_not_written_by_a_look(hasty_config, tmp_path):
    root = create_root(hasty_config, str(tmp_path / "root"))
    with pytest.raises(InputError, match=r"group = 43: needs prototypes.* `semix resume .*rds 7`"):
        regenerate(root, 43)
    assert root.store.list("") == ["plan.json"]


def test_lossy_images_are_made_off_the_main_thread(monkeypatch):
    series = np.random.default_rng(0).integers(0, 256, (3, 2, 16, 16, 3), dtype=np.uint8)
    threads = []

    def watched(images: np.ndarray, extension: str, *, mark: bool) -> list[bytes]:
        threads.append(threading.current_thread())
        return encode_series(images, extension, mark=mark)

    monkeypatch.setattr("semix.pipeline.shard.encode_series", watched)
    files, pixels = encode_and_decode(series, "jpg", mark=True)
    assert len(threads) == 3 and threading.main_thread() not in threads
    assert files == [encode_series(images, "jpg", mark=True) for images in series]
    for stored, encoded in zip(pixels.numpy(), files, strict=True):
        assert np.array_equal(stored, np.stack([decode_image(file) for file in encoded]))
