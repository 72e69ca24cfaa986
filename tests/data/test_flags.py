"""Flags of audits: numbered, create-only, strictly read."""

import json

import pytest

from data.flags import flagged_groups, newest_flags, store_flags
from data.formats import FLAGS, SeriesFlags
from data.root import Root
from tests import handmade

DIGEST = "a" * 64


def flags(
    index: str = "index/0.json", labels: str | None = None, **found: list[int]
) -> SeriesFlags:
    by_flag = {flag: found.get(flag, []) for flag in FLAGS}
    return SeriesFlags(index=index, digest=DIGEST, labels=labels, flags=by_flag)


@pytest.fixture
def root(tmp_path) -> Root:
    return handmade.make_root(tmp_path)


def test_audits_are_numbered_and_an_equal_one_is_not_stored_twice(root):
    assert newest_flags(root, "index/0.json") is None
    assert store_flags(root, flags(duplicate=[1])) == "audit/0.json"
    assert store_flags(root, flags(duplicate=[2])) == "audit/1.json"
    assert store_flags(root, flags(duplicate=[1])) == "audit/0.json"
    assert root.store.list("audit") == ["audit/0.json", "audit/1.json"]


def test_the_newest_of_an_index_is_found_also_after_the_tenth(root):
    for number in range(11):
        store_flags(root, flags(duplicate=[number]))
    store_flags(root, flags("index/1.json", still=[5]))
    assert newest_flags(root, "index/0.json") == flags(duplicate=[10])
    assert newest_flags(root, "index/1.json") == flags("index/1.json", still=[5])


def test_groups_of_several_flags_are_joined():
    found = flags(duplicate=[1, 3], degenerate=[3, 4], still=[9])
    assert flagged_groups(found, ["duplicate", "degenerate"]) == {1, 3, 4}


def test_an_audit_that_looked_for_other_flags_can_be_read(root):
    """As of a version that knew one less, or one that knows more."""
    said = json.loads(flags(duplicate=[1]).written())
    del said["flags"]["still"]
    said["flags"]["blurred"] = [7]
    root.store.put("audit/0.json", json.dumps(said).encode())
    found = newest_flags(root, "index/0.json")
    assert (found.flags["blurred"], found.flags["duplicate"]) == ([7], [1])
    assert flagged_groups(found, ["duplicate", "blurred"]) == {1, 7}
    with pytest.raises(KeyError, match="still"):
        flagged_groups(found, ["still"])
    assert store_flags(root, flags(duplicate=[1])) == "audit/1.json"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", r"audit/0\.json: audit: .*remove it and run `semix audit` again"),
        (b'{"index": "index/0.json"}', "digest: Field required"),
        (flags().written().replace(b'"still":[]', b'"still":[-1]'), r"flags\.still"),
        (flags().written().replace(b'"still":[]', b'"still":[],"still":[3]'), "stands twice"),
        (flags().written()[:-9], "audit: "),
    ],
)
def test_a_damaged_audit_is_named(root, content, problem):
    root.store.put("audit/0.json", content)
    with pytest.raises(ValueError, match=problem):
        newest_flags(root, "index/0.json")
