"""Every file of a root: what it may hold, what is refused, and what a newer version wrote."""

import json

import pytest

from semix.data.errors import InputError
from semix.data.fingerprint import canonical_json
from semix.data.formats import (
    CommitRecord,
    LabelSetRecord,
    Plan,
    SeriesFlags,
    SeriesRecord,
    ShardEntry,
    ShardLabels,
    StoredFile,
)
from tests.handmade import ENCODER, EXAMPLES, HASH, MODELS, STEM, make_plan, record

COMMIT = EXAMPLES[CommitRecord]
every_format = pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)


def text(value) -> bytes:
    return json.dumps(value).encode()


def nested(**changes):
    """A commit record whose features differ."""
    return COMMIT | {"features": COMMIT["features"] | changes}


@every_format
def test_what_is_right_comes_back_as_it_was_written(kind: type[StoredFile]):
    parsed = kind.read(text(EXAMPLES[kind]))
    assert json.loads(parsed.written()) == EXAMPLES[kind]
    assert parsed.written() == canonical_json(EXAMPLES[kind]).encode()
    assert kind.read(parsed.written(indent=1)) == parsed


def test_a_series_of_several_classes_and_two_encoders_comes_back():
    simplex = record(5, classes=[0, 1, 2], names=["a", "b", "c"]) | {
        "mixture": [[0.5, 0.25, 0.25], [1, 0, 0]],
        "coordinates": [[1.5, -0.5, 0.0], [1, 0, 0]],
        "agreement": {"weights": [0.1, 0.9], "difference": [0.0, 0.2]},
    }
    parsed = SeriesRecord.read(text(simplex))
    assert json.loads(parsed.written()) == simplex
    assert (parsed.mixtures, parsed.stability) == (simplex["mixture"], None)


def test_a_plan_keeps_what_it_does_not_know():
    plan = make_plan(3, 6) | {"of a later version": 1}
    plan["models"] = {**plan["models"], "later": {"model": 7}}
    plan["models"]["generator"] = {**plan["models"]["generator"], "later": 1}
    plan["config"]["later"] = [1]
    assert json.loads(Plan.read(text(plan), where="x").written()) == {
        name: value for name, value in plan.items() if value != {}
    }


def test_a_plan_of_another_schema_is_told_by_its_number_alone():
    with pytest.raises(InputError, match=r"^here/plan\.json schema = 9: another version of semix"):
        Plan.read(b'{"schema": 9, "layout": []}', where="here/plan.json")


@every_format
def test_what_a_newer_version_wrote_is_refused_by_name(kind: type[StoredFile]):
    message = r"^at/it\.json schema = 7: a newer version of semix wrote it, this one reads 1; use"
    newer = {"schema": 7, "of a newer version": [1]}
    for value in (EXAMPLES[kind] | newer, newer, EXAMPLES[kind] | {"schema": 7}):
        with pytest.raises(InputError, match=message):
            kind.read(text(value), where="at/it.json")
    assert kind.read(text(EXAMPLES[kind] | {"schema": 1})) == kind.read(text(EXAMPLES[kind]))
    for schema in (0, -1, "7", 7.0, None):
        with pytest.raises(ValueError, match=f"^{kind.WHAT}: schema: "):
            kind.read(text(EXAMPLES[kind] | {"schema": schema}))


@every_format
def test_what_is_too_large_is_not_parsed_for_its_schema_either(kind: type[StoredFile], monkeypatch):
    monkeypatch.setattr(kind, "MAX_BYTES", 9)
    with pytest.raises(ValueError, match=rf"^{kind.WHAT}: \d+ bytes, at most 9 are read"):
        kind.read(text(EXAMPLES[kind] | {"schema": 7}))


@every_format
def test_nothing_may_be_missing_and_nothing_more_there(kind: type[StoredFile]):
    for key in EXAMPLES[kind].keys() - {"left_out"}:
        lacking = {name: value for name, value in EXAMPLES[kind].items() if name != key}
        with pytest.raises(ValueError, match=rf"^{kind.WHAT}: {key}: Field required"):
            kind.read(text(lacking))
    with pytest.raises(ValueError, match=rf"^{kind.WHAT}: command: Extra inputs"):
        kind.read(text(EXAMPLES[kind] | {"command": "rm"}))


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
        ({"mixture": [[1.0]] * 2}, "a row of mixture or coordinates has 1 entries, not 2"),
        ({"agreement": {"weights": [1.0], "difference": [1.0]}}, "agreement.weights has 1"),
        ({"noise": "random"}, "noise"),
        ({"noise": {"a": float("nan")}}, "'NaN' is not a finite number"),
        ({"\x1b[2J\u202e" + "x" * 99: 1}, r"'\\x1b\[2J\\u202ex+\.\.\.': Extra"),
    ],
)
def test_a_record_of_a_series_is_refused_by_its_field(changes, message):
    with pytest.raises(ValueError, match=message):
        SeriesRecord.read(text(record(3) | changes))


