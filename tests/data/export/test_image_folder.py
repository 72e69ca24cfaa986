import csv
import json

import pytest

from data.export.image_folder import COLUMNS, folder_names, write_image_folder
from data.export.rows import open_source
from tests.data import hostile
from tests.handmade import make_root, record, root_of, sample

NAUGHTY = ["=cmd|' /C calc'!A0", '../../etc\n,"x', "\u202e@evil\x1b[2J"]


def table(folder):
    with (folder / "labels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_files_and_table_agree_with_the_root(root, tmp_path):
    folder = tmp_path / "out"
    assert write_image_folder(open_source(root.url), folder) == 18
    rows = table(folder)
    assert sorted(p.relative_to(folder).as_posix() for p in folder.glob("*/*")) == sorted(
        row["file"] for row in rows
    )
    assert rows[3]["file"] == "cat_fox/00000001.00.webp"
    for row in rows:
        group, position = int(row["group"]), int(row["position"])
        wanted = record(group, 3)
        content = (folder / row["file"]).read_bytes()
        assert content == sample(group, 3).images[position]
        assert json.loads(row["classes"]) == wanted["classes"]
        assert json.loads(row["names"]) == wanted["names"]
        assert float(row["alpha"]) == wanted["alphas"][position]
        assert float(row["weight"]) == wanted["weights"][position]
        found = dict(map(tuple, json.loads(row["label"])))
        assert found == {k: p for k, p in wanted["labels"][position] if p > 0}
    assert json.loads((folder / "classes.json").read_text()) == ["cat", "dog", "fox"]


def test_png_on_request(root, tmp_path):
    write_image_folder(open_source(root.url, image_format="png"), tmp_path / "out")
    assert {row["file"][-4:] for row in table(tmp_path / "out")} == {".png"}


def test_class_names_are_neither_paths_nor_formulas(tmp_path):
    names = {0: NAUGHTY[:2], 1: NAUGHTY[::2], 2: NAUGHTY[1:]}
    samples = [sample(g, names=names[g % 3]) for g in range(3)]
    root = root_of(tmp_path / "root", samples, NAUGHTY)
    write_image_folder(open_source(root.url), tmp_path / "out")
    found = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert all(name.startswith(("root/", "out/")) for name in found)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *("cmd-C-calc-A0_etc-x", "cmd-C-calc-A0_evil-2J", "etc-x_evil-2J"),
        *("labels.csv", "classes.json"),
    }
    for row in table(tmp_path / "out"):
        for column in COLUMNS:
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
    with pytest.raises(ValueError, match=root.committed()[0]["tar"]):
        write_image_folder(open_source(root.url), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["root"]
