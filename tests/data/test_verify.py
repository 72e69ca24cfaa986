"""Damage of every kind in a complete root: it is found, named, quarantined and repaired."""

import hashlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from semix.data.errors import InputError
from semix.data.formats import CommitRecord, record_name, shard_stem
from semix.data.index import open_index
from semix.data.label_sets import LabelSet
from semix.data.machine import machine
from semix.data.root import Root
from semix.data.store import Store
from semix.data.verify import damage, quarantine, verify
from tests.data.whole_roots import FACTS, prototypes, whole_root
from tests.handmade import LABELS_DIGEST, committed, label_set, labels_of, put_shard, sample, tar_of


def problems_found(root: Root, *, full: bool = False) -> list[str]:
    return [str(problem) for problem in damage(root, full=full)]


def rewrite(root: Root, name: str, change) -> None:
    root.store.put(name, change(root.store.get(name)))


def flip_bit_at(offset: int):
    def flip(content: bytes) -> bytes:
        return content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]

    return flip


def replace_shard_1(root: Root, *samples) -> None:
    """Replace shard 1 by these samples, with a record that fits them."""
    put_shard(root.store, 1, tar_of(*samples), first=2, groups=2, count=2)


def rewrite_record(root: Root, shard: int, **changes) -> Root:
    """The root after these fields of a commit record were changed."""
    record = root.record(shard).model_copy(update=changes)
    root.store.put(record_name(shard), record.written())
    return Root(root.url)


def test_a_whole_root_has_no_problem(root):
    assert list(verify(root)) == list(verify(root, full=True)) == []


def test_a_truncated_tar_and_a_missing_one(root):
    tars, size = [record.tar for record in root.records()], root.record(0).bytes
    rewrite(root, tars[0], lambda content: content[:-1])
    root.store.delete(tars[2])
    assert [(p.shard, p.text, p.files) for p in damage(root) if p.kind == "shard"] == [
        (0, f"{tars[0]} has {size - 1} bytes, not {size}", (tars[0],)),
        (2, f"{tars[2]} is missing", ()),
    ]


@pytest.mark.parametrize("place", [0, 700, 2000, -1])
def test_a_flipped_bit_is_seen_by_a_full_look_alone(root, place):
    tar = committed(root)[1].tar
    size = len(root.store.get(tar))
    rewrite(root, tar, flip_bit_at(place % size))
    assert problems_found(root) == []
    (problem,) = damage(root, full=True)
    assert (problem.shard, problem.files) == (1, (tar,))
    assert problem.text.startswith(f"{tar} does not have the recorded SHA-256")


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([sample(2)], "holds 1 groups"),
        ([sample(2), sample(4)], "holds group 4, its record says otherwise"),
        ([sample(2), sample(3, 3)], "group 3 has 3 images, not 2"),
        ([sample(2), sample(3, labels=[[[0, 1.0]]])], "labels has 1 entries, not 2"),
        ([sample(2), sample(3, labels=[[[0, 0.7], [1, 0.7]]] * 2)], "sums to 1.4, not 1"),
        ([sample(2), sample(3, labels=[[[9, 1.0]]] * 2)], "group 3 names class 9, the plan has 3"),
        ([sample(2), sample(3, weights=[0.5])], "labels has 2 entries, not 1"),
    ],
)
def test_series_that_do_not_fit_their_plan(root, samples, reason):
    replace_shard_1(root, *samples)
    (problem,) = [p for p in damage(Root(root.url), full=True) if p.kind == "shard"]
    assert reason in problem.text


