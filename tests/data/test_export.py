"""Exports: rows by hand, files that other programs open, targets that appear whole."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from semix.data import export
from semix.data.errors import InputError
from semix.data.export import (
    folder_names,
    image_rows,
    new_target,
    write_hugging_face,
    write_image_folder,
    write_parquet,
)
from semix.data.images import decode_image
from semix.data.label_sets import LabelSet
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from tests import handmade
from tests.data import hostile
from tests.handmade import committed, labels_of, make_root, pixels, record, root_of, sample

NAUGHTY = ["=cmd|' /C calc'!A0", '../../etc\n,"x', "\u202e@evil\x1b[2J"]

ONE_FILE = "train-00000-of-00001.parquet"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Two shards of three series of three images."""
    return make_root(tmp_path / "root", shards=2, groups=3, count=3)


@pytest.fixture
def label_set(root: Root) -> LabelSet:
    """Labels of the first shard alone; every image is three quarters of its first class."""
    labels = handmade.label_set(root)
    label_shard(labels, 0)
    return labels


def label_shard(label_set: LabelSet, shard: int) -> None:
    images = committed(label_set.root)[shard]
    groups = []
    for group in images.group_numbers:
        first, second = [(0, 1), (0, 2), (1, 2)][group % 3]
        label = [[first, 0.75], [second, 0.25]]
        groups.append(labels_of(group, weights=[0.6] * 3, labels=[label] * 3))
    assert label_set.commit(shard, images=images.sha256, groups=groups)


def rows_of(root, *, image_format="keep", **options):
    return list(image_rows(PinnedRoot(root, **options), image_format=image_format))


def test_every_image_is_a_row_with_its_own_numbers(root):
    rows = rows_of(root)
    assert [(row.group, row.position) for row in rows] == [
        (g, p) for g in range(6) for p in range(3)
    ]
    for row in rows:
        expected = record(row.group, 3)
        assert (row.classes, row.names) == (expected["classes"], expected["names"])
        assert (row.alpha, row.weight) == (
            expected["alphas"][row.position],
            expected["weights"][row.position],
        )
        assert row.mixture == [row.alpha, 1 - row.alpha]
        assert row.content == sample(row.group, 3).images[row.position]
        assert dict(row.label) == {k: p for k, p in expected["labels"][row.position] if p > 0}


def test_images_become_png_without_a_changed_pixel(root):
    for row in rows_of(root, image_format="png"):
        assert (row.extension, row.content[:4]) == ("png", b"\x89PNG")
        expected = pixels(row.group, 3, 8)[row.position]
        np.testing.assert_array_equal(decode_image(row.content), expected)


def test_labels_of_another_set(root, label_set):
    digest = label_set.digest[:8]
    with pytest.raises(
        InputError, match=r"labels = \w{12}: has no labels for 1 shards of the index, shard 1"
    ):
        PinnedRoot(root, labels=digest)
    label_shard(label_set, 1)
    for row in rows_of(root, labels=digest):
        assert row.label == [(row.classes[0], 0.75), (row.classes[1], 0.25)]
        assert row.weight == 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups[1].update(labels=[[[9, 1.0]]] * 3), "a label names class 9"),
        (lambda groups: groups.pop(1), "the label set has no labels, or too many, for it"),
        (
            lambda groups: groups[1].update(labels=[[[1, 1.0]]] * 2, weights=[1.0] * 2),
            "the label set has no labels, or too many, for it",
        ),
    ],
)
def test_labels_that_do_not_fit_the_images_are_refused(root, label_set, change, message):
    label_shard(label_set, 1)
    name = label_set.name(0)
    values = json.loads(root.store.get(name))
    change(values["groups"])
    root.store.put(name, json.dumps(values).encode())
    with pytest.raises(ValueError, match=rf"^{name}: group 1: {message}"):
        rows_of(root, labels=label_set.digest)


def test_more_than_two_classes_keep_their_labels(root):
    plan = json.loads(root.store.get("plan.json"))
    plan["classes_per_group"] = 3
    root.store.put("plan.json", json.dumps(plan).encode())
    with pytest.raises(InputError, match=r"scale = 4\.0: .* mixes 3 classes, whose labels stay"):
        PinnedRoot(Root(root.url), scale=4.0)


@pytest.mark.parametrize("kind", ["EPS", "WebP of 60000 pixels", "symlink", "image missing"])
@pytest.mark.parametrize("image_format", ["keep", "png"])
def test_a_hostile_shard_is_named(kind, image_format, tmp_path):
    tar = {**hostile.images(), **hostile.archives(), **hostile.series()}[kind]
    root = make_root(tmp_path, shards=2, groups=1, tars=[tar])
    name = committed(root)[0].tar
    with pytest.raises(ValueError, match=f"^{name}: "):
        rows_of(root, image_format=image_format)


