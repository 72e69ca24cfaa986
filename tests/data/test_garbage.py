"""Garbage: files that nothing refers to are found, and removed only where nobody can need them."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from semix.data.formats import File, shard_stem
from semix.data.garbage import garbage, remove
from semix.data.index import open_index
from semix.data.leases import claim
from semix.data.machine import machine
from semix.data.root import Root
from semix.data.verify import damage
from tests.data.whole_roots import failure
from tests.handmade import committed, label_set, labels_of

HOURS = 3600.0
DIGEST = 64 * "a"


@pytest.fixture
def root(shared_root, tmp_path):
    """A complete root whose files are two hours old."""
    shutil.copytree(shared_root.url, tmp_path / "root")
    make_old(tmp_path / "root")
    return Root(str(tmp_path / "root"))


def make_old(folder, hours: float = 2) -> None:
    when = time.time() - hours * HOURS
    for path in folder.rglob("*"):
        os.utime(path, (when, when))


def names(root: Root, **options) -> list[str]:
    return [item.name for item in garbage(root, **options)]


def orphan(root: Root, shard: int = 1) -> tuple[str, str]:
    """Write a tar and features, two hours old, that no record, index or label set names."""
    stem = f"{shard_stem(shard)}-0123abcd"
    for name in (f"{stem}.tar", f"{stem}.features.safetensors"):
        root.store.put(name, b"1234")
        when = time.time() - 2 * HOURS
        os.utime(f"{root.url}/{name}", (when, when))
    return f"{stem}.features.safetensors", f"{stem}.tar"


def test_a_whole_root_has_no_garbage(root):
    assert garbage(root) == []


def test_orphans_are_shown_and_go_only_on_request(root):
    files = orphan(root)
    assert [(g.name, g.bytes, g.why) for g in garbage(root)] == [
        (name, 4, "no record names it") for name in files
    ]
    assert all(root.store.exists(name) for name in files)
    before = set(root.store.list("")) - set(files)
    assert [g.name for g in remove(root, garbage(root))] == list(files)
    assert set(root.store.list("")) == before
    assert damage(root, full=True) == []


def test_what_is_young_stays_by_the_stores_clock(root, monkeypatch):
    files = orphan(root)
    root.store.put(files[1], b"1234")  # a builder is about to commit it
    monkeypatch.setattr(time, "time", lambda: time.monotonic() + 9e9)  # ours is wrong
    assert names(root) == [files[0]]
    assert names(root, older_than_s=0) == list(files)


def test_files_from_the_future_stay(root):
    files = orphan(root)
    os.utime(f"{root.url}/{files[1]}", (time.time() + 9 * HOURS,) * 2)
    assert names(root) == [files[0]]


def test_what_an_index_pins_stays_when_its_record_is_gone(root):
    root.discard(1)
    assert names(root) == []
    entry = open_index(root.store, "index/0.json").shards[1]
    root.write_index()
    make_old(Path(root.url))
    assert names(root) == []  # the older index still pins it
    root.store.delete("index/0.json")
    assert names(Root(root.url)) == [entry.features.name, entry.tar]


def test_with_a_damaged_index_nothing_that_it_may_pin_goes(root):
    orphan(root)
    root.store.put("index/1.json", b"{")
    make_old(Path(root.url))
    assert names(root) == ["index/1.json"]
    remove(root, garbage(root))
    assert len(names(root)) == 2


def test_shards_under_a_living_lease_are_left_alone(root):
    files = orphan(root)
    with subprocess.Popen(["sleep", "60"]) as builder:
        note = {"host": machine(), "pid": builder.pid}
        root.store.create("leases/0000001.json", json.dumps(note).encode())
        assert garbage(root) == []
        builder.kill()
    make_old(Path(root.url))
    assert names(root) == ["leases/0000001.json", *files]


def test_a_builder_that_starts_between_looking_and_removing_loses_nothing(root):
    """It finds its tar there already, by name and size, and need not write it again."""
    orphan(root)
    garbage_found = garbage(root)
    with subprocess.Popen(["sleep", "60"]) as builder:
        note = {"host": machine(), "pid": builder.pid}
        root.store.create("leases/0000001.json", json.dumps(note).encode())
        assert remove(root, garbage_found) == []
        builder.kill()


def test_a_tar_that_was_committed_between_looking_and_removing_stays(root):
    root.store.delete("index/0.json")
    entry = root.record(2)
    root.store.delete(f"{shard_stem(2)}.json")
    garbage_found = garbage(Root(root.url))
    assert {item.name for item in garbage_found} == {entry.tar, entry.features.name}
    root.commit(entry)
    assert remove(root, garbage_found) == []
    assert damage(root, full=True) == []


def test_failures_that_are_past_and_leases_that_are_forgotten(root):
    root.record_failure(failure(0))
    root.store.create("leases/0000002.json", b'{"host": "gone", "pid": 1}')
    root.discard(1)
    root.record_failure(failure(1))
    make_old(Path(root.url))
    garbage_found = remove(root, garbage(root))
    assert [item.name for item in garbage_found] == [
        "leases/0000002.json",
        "failed/0000/0000000.1.json",
    ]
    assert list(root.failures()) == [1]
    assert root.store.exists("discarded/0000/0000001.1.json")


def test_unfinished_files_of_dead_processes(root):
    with subprocess.Popen(["true"]) as process:
        pass
    name = f".0000001.tar.{machine()}.{process.pid}.abc.partial"
    path = Path(root.url) / "shards/0000" / name
    path.write_bytes(b"12345")
    make_old(Path(root.url))
    (item,) = garbage(root)
    assert (item.name, item.bytes) == (f"shards/0000/{name}", 5)
    assert [removed.name for removed in remove(root, [item])] == [item.name]
    assert not path.exists()


def test_features_that_waited_for_prototypes(root):
    for number in range(2):
        root.store.put(f"prototypes/{DIGEST}/000000{number}.safetensors", b"abc")
    make_old(Path(root.url, "prototypes"))
    assert len(names(root)) == 2
    root.store.put(f"prototypes/{DIGEST}/0000002.safetensors", b"abc")
    assert names(root) == []  # a measurement goes on
    root.store.delete(f"prototypes/{DIGEST}/0000002.safetensors")
    root.store.delete("prototypes.safetensors")
    assert names(root) == []  # it was killed, and can go on


def test_features_of_a_label_set_that_no_labels_name(root):
    labels = label_set(root, features="images")
    used, stray = (f"{shard_stem(1, labels.folder)}-{n * 8}.features.safetensors" for n in "12")
    for name in (used, stray):
        root.store.put(name, b"abc")
    groups = [labels_of(group) for group in (2, 3)]
    features = File(name=used, sha256="1" * 64, bytes=3)
    images = committed(root)[1].sha256
    labels.commit(1, images=images, groups=groups, features=features)
    for shard in (1, 2):
        labels.record_failure(failure(shard))
    make_old(Path(root.url))
    old_failure = f"{labels.folder}/failed/0000/0000001.1.json"
    assert names(root) == [stray, old_failure]
    assert claim(root.store, "labels-ab12ab12ab12-0000001")
    assert names(root) == [old_failure]  # a living relabelling, even if it is this process
