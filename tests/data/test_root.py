import json
import subprocess
import sys

import pytest

from data.errors import InputError
from data.leases import claim, release
from data.root import Root, spec_digest
from data.shards import shard_name
from data.store import Store


@pytest.fixture
def root(tmp_path):
    plan = {"schema": 2, "digest": "d", "num_shards": 3, "num_groups": 6, "images_per_group": 2}
    Store(str(tmp_path)).create("plan.json", json.dumps(plan).encode())
    return Root(str(tmp_path))


def record(shard, *, plan="d"):
    part = {
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    return {
        "spec": spec_digest(plan, shard),
        "shard": shard,
        "tar": f"{shard_name(shard)}-ba7816bf.tar",
        **part,
        "features": {"name": f"{shard_name(shard)}.features.safetensors", **part},
        "groups": 2,
        "seconds": {"generate": 1.5, "write": 0.5},
        "wall_seconds": 2.0,
        "tflop": 0.25,
    }


def test_no_plan_no_root(tmp_path):
    with pytest.raises(InputError, match=r"holds no plan\.json; start it with `semix build`"):
        Root(str(tmp_path))


def test_only_this_plans_records_count(root):
    assert root.commit(record(0))
    root.store.put(f"{shard_name(1)}.json", json.dumps(record(1, plan="other")).encode())
    root.store.put(f"{shard_name(2)}.json", b'{"shard": 2, "sp')
    assert list(root.committed()) == [0]
    assert root.missing() == [1, 2]


def test_commit_is_create_only_but_replaces_damaged_records(root):
    assert root.commit(record(0))
    assert not root.commit({**record(0), "worker": "a slow twin"})
    assert "worker" not in root.committed()[0]
    root.store.put(f"{shard_name(2)}.json", b"{")
    assert root.missing() == [1, 2]
    assert root.commit(record(2))
    assert root.missing() == [1]


def test_progress_counts_records_and_failures(root):
    root.commit(record(0))
    root.record_failure(1, {"error": "ValueError", "message": "m", "time": 1.0})
    root.record_failure(1, {"error": "ValueError", "message": "m", "time": 2.0})
    found = root.progress()
    assert (found.shards, found.done, found.failed, found.images_done, found.images) == (
        3,
        1,
        1,
        4,
        12,
    )
    assert (found.seconds, found.tflop) == (2.0, 0.25)
    assert found.stages == {"generate": 1.5, "write": 0.5}
    assert [f["attempt"] for f in root.failures()[1]] == [1, 2]
    root.commit(record(1))
    assert root.failures() == {}


def test_work_and_seconds_add_up(root):
    assert root.progress().tflop == 0
    root.commit(record(0))
    root.commit(record(1))
    assert (root.progress().tflop, root.progress().stages["generate"]) == (0.5, 3.0)
    root.commit({**record(2), "tflop": None})
    assert root.progress().tflop is None


def test_an_index_is_new_only_when_something_changed(root):
    root.commit(record(0))
    assert root.write_index() == "index/0.json" == root.write_index()
    root.commit(record(2))
    assert root.write_index() == "index/1.json"
    assert root.indices() == ["index/0.json", "index/1.json"]


def test_verify_names_what_is_wrong_and_discard_makes_it_missing(root):
    for shard in (0, 1):
        root.commit(record(shard))
        root.store.put(record(shard)["features"]["name"], b"abc")
    root.store.put(record(0)["tar"], b"abcd")
    problems = [str(problem) for problem in root.verify()]
    assert problems[0].endswith("0000000-ba7816bf.tar has 4 bytes, not 3")
    assert problems[1].endswith("0000001-ba7816bf.tar is missing")
    root.store.put(record(0)["tar"], b"abd")
    assert root.verify()[0].shard == 1
    assert "recorded SHA-256" in root.verify(full=True)[0].text
    root.discard(0)
    assert root.missing() == [0, 2]


def test_a_lease_holds_while_its_process_lives(root):
    script = (
        "import sys\nfrom data.leases import claim\nfrom data.store import Store\n"
        "print(claim(Store(sys.argv[1]), 1), flush=True)\nsys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, root.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "True\n"
    assert not claim(root.store, 1)
    assert claim(root.store, 2)
    assert claim(root.store, 2)  # our own
    other.kill()
    other.wait()
    assert claim(root.store, 1)
    release(root.store, 1)
    assert root.store.list("leases") == ["leases/0000002.json"]
