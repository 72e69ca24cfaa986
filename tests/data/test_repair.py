import json
import subprocess
from pathlib import Path

import pytest

from data.errors import InputError
from data.machine import machine
from data.repair import put_aside, refuse_other_prototypes
from data.root import Root
from data.shards import shard_name
from tests.data.whole_roots import prototypes
from tests.handmade import put_shard, sample, tar_of


def test_what_is_damaged_counts_as_missing_and_can_be_made_again(root):
    entry = root.committed()[1]
    whole = root.store.get(entry["tar"])
    root.store.put(entry["tar"], whole[:600] + b"?" + whole[601:])
    assert put_aside(root, root.verify()) == 0
    assert put_aside(root, root.verify(full=True)) == 1
    assert root.missing() == Root(root.url).missing() == [1]
    # A store may keep an object of the same name and size, so the damaged one must be gone.
    assert not root.store.exists(entry["tar"])
    assert root.store.exists(entry["features"]["name"])
    note = json.loads(root.store.get("discarded/0000/0000001.1.json"))
    assert "does not have the recorded SHA-256" in note["why"]
    root.store.put(entry["tar"], whole)
    assert root.commit({**json.loads(note["record"]), "worker": "second"})
    assert Root(root.url).verify(full=True) == []
    assert root.write_index() == "index/1.json"


def test_a_damaged_record_is_put_aside_and_its_tar_stays(root):
    tar = root.committed()[1]["tar"]
    root.store.put(f"{shard_name(1)}.json", b'{"shard"')
    assert put_aside(root, root.verify()) == 1
    assert not root.store.exists(f"{shard_name(1)}.json")
    assert root.store.exists(tar)
    assert root.missing() == [1]


def test_a_shard_that_a_living_process_works_on_is_left_to_it(root):
    root.store.delete(root.committed()[1]["tar"])
    with subprocess.Popen(["sleep", "60"]) as other:
        note = {"host": machine(), "pid": other.pid}
        root.store.create("leases/0000001.json", json.dumps(note).encode())
        assert put_aside(root, root.verify()) == 0
        assert root.missing() == []
        other.kill()
    assert put_aside(root, root.verify()) == 1
    assert root.store.list("leases") == []
    assert root.missing() == [1]


def test_unreadable_prototypes_are_put_aside_with_a_tombstone(root):
    root.store.put("prototypes.safetensors", b"x")
    assert put_aside(root, root.verify()) == 1
    assert not root.store.exists("prototypes.safetensors")
    why = json.loads(root.store.get("discarded/prototypes.1.json"))["why"]
    assert why.startswith("prototypes.safetensors cannot be read")
    assert put_aside(root, root.verify()) == 0  # missing: there is nothing to put aside


def test_what_only_a_person_can_repair_is_passed_over(root):
    root.store.delete(f"{shard_name(2)}.json")
    Path(root.url, f"{shard_name(2)}.json").mkdir()
    root.store.create("index/1.json", b"{")
    put_shard(root.store, 7, tar_of(sample(14), sample(15)), first=14, groups=2, count=2)
    names = root.store.list("")
    problems = Root(root.url).verify()
    assert {p.kind for p in problems} == {"record", "index"}
    assert put_aside(root, problems) == 0
    assert root.store.list("") == names


def test_prototypes_must_be_those_that_shards_were_labelled_with(root):
    refuse_other_prototypes(root, root.prototypes_sha256)  # records of old say nothing
    record = {**root.record(1), "prototypes": root.prototypes_sha256}
    root.store.put(f"{shard_name(1)}.json", json.dumps(record).encode())
    refuse_other_prototypes(Root(root.url), root.prototypes_sha256)
    root.store.put("prototypes.safetensors", prototypes() + b" ")
    message = r"prototypes\.safetensors = .*are not those that 1 shards, 1 on, were labelled with"
    with pytest.raises(InputError, match=message):
        refuse_other_prototypes(Root(root.url), Root(root.url).prototypes_sha256)
