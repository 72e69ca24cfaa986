"""Evaluation: the files of a run, and the classifier that anyone can load from them."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from calib.evaluate import evaluate_run, in_chunks, load_classifier, measure, predict
from calib.metrics import calibration_metrics
from calib.run_folder import claim_run, is_measured, run_digest
from calib.train import train
from calib.training_data import open_data
from data.errors import InputError
from data.real import load_real

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured(make_config, tmp_path_factory):
    run = claim_run(make_config("seeds=[0,2]"), tmp_path_factory.mktemp("run")).parent
    train(run)
    return run


def evaluation(run: Path) -> dict:
    return json.loads((run / "evaluation.json").read_text())


def test_the_run_folder_holds_what_its_readers_expect(measured, make_config):
    config = make_config("seeds=[0,2]")
    found, data = evaluation(measured), open_data(config)
    assert json.loads((measured / "config.json").read_text()) == config.model_dump(mode="json")
    assert json.loads((measured / "data.json").read_text()) == data.record
    assert found["schema"] == 1
    assert found["name"] == "all"
    assert found["digest"] == run_digest(config, data.record)
    assert found["seconds"] > 0
    assert {"python", "torch", "accelerate"} <= set(found["versions"])
    places = [(row["seed"], row["stage"]) for row in found["rows"]]
    assert places == [(0, "base"), (0, "head"), (2, "base"), (2, "head")]
    for row in found["rows"]:
        logits = load_file(measured / row["logits"])
        assert logits["validation_logits"].shape == (50, 10)
        assert logits["test_logits"].dtype == torch.float32
        assert set(row) == {"stage", "seed", "temperature", "logits", "plain", "scaled"}
        assert set(row["plain"]) == set(row["scaled"]) >= {"accuracy", "ece", "nll", "brier"}
    assert is_measured(config, measured)
    assert not is_measured(make_config("seeds=[0]"), measured)


@pytest.mark.parametrize("stage", ["base", "head"])
def test_a_loaded_classifier_gives_the_stored_logits(measured, make_config, stage):
    test = load_real(make_config().real).test
    classifier = load_classifier(measured, 2, stage)
    assert not classifier.training
    stored = load_file(measured / "seed-2" / f"logits-{stage}.safetensors")
    images = torch.from_numpy(test.images(range(9)))  # in another batch than evaluation's
    with torch.no_grad():
        torch.testing.assert_close(classifier(images), stored["test_logits"][:9])
    torch.testing.assert_close(stored["test_targets"], torch.from_numpy(test.targets))


def test_the_head_is_another_classifier_than_its_base(measured):
    base, head = (
        load_file(measured / "seed-0" / f"logits-{stage}.safetensors")["test_logits"]
        for stage in ("base", "head")
    )
    assert (base.softmax(1) - head.softmax(1)).abs().max() > 0.01


def test_measuring_again_gives_the_same_rows_without_training(measured, tmp_path):
    run = Path(shutil.copytree(measured, tmp_path / "run"))
    (run / "evaluation.json").unlink()
    (run / "seed-0" / "logits-head.safetensors").unlink()
    model = (run / "seed-0" / "model.safetensors").stat().st_mtime_ns
    found = evaluate_run(run)
    assert found["rows"] == evaluation(measured)["rows"] == evaluation(run)["rows"]
    assert (run / "seed-0" / "model.safetensors").stat().st_mtime_ns == model


def test_the_temperature_comes_from_validation_and_measures_from_test():
    # Validation: 3 of 4 right, each with the same gap of 2 between two classes. The best
    # temperature makes the confidence 3/4, so 2 / T = log 3.
    validation = torch.tensor([[2.0, 0.0]] * 4)
    test = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    found = measure(
        {
            "validation_logits": validation,
            "validation_targets": torch.tensor([0, 0, 0, 1]),
            "test_logits": test,
            "test_targets": torch.tensor([0, 0]),
        }
    )
    temperature = 2 / math.log(3)
    assert found["temperature"] == pytest.approx(temperature, rel=1e-4)
    nll = (math.log1p(math.exp(-4)) + math.log1p(math.exp(4))) / 2
    assert found["plain"]["nll"] == pytest.approx(nll, rel=1e-5)
    gap = 4 / temperature
    scaled = (math.log1p(math.exp(-gap)) + math.log1p(math.exp(gap))) / 2
    assert found["scaled"]["nll"] == pytest.approx(scaled, rel=1e-4)
    assert found["plain"]["accuracy"] == found["scaled"]["accuracy"] == 0.5


def test_what_is_not_trained_is_named(measured, tmp_path):
    with pytest.raises(InputError, match=r"seed-7/model\.safetensors: is not there; train this"):
        load_classifier(measured, 7)
    with pytest.raises(InputError, match=r"^run = .*config\.json: is not there"):
        load_classifier(tmp_path, 0)


def test_weights_of_other_settings_are_named(measured, tmp_path):
    run = Path(shutil.copytree(measured, tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    config["model"]["width"] = 3
    (run / "config.json").write_text(json.dumps(config))
    text = r"model\.safetensors: backbone\.features\.stem\.0\.weight = \(2, 3, 3, 3\): the model"
    with pytest.raises(InputError, match=text):
        load_classifier(run, 0)


def test_chunks_come_back_in_order_without_gradients():
    rows = torch.arange(1201.0, requires_grad=True)
    found = in_chunks(lambda part: part * 2, rows)
    torch.testing.assert_close(found, torch.arange(1201.0) * 2)
    assert not found.requires_grad


def test_predict_takes_images_of_any_number(measured):
    images = torch.zeros(3, 16, 16, 3, dtype=torch.uint8)
    logits = predict(load_classifier(measured, 0), images, device=CPU)
    assert logits.shape == (3, 10)
    assert calibration_metrics(logits, torch.zeros(3, dtype=torch.int64)).accuracy in (0.0, 1.0)
