"""Damage of every kind, done to a whole root: found, named, counted."""

import json

import numpy as np
import pytest
from safetensors.numpy import save

from data.label_sets import LabelSet, create_set
from data.root import Root
from data.shards import shard_name
from data.store import Store
from data.verification import verify
from tests.data.whole_roots import FACTS, prototypes, whole_root
from tests.handmade import put_shard, record, sample, tar_of


def found(root: Root, *, full: bool = False) -> list[str]:
    return [str(problem) for problem in root.verify(full=full)]


def changed(root: Root, name: str, change) -> None:
    root.store.put(name, change(root.store.get(name)))


def flipped(place: int):
    def flip(content: bytes) -> bytes:
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    return flip


def replaced(root: Root, *samples) -> None:
    """Shard 1 again, of these samples, with a record that fits them."""
    put_shard(root.store, 1, tar_of(*samples), first=2, groups=2, count=2)


def test_a_whole_root_has_no_problem(root):
    assert list(verify(root)) == list(verify(root, full=True)) == []


def test_a_truncated_tar_and_a_missing_one(root):
    tars = [record["tar"] for record in root.committed().values()]
    changed(root, tars[0], lambda content: content[:-1])
    root.store.delete(tars[2])
    size = root.committed()[0]["bytes"]
    assert [(p.shard, p.text, p.files) for p in root.verify() if p.kind == "shard"] == [
        (0, f"{tars[0]} has {size - 1} bytes, not {size}", (tars[0],)),
        (2, f"{tars[2]} is missing", ()),
    ]


@pytest.mark.parametrize("place", [0, 700, 2000, -1])
def test_a_flipped_bit_is_seen_by_a_full_look_alone(root, place):
    tar = root.committed()[1]["tar"]
    size = len(root.store.get(tar))
    changed(root, tar, flipped(place % size))
    assert found(root) == []
    (problem,) = root.verify(full=True)
    assert (problem.shard, problem.files) == (1, (tar,))
    assert problem.text.startswith(f"{tar} does not have the recorded SHA-256")


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([sample(2)], "holds 1 groups"),
        ([sample(2), sample(4)], "holds 2 groups"),
        ([sample(2), sample(3, 3)], "group 3 has 3 images, not 2"),
        ([sample(2), sample(3, labels=[[[0, 1.0]]])], "labels has 1 entries, not 2"),
        ([sample(2), sample(3, labels=[[[0, 0.7], [1, 0.7]]] * 2)], "sums to 1.4, not 1"),
        ([sample(2), sample(3, labels=[[[9, 1.0]]] * 2)], "group 3 names class 9 of 3"),
        ([sample(2), sample(3, weights=[0.5])], "labels has 2 entries, not 1"),
    ],
)
def test_series_that_do_not_fit_their_plan(root, samples, reason):
    replaced(root, *samples)
    (problem,) = [p for p in Root(root.url).verify(full=True) if p.kind == "shard"]
    assert reason in problem.text


def test_a_missing_member_and_an_image_that_is_none(root):
    whole = sample(3)
    short = type(whole)(whole.record, whole.images[:1], "webp")
    replaced(root, sample(2), short)
    assert "wanted 2 images" in found(root, full=True)[0]
    broken = type(whole)(whole.record, [whole.images[0], b"RIFF no image"], "webp")
    replaced(root, sample(2), broken)
    assert "group 3, image 1: " in found(root, full=True)[0]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"features": np.zeros((2, 3, 4), np.float16)}, "has shape [2, 3, 4], not [2, 2, width]"),
        ({"features": np.zeros((2, 2, 4), np.float32)}, "is float32, not float16"),
        ({"features": np.full((2, 2, 4), np.nan, np.float16)}, "no finite numbers"),
        ({"second": np.zeros((2, 2, 4), np.float16)}, "has no tensor 'features'"),
    ],
)
def test_features_that_do_not_fit(root, monkeypatch, tensors, reason):
    monkeypatch.setattr("tests.handmade.save", lambda _: save(tensors))
    replaced(root, sample(2), sample(3))
    (problem,) = [p for p in Root(root.url).verify(full=True) if p.kind == "shard"]
    assert reason in problem.text


def test_features_that_are_cut_or_changed(root):
    name = root.committed()[0]["features"]["name"]
    changed(root, name, flipped(-1 % 80))
    assert "does not have the recorded SHA-256" in found(root, full=True)[0]
    changed(root, name, lambda content: content[:10])
    assert f"{name} has 10 bytes" in found(root)[0]


def test_a_record_without_a_tar_and_a_tar_without_a_record(root):
    first, second = (root.committed()[shard] for shard in (0, 1))
    root.store.delete(first["tar"])
    root.store.delete(f"{shard_name(1)}.json")
    everything = list(verify(Root(root.url)))
    assert [str(p) for p in everything if p.kind == "shard"] == [
        f"shard 0: {first['tar']} is missing"
    ]
    orphans = {p.text.split(":")[0] for p in everything if not p.damage}
    assert orphans == {second["tar"], second["features"]["name"]}


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_a_damaged_record_is_named_even_if_an_index_knows_it(root, index, full):
    if not index:
        root.store.delete("index/0.json")
    changed(root, f"{shard_name(1)}.json", lambda content: content[:-30])
    again = Root(root.url)
    assert again.missing() == [1]
    (problem,) = [p for p in again.verify(full=full) if p.kind == "record"]
    assert (problem.shard, problem.files) == (1, (f"{shard_name(1)}.json",))
    assert problem.text.startswith("its commit record commit record: ")


