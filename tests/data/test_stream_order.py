"""A stream that goes on in the middle of an epoch: no image is lost, none comes twice."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.stream import mixed_pipeline
from tests import handmade

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SHARDS, GROUPS, COUNT = 6, 3, 4
EVERY = [(group, position) for group in range(SHARDS * GROUPS) for position in range(COUNT)]


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    return handmade.make_root(tmp_path_factory.mktemp("mixed"), SHARDS, GROUPS, count=COUNT).url


def keys_in(batch) -> list[tuple[int, int]]:
    groups, positions = (np.atleast_1d(batch[key]).tolist() for key in ("group", "position"))
    return list(zip(groups, positions, strict=True))


def keys_of(samples) -> list[tuple[int, int]]:
    return [key for batch in samples for key in keys_in(batch)]


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("shuffle", [0, 7, 1000])
@pytest.mark.parametrize("stop", [0, 1, 11, 12, 40, 71, 72])
def test_it_goes_on_in_the_same_order_wherever_it_stopped(url, shuffle, stop):
    whole = keys_of(mixed_pipeline(url, shuffle=shuffle, epoch=2))
    stream = mixed_pipeline(url, shuffle=shuffle, epoch=2)
    samples = iter(stream)
    before = keys_of([next(samples) for _ in range(stop)])
    continued = mixed_pipeline(url, shuffle=shuffle)
    continued.load_state_dict(through_json(stream.state_dict()))
    assert before + keys_of(continued) == whole
    assert keys_of(continued) == whole  # the next iteration begins at the start again
    continued.set_epoch(3)
    assert keys_of(continued) == keys_of(mixed_pipeline(url, shuffle=shuffle, epoch=3))


def test_it_may_stop_again_and_again(url):
    keys, state = [], None
    for _ in range(8):
        stream = mixed_pipeline(url, shuffle=7)
        if state:
            stream.load_state_dict(state)
            assert stream.state_dict() == state
        samples = iter(stream)
        keys += keys_of([next(samples) for _ in range(9)])
        state = stream.state_dict()
    assert keys == keys_of(mixed_pipeline(url, shuffle=7))


@pytest.mark.parametrize("stop", [1, 5, 7, 13, 14])  # a pass has 18 batches of 4
def test_batches_and_further_passes_go_on(url, stop):
    def make():
        return mixed_pipeline(url, shuffle=7).batched(10).with_epoch(nbatches=15)

    whole = [keys_in(batch) for batch in make()]
    assert len(whole) == 15
    stream = make()
    batches = iter(stream)
    before = [keys_in(next(batches)) for _ in range(stop)]
    continued = make()
    continued.load_state_dict(stream.state_dict())
    assert before + [keys_in(batch) for batch in continued] == whole


def test_whole_series_and_left_out_series_go_on(tmp_path):
    backwards = {1: {"weights": [0.9, 0.6, 0.4, 0.1]}}
    samples = [handmade.sample(group, COUNT, **backwards.get(group, {})) for group in range(6)]
    root = handmade.root_of(tmp_path, samples, handmade.NAMES).url
    options = {"exclude": Exclusion(monotone=True), "series": True, "shuffle": 2}
    stream = mixed_pipeline(root, **options)
    series = iter(stream)
    before = [next(series)["group"] for _ in range(3)]
    continued = mixed_pipeline(root, **options)
    continued.load_state_dict(stream.state_dict())
    after = [sample["group"] for sample in continued]
    assert sorted(before + after) == [0, 2, 3, 4, 5]


def test_shards_whose_images_were_all_given_are_not_read_again(tmp_path):
    root = handmade.make_root(tmp_path, SHARDS, GROUPS, count=COUNT)
    stream = mixed_pipeline(root.url, shuffle=0)
    samples = iter(stream)
    before = keys_of([next(samples) for _ in range(GROUPS * COUNT + 1)])
    continued = mixed_pipeline(root.url, shuffle=0)
    continued.load_state_dict(stream.state_dict())
    (Path(root.url) / root.record(before[0][0] // GROUPS).tar).unlink()
    assert sorted(before + keys_of(continued)) == EVERY


def test_a_state_of_something_else_is_refused_by_name(url, tmp_path, monkeypatch):
    stream = mixed_pipeline(url, seed=3)
    next(iter(stream))
    state = stream.state_dict()
    other = handmade.make_root(tmp_path, SHARDS, GROUPS + 1, count=COUNT).url

    def refusal(url=url, state=state, **options):
        with pytest.raises(InputError) as caught:
            mixed_pipeline(url, **{"seed": 3} | options).load_state_dict(state)
        return str(caught.value)

    assert refusal(other).startswith(
        "index = index/0.json: the state is of index/0.json of another"
    )
    assert refusal(seed=4) == "seed = 4: the state is of seed 3; go on with that"
    assert refusal(shuffle=5) == "shuffle = 5: the state is of shuffle 1000; go on with that"
    assert refusal(series=True).startswith("series = True: the state is of series False")
    assert refusal(exclude=Exclusion(monotone=True)).startswith("exclude = ")
    assert "this setting is required" in refusal(state={})
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refusal() == "ranks = 2: the state is of 1 ranks; go on with as many"
    assert refusal(state=state | {"ranks": 2}).startswith("rank = 1: the state is of rank 0; save")
    monkeypatch.setenv("NUM_WORKERS", "3")
    monkeypatch.setenv("WORKER", "0")
    stream.load_state_dict(state | {"ranks": 2, "rank": 1})
    with pytest.raises(InputError, match=r"^num_workers = 3: the state is of 1 workers; go on"):
        iter(stream)


def test_stages_that_hold_samples_back_have_no_state(url):
    for stream in (
        mixed_pipeline(url).shuffle(10),
        mixed_pipeline(url).batched(4).unbatched(),
        mixed_pipeline(url).slice(5),
        mixed_pipeline(url).compose(wds.batched(4)),
    ):
        with pytest.raises(
            InputError, match=r"^state_dict = of a stream with (shuffle|un|isl|batched)"
        ):
            stream.state_dict()
    assert mixed_pipeline(url).to_tuple("image").map(len).state_dict()["epoch"] == 0


def test_samples_that_were_read_ahead_are_not_counted_as_consumed(url):
    stream = mixed_pipeline(url, shuffle=7)
    batches = iter(stream.batched(5))
    first, second, _ = (next(batches) for _ in range(3))
    for batch in (first, second):
        stream.consumed(batch["cursor"])
    continued = mixed_pipeline(url, shuffle=7)
    continued.load_state_dict(stream.state_dict())
    assert sorted(keys_in(first) + keys_in(second) + keys_of(continued)) == EVERY
    stream.consumed(first["cursor"])  # the iteration began again
    continued.load_state_dict(stream.state_dict())
    assert sorted(keys_in(first) + keys_of(continued)) == EVERY
    stream.set_epoch(1)
    with pytest.raises(InputError, match=r"^cursor = of epoch 0: the stream is at epoch 1"):
        stream.consumed(first["cursor"])


def test_an_iteration_that_began_again_counts_no_worker_of_the_one_before(url):
    stream = mixed_pipeline(url)
    for worker, samples in ((0, 4), (1, 4), (0, 8)):
        stream.consumed(np.array([0, worker, 2, 0, samples, samples - 1]))
    assert stream.state_dict()["workers"] == {"0": [0, 8, 8], "1": [0, 4, 4]}
    stream.consumed(np.array([0, 0, 2, 0, 1, 0]))
    assert stream.state_dict()["workers"] == {"0": [0, 1, 1]}


@pytest.mark.process
def test_workers_that_read_ahead_are_asked_for_by_name(url):
    stream = mixed_pipeline(url)
    loader = DataLoader(stream, batch_size=4, num_workers=2)
    batch = next(iter(loader))
    with pytest.raises(InputError, match=r"`consumed`, or save .* StatefulDataLoader"):
        stream.state_dict()
    stream.consumed(batch["cursor"])
    state = stream.state_dict()
    continued = mixed_pipeline(url)
    continued.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"num_workers = 3: the state is of 2 workers"):
        list(DataLoader(continued, batch_size=4, num_workers=3))
    rest = DataLoader(continued, batch_size=4, num_workers=2)
    assert sorted(keys_in(batch) + keys_of(rest)) == EVERY
    assert sorted(keys_of(rest)) == EVERY  # the next iteration


LOADERS = ("plain", "stateful", "web")


def _loader_of(kind: str, url: str, state: dict | None):
    """A loader with two workers that goes on at a state; and how to save the next state."""
    stream = mixed_pipeline(url, shuffle=7, seed=1)
    if kind == "stateful":
        loader = StatefulDataLoader(stream, batch_size=4, num_workers=2)
        if state is not None:
            loader.load_state_dict(state)
        return loader, lambda batch: loader.state_dict()
    if state is not None:
        stream.load_state_dict(state)
    if kind == "plain":
        loader = DataLoader(stream, batch_size=4, num_workers=2)
    else:
        loader = wds.WebLoader(stream.batched(4), batch_size=None, num_workers=2)

    def saved(batch):
        stream.consumed(batch["cursor"])
        return stream.state_dict()

    return loader, saved


def _read_as(rank: int, url: str, folder: Path, killed_after: int | None) -> None:
    multiprocessing.set_start_method("fork", force=True)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    iterators = []  # kept, so that all workers run when the process is killed
    for kind in LOADERS:
        file = folder / f"{kind}-{rank}.json"
        keys, state = json.loads(file.read_text()) if file.exists() else ([], None)
        loader, saved = _loader_of(kind, url, state)
        iterators.append(iter(loader))
        for number, batch in enumerate(iterators[-1]):
            keys, state = keys + keys_in(batch), saved(batch)
            file.write_text(json.dumps([keys, state]))
            if number + 1 == killed_after:
                break
    if killed_after:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_two_killed_ranks_of_two_workers_go_on_and_every_image_comes_once(url, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imports torch once for all ranks
    for killed_after in ((2, 5), (3, 2), (None, None)):
        ranks = [
            context.Process(target=_read_as, args=(rank, url, tmp_path, killed_after[rank]))
            for rank in (0, 1)
        ]
        for process in ranks:
            process.start()
        for process, after in zip(ranks, killed_after, strict=True):
            process.join(timeout=240)
            assert process.exitcode == (-signal.SIGKILL if after else 0)
    for kind in LOADERS:
        keys = [json.loads((tmp_path / f"{kind}-{rank}.json").read_text())[0] for rank in (0, 1)]
        assert all(keys)
        assert sorted(map(tuple, keys[0] + keys[1])) == EVERY
