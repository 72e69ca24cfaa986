"""`semix predict`: a row per picture, whatever the pictures are."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from semix.calib.classifier import load_classifier
from semix.calib.config import TrainConfig
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from semix.data.settings import load_settings
from semix.flows import predict
from tests.command import semix
from tests.flows.test_evaluate import SETTINGS


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = claim_run(load_settings(TrainConfig, SETTINGS), tmp_path_factory.mktemp("run")).parent
    train_run(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Five pictures in two folders, one of which is none."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for name in ("b/2.png", "b/10.jpg", "a/1.webp", "a/=1.png"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(256, size=(20, 24, 3), dtype=np.uint8)).save(path)
    (folder / "a" / "bad.png").write_bytes(b"\x89PNG")
    (folder / "a" / "notes.txt").write_text("no picture")
    return folder


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_folder_is_predicted_in_order_with_all_that_is_asked_for(run, pictures, monkeypatch):
    monkeypatch.setattr(predict, "BATCH", 2)  # the bad picture is in the middle of a batch
    monkeypatch.setattr("semix.data.workers.MAX_WORKERS", 0)
    options = ("--top", "3", "--coverage", "0.5", "--least", "0.2", "--ood", "--skip-bad", "1")
    status, out, err = semix("predict", run, str(pictures), *options, "--device", "cpu")
    assert status == 0, err
    rows = rows_of(out)
    names = ["a/1.webp", "a/=1.png", "a/bad.png", "b/10.jpg", "b/2.png"]
    assert [row["path"] for row in rows] == [str(pictures / name) for name in names]
    classifier = load_classifier(run)
    for row, name in zip(rows, names, strict=True):
        if name == "a/bad.png":
            assert row["reason"] and not row["class"] and not row["set"] and not row["abstain"]
            continue
        probabilities = classifier.probabilities(pictures / name)[0]
        best = probabilities.topk(3)
        shown = [row[key] for key in ("class", "class_2", "class_3")]
        assert shown == [classifier.class_names[k] for k in best.indices]
        values = [float(row[key]) for key in ("probability", "probability_2", "probability_3")]
        assert values == pytest.approx(best.values.tolist(), abs=1e-6)
        assert row["abstain"] == str(best.values[0].item() < 0.2).lower()
        entropy = -(probabilities * probabilities.log()).sum().item()
        assert float(row["ood_score"]) == pytest.approx(entropy, abs=1e-5)
        held = classifier.predict_set(pictures / name, 0.5)[0]
        assert row["set"].split("|") == [
            name for name, holds in zip(classifier.class_names, held, strict=True) if holds
        ]
    assert "5 pictures, of which 1 cannot be decoded" in err
    assert "on validation images, by cross-fitting, the lowest of" in err


@pytest.mark.process
def test_worker_processes_change_no_row(run, pictures, monkeypatch):
    options = (
        "predict",
        run,
        str(pictures),
        "--top",
        "3",
        "--skip-bad",
        "1",
        "--calibrator",
        "ets",
    )
    _, alone, _ = semix(*options)
    monkeypatch.setattr(predict, "BATCH", 2)
    status, rows, err = semix(*options)
    assert (status, rows) == (0, alone), err


def test_bad_pictures_are_rows_and_a_status(run, pictures, tmp_path):
    path = tmp_path / "out.csv"
    status, _, err = semix("predict", run, str(pictures), "--to", str(path), "--seed", "0")
    assert status == 1
    assert "1 of 5 pictures cannot be decoded; their rows say why; --skip-bad 1 accepts" in err
    assert [bool(row["reason"]) for row in rows_of(path.read_text())].count(True) == 1


def test_parquet_has_types_and_the_same_values(run, pictures, tmp_path):
    sources = [str(pictures / "b"), str(pictures / "a" / "1*")]
    table = tmp_path / "out.parquet"
    status, _, err = semix("predict", run, *sources, "--to", str(table), "--calibrator", "scaled")
    assert status == 0, err
    rows = parquet.read_table(table).to_pylist()
    assert [Path(row["path"]).name for row in rows] == ["10.jpg", "2.png", "1.webp"]
    assert all(0 < row["probability"] <= 1 and row["reason"] is None for row in rows)
    _, out, _ = semix("predict", run, *sources, "--calibrator", "scaled")
    shown = [float(row["probability"]) for row in rows_of(out)]
    assert shown == pytest.approx([row["probability"] for row in rows], rel=1e-6)


def test_paths_may_come_from_standard_input(run, pictures, monkeypatch):
    lines = f"{pictures / 'b' / '2.png'}\n\n{pictures / 'a' / '1.webp'}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    status, out, err = semix("predict", run, "-")
    assert status == 0, err
    assert [Path(row["path"]).name for row in rows_of(out)] == ["2.png", "1.webp"]


def test_nothing_is_written_if_it_cannot_begin(run, pictures, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    mistakes = {
        (str(tmp_path / "none"),): "PICTURES = ",
        (str(empty),): "holds no picture (",
        (str(empty / "*.png"),): "holds no picture (",
        (str(pictures), "--calibrator", "smart"): "calibrator = smart: ",
        (str(pictures), "--seed", "4"): "seed = 4: choose one of 0",
        (str(pictures), "--coverage", "0.9999"): "coverage = 0.9999: 50 validation images are too",
        (str(pictures), "--to", str(tmp_path / "x.txt")): "--to = ",
    }
    for arguments, text in mistakes.items():
        status, out, err = semix("predict", run, *arguments)
        assert (status, out) == (2, "") and text in err
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_pictures_of_any_kind_are_read_or_have_a_reason(run, tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(20, 24, 3), dtype=np.uint8)
    colour = Image.fromarray(pixels)
    grey = Image.fromarray(np.full((20, 24), 40_000, np.uint16))
    frames = {"save_all": True, "append_images": [colour.rotate(180)]}
    colour.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    colour.convert("L").save(tmp_path / "grey.png")
    grey.save(tmp_path / "grey-16.png")
    colour.save(tmp_path / "moving.gif", **frames)
    colour.save(tmp_path / "moving.png", **frames)
    colour.save(tmp_path / "moving.webp", **frames)
    (tmp_path / "page.png").write_text("<html>")
    status, out, err = semix("predict", run, str(tmp_path), "--calibrator", "plain")
    assert status == 1 and "3 of 7 pictures cannot be decoded" in err
    reasons = {Path(row["path"]).name: row["reason"] for row in rows_of(out)}
    read = {"cmyk.jpg", "grey.png", "grey-16.png", "moving.gif"}  # of a GIF the first frame
    assert {name for name, reason in reasons.items() if not reason} == read
    assert "animated" in reasons["moving.png"] and "animated" in reasons["moving.webp"]
    assert "HTML" in reasons["page.png"]


def test_a_source_that_is_missing_is_named_before_the_first_picture(run, pictures, tmp_path):
    path = tmp_path / "out.csv"
    status, _, err = semix("predict", run, str(pictures), "/nowhere", "--to", str(path))
    assert status == 2 and "PICTURES = /nowhere: there is no such file or folder" in err
    assert not path.exists()
