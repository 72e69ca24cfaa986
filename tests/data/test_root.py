import json

import pytest

from data.errors import InputError
from data.extension import next_extension, write_extension
from data.root import Root
from data.shards import shard_name
from tests.data.whole_roots import commit_record, empty_root
from tests.handmade import make_plan


@pytest.fixture
def root(tmp_path):
    return empty_root(tmp_path)


def failure(time: float) -> dict:
    return {"error": "ValueError", "message": "group 3: flat", "time": time}


def test_no_plan_no_root(tmp_path):
    with pytest.raises(InputError, match=r"holds no plan\.json; start it with `semix build`"):
        Root(str(tmp_path))


@pytest.mark.parametrize("content", [b'{"schema": 2, "dig', b"", b"[1, 2]", b"\xff" * 9])
def test_a_damaged_plan_is_named(tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(InputError, match=r"plan\.json = damaged: plan\.json: .*bring it back"):
        Root(str(tmp_path))


def test_a_plan_of_another_version_is_named(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(make_plan(3, 6, schema=9)))
    with pytest.raises(
        InputError, match=r"plan\.json schema = 9: another version of semix wrote it"
    ):
        Root(str(tmp_path))


def test_only_this_plans_records_count(root):
    assert root.commit(commit_record(0))
    other = commit_record(1, plan="e" * 64)
    root.store.put(f"{shard_name(1)}.json", json.dumps(other).encode())
    root.store.put(f"{shard_name(2)}.json", b'{"shard": 2, "sp')
    assert list(root.committed()) == [0]
    assert root.missing() == [1, 2]


def test_commit_is_create_only_but_replaces_damaged_records(root):
    assert root.commit(commit_record(0))
    assert not root.commit({**commit_record(0), "worker": "a slow twin"})
    assert "worker" not in root.record(0)
    root.store.put(f"{shard_name(2)}.json", b"{")
    assert root.missing() == [1, 2]
    assert root.commit(commit_record(2))
    assert root.missing() == [1]


def test_a_record_is_not_written_into_a_folder(root, tmp_path):
    (tmp_path / f"{shard_name(1)}.json").mkdir(parents=True)
    assert root.missing() == [0, 1, 2]
    assert not root.is_committed(1)
    with pytest.raises(OSError, match=r"0000001\.json"):
        root.commit(commit_record(1))


def test_progress_counts_records_and_failures(root):
    root.commit(commit_record(0))
    root.record_failure(1, failure(1.0))
    root.record_failure(1, failure(2.0))
    found = root.progress()
    assert (found.shards, found.done, found.failed) == (3, 1, 1)
    assert (found.images_done, found.images) == (4, 12)
    assert (found.seconds, found.tflop) == (2.0, 0.25)
    assert found.stages == {"generate": 1.5, "write": 0.5}
    assert [f["attempt"] for f in root.failures()[1]] == [1, 2]
    assert root.attempts(1) == 2
    root.commit(commit_record(1))
    assert root.failures() == {}


def test_a_damaged_failure_record_hides_no_other(root):
    root.record_failure(1, failure(1.0))
    root.store.put("failed/0000/0000001.2.json", b"{")
    root.record_failure(1, failure(3.0))
    assert [f["time"] for f in root.failures()[1]] == [1.0, 3.0]
    assert root.attempts(1) == 3


def test_work_and_seconds_add_up(root):
    assert root.progress().tflop == 0
    root.commit(commit_record(0))
    root.commit(commit_record(1))
    assert (root.progress().tflop, root.progress().stages["generate"]) == (0.5, 3.0)
    root.commit({**commit_record(2), "tflop": None})
    assert root.progress().tflop is None


def test_an_index_is_new_only_when_something_changed(root):
    root.commit(commit_record(0))
    assert root.write_index() == "index/0.json" == root.write_index()
    assert Root(root.url).write_index() == "index/0.json"
    root.commit(commit_record(2))
    assert root.write_index() == "index/1.json"
    assert root.indices() == ["index/0.json", "index/1.json"]


def test_what_was_added_counts_and_the_plan_stays(root):
    before = root.store.get("plan.json")
    root.commit(commit_record(0))
    root.write_index()
    added = next_extension(root.plan["digest"], root.layout, 5, pairs=2)
    assert write_extension(root.store, 1, added)
    again = Root(root.url)
    assert (again.plan["num_groups"], again.plan["num_shards"]) == (10, 5)
    assert again.missing() == [1, 2, 3, 4]
    assert again.progress().groups == 10
    assert root.store.get("plan.json") == before
