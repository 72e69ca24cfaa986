import json
import subprocess
import sys

import pytest

from data.fingerprint import canonical_json
from data.schemas import (
    MOST_GROUP,
    read_commit_record,
    read_failure,
    read_group_record,
    read_index,
    read_plan,
)
from data.strict_json import read_object
from tests.handmade import make_plan, record

HASH = "ab" * 32
STEM = "shards/0012/0012345-abababab"
FILE = {"sha256": HASH, "bytes": 7}
SHARD = {
    "shard": 12345,
    "tar": f"{STEM}.tar",
    **FILE,
    "features": {"name": f"{STEM}.features.safetensors", **FILE},
    "groups": 64,
    "first": 790080,
}
COMMIT = SHARD | {"spec": HASH, "seconds": {"generate": 1.5}, "wall_seconds": 2, "tflop": None}
FAILURE = {"shard": 3, "attempt": 1, "error": "ValueError", "message": "m", "time": 1.5}
INDEX = {"plan": HASH, "shards": [SHARD]}


def text(value) -> bytes:
    return json.dumps(value).encode()


def nested(**changes):
    """A commit record whose features differ."""
    return COMMIT | {"features": COMMIT["features"] | changes}


def test_what_is_right_comes_back_as_it_was_written():
    simplex = record(5, classes=[0, 1, 2], names=["a", "b", "c"]) | {
        "mixture": [[0.5, 0.25, 0.25], [1, 0, 0]],
        "coordinates": [[1.5, -0.5, 0.0], [1, 0, 0]],
        "agreement": {"weights": [0.1, 0.9], "difference": [0.0, 0.2]},
    }
    for value in (record(3), simplex):
        assert read_group_record(canonical_json(value).encode()) == value
    assert read_commit_record(text(COMMIT)) == COMMIT
    assert read_failure(text(FAILURE)) == FAILURE
    assert read_index(text(INDEX)) == INDEX
    plan = make_plan(3, 6) | {"of a later version": 1}
    assert read_plan(text(plan)) == plan


def test_a_plan_of_another_schema_is_told_by_its_number_alone():
    assert read_plan(b'{"schema": 9, "layout": []}') == {"schema": 9, "layout": []}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": -1}, r"record of a series: group: .*greater than or equal to 0"),
        ({"group": 10**8}, r"group: .*less than 100000000"),
        ({"group": "3"}, r"group: .*valid integer"),
        ({"group": 3.0}, r"group: .*valid integer"),
        ({"group": True}, r"group: .*valid integer"),
        ({"seed": -1}, "seed"),
        ({"classes": [0]}, r"classes: .*at least 2"),
        ({"classes": [1, 1]}, "classes holds one twice"),
        ({"classes": [0, -1]}, r"classes\.1"),
        ({"names": ["a"]}, "names has 1 entries, not 2"),
        ({"alphas": [0.0]}, "weights has 2 entries, not 1"),
        ({"alphas": [0.0, 1.5]}, r"alphas\.1"),
        ({"alphas": "01"}, "alphas"),
        ({"weights": [0.5]}, "labels has 2 entries, not 1"),
        ({"weights": [0.5, None]}, r"weights\.1"),
        ({"weights": []}, r"weights: .*at least 1"),
        ({"weights": [0.5] * 101}, r"weights: .*at most 100"),
        ({"labels": [[[0, 0.5], [1, 0.5]], [[0, 0.5], [1, 0.4]]]}, r"labels\.1: sums to 0\.9,"),
        ({"labels": [[[0, 0.5], [0, 0.5]]] * 2}, r"labels\.0: names a class twice"),
        ({"labels": [[[0, 2.0], [1, -1.0]]] * 2}, r"labels\.0\.0\.1"),
        ({"labels": [[[-1, 1.0]]] * 2}, r"labels\.0\.0\.0"),
        ({"labels": [[]] * 2}, r"labels\.0: sums to 0"),
        ({"mixture": [[0.5, 0.5]]}, "mixture has 1 entries, not 2"),
        ({"mixture": []}, "mixture has 0 entries, not 2"),
        ({"mixture": None}, "mixture: .*valid array"),
        ({"mixture": [[1.0]] * 2}, "a row of mixture or coordinates has 1 entries, not 2"),
        ({"agreement": {"weights": [1.0], "difference": [1.0]}}, "agreement.weights has 1"),
        ({"noise": "random"}, "noise"),
        ({"noise": {"a": float("nan")}}, "'NaN' is no finite number"),
        ({"extra": 1}, "extra: Extra inputs"),
        ({"\x1b[2J\u202e" + "x" * 99: 1}, r"'\\x1b\[2J\\u202ex+\.\.\.': Extra"),
    ],
)
def test_a_record_of_a_series_is_refused_by_its_field(changes, message):
    with pytest.raises(ValueError, match=message):
        read_group_record(text(record(3) | changes))


