"""A trained run as a classifier of pictures: the probabilities that its evaluation measured."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

import semix
from semix.calib import cross_fitting
from semix.calib.classifier import CalibratedClassifier, load_classifier
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from semix.data.errors import InputError
from semix.data.real import load_real

SETTINGS = ("seeds=[0,2]", "epochs=2", "head.epochs=1", "evaluation.ensemble=true")


@pytest.fixture(scope="module")
def run(make_config, tmp_path_factory) -> Path:
    folder = claim_run(make_config(*SETTINGS), tmp_path_factory.mktemp("run")).parent
    train_run(folder)
    return folder


@pytest.fixture(scope="module")
def evaluated(make_config):
    split = load_real(make_config().real).test
    return split.images(), torch.from_numpy(split.targets)


def row(run: Path, seed: int | None, stage: str) -> dict:
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    return next(each for each in rows if (each["seed"], each["stage"]) == (seed, stage))


def nll(probabilities: torch.Tensor, targets: torch.Tensor) -> float:
    return functional.nll_loss(probabilities.double().log(), targets).item()


@pytest.mark.parametrize("stage", ["base", "head"])
@pytest.mark.parametrize("calibrator", ["plain", "scaled", "ets", "sms", "isotonic"])
def test_on_test_images_the_nll_is_that_of_the_evaluation(run, evaluated, stage, calibrator):
    images, targets = evaluated
    classifier = load_classifier(run, 2, stage, calibrator)
    measured = row(run, 2, stage)["kinds"][calibrator]["nll"]
    assert nll(classifier.probabilities(images), targets) == pytest.approx(measured, abs=1e-5)


def test_all_seeds_are_averaged_after_each_is_calibrated(run, evaluated):
    images, targets = evaluated
    classifier = load_classifier(run, calibrator="scaled")
    got = classifier.probabilities(images)
    each = [load_classifier(run, s, calibrator="scaled").probabilities(images) for s in (0, 2)]
    torch.testing.assert_close(got, torch.stack(each).mean(0))
    ensemble = row(run, None, "head")["kinds"]["plain"]["nll"]
    assert nll(got, targets) == pytest.approx(ensemble, abs=1e-5)
    assert "mean of 2 seeds; calibrator scaled" in classifier.label


def test_the_default_is_the_last_stage_and_the_lowest_nll_by_cross_fitting(run, monkeypatch):
    classifier = load_classifier(run)
    assert "(head)" in classifier.label and "by cross-fitting, the lowest of 7" in classifier.label
    assert classifier.calibrator != "plain"
    monkeypatch.setattr(cross_fitting, "_cross_fitted", None)  # its results are kept
    assert load_classifier(run).label == classifier.label
    kept = run / "seed-2" / "cross-fitted-head.json"
    kept.write_text(kept.read_text().replace('"source": "', '"source": "of other weights '))
    with pytest.raises(TypeError):
        load_classifier(run)
    kept.unlink()
    assert classifier.class_names[:2] == ("zero", "one")


def test_files_pil_images_arrays_and_tensors_are_read_as_training_reads_them(run, tmp_path):
    classifier = load_classifier(run, 0)
    wide = np.random.default_rng(0).integers(256, size=(40, 60, 3), dtype=np.uint8)
    path = tmp_path / "wide.png"
    Image.fromarray(wide).save(path)
    from_file = classifier.probabilities(path)
    assert from_file.shape == (1, 10)
    others = (str(path), [path], Image.open(path), wide, wide[None], torch.from_numpy(wide))
    for pictures in others:
        assert torch.equal(classifier.probabilities(pictures), from_file)
    turned = Image.fromarray(np.rot90(wide))
    exif = Image.Exif()
    exif[274] = 6  # to be turned by 270 degrees
    turned.save(tmp_path / "turned.png", exif=exif)
    upright = classifier.probabilities(tmp_path / "turned.png")
    torch.testing.assert_close(upright, from_file)
    torch.testing.assert_close(classifier.logits(wide).softmax(1), from_file)
    assert classifier.probabilities([]).shape == (0, 10)


def test_sets_hold_the_true_class_at_the_rate_and_grow_with_it(run, evaluated):
    images, targets = evaluated
    classifier = load_classifier(run, 0, calibrator="scaled")
    sets = {rate: classifier.predict_set(images, rate) for rate in (0.8, 0.95)}
    for rate, held in sets.items():
        assert held[range(len(targets)), targets].float().mean() > rate - 0.1
    assert (sets[0.8] <= sets[0.95]).all() and sets[0.8].any(1).all()
    stored = row(run, 0, "head")["conformal"]["thr"]
    held = classifier.predict_set(images, 0.9)
    assert held.sum(1).double().mean().item() == pytest.approx(stored["size"], abs=1e-3)


def test_half_precision_changes_little(run, evaluated):
    images, _ = evaluated
    exact = load_classifier(run, 0).probabilities(images[:32])
    half = load_classifier(run, 0).half().probabilities(images[:32])
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, atol=0.02, rtol=0)
    assert not torch.equal(half, exact)


def test_it_is_part_of_semix(run):
    assert isinstance(semix.load_classifier(run, 0), CalibratedClassifier)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"seed": 1}, r"^seed = 1: choose one of 0, 2"),
        ({"stage": "tail"}, r"^stage = tail: choose one of base, head"),
        ({"calibrator": "smart"}, r"^calibrator = smart: .*choose one of plain, scaled, ets"),
        ({"device": "cuda"}, r"^device = cuda: torch sees no GPU here"),
    ],
)
def test_what_a_run_does_not_have_is_named(run, arguments, text):
    with pytest.raises(InputError, match=text):
        load_classifier(run, **arguments)


@pytest.mark.parametrize(
    ("pictures", "text"),
    [
        (np.zeros((4, 4, 3)), r"^pictures = float64 \[4, 4, 3\]: give uint8 \[N, H, W, 3\]"),
        (np.zeros((4, 4), np.uint8), r"^pictures = uint8 \[4\]: give uint8"),
        ("/nowhere.png", r"^pictures = /nowhere.png: No such file"),
    ],
)
def test_what_is_no_picture_is_named(run, pictures, text):
    with pytest.raises(InputError, match=text):
        load_classifier(run, 0).probabilities(pictures)


@pytest.mark.parametrize("coverage", [0.0, 1.0, 0.999])
def test_a_coverage_without_a_threshold_is_refused(run, coverage):
    with pytest.raises(InputError, match=r"^coverage = "):
        load_classifier(run, 0).limit_of(coverage)


def test_a_run_without_its_logits_or_calibration_is_measured_again_first(run, tmp_path):
    for name in ("calibration.json", "logits-head.safetensors"):
        copy = Path(shutil.copytree(run, tmp_path / name))
        (copy / "seed-0" / name).unlink()
        with pytest.raises(InputError, match=rf"{name}: is missing; run `semix evaluate "):
            load_classifier(copy)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change(path: Path, section: str, **values) -> None:
    content = json.loads(path.read_text())
    content[section] = content[section] | values if values else content[section][:-1]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda run: cut(run / "seed-0" / "model.safetensors"),
            "model.safetensors: is no complete",
        ),
        (lambda run: cut(run / "seed-2" / "head.safetensors"), "head.safetensors: is no complete"),
        (lambda run: cut(run / "seed-2" / "logits-head.safetensors"), "head.safetensors: is no"),
        (lambda run: cut(run / "seed-2" / "calibration.json"), "calibration.json: is damaged"),
        (lambda run: change(run / "config.json", "model", name="resnet20"), "other classes or set"),
        (lambda run: change(run / "data.json", "class_names"), "other classes or settings"),
    ],
)
def test_a_run_that_does_not_fit_its_weights_is_named(run, tmp_path, damage, text):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    damage(copy)
    with pytest.raises(InputError, match=text):
        load_classifier(copy, calibrator="scaled")
