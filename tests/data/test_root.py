"""A root: its plan, what is committed and what failed, on stores of each kind, at any size."""

import json
import secrets
import subprocess
import sys
import tracemalloc
from collections.abc import Callable

import pytest

from semix.data.errors import InputError
from semix.data.formats import record_name
from semix.data.garbage import garbage, remove
from semix.data.layout import next_extension, write_extension
from semix.data.leases import claim, release
from semix.data.ranges import format_ranges, parse_ranges
from semix.data.root import Root
from semix.data.verify import damage, quarantine
from semix.flows.build_steps import ShardSelection, gaps
from tests.data.whole_roots import commit_record, empty_root, failure, whole_root
from tests.handmade import committed, make_plan
from tests.simulated import PAGE, SimulatedShards, index_of, simulated


@pytest.fixture
def root(tmp_path):
    return empty_root(tmp_path)


def test_no_plan_no_root(tmp_path):
    with pytest.raises(InputError, match=r"holds no plan\.json; start it with `semix build`"):
        Root(str(tmp_path))


PLANS = [b'{"schema": 4, "dig', b"", b"[1, 2]", b"null", b"\xff" * 9, b'{"schema":' * 99_999]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, r" = damaged: plan\.json: .*restore it") for content in PLANS),
        (b"{}", " schema = 1: another version of semix wrote it"),
    ],
    ids=range(len(PLANS) + 1),
)
def test_a_damaged_plan_is_named(tmp_path, content, message):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"plan\.json{message}"):
        Root(str(tmp_path))


def test_a_folder_where_the_plan_goes_is_named(tmp_path):
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(InputError, match=r"plan\.json = damaged: .*restore it"):
        Root(str(tmp_path))


def test_commit_is_create_only(root):
    assert root.commit(commit_record(0))
    assert not root.commit(commit_record(0, worker="a slow twin"))
    assert root.record(0).worker == ""
    assert root.record(1) is None


def test_an_older_root_is_refused_with_what_it_was_made_by(tmp_path):
    versions = {"torch": "2.11.0", "diffusers": "0.36.0", "numpy": "2.4"}
    for made_by, name in (
        (versions, "another version of semix, with diffusers 0.36.0 and torch 2.11.0,"),
        (versions | {"semix": "0.1.9"}, "semix 0.1.9, with diffusers 0.36.0 and torch 2.11.0,"),
        (7, "another version of semix"),
    ):
        plan = json.dumps({"schema": 3, "versions": made_by})
        (tmp_path / "plan.json").write_text(plan)
        with pytest.raises(InputError) as raised:
            Root(str(tmp_path))
        assert f"schema = 3: {name} wrote it, this one reads 4" in str(raised.value)


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ([[1, 0]], "one does not ascend"),
        ([[0, 9]], "of the 3 classes"),
        ([[0, 2], [0, 1]], "pairs do not ascend"),
    ],
)
def test_pairs_of_a_plan_ascend_and_are_of_its_classes(tmp_path, pairs, problem):
    (tmp_path / "plan.json").write_text(json.dumps(make_plan(3, 6, pairs=pairs)))
    with pytest.raises(InputError, match=rf"plan\.json = damaged: .*{problem}"):
        Root(str(tmp_path))


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
    progress = root.progress()
    assert (progress.shards, progress.done, progress.failed) == (3, 1, 1)
    assert (progress.images_done, progress.images) == (4, 12)
    assert [f.attempt for f in root.failures()[1]] == [1, 2]
    assert (root.attempts(1), root.failed_attempts()) == (2, {1: 2})
    root.commit(commit_record(1))
    assert root.failures() == root.failed_attempts() == {}


def test_what_was_added_counts_and_the_plan_stays(root):
    before = root.store.get("plan.json")
    root.commit(commit_record(0))
    added = next_extension(root.plan.digest, root.layout, 4, groups_per_pair=5)
    assert write_extension(root.store, 1, added)
    reopened = Root(root.url)
    assert (reopened.plan.num_groups, reopened.plan.num_shards) == (10, 5)
    assert (reopened.plan.groups_per_pair, reopened.plan.num_pairs) == (5, 2)
    assert reopened.missing() == [1, 2, 3, 4]
    assert reopened.progress().groups == 10
    assert root.store.get("plan.json") == before