@pytest.mark.parametrize("key", record(3))
def test_nothing_may_be_missing(key):
    short = record(3)
    del short[key]
    with pytest.raises(ValueError, match=rf"record of a series: {key}: Field required"):
        read_group_record(text(short))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "EOF"),
        (b"[]", "should be an object"),
        (b"{} {}", "trailing"),
        (text(record(3)).replace(b"1003", b"NaN"), "seed: "),
        (b'{"noise": {"a": ' + b"[" * 100_000, "recursion limit"),
        (b'{"noise": {"a": ' + b'{"a":' * 100_000, "recursion limit"),
        (b'{"seed": ' + b"9" * 1_000_000 + b"}", "out of range"),
        (b'{"noise": {"a": "' + b"x" * MOST_GROUP + b'"}}', "bytes, at most 4194304 are read"),
        (b'{"noise": {"a": "\xff"}}', "unicode"),
        (b'{"noise": {"a": "\\ud800"}}', "Invalid JSON"),
        (text(record(3)).decode().encode("utf-16"), "Invalid JSON"),
        (b"\xef\xbb\xbf" + text(record(3)), "Invalid JSON"),
        (text(record(3)).replace(b"null", b"1e999"), "'1e999' is no finite number"),
        (text(record(3)).replace(b"null", b"1e5, 2"), "Invalid JSON"),
        (text(record(3))[:-1] + b', "group": 4}', "key 'group' stands twice"),
        (text(record(3)).replace(b"null", b'{"a": 1, "a": 2}'), "key 'a' stands twice"),
    ],
)
def test_hostile_json_is_a_named_error(content, message):
    with pytest.raises(ValueError, match=f"record of a series: .*{message}"):
        read_group_record(content)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (COMMIT | {"tar": "../../etc/passwd"}, rf"commit record: tar is not {STEM}\.tar"),
        (COMMIT | {"tar": "/etc/passwd"}, "tar is not"),
        (COMMIT | {"tar": f"{STEM}.tar/../x"}, "tar is not"),
        (COMMIT | {"tar": f"pipe:cat {STEM}.tar"}, "tar is not"),
        (COMMIT | {"tar": "shards/0012/0012346-abababab.tar"}, "tar is not"),
        (COMMIT | {"shard": 12346}, "tar is not shards/0012/0012346"),
        (COMMIT | {"sha256": "cd" * 32}, "tar is not shards/0012/0012345-cdcdcdcd"),
        (COMMIT | {"sha256": "AB" * 32}, "sha256"),
        (COMMIT | {"sha256": HASH + "\n"}, "sha256"),
        (COMMIT | {"bytes": -1}, "bytes"),
        (COMMIT | {"groups": 0}, "groups"),
        (COMMIT | {"shard": 10**7}, "shard"),
        (COMMIT | {"wall_seconds": float("inf")}, "wall_seconds"),
        (COMMIT | {"command": "rm"}, "command: Extra"),
        (nested(name="../x"), "features is not of shard 12345"),
        (nested(name=f"{STEM}.features.safetensors.pt"), "features is not of shard"),
        (nested(sha256="cd" * 32), "features is not of shard 12345, or not of its hash"),
        ({k: v for k, v in COMMIT.items() if k != "first"}, "first: Field required"),
    ],
)
def test_a_commit_record_can_name_nothing_but_its_own_files(value, message):
    with pytest.raises(ValueError, match=message):
        read_commit_record(text(value))


def test_an_index_lists_shards_once_and_in_order():
    for shards in ([SHARD, SHARD], [SHARD, SHARD | {"tar": "/etc/passwd"}]):
        with pytest.raises(ValueError, match=r"index: (shards do not ascend|shards\.1: tar)"):
            read_index(text(INDEX | {"shards": shards}))
    with pytest.raises(ValueError, match="index: plan"):
        read_index(text(INDEX | {"plan": "../x"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shards": 10**9}, "num_shards"),
        ({"images_per_group": 0}, "images_per_group"),
        ({"class_names": ["one"]}, "class_names"),
        ({"config": []}, "config"),
        ({"config": {"a": float("inf")}}, "no finite number"),
        ({"digest": "../x"}, "digest"),
        ({"schema": "2"}, "schema"),
    ],
)
def test_a_plan_is_refused_by_its_field(changes, message):
    with pytest.raises(ValueError, match=rf"plan\.json: .*{message}"):
        read_plan(text(make_plan(3, 6) | changes))


def test_any_object_is_bounded_too():
    assert read_object(b'{"a": [1, {"b": null}]}', what="note", most=99) == {"a": [1, {"b": None}]}
    for content in (b"[]", b"1", b'{"a": 1, "a": 2}', b'{"a":' * 9999, b'{"a": 1e999}', b"{" * 99):
        with pytest.raises(ValueError, match=r"^note: "):
            read_object(content, what="note", most=50_000)


def test_failures_are_read_strictly_too():
    with pytest.raises(ValueError, match="failure record: message: Field required"):
        read_failure(b'{"shard": 1, "attempt": 1, "error": "E", "time": 1.0}')


@pytest.mark.process
def test_none_of_it_needs_torch():
    code = "import sys, data.schemas, data.shards, data.tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
