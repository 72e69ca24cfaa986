"""Series that readers leave out: the rules, on series made by hand, and the flags of audits."""

import json
import logging

import numpy as np
import pytest

from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.exclusion import Exclusion, flagged_groups, newest_flags, store_flags
from semix.data.formats import FLAGS, SeriesFlags, SeriesRecord
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.series_filter import SeriesFilter, describe
from semix.data.settings import load_settings
from semix.data.tar import GroupSample
from tests import featured, handmade
from tests.handmade import committed

INDEX = "index/0.json"
ALPHAS = [0.0, 0.3, 0.7, 1.0]
SIMPLEX = {"classes": [0, 1, 2], "names": list(handmade.NAMES)}
WEIGHTS = [
    [-0.2, 0.1, 0.8, 1.3],  # in order: Spearman 1
    [0.0, 0.6, 0.5, 1.0],  # neighbours swapped: 0.8
    [1.0, 0.9, 0.1, 0.0],  # backwards: -1
    [0.5, 0.5, 0.5, 0.5],  # follows nothing: 0, and falls nowhere
]
AWAY = {1: featured.VECTORS[[1, 2, 0, 0]], 3: np.full((4, 4), np.nan)}


def samples() -> list[GroupSample]:
    return [
        handmade.sample(
            group,
            4,
            alphas=ALPHAS,
            weights=weights,
            agreement={"weights": weights, "difference": [0.0, 0.1 * group, 0.0, 0.05]},
            noise={"strategy": "select", "stability": 0.9 - 0.2 * group},
        )
        for group, weights in enumerate(WEIGHTS)
    ]


def read_decisions(rules: Exclusion, records: list[SeriesRecord], *, root: Root) -> list[bool]:
    """Whether a reader keeps each of these series, shard by shard."""
    source, decisions = PinnedRoot(root), []
    series_filter = SeriesFilter(rules, source)
    for shard in source.shards:
        in_shard = [record for record in records if record.group in shard.group_numbers]
        decisions += series_filter.keep(shard, in_shard)
    series_filter.conclude()
    return decisions


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Root:
    series = samples()
    folder = tmp_path_factory.mktemp("root")
    return featured.root_of(folder, [series[:2], series[2:]], features=AWAY)


@pytest.fixture(scope="module")
def records() -> list[SeriesRecord]:
    return [sample.record for sample in samples()]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, [True, True, True, True]),
        ({"min_correlation": 0.8}, [True, True, False, False]),
        ({"min_correlation": 0.0}, [True, True, False, True]),
        ({"monotone": True}, [True, False, False, True]),
        # The first image of series 1 was made for fox and is nearest to dog; series 3 has NaNs.
        ({"end_points": True}, [True, False, True, False]),
        ({"max_disagreement": 0.1}, [True, True, False, False]),
        ({"min_stability": 0.6}, [True, True, False, False]),
        ({"monotone": True, "min_stability": 0.4}, [True, False, False, False]),
    ],
)
def test_what_each_rule_leaves_out(root, records, rules, expected):
    assert read_decisions(load_settings(Exclusion, rules), records, root=root) == expected


def test_answers_are_in_the_order_of_the_records_and_the_same_one_by_one(root, records):
    source = PinnedRoot(root)
    series_filter = SeriesFilter(Exclusion(end_points=True, monotone=True), source)
    shard = source.shards[0]
    assert series_filter.keep(shard, [records[1], records[0]]) == [False, True]
    one_by_one = [series_filter.keep(shard, [record]) for record in records[:2]]
    assert one_by_one == [[True], [False]]


def test_end_points_are_judged_by_the_encoder_whose_labels_are_in_use(tmp_path, records):
    series = samples()
    root = featured.root_of(tmp_path, [series[:2], series[2:]], features=AWAY)
    digest = featured.label_set(root, {2: featured.VECTORS[[0, 0, 0, 0]]}, prototype_length=3.0)
    rules = Exclusion(end_points=True)
    assert MixedDataset(root.url, exclude=rules).numbers.tolist() == [0, 2]
    assert MixedDataset(root.url, exclude=rules, labels=digest).numbers.tolist() == [0, 1, 3]


