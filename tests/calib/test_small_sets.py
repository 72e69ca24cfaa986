"""A MaC-Cal head on a small dataset: defaults keep accuracy, losses of accuracy are warned of."""

import json
import shutil
from pathlib import Path

import pytest

from semix.calib.config import HeadConfig, MaCCalConfig, TrainConfig, TSTConfig
from semix.calib.page import write_report
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from semix.data.settings import load_settings
from tests.command import semix

SETTINGS = {
    "name": "small",
    "real": {"name": "digits", "image_size": 16, "train_per_class": 60},
    "model": {"name": "resnet8", "width": 8},
    "epochs": 12,
    "batch_size": 30,
    "augment": {"shift": 1},
    "optimiser": {"name": "adamw", "learning_rate": 0.01, "schedule": "cosine"},
    "head": {"method": "mac_cal", "gamma": 0.9},  # as in the README
    "trackers": [],
    "evaluation": {"bootstrap": 0},
}
PAPER_HEAD = {"method": "mac_cal", "batch_size": 128, "optimiser": {"learning_rate": 0.1}}
LARGE = {**SETTINGS, "name": "large batches", "head": PAPER_HEAD}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = claim_run(load_settings(TrainConfig, SETTINGS), tmp_path_factory.mktemp("small")).parent
    train_run(run)
    return run


def evaluation(run: Path) -> dict:
    return json.loads((run / "evaluation.json").read_text())


def accuracy_loss(run: Path) -> float:
    """Percentage points of validation accuracy that are lost with the head."""
    base, head = evaluation(run)["rows"]
    return 100 * (base["validation_accuracy"] - head["validation_accuracy"])


@pytest.mark.process  # for its length
def test_a_head_of_default_settings_keeps_a_small_sets_accuracy(small: Path):
    assert evaluation(small)["rows"][0]["validation_accuracy"] > 0.9
    assert accuracy_loss(small) <= 2
    assert evaluation(small)["warnings"] == []


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = load_settings(TrainConfig, LARGE)
    run = claim_run(config, tmp_path_factory.mktemp("large")).parent
    train_run(run)
    return run


@pytest.mark.process  # for its length
def test_a_head_that_costs_accuracy_says_so_in_evaluation_terminal_and_report(
    small: Path, large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert accuracy_loss(large) > 2
    (warning,) = evaluation(large)["warnings"]
    base, head = (row["validation_accuracy"] for row in evaluation(large)["rows"])
    text = "large batches: the mac_cal head loses more than 2 points of validation accuracy"
    values = f"(seed 0: {100 * base:.1f} % to {100 * head:.1f} %; 300 images)"
    assert warning.startswith(f"{text} {values}: lower head.optimiser.learning_rate")
    assert "head.batch_size" in warning and "head.p_start" in warning
    train_run(large)  # nothing is left to do, and the warning is printed again
    assert f"warning: {warning}" in capsys.readouterr().out.splitlines()
    page = tmp_path / "page.html"
    write_report(page, runs=[small, large], mixed=None, agreement=None, facts={}, title="heads")
    assert page.read_text().count("<b>Warning.</b>") == 1
    assert warning in page.read_text()


@pytest.mark.process
def test_the_warning_is_the_last_line_that_is_printed(
    large: Path, tmp_path: Path, prefect_api: str
):
    """By a training, here a finished one, and by a later evaluation."""
    run, config = tmp_path / "run", tmp_path / "large.json"
    shutil.copytree(large, run)
    config.write_text(json.dumps(LARGE))
    for command in (("train", str(config), "--out", str(run)), ("evaluate", str(run))):
        status, _, output = semix(*command)
        assert status == 0
        assert output.splitlines()[-1] == f"warning: {evaluation(run)['warnings'][0]}"


@pytest.mark.parametrize(
    ("images", "batch", "rate"),
    [
        (45_000, 128, 0.1),  # the paper's
        (16_384, 128, 0.1),
        (16_383, 64, 0.05),
        (2_000, 8, 0.00625),
        (300, 4, 0.003125),  # 75 steps
        (20, 4, 0.003125),
    ],
)
def test_batches_and_learning_rate_follow_the_size_of_the_training_set(images, batch, rate):
    head = MaCCalConfig()
    assert head.batch_size_for(images) == batch
    assert head.optimiser_for(images).learning_rate == pytest.approx(rate)


@pytest.mark.parametrize(
    ("head", "batch", "rate"),
    [
        (MaCCalConfig(batch_size=20), 20, 0.1),
        (MaCCalConfig.model_validate({"optimiser": {"learning_rate": 0.5}}), 4, 0.5),
        (TSTConfig(method="tst"), 4, 1e-4),
    ],
)
def test_what_is_set_by_hand_stays(head: HeadConfig, batch: int, rate: float):
    assert head.batch_size_for(300) == batch
    assert head.optimiser_for(300).learning_rate == rate
