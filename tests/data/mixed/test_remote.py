"""Reading a root that is not local: through copies, fewer than there are shards."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from data.errors import InputError
from data.mixed import MixedDataset, MixedLoader, shard_files
from data.root import Root
from data.shard_cache import ShardCache
from tests import handmade

SHARDS, GROUPS, COUNT = 5, 3, 2


@pytest.fixture
def remote() -> Iterator[Root]:
    yield handmade.make_root("memory://reading", SHARDS, GROUPS, count=COUNT)
    fsspec.filesystem("memory").rm("/reading", recursive=True)


def size_of(root: Root) -> int:
    return max(record["bytes"] for record in root.committed().values())


def open_small(root: Root, cache: Path) -> MixedDataset:
    """With room for two of five shards."""
    return MixedDataset(root.url, memory_limit=0, cache=cache, cache_limit=2 * size_of(root))


def used(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("*.tar"))


def check_epoch(loader: MixedLoader) -> None:
    """Every image once, with its own pixels."""
    seen = []
    for batch in loader:
        for number, image in zip(batch.ids.tolist(), batch.images, strict=True):
            group, position = divmod(number, COUNT)
            assert torch.equal(image, torch.from_numpy(handmade.pixels(group, COUNT, 8))[position])
            seen.append(number)
    assert sorted(seen) == list(range(SHARDS * GROUPS * COUNT))


def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that are fetched from now on."""
    names: list[str] = []
    fetch = ShardCache._fetched

    def noting(self, shard, store):
        names.append(shard["tar"])
        return fetch(self, shard, store)

    monkeypatch.setattr(ShardCache, "_fetched", noting)
    return names


def test_an_epoch_fetches_each_shard_once_into_a_cache_of_two(remote, tmp_path, monkeypatch):
    monkeypatch.setitem(shard_files.MOST_OPEN, False, 2)  # else all five copies stay open
    mixed = open_small(remote, tmp_path)
    assert used(tmp_path) <= 2 * size_of(remote)
    loader = MixedLoader(mixed, batch_size=2, kind="images", window=2)
    names = fetched(monkeypatch)
    check_epoch(loader)
    assert len(names) == len(set(names)) >= SHARDS - 2
    assert used(tmp_path) <= 2 * size_of(remote)


def test_draws_are_those_of_a_local_root(remote, tmp_path):
    local = MixedDataset(handmade.make_root(tmp_path / "local", SHARDS, GROUPS, count=COUNT).url)
    targets = torch.tensor([0, 1, 2] * 10)
    draws = [
        mixed.draw(targets, rng=torch.Generator().manual_seed(0))
        for mixed in (local, open_small(remote, tmp_path / "cache"))
    ]
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


def test_opening_again_reads_no_tar_for_its_records(remote, tmp_path, monkeypatch):
    first = open_small(remote, tmp_path)
    for copy in tmp_path.glob("*.tar"):
        copy.unlink()
    names = fetched(monkeypatch)
    again = open_small(remote, tmp_path)
    assert names == [remote.committed()[0]["tar"]]  # for the size of the images
    assert again.groups == first.groups
    assert torch.equal(again.labels, first.labels)


def test_damaged_notes_of_a_shard_are_made_anew(remote, tmp_path):
    first = open_small(remote, tmp_path)
    for note in (tmp_path / "contents").iterdir():
        note.write_bytes(note.read_bytes()[:-7])
    assert open_small(remote, tmp_path).groups == first.groups


def test_a_copy_that_decays_unseen_is_fetched_again(remote, tmp_path):
    """As a failing disk does it: other bytes, the same size and times."""
    mixed = MixedDataset(remote.url, memory_limit=0, cache=tmp_path)
    for copy in tmp_path.glob("*.tar"):
        before = copy.stat()
        with copy.open("r+b") as file:
            file.seek(600)
            file.write(b"\xff")
        os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    check_epoch(MixedLoader(mixed, batch_size=4, kind="images"))


def test_all_images_can_go_into_memory(remote, tmp_path):
    mixed = MixedDataset(remote.url, cache=tmp_path)
    assert mixed.in_memory
    assert torch.equal(mixed.images[7], torch.from_numpy(handmade.pixels(7, COUNT, 8)))


def test_a_shard_that_is_not_as_indexed_is_named(remote, tmp_path):
    tar = remote.committed()[3]["tar"]
    remote.store.put(tar, remote.store.get(remote.committed()[2]["tar"]))
    with pytest.raises(ValueError, match=rf"{tar}: .*its index says .*semix verify"):
        open_small(remote, tmp_path)


def test_the_cache_folder_is_semix_cache(remote, tmp_path, monkeypatch):
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "mine"))
    MixedDataset(remote.url, memory_limit=0)
    assert len(list((tmp_path / "mine" / "shards").glob("*.tar"))) == SHARDS


@pytest.mark.process
def test_workers_cannot_see_the_memory_of_this_process(remote, tmp_path):
    mixed = open_small(remote, tmp_path)
    with pytest.raises(InputError, match=r"workers = 2: only this process sees memory://reading"):
        MixedLoader(mixed, batch_size=2, workers=2)
    memory = MixedDataset(remote.url, cache=tmp_path)
    check_epoch(MixedLoader(memory, batch_size=2, kind="images", workers=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_from_s3_through_a_cache_of_two_shards(bucket, tmp_path, workers):
    root = handmade.make_root(f"{bucket}/mixed", SHARDS, GROUPS, count=COUNT)
    mixed = open_small(root, tmp_path)
    loaders = [
        MixedLoader(
            mixed, batch_size=4, kind="images", workers=workers, rank=rank, ranks=2, window=2
        )
        for rank in (0, 1)
    ]
    seen = [batch.ids[batch.counted].tolist() for loader in loaders for batch in loader]
    assert sorted(itertools.chain(*seen)) == list(range(SHARDS * GROUPS * COUNT))
    check_epoch(MixedLoader(mixed, batch_size=4, kind="images", workers=workers))
    assert used(tmp_path) <= 2 * size_of(root)


def test_spawned_workers_read_from_s3(bucket, tmp_path):
    root = handmade.make_root(f"{bucket}/mixed", SHARDS, GROUPS, count=COUNT)
    mixed = open_small(root, tmp_path)
    check_epoch(MixedLoader(mixed, batch_size=4, kind="images", workers=1, context="spawn"))


def test_an_epoch_survives_a_server_that_fails_and_cuts(faulty_s3, bucket, tmp_path):
    root = handmade.make_root(f"{bucket}/mixed", SHARDS, GROUPS, count=COUNT)
    faulty_s3.fail(errors=0.2, cut_answers=0.2, path=".tar", seed=3)
    mixed = open_small(root, tmp_path)
    check_epoch(MixedLoader(mixed, batch_size=4, kind="images", window=2))
    assert faulty_s3.done["errors"] + faulty_s3.done["cut_answers"] > 0
