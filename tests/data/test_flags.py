"""Flags of excluded series: written by several people at once, taken back, pinned, damaged."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.flags import DamagedFlags, ExcludedSeries, flag_series, read_excluded
from semix.data.garbage import garbage
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.verify import damage
from tests.data.whole_roots import whole_root
from tests.handmade import make_root

RULE = Exclusion(flagged=("excluded",))


def test_series_are_excluded_and_taken_back(tmp_path):
    root = make_root(tmp_path)
    assert read_excluded(root) == ExcludedSeries(0, frozenset())
    assert flag_series(root, excluded=[1, 4]) == "flags/0.json"
    assert flag_series(root, excluded=[2], restored=[4]) == "flags/1.json"
    first = read_excluded(root, count=1)
    assert first.groups == {1, 4}
    assert read_excluded(root) == read_excluded(root, after=first) == ExcludedSeries(2, {1, 2})


def test_many_people_at_once_lose_no_flag(tmp_path):
    root = make_root(tmp_path, shards=4, groups=8)
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda group: flag_series(root, excluded=[group]), range(32)))
    assert len(set(names)) == 32
    assert read_excluded(Root(root.url)) == ExcludedSeries(32, frozenset(range(32)))


def test_a_reader_leaves_them_out_and_a_run_keeps_those_it_began_with(tmp_path):
    root = make_root(tmp_path)
    begun = MixedDataset(root.url, exclude=RULE)
    assert (begun.flags, begun.numbers.tolist()) == (0, [0, 1, 2, 3, 4, 5])
    flag_series(root, excluded=[1, 4])
    now = MixedDataset(root.url, exclude=RULE)
    assert (now.flags, now.numbers.tolist()) == (1, [0, 2, 3, 5])
    again = MixedDataset(root.url, exclude=RULE, flags=0)
    assert again.series_digest == begun.series_digest != now.series_digest
    assert MixedDataset(root.url).flags is None  # without the rule none are read


def test_a_copy_in_another_process_keeps_the_flags_that_were_read(tmp_path):
    root = make_root(tmp_path)
    source = PinnedRoot(root)
    assert source.excluded.groups == set()
    flag_series(root, excluded=[1])
    reopen, arguments = source.__reduce__()
    assert reopen(*arguments).excluded.groups == set()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"plan": "e" * 64}, "belongs to another plan"),
        ({"excluded": [3], "restored": [3]}, "group 3 is both excluded and restored"),
        ({"excluded": [-1]}, r"exclusion flags: excluded\.0"),
        ({"command": "rm"}, "exclusion flags: command"),
    ],
)
def test_damaged_flags_are_refused_by_name_and_found_by_verify(tmp_path, changes, problem):
    root = whole_root(tmp_path)
    flag_series(root, excluded=[1])
    path = tmp_path / "flags" / "0.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    with pytest.raises(DamagedFlags, match=rf"flags/0\.json = damaged: .*{problem}.*restore it"):
        MixedDataset(root.url, exclude=RULE)
    assert [p.text for p in damage(root) if p.kind == "flags" and "flags/0.json" in p.text]


def test_a_missing_file_would_change_what_is_excluded(tmp_path):
    root = whole_root(tmp_path)
    for group in range(3):
        flag_series(root, excluded=[group])
    assert damage(root) == [] and garbage(root, older_than_s=0) == []  # no leftovers
    (tmp_path / "flags" / "1.json").unlink()
    with pytest.raises(DamagedFlags, match=r"flags/1\.json = missing"):
        read_excluded(root)
    with pytest.raises(DamagedFlags, match=r"flags/7\.json = missing"):
        read_excluded(root, count=8, after=ExcludedSeries(7))


def test_flags_of_a_newer_version_are_left_alone(tmp_path):
    root = whole_root(tmp_path)
    flag_series(root, excluded=[1])
    path = tmp_path / "flags" / "0.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"schema": 9}))
    with pytest.raises(InputError, match="a newer version of semix wrote it"):
        damage(root)


def test_a_series_that_is_not_there_is_refused(tmp_path):
    root = make_root(tmp_path)
    with pytest.raises(InputError, match=r"group = 6: .* has groups 0 to 5"):
        flag_series(root, excluded=[6])
    assert not (tmp_path / "flags").exists()
