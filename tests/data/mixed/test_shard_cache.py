"""The cache of remote shards: verified, limited, shared, and never believed blindly."""

import itertools
import multiprocessing
import os
import random
from pathlib import Path

import pytest

from data.errors import InputError
from data.root import Root
from data.shard_cache import ShardCache
from data.store import Store
from tests import handmade


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Root:
    return handmade.make_root(tmp_path_factory.mktemp("remote"), 6, 2)


def shards(root: Root) -> list[dict]:
    return list(root.committed().values())


def content(cache: ShardCache, shard: dict, store: Store) -> bytes:
    descriptor = cache.open(shard, store)
    try:
        return os.pread(descriptor, 10**9, 0)
    finally:
        os.close(descriptor)


def copies(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.tar")}


def test_a_copy_is_the_shard_and_is_fetched_once(root, tmp_path):
    cache = ShardCache(tmp_path)
    shard = shards(root)[0]
    expected = root.store.get(shard["tar"])
    assert content(cache, shard, root.store) == expected
    assert (tmp_path / f"{shard['sha256']}.tar").read_bytes() == expected
    nowhere = Store(str(tmp_path / "nowhere"))
    assert content(cache, shard, nowhere) == expected


def test_the_least_recently_used_goes_first_and_the_limit_holds(root, tmp_path):
    some = shards(root)
    size = max(shard["bytes"] for shard in some)
    cache = ShardCache(tmp_path, limit=3 * size)
    for shard in (*some[:3], some[0], some[3]):
        content(cache, shard, root.store)
    assert copies(tmp_path) == {some[at]["sha256"] for at in (0, 2, 3)}
    small = ShardCache(tmp_path, limit=size // 2)
    content(small, some[4], root.store)
    assert copies(tmp_path) == {some[4]["sha256"]}


def test_a_copy_that_is_removed_stays_readable_where_it_is_open(root, tmp_path):
    cache = ShardCache(tmp_path, limit=1)
    first, second = shards(root)[:2]
    descriptor = cache.open(first, root.store)
    content(cache, second, root.store)
    assert copies(tmp_path) == {second["sha256"]}
    assert os.pread(descriptor, 10**9, 0) == root.store.get(first["tar"])
    os.close(descriptor)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer"])
def test_a_damaged_copy_is_fetched_again(root, tmp_path, damage):
    cache = ShardCache(tmp_path)
    shard = shards(root)[1]
    whole = content(cache, shard, root.store)
    path = tmp_path / f"{shard['sha256']}.tar"
    changed = {
        "flipped": whole[:700] + bytes([whole[700] ^ 1]) + whole[701:],
        "truncated": whole[:-1],
        "longer": whole + b"\0",
    }
    path.write_bytes(changed[damage])
    assert content(cache, shard, root.store) == whole
    assert path.read_bytes() == whole


def test_what_is_not_as_the_index_says_is_never_kept(root, tmp_path):
    cache = ShardCache(tmp_path / "cache")
    shard = shards(root)[2]
    whole = root.store.get(shard["tar"])
    other = Store(str(tmp_path / "other"))
    for wrong, message in (
        (whole[:700] + bytes([whole[700] ^ 1]) + whole[701:], "another SHA-256, its index says"),
        (whole[:-1], rf"{len(whole) - 1:,} bytes, its index says {len(whole):,} bytes"),
        (whole + bytes(10**7), "bytes, its index says"),
    ):
        other.put(shard["tar"], wrong)
        with pytest.raises(ValueError, match=rf"{shard['tar']}: .*{message}.*semix verify"):
            cache.open(shard, other)
    other.delete(shard["tar"])
    with pytest.raises(ValueError, match=rf"{shard['tar']} is not in .*other; run `semix verify`"):
        cache.open(shard, other)
    assert not list(cache.folder.glob("*.tar")) + list(cache.folder.glob(".*.partial"))


def test_what_a_killed_process_left_makes_room(root, tmp_path):
    cache = ShardCache(tmp_path)
    left = tmp_path / f".{'0' * 64}.partial"
    left.write_bytes(b"half")
    content(cache, shards(root)[0], root.store)
    assert not left.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cache = .*file.*: cannot be written .*SEMIX_CACHE"):
        ShardCache(tmp_path / "file" / "shards")


def _read_at_random(url: str, folder: Path, seed: int, results: "multiprocessing.Queue") -> None:
    root, rng = Root(url), random.Random(seed)
    some = shards(root)
    cache = ShardCache(folder, limit=2 * some[0]["bytes"])
    expected = {shard["shard"]: root.store.get(shard["tar"]) for shard in some}
    right = 0
    for shard in itertools.chain(*(rng.sample(some, len(some)) for _ in range(20))):
        right += content(cache, shard, root.store) == expected[shard["shard"]]
    results.put(right)


@pytest.mark.process
def test_processes_share_a_folder_that_holds_only_two_shards(root, tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = [(root.url, tmp_path, seed, results) for seed in range(3)]
    processes = [context.Process(target=_read_at_random, args=args) for args in arguments]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [120] * 3
    for process in processes:
        process.join()
    assert not list(tmp_path.glob(".*.partial"))
