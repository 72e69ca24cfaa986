import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.export import hugging_face
from data.export.hugging_face import write_hugging_face
from data.export.parquet import write_parquet
from data.export.rows import open_source
from tests.handmade import pixels, record

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
# As a user would, in a process of its own: no network, a cache that is new.
LOAD = """
import sys
import numpy as np
from datasets import load_dataset
from datasets import Image, List

kind, path, out = sys.argv[1:]
given = {"data_files": path} if kind == "parquet" else {}
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
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(np.load(out))


def check(found: dict) -> None:
    groups = [g for g in range(6) for _ in range(3)]
    assert found["groups"].tolist() == groups
    wanted = np.concatenate([pixels(g, 3, 8) for g in range(6)])
    np.testing.assert_array_equal(found["images"], wanted)
    assert found["names"].tolist() == [record(g)["names"] for g in groups]
    for group, label in zip(groups, found["labels"], strict=True):
        assert set(np.flatnonzero(label)) <= set(record(group)["classes"])
    np.testing.assert_allclose(found["labels"].sum(1), 1, atol=1e-6)


def test_datasets_opens_the_folder_offline(root, tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face, "FILE_BYTES", 1)  # a file for each shard
    assert write_hugging_face(open_source(root.url), tmp_path / "out") == 18
    assert sorted(p.name for p in (tmp_path / "out" / "data").iterdir()) == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog", "fox"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "18 images in series of 3" in card
    check(load("folder", tmp_path / "out", tmp_path))


def test_datasets_opens_the_single_file_too(root, tmp_path):
    write_parquet(open_source(root.url), tmp_path / "out.parquet")
    check(load("parquet", tmp_path / "out.parquet", tmp_path))
