"""`semix export-classifier`: its folder, card and upload; the server of docs/serving.md."""

import io
import json
import re
import socket
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from PIL import Image

from benchmarks.environments import make_environment
from semix.calib.classifier import load_classifier
from semix.calib.config import TrainConfig
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from semix.data.settings import load_settings
from tests.command import semix
from tests.flows.test_evaluate import SETTINGS

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    shift = {"corruptions": ["fog"], "severities": [3], "images": 50}
    evaluation = {**SETTINGS["evaluation"], "shift": shift}
    config = load_settings(TrainConfig, {**SETTINGS, "evaluation": evaluation})
    folder = claim_run(config, tmp_path_factory.mktemp("run")).parent
    train_run(folder)
    return str(folder)


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    status, out, err = semix(
        "export-classifier", run, "--to", str(folder), "--license", "mit", "--calibrator", "svs"
    )
    assert status == 0, err
    names = ["README.md", "config.json", "model.onnx"]
    assert out.splitlines() == [f"written: {folder / name}" for name in names]
    return folder


def test_the_card_has_the_hubs_head_and_the_figures_of_the_evaluation(run, exported):
    card = (exported / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["license"] == "mit" and head["pipeline_tag"] == "image-classification"
    (row,) = json.loads(Path(run, "evaluation.json").read_text())["rows"]
    for kind, label in (("plain", "as trained"), ("svs", "SVS")):
        (line,) = re.findall(rf"^\| {label} +\|(.*)\|$", card, re.MULTILINE)[:1]
        shown = [float(cell) for cell in line.split("|")]
        keys = ("accuracy", "ece", "adaptive_ece", "nll", "brier")
        per_cent = [100, 100, 100, 1, 1]
        expected = [row["kinds"][kind][k] * f for k, f in zip(keys, per_cent, strict=True)]
        assert shown == pytest.approx(expected, abs=0.006)
    for text in ("1,697 test images, 15 bins", "On corrupted test images", "zero, one", "`mit`"):
        assert text in card, text
    assert "calibrator svs" in card and "What it is not for" in card
    assert json.loads((exported / "config.json").read_text())["label_names"][1] == "one"


def test_a_dry_run_lists_what_would_be_uploaded(run, tmp_path):
    push = ("--push-to-hub", "me/digits", "--dry-run", "--calibrator", "scaled")
    status, out, err = semix(
        "export-classifier", run, "--to", str(tmp_path / "m"), "--format", "pt2", *push
    )
    assert status == 0, err
    expected = "would upload to me/digits: README.md, config.json, model.pt2"
    assert out.splitlines()[-1] == expected


def test_the_run_knows_its_exports_and_the_report_links_their_cards(run, exported, tmp_path):
    (export,) = (
        each
        for each in json.loads(Path(run, "exports.json").read_text())["exports"]
        if each["folder"] == str(exported)
    )
    assert (export["format"], export["calibrator"], export["seeds"]) == ("onnx", "svs", 1)
    page = tmp_path / "report.html"
    assert semix("report", run, "--out", str(page))[0] == 0
    assert f'<a href="{(exported / "README.md").as_uri()}">onnx, svs: model card</a>' in (
        page.read_text()
    )


def test_a_failed_export_leaves_nothing(run, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr("semix.calib.model_card.model_card", fail)
    status, _, err = semix("export-classifier", run, "--to", str(tmp_path / "m"), "--format", "pt2")
    assert status == 1 and "no space" in err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_or_uploaded_is_named(run, exported, tmp_path):
    (tmp_path / "file").write_text("")
    mistakes = {
        ("--to", str(tmp_path / "x"), "--dry-run"): "--dry-run = True: goes with --push-to-hub",
        ("--to", str(tmp_path / "file")): "exists; name a new folder, or remove it",
        ("--to", str(exported)): "exists; name a new folder, or remove it",
        ("--to", str(tmp_path / "x"), "--format", "timm"): "model.name = resnet8: timm builds no",
    }
    for arguments, text in mistakes.items():
        status, _, err = semix("export-classifier", run, *arguments)
        assert status == 2 and text in err
    assert not (tmp_path / "x").exists()


def test_a_wrong_repository_or_a_missing_package_is_named_before_the_run_is_read(
    tmp_path, monkeypatch
):
    missing, to = str(tmp_path / "no-run"), ("--to", str(tmp_path / "x"))
    status, _, err = semix("export-classifier", missing, *to, "--push-to-hub", "a b")
    assert status == 2 and "--push-to-hub = a b: " in err and "give OWNER/NAME" in err
    monkeypatch.setattr("semix.flows.export_classifier.find_spec", lambda name: None)
    status, _, err = semix("export-classifier", missing, *to)
    assert status == 2 and "--format = onnx: needs onnx and onnxscript; run pip install" in err


@pytest.mark.slow
def test_the_server_of_the_page_answers_as_predict_does(run, exported, tmp_path):
    """In an environment with what the page names and nothing of ours."""
    (code,) = re.findall(r"```python\n(import io.*?)```", PAGE.read_text(), re.DOTALL)
    (packages,) = re.findall(r"`pip install (fastapi [^`]*)`", PAGE.read_text())
    python = make_environment(tmp_path / "venv", packages.split(), shared=[])
    (tmp_path / "csm-onnx").symlink_to(exported)
    (tmp_path / "server.py").write_text(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "uvicorn", "server:app", "--port", str(port)]
    pixels = np.random.default_rng(0).integers(256, size=(30, 20, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = f"http://127.0.0.1:{port}/predict"
    with subprocess.Popen(command, cwd=tmp_path) as server:
        try:
            transport = httpx.HTTPTransport(retries=10)
            with httpx.Client(transport=transport, timeout=30) as client:
                answer = client.post(url, content=file.getvalue()).json()
                assert client.post(url, content=b"nonsense").status_code == 415
                assert client.post(url, content=bytes(21 * 2**20)).status_code == 413
        finally:
            server.terminate()
    classifier = load_classifier(run, calibrator="svs")
    best = classifier.probabilities(pixels)[0].topk(3)
    assert list(answer) == [classifier.class_names[k] for k in best.indices]
    assert list(answer.values()) == pytest.approx(best.values.tolist(), abs=1e-5)


def test_the_card_names_what_made_the_mixed_images_and_no_folder_of_this_machine(built, tmp_path):
    settings = {**SETTINGS, "mixed": {"url": built.url}}
    run = claim_run(load_settings(TrainConfig, settings), tmp_path / "run").parent
    train_run(run)
    model = tmp_path / "model"
    status, _, err = semix(
        "export-classifier", str(run), "--to", str(model), "--calibrator", "plain"
    )
    assert status == 0, err
    card = (model / "README.md").read_text()
    assert re.search(
        r"; plan \w{12}; generator diffusion \w{12}; annotation clip \w{12}; licences: .*$",
        card,
        re.M,
    )