WITHOUT_TORCH = """
import sys
from semix.data.exclusion import newest_flags
from semix.data.garbage import garbage
from semix.data.label_sets import label_sets
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.contact_sheet import read_series
from semix.data.verify import damage
from tests.handmade import committed

root = Root(sys.argv[1])
assert root.progress().done == 3 and damage(root) == damage(root, full=True) == []
assert garbage(root) == label_sets(root) == [] and newest_flags(root, "index/0.json") is None
assert len(read_series(root, [3, 0])) == len(list(PinnedRoot(root).samples(root.record(0)))) == 2
sys.exit("torch" in sys.modules)
"""


@pytest.mark.process
def test_looking_after_a_root_needs_no_torch(tmp_path):
    root = whole_root(tmp_path)
    assert subprocess.run([sys.executable, "-c", WITHOUT_TORCH, root.url]).returncode == 0


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.process)])
def url(request):
    """The URL of a root on a store that is no local folder."""
    if request.param == "s3":
        return request.getfixturevalue("bucket") + "/some/root"
    return f"memory://{secrets.token_hex(4)}"


def test_damage_is_found_put_aside_and_made_again(url):
    root = whole_root(url, shards=4)
    assert damage(root, full=True) == []
    entries, record, tars = committed(root), root.record(1), {}
    for shard in (0, 1):
        name = entries[shard].tar
        tars[name] = root.store.get(name)
        root.store.put(name, tars[name][:700] + b"?" + tars[name][701:])
    root.store.delete(entries[2].tar)
    other_reader = Root(url)
    assert quarantine(other_reader, damage(other_reader, full=True)) == 3
    assert other_reader.missing() == Root(url).missing() == [0, 1, 2]
    root.store.put(record.tar, tars[record.tar])
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


SHARDS, LACKING = 100_000, 300
SOME = 5_000  # shards where memory is traced, which is slow


def peak(work: Callable[[], object]) -> int:
    """The peak of the bytes that Python allocated while `work` ran."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_simulation_holds_what_a_root_would_write():
    shards = SimulatedShards(2500, 2300)
    with simulated(shards) as root:
        assert root.write_index() == "index/0.json"
        assert shards.written["index/0.json"] == index_of(2300)
        assert root.missing() == list(range(2300, 2500))
        assert [p.kind for p in damage(root)] == ["prototypes"]  # there are none


def test_counting_takes_few_bytes_per_shard():
    shards = SimulatedShards(SOME, SOME - LACKING)
    with simulated(shards) as root:

        def count():
            assert root.status()["done"] == SOME - LACKING
            assert len(root.missing()) == len(ShardSelection().shards_to_make(root)) == LACKING
            assert [len(gap) for gap in gaps(root, (), allowed_failures=None)] == [LACKING, 0]
            assert root.failures() == {}

        assert peak(count) < 1000 * SOME


def test_counting_lists_and_reads_no_record():
    folders = SHARDS // PAGE
    shards = SimulatedShards(SHARDS, SHARDS - LACKING)
    with simulated(shards) as root:
        root.progress()
        pages = 3 * (folders - 1) + -(-3 * (PAGE - LACKING) // PAGE)
        # Besides these the folders of shards, failures, extensions; the plan.
        assert shards.requests == {"list": pages + 3, "get": 1}
        shards.done = SHARDS
        assert root.missing() == []


def test_verifying_holds_one_folder_in_memory():
    shards = SimulatedShards(SOME, SOME, index=index_of(SOME))
    with simulated(shards) as root:
        problems = []
        assert peak(lambda: problems.extend(damage(root))) < 4000 * SOME
        assert [p.kind for p in problems] == ["prototypes"]  # there are none
        assert shards.requests["get"] == SOME + 2 + 1  # plan and prototypes; the index


def test_a_million_numbers_are_cheap():
    def look():
        numbers = parse_ranges("0-999999")
        assert (len(numbers), numbers[-1]) == (10**6, 10**6 - 1)
        assert format_ranges(n for n in numbers if n != 7) == "0-6,8-999999"

    assert peak(look) < 160 * 2**20


@pytest.mark.parametrize(
    ("generator", "problem"),
    [
        (7, "Input should be an object"),
        ({"model": "sd", "revision": None}, "files: Field"),
    ],
)
def test_a_plan_whose_models_have_another_form_is_named_by_the_field(tmp_path, generator, problem):
    root = whole_root(tmp_path)
    plan = json.loads(root.store.get("plan.json"))
    plan["models"]["generator"] = generator
    root.store.put("plan.json", json.dumps(plan).encode())
    with pytest.raises(InputError, match=rf"/plan\.json = damaged: .*models\.generator.*{problem}"):
        Root(root.url)