def table(folder):
    with (folder / "labels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_files_and_table_agree_with_the_root(root, tmp_path):
    folder = tmp_path / "out"
    assert write_image_folder(PinnedRoot(root), folder) == 18
    rows = table(folder)
    assert sorted(p.relative_to(folder).as_posix() for p in folder.glob("*/*")) == sorted(
        row["file"] for row in rows
    )
    assert rows[3]["file"] == "cat_fox/00000001.00.webp"
    for row in rows:
        group, position = int(row["group"]), int(row["position"])
        expected = record(group, 3)
        content = (folder / row["file"]).read_bytes()
        assert content == sample(group, 3).images[position]
        assert json.loads(row["classes"]) == expected["classes"]
        assert json.loads(row["names"]) == expected["names"]
        assert float(row["alpha"]) == expected["alphas"][position]
        assert float(row["weight"]) == expected["weights"][position]
        label = dict(map(tuple, json.loads(row["label"])))
        assert label == {k: p for k, p in expected["labels"][position] if p > 0}
    assert json.loads((folder / "classes.json").read_text()) == ["cat", "dog", "fox"]


def test_png_on_request(root, tmp_path):
    write_image_folder(PinnedRoot(root), tmp_path / "out", image_format="png")
    assert {row["file"][-4:] for row in table(tmp_path / "out")} == {".png"}


def test_class_names_are_neither_paths_nor_formulas(tmp_path):
    names = {0: NAUGHTY[:2], 1: NAUGHTY[::2], 2: NAUGHTY[1:]}
    samples = [sample(g, names=names[g % 3]) for g in range(3)]
    root = root_of(tmp_path / "root", samples, NAUGHTY)
    write_image_folder(PinnedRoot(root), tmp_path / "out")
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert all(name.startswith(("root/", "out/")) for name in files)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *("cmd-C-calc-A0_etc-x", "cmd-C-calc-A0_evil-2J", "etc-x_evil-2J"),
        *("labels.csv", "classes.json", "croissant.json"),
    }
    for row in table(tmp_path / "out"):
        for column in row:
            # A spreadsheet takes these for a formula, but for a plain number.
            if row[column].startswith(("=", "+", "-", "@", "\t", "\r")):
                float(row[column])
    text = (tmp_path / "out" / "labels.csv").read_bytes()
    assert max(text) < 128
    assert b"\x1b" not in text
    assert json.loads(table(tmp_path / "out")[0]["names"]) == NAUGHTY[:2]


@pytest.mark.parametrize(
    ("names", "folders"),
    [
        (["great_white shark", "\u00c5l"], ["great-white-shark", "Al"]),
        (["Cat", "cat", "dog"], ["Cat.0", "cat.1", "dog"]),
        (["\u732b", "\u72ac", ".."], ["class.0", "class.1", "class.2"]),
        (["a" * 300, "a" * 299], [f"{'a' * 100}.0", f"{'a' * 100}.1"]),
    ],
)
def test_folders_have_the_names_of_classes_and_differ(names, folders):
    assert folder_names(names, together=2) == folders


