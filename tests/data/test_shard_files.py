"""Shards as open files: a cache that is verified, limited and shared, and reading through it."""

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader

from semix.data import shard_files
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.formats import ShardEntry
from semix.data.root import Root
from semix.data.shard_files import ShardCache
from semix.data.store import Store
from tests import handmade
from tests.handmade import committed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SHARDS, GROUPS, COUNT, SIDE = 5, 3, 2, 32


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> Root:
    return handmade.make_root(tmp_path_factory.mktemp("remote"), 6, 2)


def shards(root: Root) -> list[ShardEntry]:
    return list(committed(root).values())


def content(cache: ShardCache, shard: ShardEntry, store: Store) -> bytes:
    descriptor = cache.open(shard, store)
    try:
        return os.pread(descriptor, 10**9, 0)
    finally:
        os.close(descriptor)


def copies(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.tar")}


def test_a_copy_is_the_shard_and_is_fetched_once(six, tmp_path):
    cache = ShardCache(tmp_path)
    shard = shards(six)[0]
    expected = six.store.get(shard.tar)
    assert content(cache, shard, six.store) == expected
    assert (tmp_path / f"{shard.sha256}.tar").read_bytes() == expected
    nowhere = Store(str(tmp_path / "nowhere"))
    assert content(cache, shard, nowhere) == expected


def test_the_least_recently_used_goes_first_and_the_limit_holds(six, tmp_path):
    some = shards(six)
    size = max(shard.bytes for shard in some)
    cache = ShardCache(tmp_path, limit=3 * size)
    for shard in (*some[:3], some[0], some[3]):
        content(cache, shard, six.store)
    assert copies(tmp_path) == {some[at].sha256 for at in (0, 2, 3)}
    small = ShardCache(tmp_path, limit=size // 2)
    content(small, some[4], six.store)
    assert copies(tmp_path) == {some[4].sha256}


def test_a_copy_that_is_removed_stays_readable_where_it_is_open(six, tmp_path):
    cache = ShardCache(tmp_path, limit=1)
    first, second = shards(six)[:2]
    descriptor = cache.open(first, six.store)
    content(cache, second, six.store)
    assert copies(tmp_path) == {second.sha256}
    assert os.pread(descriptor, 10**9, 0) == six.store.get(first.tar)
    os.close(descriptor)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer"])
def test_a_damaged_copy_is_fetched_again(six, tmp_path, damage):
    cache = ShardCache(tmp_path)
    shard = shards(six)[1]
    tar = content(cache, shard, six.store)
    path = tmp_path / f"{shard.sha256}.tar"
    changed = {
        "flipped": tar[:700] + bytes([tar[700] ^ 1]) + tar[701:],
        "truncated": tar[:-1],
        "longer": tar + b"\0",
    }
    path.write_bytes(changed[damage])
    assert content(cache, shard, six.store) == tar
    assert path.read_bytes() == tar


def test_what_is_not_as_the_index_says_is_never_kept(six, tmp_path):
    cache = ShardCache(tmp_path / "cache")
    shard = shards(six)[2]
    tar = six.store.get(shard.tar)
    other_store = Store(str(tmp_path / "other"))
    for damaged, message in (
        (tar[:700] + bytes([tar[700] ^ 1]) + tar[701:], "another SHA-256, its index says"),
        (tar[:-1], rf"{len(tar) - 1:,} bytes, its index says {len(tar):,} bytes"),
        (tar + bytes(10**7), "bytes, its index says"),
    ):
        other_store.put(shard.tar, damaged)
        with pytest.raises(ValueError, match=rf"{shard.tar}: .*{message}.*semix verify"):
            cache.open(shard, other_store)
    other_store.delete(shard.tar)
    with pytest.raises(ValueError, match=rf"{shard.tar} is not in .*other; run `semix verify`"):
        cache.open(shard, other_store)
    assert not list(cache.folder.glob("*.tar")) + list(cache.folder.glob(".*.partial"))


def test_what_a_killed_process_left_makes_room(six, tmp_path):
    cache = ShardCache(tmp_path)
    leftover = tmp_path / f".{'0' * 64}.partial"
    leftover.write_bytes(b"half")
    content(cache, shards(six)[0], six.store)
    assert not leftover.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cache = .*file.*: cannot be written .*SEMIX_CACHE"):
        ShardCache(tmp_path / "file" / "shards")


def _read_at_random(url: str, folder: Path, seed: int, results: "multiprocessing.Queue") -> None:
    root, rng = Root(url), random.Random(seed)
    some = shards(root)
    cache = ShardCache(folder, limit=2 * some[0].bytes)
    expected = {shard.shard: root.store.get(shard.tar) for shard in some}
    num_correct = 0
    for shard in itertools.chain(*(rng.sample(some, len(some)) for _ in range(20))):
        num_correct += content(cache, shard, root.store) == expected[shard.shard]
    results.put(num_correct)


@pytest.mark.process
def test_processes_share_a_folder_that_holds_only_two_shards(six, tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = [(six.url, tmp_path, seed, results) for seed in range(3)]
    processes = [context.Process(target=_read_at_random, args=args) for args in arguments]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [120] * 3
    for process in processes:
        process.join()
    assert not list(tmp_path.glob(".*.partial"))


@pytest.fixture
def remote() -> Iterator[Root]:
    yield handmade.make_root("memory://reading", SHARDS, GROUPS, count=COUNT, side=SIDE)
    fsspec.filesystem("memory").rm("/reading", recursive=True)


def size_of(root: Root) -> int:
    return max(record.bytes for record in committed(root).values())


def open_small(root: Root, cache: Path) -> MixedDataset:
    """Open a dataset whose cache has room for two of five shards."""
    return MixedDataset(root.url, memory_limit=0, cache=cache, cache_limit=2 * size_of(root))


def used(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("*.tar"))


def check_epoch(mixed: MixedDataset, order: Iterable[int] = (), **options) -> None:
    """Check that an epoch has every image once, with its own pixels."""
    images = mixed.by_image()
    sampler = list(order) or torch.randperm(len(images)).tolist()
    images_seen = []
    for batch in DataLoader(images, batch_size=4, sampler=sampler, **options):
        keys = zip(batch["group"].tolist(), batch["position"].tolist(), strict=True)
        for (group, position), image in zip(keys, batch["image"], strict=True):
            stored = torch.from_numpy(handmade.pixels(group, COUNT, SIDE))
            assert torch.equal(image, stored[position])
            images_seen.append((group, position))
    assert sorted(images_seen) == list(itertools.product(range(SHARDS * GROUPS), range(COUNT)))


def note_fetches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the names of the shards that are fetched from now on."""
    names: list[str] = []
    fetch = ShardCache._fetch

    def noting(self, shard, store):
        names.append(shard.tar)
        return fetch(self, shard, store)

    monkeypatch.setattr(ShardCache, "_fetch", noting)
    return names


def test_an_epoch_fetches_each_shard_once_into_a_cache_of_two(remote, tmp_path, monkeypatch):
    monkeypatch.setitem(shard_files.MAX_OPEN, False, 2)  # else all five copies stay open
    mixed = open_small(remote, tmp_path)
    assert used(tmp_path) <= 2 * size_of(remote)
    names = note_fetches(monkeypatch)
    check_epoch(mixed, range(SHARDS * GROUPS * COUNT))
    assert len(names) == len(set(names)) >= SHARDS - 2
    assert used(tmp_path) <= 2 * size_of(remote)


def test_draws_are_those_of_a_local_root(remote, tmp_path):
    local = MixedDataset(
        handmade.make_root(tmp_path / "local", SHARDS, GROUPS, count=COUNT, side=SIDE).url
    )
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
    names = note_fetches(monkeypatch)
    again = open_small(remote, tmp_path)
    assert names == [committed(remote)[0].tar]  # for the size of the images
    assert torch.equal(again.numbers, first.numbers)
    assert torch.equal(again.labels, first.labels)


def test_notes_are_removed_that_were_not_used_for_longest(remote, tmp_path):
    """Notes of roots that were read once are removed when the cache is opened next."""
    limit = 2 * size_of(remote)
    mixed = open_small(remote, tmp_path)
    notes = {path.name: path.stat().st_size for path in (tmp_path / "contents").iterdir()}
    assert len(notes) == SHARDS and sum(notes.values()) < limit // 8
    leftover = tmp_path / "contents" / f".{'0' * 64}.json.partial"  # by a killed process
    for number in range(100):
        path = tmp_path / "contents" / f"{number:064x}.json" if number else leftover
        path.write_bytes(bytes(limit // 80))
        os.utime(path, (number, number))
    assert torch.equal(open_small(remote, tmp_path).numbers, mixed.numbers)
    after = list((tmp_path / "contents").iterdir())
    assert notes.keys() < {path.name for path in after} and not leftover.exists()
    assert sum(path.stat().st_size for path in after) <= limit // 8


def test_notes_alone_are_removed_to_make_room(tmp_path):
    """The folder may be one that somebody keeps other things in."""
    thesis = tmp_path / "contents" / "thesis.json"
    thesis.parent.mkdir()
    thesis.write_text("precious")
    ShardCache(tmp_path, limit=0)
    assert thesis.read_text() == "precious"


def test_damaged_notes_of_a_shard_are_made_anew(remote, tmp_path):
    first = open_small(remote, tmp_path)
    for note in (tmp_path / "contents").iterdir():
        note.write_bytes(note.read_bytes()[:-7])
    assert torch.equal(open_small(remote, tmp_path).weights, first.weights)


def test_notes_of_another_version_are_made_anew(remote, tmp_path):
    first = open_small(remote, tmp_path)
    for note in (tmp_path / "contents").iterdir():
        text = note.read_bytes().partition(b"\n")[2]
        newer = json.dumps(json.loads(text) | {"wings": 2}).encode()
        note.write_bytes(hashlib.sha256(newer).hexdigest().encode() + b"\n" + newer)
    assert torch.equal(open_small(remote, tmp_path).weights, first.weights)


def test_a_copy_that_decays_unseen_is_fetched_again(remote, tmp_path):
    """Bytes change but size and times do not, as on a failing disk."""
    mixed = MixedDataset(remote.url, memory_limit=0, cache=tmp_path)
    for copy in tmp_path.glob("*.tar"):
        before = copy.stat()
        with copy.open("r+b") as file:
            file.seek(600)
            file.write(b"\xff")
        os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    check_epoch(mixed)


def test_all_images_can_go_into_memory(remote, tmp_path):
    mixed = MixedDataset(remote.url, cache=tmp_path)
    assert mixed.in_memory
    assert torch.equal(mixed.images[7], torch.from_numpy(handmade.pixels(7, COUNT, SIDE)))


def test_a_shard_that_is_not_as_indexed_is_named(remote, tmp_path):
    tar = committed(remote)[3].tar
    remote.store.put(tar, remote.store.get(committed(remote)[2].tar))
    with pytest.raises(ValueError, match=rf"{tar}: .*its index says .*semix verify"):
        open_small(remote, tmp_path)


def test_a_series_of_more_images_than_the_first_is_named(tmp_path):
    root = handmade.root_of(
        tmp_path / "root", [handmade.sample(0), handmade.sample(1, 3)], handmade.NAMES
    )
    with pytest.raises(ValueError, match="group 1 has 3 images, the first group has 2"):
        MixedDataset(root.url, memory_limit=0, cache=tmp_path / "cache")


def test_the_cache_folder_is_semix_cache(remote, tmp_path, monkeypatch):
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "mine"))
    MixedDataset(remote.url, memory_limit=0)
    assert len(list((tmp_path / "mine" / "shards").glob("*.tar"))) == SHARDS


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_from_s3_through_a_cache_of_two_shards(bucket, tmp_path, workers):
    root = handmade.make_root(f"{bucket}/mixed", SHARDS, GROUPS, count=COUNT, side=SIDE)
    mixed = open_small(root, tmp_path)
    check_epoch(mixed, num_workers=workers)
    assert used(tmp_path) <= 2 * size_of(root)


def test_spawned_workers_read_from_s3(bucket, tmp_path):
    root = handmade.make_root(f"{bucket}/mixed", SHARDS, GROUPS, count=COUNT, side=SIDE)
    check_epoch(open_small(root, tmp_path), num_workers=1, multiprocessing_context="spawn")


def test_an_epoch_survives_a_server_that_fails_and_cuts(faulty_s3, bucket, tmp_path):
    root = handmade.make_root(f"{bucket}/mixed", SHARDS, GROUPS, count=COUNT, side=SIDE)
    faulty_s3.fail(errors=0.2, cut_answers=0.2, path=".tar", seed=3)
    check_epoch(open_small(root, tmp_path))
    assert faulty_s3.done["errors"] + faulty_s3.done["cut_answers"] > 0


@pytest.mark.process
def test_a_script_that_ends_with_open_shards_says_nothing(six):
    script = f"import semix; mixed = semix.MixedDataset({six.url!r}, memory_limit=0); mixed[0]"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