def test_a_missing_member_and_an_image_that_is_none(root):
    valid = sample(3)
    one_image = type(valid)(valid.record, valid.images[:1], "webp")
    replace_shard_1(root, sample(2), one_image)
    assert "wanted 2 images" in problems_found(root, full=True)[0]
    unreadable = type(valid)(valid.record, [valid.images[0], b"RIFF no image"], "webp")
    replace_shard_1(root, sample(2), unreadable)
    assert "group 3, image 1: " in problems_found(root, full=True)[0]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"features": np.zeros((2, 3, 4), np.float16)}, "has shape [2, 3, 4], not [2, 2, width]"),
        ({"features": np.zeros((2, 2, 4), np.float32)}, "is float32, not float16"),
        ({"features": np.full((2, 2, 4), np.nan, np.float16)}, "not finite"),
        ({"second": np.zeros((2, 2, 4), np.float16)}, "has no tensor 'features'"),
    ],
)
def test_features_that_do_not_fit(root, monkeypatch, tensors, reason):
    monkeypatch.setattr("tests.handmade.save", lambda _: save(tensors))
    replace_shard_1(root, sample(2), sample(3))
    (problem,) = [p for p in damage(Root(root.url), full=True) if p.kind == "shard"]
    assert reason in problem.text


def test_features_that_are_cut_or_changed(root):
    name = committed(root)[0].features.name
    rewrite(root, name, flip_bit_at(-1 % 80))
    assert "does not have the recorded SHA-256" in problems_found(root, full=True)[0]
    rewrite(root, name, lambda content: content[:10])
    assert f"{name} has 10 bytes" in problems_found(root)[0]


def test_a_record_without_a_tar_and_a_tar_without_a_record(root):
    first, second = (committed(root)[shard] for shard in (0, 1))
    root.store.delete(first.tar)
    root.store.delete(record_name(1))
    everything = list(verify(Root(root.url)))
    assert [str(p) for p in everything if p.kind == "shard"] == [f"shard 0: {first.tar} is missing"]
    orphans = {p.text.split(":")[0] for p in everything if not p.damage}
    assert orphans == {second.tar, second.features.name}


@pytest.mark.parametrize("full", [True, False])
def test_a_damaged_record_is_named_even_if_an_index_knows_it(root, full):
    rewrite(root, record_name(1), lambda content: content[:-30])
    (problem,) = [p for p in damage(Root(root.url), full=full) if p.kind == "record"]
    assert (problem.shard, problem.files) == (1, (record_name(1),))
    assert problem.text.startswith("its commit record commit record: ")


def test_a_flipped_bit_in_a_record(root):
    rewrite(root, record_name(1), lambda content: content.replace(b'"groups": 2', b'"groups": 9'))
    assert problems_found(root) == ["shard 1: holds 9 groups from 2 on, the plan says otherwise"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_folder_where_a_record_goes(root, tmp_path, inside):
    root.store.delete(record_name(2))
    folder = tmp_path / "root" / record_name(2)
    folder.mkdir()
    if inside:
        (folder / "file").write_text("x")
    (problem,) = [p for p in damage(Root(root.url)) if p.kind == "record"]
    assert (problem.shard, problem.files) == (2, ())
    assert "is a folder, not a commit record" in problem.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read"),
        (prototypes()[:-1], "cannot be read"),
        (flip_bit_at(-1 % len(prototypes()))(prototypes()), "does not have the SHA-256"),
        (prototypes(np.eye(4, dtype=np.float32)), "has prototypes of shape [4, 4], not [3, width]"),
        (prototypes(np.full((3, 4), np.inf, np.float32)), "not finite"),
        (prototypes(facts={"scale": "10.0"}), "cannot be read"),
        (save({"prototypes": np.eye(3, 4)}), "cannot be read"),
    ],
)
def test_unreadable_prototypes(root, content, reason):
    root.store.put("prototypes.safetensors", content)
    (problem,) = damage(root)
    assert (problem.kind, problem.files) == ("prototypes", ("prototypes.safetensors",))
    assert reason in problem.text


def test_prototypes_that_are_missing_or_others(root):
    root.store.delete("prototypes.safetensors")
    assert problems_found(root) == ["prototypes.safetensors is missing"]
    other_encoder = FACTS | {"encoder": '{"model": "large"}'}
    root.store.put("prototypes.safetensors", prototypes(facts=other_encoder))
    assert problems_found(Root(root.url)) == [
        "prototypes.safetensors was measured with another encoder than the plan's"
    ]


