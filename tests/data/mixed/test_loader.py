"""MixedLoader: who sees what, in which order, however many share the work."""

import itertools
import multiprocessing

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from data.errors import InputError
from data.mixed import MixedBatch, MixedDataset, MixedLoader
from data.mixed.order import epoch_order, share_of_step
from tests import handmade

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SHARDS, GROUPS, COUNT = 5, 3, 2
IMAGES = SHARDS * GROUPS * COUNT


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    return handmade.make_root(tmp_path_factory.mktemp("mixed"), SHARDS, GROUPS, count=COUNT).url


@pytest.fixture(scope="module")
def mixed(url) -> MixedDataset:
    """Read from the shards, as what does not fit into memory."""
    return MixedDataset(url, memory_limit=0)


def ids(batches: list[MixedBatch]) -> list[list[int]]:
    return [batch.ids[batch.counted].tolist() for batch in batches]


def together(shares: list[list[MixedBatch]]) -> list[list[int]]:
    """By step the ids that all ranks saw, in the order of the ranks."""
    steps = zip(*(ids(share) for share in shares), strict=True)
    return [list(itertools.chain(*step)) for step in steps]


def equal(first: list[MixedBatch], second: list[MixedBatch]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def alone(mixed) -> dict[str, list[MixedBatch]]:
    """What one rank without workers sees, for each policy."""
    policies = ("short", "drop", "repeat")
    return {
        last: list(MixedLoader(mixed, batch_size=8, kind="images", seed=7, last=last))
        for last in policies
    }


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        *((1, 0), (2, 0), (4, 0)),
        *(pytest.param(*pair, marks=pytest.mark.process) for pair in ((1, 4), (2, 2), (4, 1))),
    ],
)
@pytest.mark.parametrize("last", ["short", "drop", "repeat"])
def test_every_image_is_seen_once_in_one_order_by_any_ranks_and_workers(
    mixed, alone, ranks, workers, last
):
    options = {"batch_size": 8, "kind": "images", "seed": 7, "last": last, "workers": workers}
    loaders = [MixedLoader(mixed, rank=r, ranks=ranks, **options) for r in range(ranks)]
    shares = [list(loader) for loader in loaders]
    assert {len(share) for share in shares} == {len(loaders[0])} == {3 if last == "drop" else 4}
    for step in zip(*shares, strict=True):
        assert len({batch.images.shape for batch in step}) == 1
    assert together(shares) == ids(alone[last])
    seen = sorted(itertools.chain(*together(shares)))
    assert len(set(seen)) == len(seen) == (24 if last == "drop" else IMAGES)


@pytest.mark.parametrize("kind", ["images", "groups"])
def test_pixels_and_labels_belong_to_the_ids(url, kind):
    found = {}
    for limit in (0, 2**30):
        mixed = MixedDataset(url, memory_limit=limit)
        found[limit] = list(MixedLoader(mixed, batch_size=4, kind=kind, seed=1))
    assert equal(found[0], found[2**30])
    labels = mixed.labels
    for batch in found[0]:
        for number, image, label in zip(
            batch.ids.tolist(), batch.images, batch.labels, strict=True
        ):
            group, position = divmod(number, COUNT) if kind == "images" else (number, slice(None))
            stored = torch.from_numpy(handmade.pixels(group, COUNT, 8))
            assert torch.equal(image, stored[position])
            assert torch.equal(label, labels[group, position])


def test_the_last_batch_is_shared_out_as_the_policy_says(mixed):
    def last(policy: str, ranks: int) -> list[list[bool]]:
        options = {"batch_size": 8, "kind": "images", "last": policy, "ranks": ranks}
        return [
            list(MixedLoader(mixed, rank=r, **options))[-1].counted.tolist() for r in range(ranks)
        ]

    # Thirty images: six are left for the fourth step.
    assert last("short", 1) == [[True] * 6]
    assert last("short", 4) == [[True, True], [True, True], [True, False], [True, False]]
    assert last("repeat", 1) == [[True] * 6 + [False] * 2]
    assert last("repeat", 4) == [[True, True]] * 3 + [[False, False]]
    assert last("drop", 4) == [[True, True]] * 4
    # Fewer than there are ranks: those without an image get one that was seen.
    order = np.arange(17)
    shares = [
        share_of_step(order, 2, batch_size=8, rank=r, ranks=4, last="short") for r in range(4)
    ]
    assert [(samples.tolist(), count) for samples, count in shares] == [
        ([16], 1),
        ([1], 0),
        ([2], 0),
        ([3], 0),
    ]