def test_counts_are_logged_once(root, records, monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("semix.data"), "info", lambda t, *a: messages.append(t % a)
    )
    read_decisions(Exclusion(monotone=True, min_stability=0.4), records, root=root)
    assert messages == ["exclusion keeps 1 of 4 series; left out: monotone 2, min_stability 1"]


def test_words():
    text = describe({"monotone": 1200, "flagged": 0}, remaining=3800, series=5000)
    assert text == "exclusion keeps 3,800 of 5,000 series; left out: monotone 1,200, flagged 0"


def store_audit(root: Root, digest: str, **flags: list[int]) -> None:
    by_flag = {flag: flags.get(flag, []) for flag in FLAGS}
    store_flags(root, SeriesFlags(index=INDEX, digest=digest, labels=None, flags=by_flag))


def test_flagged_series_are_left_out_once_the_index_is_audited(tmp_path, records):
    root = featured.root_of(tmp_path, [samples()])
    rule = Exclusion(flagged=("duplicate", "degenerate"))
    message = rf"exclude.flagged = duplicate, degenerate: {INDEX} was not audited; run `semix audit"
    with pytest.raises(InputError, match=message):
        read_decisions(rule, records, root=root)
    store_audit(root, "f" * 64, duplicate=[0])  # of another content of that name
    with pytest.raises(InputError, match=f"semix audit {root.url} --index {INDEX}"):
        read_decisions(rule, records, root=root)
    store_audit(root, PinnedRoot(root).digest, duplicate=[1], degenerate=[3], still=[0])
    assert read_decisions(rule, records, root=root) == [True, False, True, False]


def test_a_flag_that_the_audit_did_not_look_for_wants_another_audit(tmp_path, records):
    """An audit of an earlier version lacks a flag, and one of a later version may have more."""
    root = featured.root_of(tmp_path, [samples()])
    by_flag = {"degenerate": [3], "blurred": [0]}
    digest = PinnedRoot(root).digest
    store_flags(root, SeriesFlags(index=INDEX, digest=digest, labels=None, flags=by_flag))
    assert read_decisions(Exclusion(flagged=("degenerate",)), records, root=root) == [True] * 3 + [
        False
    ]
    message = r"^exclude\.flagged = duplicate: the last audit did not look for it; run `semix audit"
    with pytest.raises(InputError, match=message):
        read_decisions(Exclusion(flagged=("duplicate", "degenerate")), records, root=root)


def test_an_audit_is_numbered_after_the_last_whatever_was_removed(root):
    digest = PinnedRoot(root).digest
    audits = [
        SeriesFlags(index=INDEX, digest=digest, labels=None, flags={"still": [n]}) for n in range(4)
    ]
    names = [store_flags(root, audit) for audit in audits[:3]]
    first = int(names[0].removeprefix("audit/").removesuffix(".json"))
    assert names == [f"audit/{first + n}.json" for n in range(3)]
    root.store.delete(names[1])
    assert store_flags(root, audits[3]) == f"audit/{first + 3}.json"
    assert newest_flags(root, INDEX) == audits[3]


def test_nothing_is_deleted(root, records):
    before = {name: root.store.get(name) for name in root.store.list("")}
    read_decisions(Exclusion(monotone=True, end_points=True), records, root=root)
    assert {name: root.store.get(name) for name in root.store.list("")} == before


def test_a_rule_that_leaves_nothing_is_refused(root, records):
    message = r"exclude = monotone True, min_stability 0.95: leaves none of 4 series; ease a rule"
    with pytest.raises(InputError, match=message):
        read_decisions(Exclusion(monotone=True, min_stability=0.95), records, root=root)


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        (
            {"min_correlation": 0.5},
            SIMPLEX,
            r"exclude.min_correlation = 0.5: is for pairs; these mix 3 classes",
        ),
        ({"monotone": True}, SIMPLEX, r"exclude.monotone = True: is for pairs"),
        (
            {"max_disagreement": 0.1},
            {},
            r"exclude.max_disagreement = 0.1: .* stores no CLIP weights by a second",
        ),
        (
            {"min_stability": 0.1},
            {},
            r"exclude.min_stability = 0.1: 1 of 1 series in .* have no stability score",
        ),
    ],
)
def test_rules_that_do_not_apply_are_refused(root, rule, changes, message):
    record = handmade.series_of(handmade.record(0, 4, **changes))
    with pytest.raises(InputError, match=message):
        read_decisions(Exclusion(**rule), [record], root=root)


