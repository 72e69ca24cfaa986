"""A root: its plan, what is committed and what failed, on stores of each kind."""

import json
import secrets
import subprocess
import sys

import pytest

from data.errors import InputError
from data.formats import record_name
from data.garbage import garbage, remove
from data.layout import next_extension, write_extension
from data.leases import claim, release
from data.root import Root
from data.store import Store
from data.verify import damage, put_aside
from tests.data.whole_roots import Counting, commit_record, empty_root, failure, whole_root
from tests.handmade import make_plan


@pytest.fixture
def root(tmp_path):
    return empty_root(tmp_path)


def test_no_plan_no_root(tmp_path):
    with pytest.raises(InputError, match=r"holds no plan\.json; start it with `semix build`"):
        Root(str(tmp_path))


@pytest.mark.parametrize("content", [b'{"schema": 3, "dig', b"", b"[1, 2]", b"\xff" * 9])
def test_a_damaged_plan_is_named(tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(InputError, match=r"plan\.json = damaged: plan\.json: .*bring it back"):
        Root(str(tmp_path))


def test_a_folder_where_the_plan_goes_is_named(tmp_path):
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(InputError, match=r"plan\.json = damaged: .*bring it back"):
        Root(str(tmp_path))


def test_a_plan_of_another_version_is_named(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(make_plan(3, 6, schema=9)))
    with pytest.raises(
        InputError, match=r"plan\.json schema = 9: another version of semix wrote it"
    ):
        Root(str(tmp_path))


def test_only_this_plans_records_count(root):
    assert root.commit(commit_record(0))
    root.store.put(record_name(1), commit_record(1, plan="e" * 64).written())
    root.store.put(record_name(2), b'{"shard": 2, "sp')
    assert list(root.committed()) == [0]
    assert root.missing() == [1, 2]


def test_commit_is_create_only_but_replaces_damaged_records(root):
    assert root.commit(commit_record(0))
    assert not root.commit(commit_record(0, worker="a slow twin"))
    assert root.record(0).worker == ""
    root.store.put(record_name(2), b"{")
    assert root.missing() == [1, 2]
    assert root.commit(commit_record(2))
    assert root.missing() == [1]


def test_a_record_is_not_written_into_a_folder(root, tmp_path):
    (tmp_path / record_name(1)).mkdir(parents=True)
    assert root.missing() == [0, 1, 2]
    assert not root.is_committed(1)
    with pytest.raises(OSError, match=r"0000001\.json"):
        root.commit(commit_record(1))


def test_progress_counts_records_and_failures(root):
    root.commit(commit_record(0))
    root.record_failure(failure(1))
    root.record_failure(failure(1, 2.0))
    found = root.progress()
    assert (found.shards, found.done, found.failed) == (3, 1, 1)
    assert (found.images_done, found.images) == (4, 12)
    assert (found.seconds, found.tflop) == (2.0, 0.25)
    assert found.stages == {"generate": 1.5, "write": 0.5}
    assert [f.attempt for f in root.failures()[1]] == [1, 2]
    assert (root.attempts(1), root.failed_attempts()) == (2, {1: 2})
    root.commit(commit_record(1))
    assert root.failures() == root.failed_attempts() == {}


def test_a_damaged_failure_record_hides_no_other(root):
    root.record_failure(failure(1))
    root.store.put("failed/0000/0000001.2.json", b"{")
    root.record_failure(failure(1, 3.0))
    assert [f.time for f in root.failures()[1]] == [1.0, 3.0]
    assert root.attempts(1) == 3


def test_work_and_seconds_add_up(root):
    assert root.progress().tflop == 0
    root.commit(commit_record(0))
    root.commit(commit_record(1))
    assert (root.progress().tflop, root.progress().stages["generate"]) == (0.5, 3.0)
    root.commit(commit_record(2, tflop=None))
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
    added = next_extension(root.plan.digest, root.layout, 5, pairs=2)
    assert write_extension(root.store, 1, added)
    again = Root(root.url)
    assert (again.plan.num_groups, again.plan.num_shards) == (10, 5)
    assert again.missing() == [1, 2, 3, 4]
    assert again.progress().groups == 10
    assert root.store.get("plan.json") == before


WITHOUT_TORCH = """
import sys
from data.flags import newest_flags
from data.garbage import garbage
from data.label_sets import label_sets
from data.pinned import Pinned
from data.root import Root
from data.series import read_series
from data.verify import damage

root = Root(sys.argv[1])
assert root.progress().done == 3 and damage(root) == damage(root, full=True) == []
assert garbage(root) == label_sets(root) == [] and newest_flags(root, "index/0.json") is None
assert len(read_series(root, [3, 0])) == len(list(Pinned(root).samples(root.record(0)))) == 2
sys.exit("torch" in sys.modules)
"""


@pytest.mark.process
def test_looking_after_a_root_needs_no_torch(tmp_path):
    root = whole_root(tmp_path)
    assert subprocess.run([sys.executable, "-c", WITHOUT_TORCH, root.url]).returncode == 0


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.process)])
def url(request):
    """Of a place on a store that is no local folder."""
    if request.param == "s3":
        return request.getfixturevalue("bucket") + "/some/root"
    return f"memory://{secrets.token_hex(4)}"


def test_damage_is_found_put_aside_and_made_again(url):
    root = whole_root(url, shards=4)
    assert damage(root, full=True) == []
    entries, record, whole = root.committed(), root.record(1), {}
    for shard in (0, 1):
        name = entries[shard].tar
        whole[name] = root.store.get(name)
        root.store.put(name, whole[name][:700] + b"?" + whole[name][701:])
    root.store.delete(entries[2].tar)
    watching = Root(url)
    assert put_aside(watching, damage(watching, full=True)) == 3
    assert watching.missing() == Root(url).missing() == [0, 1, 2]
    root.store.put(record.tar, whole[record.tar])
    assert root.commit(record.model_copy(update={"spec": root.record(3).spec}))
    assert Root(url).missing() == [0, 1, 2]  # the record of another shard does not count
    assert root.commit(record)
    assert Root(url).missing() == [0, 2]
    assert claim(root.store, 1)
    release(root.store, 1)
    assert root.store.list("leases") == []


def test_garbage_is_found_and_removed(url):
    root = whole_root(url)
    root.store.put("shards/0000/0000001-0123abcd.tar", b"1234")
    assert garbage(root) == []
    (item,) = garbage(root, older_than_s=-60)
    assert remove(root, [item], older_than_s=-60) == [item]
    assert garbage(root, older_than_s=-60) == []
    assert damage(root, full=True) == []


def test_requests_do_not_grow_with_the_records_that_an_index_knows(url):
    root = whole_root(url, shards=5)
    again = Root(url)
    store = Counting(Store(url))
    again._records._store = store
    assert again.missing() == []
    assert store.calls == {"scan": 4, "get": 1}  # folders, tombstones, indices, one folder
    assert again.missing() == []
    assert store.calls == {"scan": 6, "get": 1}  # folders and tombstones
    assert len(again.committed()) == 5
    assert store.calls["get"] == 1
    assert root.write_index() == "index/0.json"