def test_each_epoch_has_an_order_of_its_own_and_each_seed(mixed):
    loader = MixedLoader(mixed, batch_size=5, seed=3)
    epochs = [ids(list(loader)) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert all(sorted(itertools.chain(*epoch)) == list(range(15)) for epoch in epochs)
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert ids(list(loader)) == epochs[1]
    assert ids(list(MixedLoader(mixed, batch_size=5, seed=4))) != epochs[0]


def test_few_shards_are_wanted_at_a_time():
    order = epoch_order([10] * 12, seed=0, epoch=0, window=3)
    assert sorted(order.tolist()) == list(range(120))
    windows = [set((order[start : start + 30] // 10).tolist()) for start in range(0, 120, 30)]
    assert [len(window) for window in windows] == [3, 3, 3, 3]
    assert len(set().union(*windows)) == 12
    # Inside a window the shards are mixed, and windows are not simply neighbours.
    assert len(set((order[:10] // 10).tolist())) > 1
    assert windows != [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_a_loaded_state_goes_on_with_exactly_what_was_left(mixed, workers):
    options = {"batch_size": 4, "kind": "images", "seed": 5}
    whole = MixedLoader(mixed, workers=workers, **options)
    list(whole)
    state, seen = {}, []
    for step, batch in enumerate(whole):
        seen.append(batch)
        if step == 2:
            state = whole.state_dict()
    following = list(whole)
    again = MixedLoader(mixed, workers=workers, **options)
    again.load_state_dict(state)
    again.set_epoch(1)  # as a loop over epochs does
    assert equal(list(again), seen[3:])
    assert equal(list(again), following)
    # Two ranks go on from what one rank left.
    shares = []
    for rank in range(2):
        share = MixedLoader(mixed, rank=rank, ranks=2, **options)
        share.load_state_dict(state)
        shares.append(list(share))
    assert together(shares) == ids(seen[3:])


def test_an_epoch_that_was_left_begins_again_without_a_state(mixed):
    loader = MixedLoader(mixed, batch_size=4)
    first = next(iter(loader))
    assert loader.state_dict()["step"] == 1
    assert equal([first], [next(iter(loader))])


def test_a_state_of_another_order_is_refused(mixed):
    state = MixedLoader(mixed, batch_size=4, seed=1).state_dict()
    with pytest.raises(InputError, match=r"loader\.seed = 2: the state has 1"):
        MixedLoader(mixed, batch_size=4, seed=2).load_state_dict(state)
    with pytest.raises(InputError, match=r"loader\.batch_size = 6: the state has 4"):
        MixedLoader(mixed, batch_size=6, seed=1).load_state_dict(state)


@pytest.mark.process
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("limit", [0, 2**30])
def test_workers_may_be_forked_or_spawned(url, context, limit):
    mixed = MixedDataset(url, memory_limit=limit)
    options = {"batch_size": 4, "kind": "images", "seed": 2}
    expected = list(MixedLoader(mixed, **options))
    assert equal(list(MixedLoader(mixed, workers=2, context=context, **options)), expected)


@pytest.mark.process
def test_an_error_in_a_worker_names_the_shard(url, tmp_path):
    root = handmade.make_root(tmp_path, 2, 2)
    mixed = MixedDataset(root.url, memory_limit=0)
    tar = mixed.images.files.shards[1]["tar"]
    path = tmp_path / tar
    content = path.read_bytes()
    path.write_bytes(content[:600] + b"\xff" + content[601:])
    with pytest.raises(ValueError, match=rf"{tar}: group 2, image 0: not a complete"):
        list(MixedLoader(mixed, batch_size=2, workers=2))


@pytest.mark.process
def test_reading_takes_no_number_from_the_global_generator(mixed):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(MixedLoader(mixed, batch_size=4, workers=1))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.process
def test_a_dataset_is_also_one_for_a_plain_data_loader(mixed):
    batch = next(iter(DataLoader(mixed, batch_size=3, num_workers=2)))
    assert batch["images"].shape == (3, COUNT, 8, 8, 3)
    assert batch["group"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6, "rank": 0, "ranks": 4}, "batch_size = 6: 4 ranks share it equally"),
        ({"batch_size": 0}, "batch_size = 0: 1 ranks share it"),
        ({"batch_size": 16, "last": "drop"}, "batch_size = 16: there are 15 groups"),
        ({"batch_size": 4, "rank": 1}, "rank, ranks = 1, None: give both or neither"),
        ({"batch_size": 4, "rank": 2, "ranks": 2}, r"rank = 2: must lie in 0 \.\. 1"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(mixed, options, message):
    with pytest.raises(InputError, match=message):
        MixedLoader(mixed, **options)


def _ids_by_rank(rank: int, url: str, port: int, results: "multiprocessing.Queue") -> None:
    """One of two real processes: what it sees with and without `accelerator.prepare`."""
    import os

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    mixed = MixedDataset(url, memory_limit=0)
    found: dict = {}
    for prepared in (False, True):
        loader = MixedLoader(mixed, batch_size=8, kind="images", seed=7, workers=1)
        found[prepared] = ids(list(accelerator.prepare(loader) if prepared else loader))
    # What it must not be: a DataLoader over this rank's own share is shared out once more.
    own = list(range(rank, IMAGES, 2))
    twice = accelerator.prepare(DataLoader(own, batch_size=1))
    found["a DataLoader"] = [sorted({int(number) for number in twice})]
    results.put((rank, found))
    accelerator.end_training()


@pytest.mark.process
def test_two_accelerate_processes_see_everything_with_and_without_prepare(url, alone):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_ids_by_rank, args=(rank, url, port, results)) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    for prepared in (False, True):
        steps = zip(found[0][prepared], found[1][prepared], strict=True)
        assert [first + second for first, second in steps] == ids(alone["short"])
    lost = set(range(IMAGES)) - set(found[0]["a DataLoader"][0] + found[1]["a DataLoader"][0])
    assert len(lost) > IMAGES // 3