@every_format
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "EOF"),
        (b"[]", "should be an object"),
        (b"{} {}", "trailing"),
        (b'{"noise": {"a": ' + b"[" * 100_000, "recursion limit"),
        (b'{"noise": {"a": ' + b'{"a":' * 100_000, "recursion limit"),
        (b'{"seed": ' + b"9" * 1_000_000 + b"}", r"out of range|bytes, at most 4096"),
        (b'{"noise": {"a": "\xff"}}', "unicode"),
        (b'{"noise": {"a": "\\ud800"}}', "Invalid JSON"),
        (b'{"schema": 9' + b"9" * 5000 + b"}", r"out of range|bytes, at most 4096"),
    ],
    ids=range(9),
)
def test_hostile_json_is_a_named_error(kind: type[StoredFile], content, message):
    with pytest.raises(ValueError, match=rf"^{kind.WHAT}: .*({message}|bytes, at most 4096)"):
        kind.read(content)


@every_format
def test_good_values_in_hostile_json(kind: type[StoredFile]):
    valid = text(EXAMPLES[kind])
    for content, message in [
        (valid.decode().encode("utf-16"), "Invalid JSON"),
        (b"\xef\xbb\xbf" + valid, "Invalid JSON"),
        (valid[:-1], "EOF"),
        (valid[:-1] + b", %s" % valid[1:], "is there twice"),
    ]:
        with pytest.raises(ValueError, match=f"^{kind.WHAT}: .*{message}"):
            kind.read(content)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (b"1e999", "'1e999' is not a finite number"),
        (b"NaN", "'NaN' is not a finite number"),
        (b"1e5, 2", "Invalid JSON"),
        (b'{"a": 1, "a": 2}', "key 'a' is there twice"),
    ],
)
def test_odd_numbers_and_keys_deep_inside(new, message):
    with pytest.raises(ValueError, match=f"record of a series: .*{message}"):
        SeriesRecord.read(text(record(3)).replace(b"null", new))


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
        (COMMIT | {"groups": 10**8 - 1, "left_out": [{"group": 790080, "reason": ""}]}, "groups"),
        (COMMIT | {"shard": 10**7}, "shard"),
        (COMMIT | {"wall_seconds": float("inf")}, "wall_seconds"),
        (nested(name="../x"), "features is not of shard 12345"),
        (nested(name=f"{STEM}.features.safetensors.pt"), "features is not of shard"),
        (nested(sha256="cd" * 32), "features is not of shard 12345, or not of its hash"),
    ],
)
def test_a_commit_record_can_name_nothing_but_its_own_files(value, message):
    with pytest.raises(ValueError, match=message):
        CommitRecord.read(text(value))


def left_out(*groups: int) -> list[dict]:
    return [{"group": group, "reason": "flat"} for group in groups]


def test_series_that_were_left_out_are_of_their_shard():
    few = COMMIT | {"first": 8, "groups": 2}
    assert CommitRecord.read(text(few)).group_numbers == [8, 9]
    for omitted, stored in [((9,), [8, 10]), ((8, 11), [9, 10]), ((10, 8), [9, 11])]:
        assert (
            CommitRecord.read(text(few | {"left_out": left_out(*omitted)})).group_numbers == stored
        )
    for invalid in [(7,), (11,), (9, 9), (9, 99)]:
        with pytest.raises(ValueError, match="commit record: left_out is not of the series from 8"):
            CommitRecord.read(text(few | {"left_out": left_out(*invalid)}))
    with pytest.raises(ValueError, match=r"left_out\.0\.reason: Field required"):
        CommitRecord.read(text(few | {"left_out": [{"group": 9}]}))