def test_nothing_appears_when_a_shard_is_damaged(tmp_path):
    root = make_root(tmp_path / "root", shards=2, groups=1, tars=[hostile.images()["EPS"]])
    with pytest.raises(ValueError, match=committed(root)[0].tar):
        write_image_folder(PinnedRoot(root), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["root"]


def test_every_column_holds_what_the_root_does(root, tmp_path):
    assert write_parquet(PinnedRoot(root), tmp_path / "out") == 18
    path = tmp_path / "out" / ONE_FILE
    rows = pq.read_table(path).to_pylist()
    assert [(r["group"], r["position"]) for r in rows] == [
        (g, p) for g in range(6) for p in range(3)
    ]
    for row in rows:
        group, position = row["group"], row["position"]
        expected = record(group, 3)
        np.testing.assert_array_equal(
            decode_image(row["image"]["bytes"]), pixels(group, 3, 8)[position]
        )
        assert row["image"]["path"] == f"{group:08d}.{position:02d}.webp"
        assert (row["classes"], row["names"]) == (expected["classes"], expected["names"])
        assert (row["alpha"], row["weight"]) == (
            expected["alphas"][position],
            expected["weights"][position],
        )
        label = np.zeros(3)
        for target, probability in expected["labels"][position]:
            label[target] = probability
        np.testing.assert_allclose(row["label"], label, atol=1e-7)
    assert json.loads(pq.read_schema(path).metadata[b"class_names"]) == ["cat", "dog", "fox"]


def test_row_groups_are_bounded_by_rows_and_bytes(root, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "MAX_ROWS", 5)
    write_parquet(PinnedRoot(root), tmp_path / "rows")
    metadata = pq.ParquetFile(tmp_path / "rows" / ONE_FILE).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [5, 5, 5, 3]
    monkeypatch.setattr(export, "MAX_BYTES", 1)
    write_parquet(PinnedRoot(root), tmp_path / "bytes")
    assert pq.ParquetFile(tmp_path / "bytes" / ONE_FILE).metadata.num_row_groups == 18


def test_the_missing_extra_is_named(root, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for write in (write_parquet, write_hugging_face):
        with pytest.raises(InputError, match=r"needs pyarrow; run pip install .*\[export\]'"):
            write(PinnedRoot(root), tmp_path / "out")
    assert not (tmp_path / "out").exists()


MEMORY = """
import resource, sys
from pathlib import Path
from semix.data import export
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
import pyarrow.parquet

export.MAX_BYTES = 2**20
export.write_parquet(PinnedRoot(Root(sys.argv[1])), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.process
def test_memory_does_not_grow_with_the_dataset(tmp_path):
    """Export 3 MB of images, then 60 MB, in row groups of one image."""
    peaks = []
    for shards in (1, 20):
        root = make_root(tmp_path / f"root{shards}", shards, 1, count=4, side=500)
        command = [sys.executable, "-c", MEMORY, root.url, str(tmp_path / f"{shards}")]
        peaks.append(int(subprocess.run(command, capture_output=True, check=True).stdout))
    assert (tmp_path / "20" / ONE_FILE).stat().st_size > 50 * 2**20
    assert peaks[1] - peaks[0] < 25, peaks


# Load as a user does, in a process of its own, without network and with a new cache.
LOAD = """
import sys
import numpy as np
from datasets import load_dataset
from datasets import Image, List

kind, path, out = sys.argv[1:]
given = {"data_files": f"{path}/*.parquet"} if kind == "parquet" else {}
found = load_dataset(kind if given else path, split="train", **given)
assert isinstance(found.features["image"], Image), found.features
assert isinstance(found.features["label"], List), found.features
np.savez(out, images=np.stack([np.asarray(row["image"]) for row in found]),
         labels=np.array(found["label"][:]), groups=np.array(found["group"][:]),
         names=np.array(found["names"][:]))
"""


def load(kind: str, path: Path, folder: Path) -> dict:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    out = folder / f"{kind}.npz"
    command = [sys.executable, "-c", LOAD, kind, str(path), str(out)]
    completed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-2000:]
    return dict(np.load(out))


def check(columns: dict) -> None:
    groups = [g for g in range(6) for _ in range(3)]
    assert columns["groups"].tolist() == groups
    expected = np.concatenate([pixels(g, 3, 8) for g in range(6)])
    np.testing.assert_array_equal(columns["images"], expected)
    assert columns["names"].tolist() == [record(g)["names"] for g in groups]
    for group, label in zip(groups, columns["labels"], strict=True):
        assert set(np.flatnonzero(label)) <= set(record(group)["classes"])
    np.testing.assert_allclose(columns["labels"].sum(1), 1, atol=1e-6)


@pytest.mark.process
def test_datasets_opens_the_folder_offline(root, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE_BYTES", 1)  # a file for each shard
    assert write_hugging_face(PinnedRoot(root), tmp_path / "out") == 18
    assert sorted(p.name for p in (tmp_path / "out" / "data").iterdir()) == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog", "fox"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "18 images in series of 3" in card
    check(load("folder", tmp_path / "out", tmp_path))


@pytest.mark.process
def test_datasets_opens_the_files_alone_too(root, tmp_path):
    write_parquet(PinnedRoot(root), tmp_path / "out")
    check(load("parquet", tmp_path / "out", tmp_path))


def test_a_file_or_folder_appears_whole(tmp_path):
    for name in ("file", "deep/folder"):
        with new_target(tmp_path / name) as partial:
            assert partial.parent == (tmp_path / name).parent
            if name == "file":
                partial.write_text("x")
            else:
                (partial / "a").mkdir(parents=True)
                (partial / "a" / "b").write_text("x")
            assert not (tmp_path / name).exists()
    assert (tmp_path / "file").read_text() == (tmp_path / "deep/folder/a/b").read_text() == "x"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "deep", "file", "folder"]


def test_what_is_there_is_never_touched(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        with (
            pytest.raises(InputError, match=f"--to = .*/{name}: is there already"),
            new_target(tmp_path / name),
        ):
            raise AssertionError("must not get here")
    with (
        pytest.raises(InputError, match=r"--to = .*/late: is there already"),
        new_target(tmp_path / "late") as partial,
    ):
        partial.write_text("ours")
        (tmp_path / "late").write_text("theirs")
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "late").read_text() == "theirs"


def test_nothing_is_left_of_what_failed(tmp_path):
    for is_folder in (True, False):
        with pytest.raises(OSError, match="No space"), new_target(tmp_path / "new") as partial:
            if is_folder:
                partial.mkdir()
            (partial / "x" if is_folder else partial).write_text("half")
            raise OSError("No space left on device")
    assert list(tmp_path.iterdir()) == []
