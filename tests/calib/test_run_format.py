"""docs/format.md is what a trained run holds: its files, and the parameters of every calibrator."""

import json
import re
from pathlib import Path

import pytest

from semix.calib.calibrators import CALIBRATORS
from semix.calib.classifier import load_classifier
from semix.calib.metrics.conformal import SCORES
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
SECTION = PAGE.partition("## Files of a training run")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def run(make_config, tmp_path_factory) -> Path:
    calibrators = [name for name in CALIBRATORS if name != "scaled"]
    settings = ("epochs=1", "head.epochs=1", f"evaluation.calibrators=[{', '.join(calibrators)}]")
    folder = claim_run(make_config(*settings), tmp_path_factory.mktemp("run")).parent
    train_run(folder)
    for stage in ("base", "head"):
        load_classifier(folder, stage=stage, among=("scaled",))
    return folder


def test_every_file_of_a_run_is_on_the_page(run):
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    general = {re.sub(r"^(seed-0/(checkpoint|tensorboard)/).*", r"\1", name) for name in files}
    (block,) = re.findall(r"```\n(config.json.*?)```", SECTION, re.DOTALL)
    block = re.sub(r", ([\w-]+-head\.)", r", seed-0/\1", block)
    named = set(re.findall(r"(?:seed-0/)?[\w-]+\.(?:jsonl|json|safetensors)", block))
    named |= {"seed-0/checkpoint/", "seed-0/tensorboard/"} | {"seed-0/head.json"}
    assert general - {"seed-0/.lock"} <= named
    assert {name for name in named if "/" in name} <= general | {"head.json"}


def test_calibration_json_has_the_parameters_of_the_table(run):
    content = json.loads((run / "seed-0" / "calibration.json").read_text())
    assert set(content) == {"schema", "stages"}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", SECTION, re.MULTILINE)
    documented = {
        name: set(re.findall(r"`(\w+)`", keys))
        for names, keys in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    for stage in content["stages"].values():
        assert set(stage) == {"source", "calibrators", "thresholds"}
        fitted = {name: set(state) for name, state in stage["calibrators"].items()}
        assert fitted == documented and set(fitted) == set(CALIBRATORS)
        assert set(stage["thresholds"]) == set(SCORES)
        assert all(set(row) == {"0.1", "0.05", "0.01"} for row in stage["thresholds"].values())