def test_an_index_keeps_of_a_record_what_readers_pin():
    record = CommitRecord.read(text(COMMIT | {"worker": "w"}))
    assert json.loads(record.entry.written()) == {
        name: value for name, value in COMMIT.items() if name in EXAMPLES[ShardEntry]
    }
    assert ShardEntry.read(record.entry.written()) == record.entry


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        (f"labels/{HASH}/0012/0012345-abababab.features.safetensors", True),
        ("shards/0012/0012345-abababab.features.safetensors", False),
        (f"labels/{HASH}/../0012345-abababab.features.safetensors", False),
        (f"labels/{HASH}/0012/0012345-abababab.features.safetensors\n", False),
        ("/etc/passwd", False),
    ],
)
def test_features_of_labels_lie_in_a_label_set(name, fine):
    value = EXAMPLES[ShardLabels] | {"features": {"name": name, "sha256": HASH, "bytes": 7}}
    if fine:
        assert ShardLabels.read(text(value)).features.name == name
    else:
        with pytest.raises(ValueError, match="shard labels: features is not in a label set"):
            ShardLabels.read(text(value))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (LabelSetRecord, {"digest": "ab"}, "digest"),
        (LabelSetRecord, {"features": "../x"}, "features"),
        (LabelSetRecord, {"batch": 0}, "batch"),
        (SeriesFlags, {"index": "../index/0.json"}, "index"),
        (SeriesFlags, {"flags": {"still": [-1]}}, r"flags\.still\.0"),
        (ShardLabels, {"groups": []}, "groups"),
        (ShardLabels, {"images": "x"}, "images"),
    ],
)
def test_other_files_are_refused_by_their_field(kind, changes, message):
    with pytest.raises(ValueError, match=f"^{kind.WHAT}: {message}: "):
        kind.read(text(EXAMPLES[kind] | changes))


MODEL = MODELS["generator"]


def models(**changes: object) -> dict[str, object]:
    return {"models": MODELS | changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shards": 10**9}, "num_shards"),
        ({"images_per_group": 0}, "images_per_group"),
        ({"class_names": ["one"]}, "class_names"),
        ({"config": []}, "config"),
        ({"config": {"a": float("inf")}}, "not a finite number"),
        ({"groups_per_shard": 0}, "groups_per_shard"),
        ({"groups_per_shard": None}, "groups_per_shard"),
        ({"groups_per_pair": 0}, "groups_per_pair"),
        ({"classes_per_group": "2"}, "classes_per_group"),
        ({"classes_per_group": 17}, "classes_per_group"),
        ({"normalize": 1}, "normalize"),
        ({"pairs": [[0, 1], [0, 1]]}, "pairs do not ascend"),
        ({"pairs": [[-1, 1]]}, "pairs.0.0: .*greater than or equal to 0"),
        ({"pairs": [[0, 1, 2]]}, "pairs.0: .*at most 2 items"),
        ({"pairs": [["0", 1]]}, "pairs.0.0: .*valid integer"),
        ({"pairs": {"0": 1}}, "pairs: .*(valid list|array)"),
        ({"models": {}}, "models.generator: Field required"),
        ({"models": 7}, "models: Input should be"),
        (models(generator=7), "models.generator: Input should be"),
        (models(generator={"model": "sd", "revision": None}), "models.generator.files: Field req"),
        (models(generator=MODEL | {"files": []}), "models.generator.files"),
        (models(generator=MODEL | {"files": {"a": 1}}), "models.generator.files.a"),
        (models(generator=MODEL | {"files": {"a": "x"}}), "models.generator.files.a"),
        (models(generator=MODEL | {"model": 7}), "models.generator.model"),
        (models(generator=MODEL | {"lora": MODEL}), "models.generator.lora"),
        (models(generator=MODEL | {"unet": "x"}), "models.generator.unet"),
        (models(annotation={"files": {}}), "models.annotation.model: Field required"),
        (models(annotation=ENCODER | {"second": 7}), "models.annotation.second"),
        (models(annotation=ENCODER | {"revision": None}), "models.annotation.revision"),
        ({"versions": {"torch": 2}}, "versions.torch"),
        ({"baked_from": {"plan": 7, "labels": None}}, "baked_from.plan"),
        ({"baked_from": {}}, "baked_from.plan: Field required"),
        ({"digest": "../x"}, "digest"),
        ({"schema": "2"}, "schema"),
    ],
)
def test_a_plan_is_refused_by_its_field(changes, message):
    with pytest.raises(ValueError, match=rf"plan\.json: .*{message}"):
        Plan.read(text(make_plan(3, 6) | changes), where="x")