def test_shards_made_with_other_prototypes(root):
    (problem,) = damage(rewrite_record(root, 1, prototypes="0" * 64))
    assert (problem.kind, problem.files) == ("prototypes", ())
    assert problem.text == (
        "prototypes.safetensors is not what 1 shards were made with, 1 on; "
        "restore the earlier file, or build into a new folder"
    )


def test_a_damaged_index_and_one_that_pins_what_is_gone(root):
    root.store.create("index/1.json", b'{"plan": "')
    root.store.delete(committed(root)[2].tar)
    texts = [p.text for p in damage(Root(root.url)) if p.kind == "index"]
    assert texts[0].startswith(
        "index/0.json: pins 1 tars that are missing or cut, shards/0000/0000002"
    )
    assert texts[1].startswith("index/1.json: index: ")


def test_a_record_beyond_the_plan(root):
    put_shard(root.store, 7, tar_of(sample(14), sample(15)), first=14, groups=2, count=2)
    (problem,) = [p for p in damage(Root(root.url)) if p.kind == "record"]
    assert problem.text.endswith("is beyond the shards of the plan; is an extension missing?")
    assert root.done() == [0, 1, 2]
    assert root.write_index() == "index/0.json"


def test_labels_that_are_damaged_or_of_other_images(root):
    labels = label_set(root)
    for shard, entry in committed(root).items():
        groups = [labels_of(group) for group in root.layout.groups_of(shard)]
        labels.commit(shard, images=entry.sha256, groups=groups)
    assert problems_found(root, full=True) == []
    rewrite(root, labels.name(1), lambda content: content[:-9])
    (problem,) = damage(root, full=True)
    assert str(problem) == "shard 1: labels/ab12ab12ab12: damaged, or of other images"
    assert quarantine(root, [problem]) == 1
    assert LabelSet(root, LABELS_DIGEST).missing() == [1]
    labels.commit(1, images=committed(root)[1].sha256, groups=[labels_of(2)])
    assert problems_found(root, full=True) == [
        "shard 1: labels/ab12ab12ab12: other groups than the shard's"
    ]


@pytest.mark.parametrize("change", ["damaged", "of another root"])
def test_a_label_set_that_cannot_be_opened(root, change):
    name = f"{label_set(root).folder}/set.json"
    values = json.loads(root.store.get(name)) | {"plan": "e" * 64}
    root.store.put(name, b"{" if change == "damaged" else json.dumps(values).encode())
    (problem,) = damage(root)
    assert (problem.kind, problem.files) == ("labels", ())
    assert problem.text.startswith(f"{name}: ") and "remove it and run" in problem.text


def test_a_full_look_reads_every_tar_once(tmp_path):
    root = whole_root(tmp_path / "many", shards=12)
    tars = [entry.tar for entry in committed(root).values()]
    for tar in tars[::2]:
        rewrite(root, tar, flip_bit_at(600))
    opened: list[str] = []
    store = root.store

    class Watched(Store):
        def open(self, name):
            opened.append(name)
            return super().open(name)

    root.store = Watched(store.url)
    assert [p.shard for p in damage(root, full=True)] == [0, 2, 4, 6, 8, 10]
    assert sorted(opened) == tars


def test_what_is_damaged_counts_as_missing_and_can_be_made_again(root):
    entry, record = committed(root)[1], root.record(1)
    content = root.store.get(entry.tar)
    root.store.put(entry.tar, content[:600] + b"?" + content[601:])
    assert quarantine(root, verify(root)) == 0
    assert quarantine(root, verify(root, full=True)) == 1
    assert root.missing() == Root(root.url).missing() == [1]
    # A store may keep an object of the same name and size, so the damaged one must be gone.
    assert not root.store.exists(entry.tar)
    assert root.store.exists(entry.features.name)
    note = json.loads(root.store.get("discarded/0000/0000001.1.json"))
    assert "does not have the recorded SHA-256" in note["why"]
    assert CommitRecord.read(note["record"].encode()) == record
    root.store.put(entry.tar, content)
    assert root.commit(record.model_copy(update={"worker": "second"}))
    assert problems_found(Root(root.url), full=True) == []
    assert root.write_index() == "index/0.json"  # it pins the same files


