"""Exported classifiers, opened again by other libraries: the same probabilities."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from onnx.reference import ReferenceEvaluator
from PIL import Image

from semix.calib.calibrators import CALIBRATORS
from semix.calib.calibrators.base import Calibrator
from semix.calib.classifier import CalibratedClassifier, load_classifier
from semix.calib.config import TrainConfig
from semix.calib.graph import export_onnx, export_pt2
from semix.calib.run_folder import claim_run
from semix.calib.timm_export import export_timm
from semix.calib.train import train_run
from semix.data.errors import InputError
from semix.data.settings import load_settings

CLOSE = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(scope="module")
def run(make_config, tmp_path_factory) -> Path:
    """Two seeds of two stages, with every calibrator."""
    settings = ("seeds=[0,2]", "epochs=2", "head.epochs=1")
    settings += ("evaluation.calibrators=[ets, vector, svs, sms, isotonic, smart]",)
    folder = claim_run(make_config(*settings), tmp_path_factory.mktemp("run")).parent
    train_run(folder)
    return folder


def images(side: int, count: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (count, side, side, 3), dtype=torch.uint8, generator=generator)


def by_onnx(path: Path, pixels: torch.Tensor) -> torch.Tensor:
    """By the reference implementation of the format, which is no part of torch."""
    (probabilities,) = ReferenceEvaluator(str(path)).run(None, {"images": pixels.numpy()})
    return torch.from_numpy(np.asarray(probabilities))


def by_pt2(path: Path, pixels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        probabilities: torch.Tensor = torch.export.load(path).module()(pixels)
    return probabilities


@pytest.mark.parametrize(
    "name", ["plain", *(n for n, k in CALIBRATORS.items() if not k.with_mixed)]
)
def test_a_graph_holds_every_calibrator_and_any_number_of_images(run, name, tmp_path):
    classifier = load_classifier(run, 0, calibrator=name)
    path = tmp_path / "model.pt2"
    export_pt2(classifier, path)
    for count in (1, 5):
        pixels = images(classifier.image_size, count)
        expected = load_classifier(run, 0, calibrator=name).probabilities(pixels)
        torch.testing.assert_close(by_pt2(path, pixels), expected, **CLOSE)


@pytest.mark.parametrize("name", ["sms", "isotonic"])
def test_onnx_holds_the_mean_of_all_seeds(run, name, tmp_path):
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        export_onnx(load_classifier(run, calibrator=name), path)
    for count in (1, 5):
        pixels = images(16, count)
        expected = load_classifier(run, calibrator=name).probabilities(pixels)
        torch.testing.assert_close(by_onnx(path, pixels), expected, **CLOSE)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]  # weights are inside


def test_isotonic_maps_of_graphs_are_those_of_numpy():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 4, generator=generator)
    targets = (logits + torch.randn(300, 4, generator=generator)).argmax(1)
    fitted: Calibrator = CALIBRATORS["isotonic"].fit(logits, targets, None)
    p = logits.double().softmax(1).numpy()
    maps = [np.interp(p[:, k], x, y) for k, (x, y) in enumerate(fitted.knots)]  # type: ignore[attr-defined]
    expected = torch.from_numpy(np.stack(maps, 1)).clamp(min=fitted.floor)  # type: ignore[attr-defined]
    expected = expected / expected.sum(1, keepdim=True)
    for computed in (fitted(logits), fitted.transform(logits.double())):
        torch.testing.assert_close(computed.exp(), expected, rtol=1e-12, atol=1e-14)


# timm


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Two classes of small wide pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for label, low in (("dark", 0), ("light", 100)):
        (folder / label).mkdir()
        for number in range(24):
            pixels = rng.integers(low, low + 150, size=(80, 100, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def train_on(pictures, tmp_path_factory):
    """train_on(model): a run on these pictures, of 64 pixels."""

    def train(model: dict, **settings: object) -> Path:
        values = {
            "name": "pictures",
            "real": {"name": "imagefolder", "path": str(pictures), "image_size": 64},
            "model": model,
            "epochs": 1,
            "batch_size": 8,
            "optimiser": {"learning_rate": 0.01},
            "trackers": [],
            "evaluation": {"bootstrap": 0},
            **settings,
        }
        config = load_settings(TrainConfig, values)
        folder = claim_run(config, tmp_path_factory.mktemp("run")).parent
        train_run(folder)
        return folder

    return train


def of_timm(classifier: CalibratedClassifier, folder: Path, pixels: torch.Tensor) -> torch.Tensor:
    """Probabilities by timm of images that need no scaling."""
    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    settings = timm.data.resolve_model_data_config(network)
    side = classifier.image_size
    assert list(settings["input_size"]) == [3, side, side]
    transform = timm.data.create_transform(**settings)
    batch = torch.stack([transform(Image.fromarray(image.numpy())) for image in pixels])
    with torch.no_grad():
        return network(batch).softmax(1)


@pytest.mark.parametrize(
    ("model", "calibrator"),
    [
        ({"name": "timm", "architecture": "test_resnet"}, "scaled"),
        ({"name": "timm", "architecture": "test_vit", "image_size": 64}, "vector"),
        ({"name": "resnet18", "stem": "imagenet"}, "vector"),
    ],
    ids=["resnet of timm", "vision transformer", "resnet of semix"],
)
def test_timm_loads_it_and_its_softmax_is_calibrated(train_on, model, calibrator, tmp_path):
    classifier = load_classifier(train_on(model), calibrator=calibrator)
    export_timm(classifier, tmp_path, license_name="mit")
    pixels = images(64)
    got = of_timm(classifier, tmp_path, pixels)
    torch.testing.assert_close(got, classifier.probabilities(pixels), atol=1e-4, rtol=0)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["label_names"] == ["dark", "light"] and config["num_classes"] == 2
    assert config["num_features"] == classifier.members[0].network.network.num_features
    pretrained = config["pretrained_cfg"]
    assert all(0 < value < 1 for value in (*pretrained["mean"], *pretrained["std"]))
    assert not {"test_input_size", "test_crop_pct"} & set(pretrained)
    assert ("model_args" in config) == (model.get("architecture") == "test_vit")


def test_transformers_loads_it_with_the_names_of_the_classes(train_on, tmp_path):
    model = {"name": "timm", "architecture": "test_resnet"}
    classifier = load_classifier(train_on(model), calibrator="scaled")
    export_timm(classifier, tmp_path)
    pixels = images(64, 1)
    classify = transformers.pipeline("image-classification", model=str(tmp_path), device="cpu")
    (answers,) = classify([Image.fromarray(pixels[0].numpy())], top_k=2)
    expected = dict(
        zip(classifier.class_names, classifier.probabilities(pixels)[0].tolist(), strict=True)
    )
    assert {a["label"]: a["score"] for a in answers} == pytest.approx(expected, abs=1e-4)


def test_what_timm_cannot_hold_is_refused_with_the_format_that_can(run, train_on, tmp_path):
    refused = {
        "--seed = mean of 2": load_classifier(run, stage="base", calibrator="scaled"),
        "--stage = head": load_classifier(run, 0, calibrator="scaled"),
        "--calibrator = sms": load_classifier(run, 0, "base", "sms"),
        "model.name = resnet8": load_classifier(run, 0, "base", "scaled"),
    }
    for text, classifier in refused.items():
        with pytest.raises(InputError, match=rf"^{text}: .*--format onnx or pt2 holds it"):
            export_timm(classifier, tmp_path / "out")
    assert not (tmp_path / "out").exists()