def test_a_flipped_bit_in_a_record_that_an_index_knows(root):
    name = f"{shard_name(1)}.json"
    changed(root, name, lambda content: content.replace(b'"groups": 2', b'"groups": 9'))
    assert found(root) == []
    assert found(Root(root.url), full=True) == [
        "shard 1: holds 9 groups from 2 on, the plan says else"
    ]


@pytest.mark.parametrize("inside", [True, False])
def test_a_folder_where_a_record_goes(root, tmp_path, inside):
    root.store.delete(f"{shard_name(2)}.json")
    folder = tmp_path / "root" / f"{shard_name(2)}.json"
    folder.mkdir()
    if inside:
        (folder / "file").write_text("x")
    (problem,) = [p for p in Root(root.url).verify() if p.kind == "record"]
    assert (problem.shard, problem.files) == (2, ())
    assert "is a folder, not a commit record" in problem.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read"),
        (prototypes()[:-1], "cannot be read"),
        (flipped(-1 % len(prototypes()))(prototypes()), "does not have the SHA-256 that it names"),
        (prototypes(np.eye(4, dtype=np.float32)), "has prototypes of shape [4, 4], not [3, width]"),
        (prototypes(np.full((3, 4), np.inf, np.float32)), "no finite numbers"),
        (save({"prototypes": np.eye(3, 4)}), "cannot be read"),
    ],
)
def test_unreadable_prototypes(root, content, reason):
    root.store.put("prototypes.safetensors", content)
    (problem,) = root.verify()
    assert (problem.kind, problem.files) == ("prototypes", ("prototypes.safetensors",))
    assert reason in problem.text


def test_prototypes_that_are_missing_or_others(root):
    root.store.delete("prototypes.safetensors")
    assert found(root) == ["prototypes.safetensors is missing"]
    other = FACTS | {"encoder": '{"model": "large"}'}
    plan = json.loads(root.store.get("plan.json")) | {"models": {"annotation": {"model": "tiny"}}}
    root.store.put("plan.json", json.dumps(plan).encode())
    root.store.put("prototypes.safetensors", prototypes(facts=other))
    assert found(Root(root.url)) == [
        "prototypes.safetensors was measured with another encoder than the plan's"
    ]


def test_shards_labelled_with_other_prototypes(root):
    root.discard(0)
    whole = root.committed()[1]
    root.store.put(
        f"{shard_name(1)}.json",
        json.dumps({**root.record(1), "prototypes": "0" * 64}).encode(),
    )
    assert whole
    (problem,) = [p for p in Root(root.url).verify() if p.kind == "prototypes"]
    assert problem.text == "prototypes.safetensors is not what 1 shards were labelled with"
    assert problem.files == ()


def test_a_damaged_index_and_one_that_pins_what_is_gone(root):
    root.store.create("index/1.json", b'{"plan": "')
    root.store.delete(root.committed()[2]["tar"])
    named = [p.text for p in Root(root.url).verify() if p.kind == "index"]
    assert named[0].startswith(
        "index/0.json: pins 1 tars that are gone or cut, shards/0000/0000002"
    )
    assert named[1].startswith("index/1.json: index: ")


def test_a_record_beyond_the_plan(root):
    put_shard(root.store, 7, tar_of(sample(14), sample(15)), first=14, groups=2, count=2)
    (problem,) = [p for p in Root(root.url).verify() if p.kind == "record"]
    assert problem.text.endswith("is of no shard of the plan; is an extension missing?")


def test_labels_that_are_damaged_or_of_other_images(root):
    digest = "a" * 64
    labels = create_set(
        root,
        {
            "schema": 1,
            "digest": digest,
            "plan": root.plan["digest"],
            "annotation": {},
            "encoders": {},
            "features": "root",
            "batch": 4,
        },
    )
    for shard, entry in root.committed().items():
        groups = [
            {key: record(group)[key] for key in ("group", "weights", "labels")}
            for group in root.layout.groups_of(shard)
        ]
        labels.commit(shard, images=entry["sha256"], groups=groups)
    assert found(root, full=True) == []
    changed(root, labels.name(1), lambda content: content[:-9])
    assert LabelSet(root, digest).missing() == [1]
    assert found(root, full=True) == ["shard 1: labels/aaaaaaaaaaaa: damaged, or of other images"]
    root.store.put(f"labels/{digest}/set.json", b"{")
    assert found(root)[0].startswith(f"labels/{digest}/set.json: label set: ")


def test_a_full_look_reads_every_tar_once(tmp_path):
    root = whole_root(tmp_path / "many", shards=12)
    tars = [entry["tar"] for entry in root.committed().values()]
    for tar in tars[::2]:
        changed(root, tar, flipped(600))
    opened: list[str] = []
    store = root.store

    class Watched(Store):
        def open(self, name):
            opened.append(name)
            return super().open(name)

    root.store = Watched(store.url)
    assert [p.shard for p in root.verify(full=True)] == [0, 2, 4, 6, 8, 10]
    assert sorted(opened) == tars