def test_a_damaged_record_is_put_aside_and_its_tar_stays(root):
    tar = committed(root)[1].tar
    root.store.put(record_name(1), b'{"shard"')
    assert quarantine(root, verify(root)) == 1
    assert not root.store.exists(record_name(1))
    assert root.store.exists(tar)
    assert root.missing() == [1]


def test_a_shard_that_a_living_process_works_on_is_left_to_it(root):
    root.store.delete(committed(root)[1].tar)
    with subprocess.Popen(["sleep", "60"]) as builder:
        note = {"host": machine(), "pid": builder.pid}
        root.store.create("leases/0000001.json", json.dumps(note).encode())
        assert quarantine(root, verify(root)) == 0
        assert root.missing() == []
        builder.kill()
    assert quarantine(root, verify(root)) == 1
    assert root.store.list("leases") == []
    assert root.missing() == [1]


def test_unreadable_prototypes_are_put_aside_with_a_tombstone(root):
    root.store.put("prototypes.safetensors", b"x")
    assert quarantine(root, verify(root)) == 1
    assert not root.store.exists("prototypes.safetensors")
    why = json.loads(root.store.get("discarded/prototypes.1.json"))["why"]
    assert why.startswith("prototypes.safetensors cannot be read")
    assert quarantine(root, verify(root)) == 0  # missing: there is nothing to put aside
    root.store.put("prototypes.safetensors", b"y")
    assert quarantine(root, verify(root)) == 1
    assert root.store.exists("discarded/prototypes.2.json")


def test_what_only_a_person_can_repair_is_passed_over(root):
    root.store.delete(record_name(2))
    Path(root.url, record_name(2)).mkdir()
    root.store.create("index/1.json", b"{")
    put_shard(root.store, 7, tar_of(sample(14), sample(15)), first=14, groups=2, count=2)
    root.store.put(f"{shard_stem(0)}-01234567.tar", b"an orphan")
    names = root.store.list("")
    problems = list(verify(Root(root.url)))
    assert {p.kind for p in problems} == {"record", "index", "orphan"}
    assert quarantine(root, problems) == 0
    assert root.store.list("") == names


def test_prototypes_must_be_those_that_shards_were_made_with(root):
    digest = hashlib.sha256(prototypes()).hexdigest()
    root.check_prototypes(b"others")  # these records do not say
    changed_root = rewrite_record(root, 0, prototypes=digest)
    changed_root.check_prototypes(prototypes())
    message = r"prototypes\.safetensors = .*are not those that shard 0 was made with; restore the"
    with pytest.raises(InputError, match=message):
        changed_root.check_prototypes(prototypes() + b" ")
    other = rewrite_record(changed_root, 2, prototypes="0" * 64)
    with pytest.raises(InputError, match="are not those that shard 2 was made with"):
        other.write_index()


def test_what_an_index_pins_may_have_been_made_again(root):
    """An index older than a shard pins the shard's first tar, which may have been removed."""
    first = committed(root)[1]
    root.discard(1)
    tar = tar_of(sample(2), sample(3, seed=7))
    put_shard(root.store, 1, tar, first=2, groups=2, count=2)
    reopened = Root(root.url)
    assert committed(reopened)[1].sha256 != first.sha256
    assert problems_found(reopened) == []
    assert open_index(root.store, "index/0.json").shards[1] == first.entry
    root.store.delete(first.tar)
    assert problems_found(reopened) == [
        f"shard 1: index/0.json: pins 1 tars that are missing or cut, {first.tar} on"
    ]