def test_features_that_are_gone_are_named(tmp_path, records):
    root = featured.root_of(tmp_path, [samples()])
    name = committed(root)[0].features.name
    root.store.delete(name)
    with pytest.raises(ValueError, match=f"{name}: the shard's features are not there"):
        read_decisions(Exclusion(end_points=True), records, root=root)


def test_values_out_of_range_are_refused():
    with pytest.raises(InputError, match=r"min_correlation = 2: .*less than or equal to 1"):
        load_settings(Exclusion, {"min_correlation": 2})
    with pytest.raises(InputError, match=r"flagged.0 = 'ugly'"):
        load_settings(Exclusion, {"flagged": ["ugly"]})


DIGEST = "a" * 64


def flags(
    index: str = "index/0.json", labels: str | None = None, **numbers: list[int]
) -> SeriesFlags:
    by_flag = {flag: numbers.get(flag, []) for flag in FLAGS}
    return SeriesFlags(index=index, digest=DIGEST, labels=labels, flags=by_flag)


@pytest.fixture
def empty_audit_root(tmp_path) -> Root:
    return handmade.make_root(tmp_path)


def test_audits_are_numbered_and_an_equal_one_is_not_stored_twice(empty_audit_root):
    assert newest_flags(empty_audit_root, "index/0.json") is None
    assert store_flags(empty_audit_root, flags(duplicate=[1])) == "audit/0.json"
    assert store_flags(empty_audit_root, flags(duplicate=[2])) == "audit/1.json"
    assert store_flags(empty_audit_root, flags(duplicate=[1])) == "audit/0.json"
    assert empty_audit_root.store.list("audit") == ["audit/0.json", "audit/1.json"]


def test_the_newest_of_an_index_is_found_also_after_the_tenth(empty_audit_root):
    for number in range(11):
        store_flags(empty_audit_root, flags(duplicate=[number]))
    store_flags(empty_audit_root, flags("index/1.json", still=[5]))
    assert newest_flags(empty_audit_root, "index/0.json") == flags(duplicate=[10])
    assert newest_flags(empty_audit_root, "index/1.json") == flags("index/1.json", still=[5])


def test_groups_of_several_flags_are_joined():
    audited = flags(duplicate=[1, 3], degenerate=[3, 4], still=[9])
    assert flagged_groups(audited, ["duplicate", "degenerate"]) == {1, 3, 4}


def test_an_audit_that_looked_for_other_flags_can_be_read(empty_audit_root):
    """An audit of a version that has one flag less and another one more."""
    values = json.loads(flags(duplicate=[1]).written())
    del values["flags"]["still"]
    values["flags"]["blurred"] = [7]
    empty_audit_root.store.put("audit/0.json", json.dumps(values).encode())
    audited = newest_flags(empty_audit_root, "index/0.json")
    assert (audited.flags["blurred"], audited.flags["duplicate"]) == ([7], [1])
    assert flagged_groups(audited, ["duplicate", "blurred"]) == {1, 7}
    with pytest.raises(KeyError, match="still"):
        flagged_groups(audited, ["still"])
    assert store_flags(empty_audit_root, flags(duplicate=[1])) == "audit/1.json"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", r"audit/0\.json: audit: .*remove it and run `semix audit` again"),
        (b'{"index": "index/0.json"}', "digest: Field required"),
        (flags().written().replace(b'"still":[]', b'"still":[-1]'), r"flags\.still"),
        (flags().written().replace(b'"still":[]', b'"still":[],"still":[3]'), "is there twice"),
        (flags().written()[:-9], "audit: "),
    ],
)
def test_a_damaged_audit_is_named(empty_audit_root, content, problem):
    empty_audit_root.store.put("audit/0.json", content)
    with pytest.raises(ValueError, match=problem):
        newest_flags(empty_audit_root, "index/0.json")
