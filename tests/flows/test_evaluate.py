"""`semix evaluate`: measures a trained run anew, and says what it cannot."""

import csv
import json
import re
import shutil
from pathlib import Path

import h5py
import pytest
from prefect.client.orchestration import get_client
from typer.testing import CliRunner

from semix.calib.config import TrainConfig
from semix.calib.run_folder import claim_run, is_measured
from semix.calib.train import train_run
from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.flows.artifacts import artifact_key
from semix.flows.cli import app
from semix.flows.evaluate import evaluate
from tests.command import semix

SETTINGS = {
    "name": "quick",
    "real": {"name": "digits", "image_size": 16, "train_per_class": 5, "validation_per_class": 5},
    "model": {"name": "resnet8", "width": 2},
    "epochs": 1,
    "batch_size": 25,
    "evaluation": {"bootstrap": 50},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = claim_run(load_settings(TrainConfig, SETTINGS), tmp_path_factory.mktemp("run")).parent
    train_run(run)
    return run


@pytest.fixture
def run(measured: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(measured, tmp_path / "run"))


def content(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*.json")}


def test_other_settings_are_measured_beside_and_the_run_keeps_its_own(run: Path, prefect_api: str):
    before = content(run)
    arguments = ["evaluate", str(run), "--set", "evaluation.bins=4", "--device", "cpu"]
    shift = '{"corruptions": ["contrast"], "severities": [2], "bins": 5, "images": 40}'
    result = CliRunner().invoke(app, [*arguments, "--set", f"evaluation.shift={shift}"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    (path,) = (run / name for name in content(run).keys() - before.keys())
    assert re.fullmatch(r"evaluation-[0-9a-f]{8}\.json", path.name) and lines[-1] == str(path)
    evaluation = json.loads(path.read_text())
    (row,) = evaluation["rows"]
    assert (row["bins"], row["shift"]["bins"]) == (4, 5)
    assert evaluation["evaluation"]["bins"] == 4
    assert {name: content(run)[name] for name in before} == before
    assert is_measured(load_settings(TrainConfig, SETTINGS), run)  # nothing to do for a train
    for kind in ("plain", "isotonic"):
        values = [f"{100 * row['kinds'][kind]['accuracy']:.2f}", f"{row['kinds'][kind]['nll']:.3f}"]
        assert any(all(value in line for value in values) for line in lines)
    text = " ".join(result.output.split())
    assert "over seeds (1), 4 bins" in text
    assert "ECE of 5 bins" in text


def test_what_is_measured_beside_leaves_runs_comparable(
    run: Path, measured: Path, tmp_path: Path, prefect_api: str
):
    evaluate(run, overrides=["evaluation.bins=20"])
    config = json.loads((measured / "config.json").read_text()) | {"name": "other"}
    other_run = Path(shutil.copytree(measured, tmp_path / "other"))
    (other_run / "config.json").write_text(json.dumps(config))
    evaluation = json.loads((other_run / "evaluation.json").read_text()) | {"name": "other"}
    (other_run / "evaluation.json").write_text(json.dumps(evaluation))
    status, out, err = semix(
        "report", str(run), str(other_run), "--out", str(tmp_path / "page.html")
    )
    assert status == 0, err
    assert "15 bins" in " ".join(out.split())


def test_another_file_may_be_named(run: Path, tmp_path: Path, prefect_api: str):
    file, before = tmp_path / "elsewhere.json", content(run)
    evaluation = evaluate(run, overrides=["evaluation.bins=7"], to=file)
    assert json.loads(file.read_text()) == evaluation and evaluation["rows"][0]["bins"] == 7
    assert content(run) == before
    evaluate(run, overrides=["evaluation.bins=8"], to=file)  # an evaluation may be written anew
    assert json.loads(file.read_text())["rows"][0]["bins"] == 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("evaluation.json", "holds the evaluation under the run's own settings; name another file"),
        ("config.json", "exists and is no evaluation; name another file"),
        ("seed-0", "exists and is no evaluation; name another file"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(run: Path, name: str, text: str):
    before = content(run)
    with pytest.raises(InputError, match=f"^--to = {run / name}: {text}"):
        evaluate(run, overrides=["evaluation.bins=3"], to=run / name)
    assert content(run) == before


def test_probabilities_are_exported_for_calarena(run: Path, prefect_api: str):
    status, out, err = semix("evaluate", str(run), "--device", "cpu", "--export", "calarena")
    assert status == 0, err
    data = run / "calarena" / "semix-multiclass.h5"
    assert out.splitlines()[-2:] == [
        f"written: {data}",
        f"written: {data.with_name('semix-multiclass-experiments.csv')}",
    ]
    with data.with_name("semix-multiclass-experiments.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    with h5py.File(data) as exported:
        p = exported[f"{row['dataset']}/{row['model']}"]["probas_test"][:]
    assert p.shape == (int(row["test_size"]), int(row["n_classes"]))
    assert row["model"] == "run-base-seed0" and abs(p.sum(1) - 1).max() < 1e-5


def test_another_format_is_refused(run: Path):
    status, _, err = semix("evaluate", str(run), "--export", "csv")
    assert status == 2
    assert "--export = csv: the only format is calarena" in err


def test_train_ends_in_the_same_table(run: Path):
    status, out, err = semix("train", str(run / "config.json"), "--out", str(run))
    assert status == 0, err
    (row,) = json.loads((run / "evaluation.json").read_text())["rows"]
    for kind in ("plain", "scaled"):
        values = [f"{100 * row['kinds'][kind]['ece']:.2f}", f"{row['kinds'][kind]['nll']:.3f}"]
        assert any(all(value in line for value in values) for line in out.splitlines())
    assert out.splitlines()[-1] == str(run / "evaluation.json")


def test_a_run_without_mixed_images_has_a_report(run: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    status, out, err = semix("report", str(run), "--out", str(page))
    assert status == 0, err
    assert out.splitlines()[-1] == str(page)
    text = page.read_text()
    (row,) = json.loads((run / "evaluation.json").read_text())["rows"]
    assert f"{100 * row['kinds']['plain']['accuracy']:.2f}" in text
    assert "Mixed" not in text and "CLIP" not in text


@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_an_unfinished_run_gets_the_command_that_finishes_it(run: Path, tmp_path: Path, command):
    (run / "evaluation.json").unlink()
    (run / "seed-0/model.safetensors").unlink()
    page = ("--out", str(tmp_path / "page.html")) if command == "report" else ()
    status, _, err = semix(command, str(run), *page)
    remedy = f"seed 0 is not trained; finish it with `semix train {run}/config.json --out {run}`"
    assert (status, err) == (2, f"error: run = {run}: {remedy}\n")


def test_prefect_shows_the_table_and_where_the_numbers_are(run: Path, artifacts_of):
    evaluate(run, overrides=["evaluation.bins=5"])
    key = artifact_key("evaluate", str(run))
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_runs(limit=1, sort="START_TIME_DESC")[0]
    artifacts = artifacts_of(flow_run.id)
    assert flow_run.name == "evaluate run: evaluation.bins=5"
    assert set(flow_run.tags) == {"semix", "evaluate"}
    assert "ECE: 5 bins" in artifacts[f"{key}-results"]["data"]
    assert artifacts[f"{key}-page"]["data"].startswith("[evaluation-")


def test_json_is_the_evaluation(run: Path, prefect_api: str):
    result = CliRunner().invoke(app, ["evaluate", str(run), "--json"])
    assert json.loads(result.stdout) == json.loads((run / "evaluation.json").read_text())


def test_what_training_decided_is_refused(run: Path, monkeypatch):
    before = (run / "config.json").read_bytes()
    text = r"^--set = epochs=2: is a setting of training; only evaluation\.\* can change"
    with pytest.raises(InputError, match=text):
        evaluate(run, overrides=["evaluation.bins=3", "epochs=2"])
    with pytest.raises(InputError, match=r"^evaluation\.shift\.corruptions = mist: choose from"):
        evaluate(run, overrides=['evaluation.shift={"corruptions": ["mist"]}'])
    with pytest.raises(InputError, match=r"^device = cuda: torch sees no GPU here"):
        evaluate(run, device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "63")  # no machine has so many
    with pytest.raises(InputError, match=r"^device = cuda: torch sees no GPU here"):
        evaluate(run)
    assert (run / "config.json").read_bytes() == before


def test_a_folder_without_a_run_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"^run = .*: holds no config\.json; name the folder"):
        evaluate(tmp_path)
