"""CalArena's layout: one group per experiment, and an index of them."""

import csv
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.torch import load_file

from semix.calib.calarena import export_calarena
from semix.data.errors import InputError
from tests.calib.measured import make_run


def index_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_stage_of_each_seed_is_an_experiment(tmp_path: Path):
    run = make_run(tmp_path / "csm", "CSM", [{}, {}], head="mac_cal")
    data, index = export_calarena(run, tmp_path / "out")
    assert (data.name, index.name) == ("semix-binary.h5", "semix-binary-experiments.csv")
    rows = index_of(index)
    models = [f"csm-{stage}-seed{seed}" for stage in ("base", "head") for seed in (0, 1)]
    assert [row["model"] for row in rows] == models
    assert {row["dataset"] for row in rows} == {"digits"}
    assert rows[0].keys() == {"dataset", "model", "cal_size", "test_size"}
    logits = load_file(run / "seed-1" / "logits-head.safetensors")
    with h5py.File(data) as file:
        group = file["digits/csm-head-seed1"]
        p = logits["test_logits"].softmax(1)[:, 1].numpy()
        np.testing.assert_allclose(group["probas_test"][:], p, rtol=1e-6)
        assert group["labels_cal"][:].tolist() == logits["validation_targets"].tolist()
        assert len(group["probas_cal"]) == int(rows[3]["cal_size"])


def test_without_h5py_it_says_what_to_install(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "csm", "CSM", [{}])
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"^export = calarena: needs h5py; run pip"):
        export_calarena(run, tmp_path / "out")
