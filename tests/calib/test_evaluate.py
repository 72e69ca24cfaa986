"""Evaluation: the files of a run, and the classifier that anyone can load from them."""

import itertools
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from semix.calib.calibration import Calibration, read_calibration
from semix.calib.calibrators import CALIBRATORS, STANDARD
from semix.calib.calibrators.scaling import TemperatureScaling
from semix.calib.check import check_evaluation
from semix.calib.checkpoint import read_metadata, save_tensors
from semix.calib.config import EvaluationConfig, OODDataConfig, TrainConfig
from semix.calib.corruptions import corrupt
from semix.calib.evaluate import evaluate_run, measure
from semix.calib.evaluate.predictions import TrainedSeed
from semix.calib.evaluate.shift_ood import images_to_corrupt, measure_cell
from semix.calib.metrics import calibration_metrics, max_probability, ood_metrics
from semix.calib.metrics.bootstrap import INTERVALS, resampled
from semix.calib.metrics.conformal import measure_sets
from semix.calib.metrics.one_pass import read_predictions, validated_inputs
from semix.calib.network import load_trained, predict
from semix.calib.real_data import open_data
from semix.calib.results import results
from semix.calib.run_folder import SCHEMA, claim_run, is_measured, run_digest
from semix.calib.temperature import fit_temperature
from semix.calib.train import train_run
from semix.data.errors import InputError
from semix.data.real import load_real
from semix.data.settings import load_settings
from semix.data.splits import in_grey
from tests.calib.runs import run_two

CPU = torch.device("cpu")
KINDS = ("plain", "scaled", *STANDARD)
TRAINED = ("seeds=[0,2]", "epochs=1", "head.epochs=1", "evaluation.bootstrap=100")


@pytest.fixture(scope="module")
def measured(make_config, tmp_path_factory):
    run = claim_run(make_config(*TRAINED), tmp_path_factory.mktemp("run")).parent
    train_run(run)
    return run


def evaluation(run: Path) -> dict:
    return json.loads((run / "evaluation.json").read_text())


def test_the_run_folder_holds_what_its_readers_expect(measured, make_config):
    config = make_config(*TRAINED)
    result, data = evaluation(measured), open_data(config)
    assert json.loads((measured / "config.json").read_text()) == config.model_dump(mode="json")
    assert json.loads((measured / "data.json").read_text()) == data.record
    assert result["schema"] == SCHEMA
    assert result["evaluation"] == config.evaluation.model_dump(mode="json")
    assert result["name"] == "all"
    assert result["digest"] == run_digest(config, data.record)
    assert result["seconds"] > 0
    assert {"python", "torch", "accelerate"} <= set(result["versions"])
    order = [(row["seed"], row["stage"]) for row in result["rows"]]
    assert order == [(0, "base"), (0, "head"), (2, "base"), (2, "head")]
    for row in result["rows"]:
        logits = load_file(measured / row["logits"])
        assert logits["validation_logits"].shape == (50, 10)
        assert logits["test_logits"].dtype == torch.float32
        assert {"stage", "seed", "logits", "temperature", "bins", "kinds"} <= set(row)
        assert row["kinds"].keys() == set(KINDS)
        assert "shift" not in row and "ood" not in row
        for measured_kind in row["kinds"].values():
            assert set(measured_kind) >= {
                "accuracy",
                "ece",
                "smooth_ece",
                "nll",
                "brier",
                "aurc",
            }
        low, high = row["intervals"]["plain"]["accuracy"]
        assert low < row["kinds"]["plain"]["accuracy"] < high
        assert row["intervals"].keys() == set(KINDS)
    assert is_measured(config, measured)
    assert not is_measured(make_config(*TRAINED, "seeds=[0]"), measured)
    assert not is_measured(make_config(*TRAINED, "evaluation.bins=20"), measured)


@pytest.mark.parametrize("stage", ["base", "head"])
def test_a_loaded_classifier_gives_the_stored_logits(measured, make_config, stage):
    test = load_real(make_config().real).test
    classifier = load_trained(measured, 2, stage)
    assert not classifier.training
    stored = load_file(measured / "seed-2" / f"logits-{stage}.safetensors")
    images = torch.from_numpy(test.images(range(9)))  # in another batch than evaluation's
    with torch.no_grad():
        torch.testing.assert_close(classifier(images), stored["test_logits"][:9])
    torch.testing.assert_close(stored["test_targets"], torch.from_numpy(test.targets))


@pytest.fixture
def run(measured, tmp_path):
    """A copy of the measured run, to be changed."""
    return Path(shutil.copytree(measured, tmp_path / "run"))


def set_evaluation(run: Path, **settings) -> None:
    config = json.loads((run / "config.json").read_text())
    config["evaluation"] |= settings
    (run / "config.json").write_text(json.dumps(config))


def test_what_was_fitted_is_stored_and_gives_the_measured_figures(measured):
    for row in evaluation(measured)["rows"]:
        calibration = read_calibration(measured, row["seed"], row["stage"])
        tensors = load_file(measured / row["logits"])
        logits, targets = tensors["test_logits"], tensors["test_targets"]
        assert calibration.temperature == row["temperature"]
        for name, calibrator in calibration.calibrators.items():
            got = calibration_metrics(calibrator(logits), targets, row["bins"])
            assert got.as_dict() == row["kinds"][name]
        for score, sets in row["conformal"].items():
            limit = calibration.thresholds[score][0.1]
            scaled = logits / calibration.temperature
            assert asdict(measure_sets(scaled, targets, score=score, limit=limit)) == sets


def test_a_calibration_that_is_damaged_or_missing_is_named(run):
    path = run / "seed-0" / "calibration.json"
    path.write_text(path.read_text().replace('"temperature"', '"temprature"', 1))
    with pytest.raises(InputError, match=r"calibration\.json: is damaged \(TypeError"):
        read_calibration(run, 0, "base")
    path.unlink()
    with pytest.raises(InputError, match=r"calibration\.json: is missing; run `semix evaluate"):
        read_calibration(run, 0, "base")


def test_measuring_again_gives_the_same_rows_without_training(measured, run):
    (run / "evaluation.json").unlink()
    (run / "seed-0" / "logits-head.safetensors").unlink()
    model = (run / "seed-0" / "model.safetensors").stat().st_mtime_ns
    result = evaluate_run(run)
    assert result["rows"] == evaluation(measured)["rows"] == evaluation(run)["rows"]
    assert (run / "seed-0" / "model.safetensors").stat().st_mtime_ns == model


def test_what_measuring_again_takes_is_not_added_to_what_it_took_before(run):
    path = run / "seed-0" / "evaluation.json"
    record = json.loads(path.read_text()) | {"training_seconds": 100.0, "seconds": 5000.0}
    path.write_text(json.dumps(record))
    result = evaluate_run(run)
    record_after = json.loads(path.read_text())
    assert record_after["training_seconds"] == 100
    assert 100 < record_after["seconds"] < 1000  # of training and this measuring
    assert result["seconds"] < 2000


def test_other_bins_take_the_stored_logits(run, measured, monkeypatch):
    monkeypatch.setattr("semix.calib.evaluate.predictions.load_stages", None)  # would be called
    set_evaluation(run, bins=3, bootstrap=0)
    (row, *_) = evaluate_run(run)["rows"]
    tensors = load_file(measured / row["logits"])
    expected = calibration_metrics(tensors["test_logits"], tensors["test_targets"], bins=3)
    assert (row["bins"], row["kinds"]["plain"]) == (3, expected.as_dict())
    assert "intervals" not in row
    with pytest.raises(TypeError, match="not callable"):
        evaluate_run(run, fresh=True)


def test_logits_of_other_weights_are_made_anew(run, measured):
    path = run / "seed-0" / "model.safetensors"
    tensors = {name: 0.5 * value for name, value in load_file(path).items()}
    save_tensors(path, tensors, metadata=read_metadata(path))
    rows = evaluate_run(run)["rows"]
    before = evaluation(measured)["rows"]
    changed = [
        row["kinds"]["plain"] != old["kinds"]["plain"]
        for row, old in zip(rows, before, strict=True)
    ]
    assert changed == [True, True, False, False]  # base and head of seed 0


def test_what_was_trained_is_measured_anew_when_only_the_measures_change(run):
    set_evaluation(run, bins=4, bootstrap=0)
    model = (run / "seed-2" / "model.safetensors").stat().st_mtime_ns
    train_run(run)
    assert [row["bins"] for row in evaluation(run)["rows"]] == [4] * 4
    assert is_measured(load_settings(TrainConfig, run / "config.json"), run)
    assert (run / "seed-2" / "model.safetensors").stat().st_mtime_ns == model


FURTHER = {
    "calibrators": ["smart", "scaled_mixed"],
    "ensemble": True,
    "shift": {"corruptions": ["fog"], "severities": [3], "calibrators": ["scaled_mixed"]},
    "bootstrap": 20,
}


@pytest.fixture(scope="module")
def measured_further(measured, tmp_path_factory):
    """The run, measured with an ensemble and with calibrators that are not standard."""
    run = Path(shutil.copytree(measured, tmp_path_factory.mktemp("further") / "run"))
    set_evaluation(run, **FURTHER)
    evaluate_run(run)
    return run


def test_the_ensemble_is_the_mean_of_calibrated_seeds(measured_further):
    rows = evaluation(measured_further)["rows"]
    for stage in ("base", "head"):
        seeds = [row for row in rows if row["stage"] == stage and row["seed"] is not None]
        (row,) = [row for row in rows if row["stage"] == stage and row["seed"] is None]
        tensors = [load_file(measured_further / each["logits"]) for each in seeds]
        probabilities = [
            (each["test_logits"] / seed["temperature"]).softmax(1)
            for each, seed in zip(tensors, seeds, strict=True)
        ]
        mean = torch.stack(probabilities).mean(0)
        stored = load_file(measured_further / row["logits"])["test_logits"]
        torch.testing.assert_close(stored.softmax(1), mean)
        targets = tensors[0]["test_targets"]
        accuracy = (mean.argmax(1) == targets).float().mean().item()
        assert row["kinds"]["plain"]["accuracy"] == pytest.approx(accuracy)
        nll = -mean.log().gather(1, targets[:, None]).mean().item()
        assert row["kinds"]["plain"]["nll"] == pytest.approx(nll, rel=1e-5)
        assert row["shift"]["images"] == seeds[0]["shift"]["images"]
        worse = [seed["shift"]["mean"]["nll"] for seed in seeds]
        assert row["shift"]["mean"]["nll"] < max(worse)


def test_an_ensemble_under_shift_is_kept_too(measured_further, tmp_path, monkeypatch):
    run = Path(shutil.copytree(measured_further, tmp_path / "run"))
    before = evaluation(run)
    monkeypatch.setattr(TrainedSeed, "predict", None)  # would fail if it ran a network
    evaluate_run(run)
    assert evaluation(run)["rows"] == before["rows"]


def test_a_calibrator_is_fitted_on_mixed_images_too(measured_further):
    for row in evaluation(measured_further)["rows"]:
        tensors = load_file(measured_further / row["logits"])
        assert len(tensors["mixed_logits"]) == len(tensors["validation_logits"]) == 50
        logits = torch.cat([tensors["validation_logits"], tensors["mixed_logits"]])
        one_hot = torch.nn.functional.one_hot(tensors["validation_targets"], 10)
        labels = torch.cat([one_hot, tensors["mixed_labels"]])
        assert (tensors["mixed_labels"].amax(1) < 0.99).any()
        fitted = CALIBRATORS["scaled_mixed"].fit(logits, labels, None)
        expected = calibration_metrics(fitted(tensors["test_logits"]), tensors["test_targets"])
        assert row["kinds"]["scaled_mixed"] == expected.as_dict()
        assert row["kinds"].keys() == {"plain", "scaled", "smart", "scaled_mixed"}
        assert {"scaled_ece", "scaled_mixed_ece"} <= row["shift"]["mean"].keys()


def test_each_calibrator_is_measured_under_shift():
    rng = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(50, 4, generator=rng), torch.randint(4, (50,), generator=rng)
    temperatures = {"scaled": 0.5, "scaled_mixed": 2.0}
    calibrators = {name: TemperatureScaling(t) for name, t in temperatures.items()}
    cell = measure_cell(logits, targets, calibrators, 10)
    for name, temperature in temperatures.items():
        expected = calibration_metrics(logits / temperature, targets, 10)
        assert cell[f"{name}_nll"] == expected.nll
        assert cell[f"{name}_ece"] == expected.ece


def test_results_name_ensembles_and_kinds_under_shift(measured_further):
    table = results([measured_further])
    ensembles = table[table.seed.isna()]
    names = {f"{name}, ensemble of 2 seeds" for name in ("all", "all + MaC-Cal")}
    assert set(ensembles.row) == names
    under_shift = table[(table.part == "shift") & (table.measure == "ece")]
    assert set(under_shift.kind) == {"plain", "scaled", "scaled_mixed"}


def letters(folder: Path) -> dict:
    """Settings of an image folder: pictures of two classes that are no digits."""
    rng = np.random.default_rng(0)
    for split, name in itertools.product(("train", "test"), ("a", "b")):
        (folder / split / name).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return {"name": "imagefolder", "path": str(folder)}


def test_shift_and_ood_images(run, tmp_path):
    shift = {"corruptions": ["fog", "contrast"], "severities": [1, 5], "bins": 7, "images": 60}
    set_evaluation(run, bootstrap=0, shift=shift, ood={"letters": letters(tmp_path / "letters")})
    rows = evaluate_run(run)["rows"]
    config = load_settings(TrainConfig, run / "config.json")
    data = open_data(config)
    for row in rows:
        result = row["shift"]
        assert (result["bins"], result["images"]) == (7, 60)
        classifier = load_trained(run, row["seed"], row["stage"])
        images, targets = images_to_corrupt(
            TrainedSeed(config, data, run, row["seed"], CPU), config.evaluation.shift
        )
        worst = torch.from_numpy(corrupt(images.tensor.numpy(), "fog", 5, seed=0))
        logits = predict(classifier, worst, device=CPU)
        expected = calibration_metrics(logits, targets, bins=7).as_dict()
        cell = result["corruptions"]["fog"]["5"]
        for name in ("accuracy", "ece", "nll"):
            assert cell[name] == pytest.approx(expected[name], abs=1e-5)
        scaled = calibration_metrics(logits / row["temperature"], targets, bins=7)
        assert cell["scaled_ece"] == pytest.approx(scaled.ece, abs=1e-5)
        cells = [result["corruptions"][c][s] for c in ("fog", "contrast") for s in ("1", "5")]
        assert result["mean"]["nll"] == pytest.approx(sum(c["nll"] for c in cells) / 4)
        assert row["ood"]["letters"]["images"] == 6
        assert row["ood"]["mean"] == {
            name: row["ood"]["letters"][name]
            for name in ("auroc", "fpr95", "entropy_auroc", "entropy_fpr95")
        }
    assert rows[0]["ood"] != rows[1]["ood"]
    stored = load_file(run / rows[0]["logits"])["test_logits"]
    ood_data = load_real(config.evaluation.ood["letters"].model_copy(update={"image_size": 16}))
    images = torch.from_numpy(ood_data.test.images())
    ood_logits = predict(load_trained(run, 0), images, device=CPU)
    expected = ood_metrics(max_probability(stored), max_probability(ood_logits))
    assert rows[0]["ood"]["letters"]["auroc"] == pytest.approx(expected.auroc, abs=1e-5)


def test_ood_images_may_be_in_grey(run, tmp_path):
    coloured = letters(tmp_path / "letters")
    datasets = {"letters": coloured, "grey letters": {**coloured, "grey": True}}
    set_evaluation(run, bootstrap=0, ood=datasets)
    config = load_settings(TrainConfig, run / "config.json")
    row = evaluate_run(run)["rows"][0]
    stored = load_file(run / row["logits"])["test_logits"]
    settings = config.evaluation.ood["grey letters"].model_copy(update={"image_size": 16})
    images = torch.from_numpy(in_grey(load_real(settings).test).images())
    assert bool((images[..., 0] == images[..., 2]).all())
    ood_logits = predict(load_trained(run, 0), images, device=CPU)
    expected = ood_metrics(max_probability(stored), max_probability(ood_logits))
    assert row["ood"]["grey letters"]["auroc"] == pytest.approx(expected.auroc, abs=1e-5)
    assert row["ood"]["grey letters"]["auroc"] != row["ood"]["letters"]["auroc"]


def test_bootstrap_resamples_are_kept_for_comparisons(run):
    set_evaluation(run, bootstrap=50)
    for row in evaluate_run(run)["rows"]:
        assert row["resamples"].keys() == set(KINDS)
        for kind, resamples in row["resamples"].items():
            assert resamples.keys() == {"accuracy", "ece", "nll", "brier"}
            assert {len(values) for values in resamples.values()} == {20}
            tensors = load_file(run / row["logits"])
            logits = tensors["test_logits"] / row["temperature"]
            predictions = read_predictions(*validated_inputs(logits, tensors["test_targets"]), 15)
            if kind == "scaled":
                expected = resampled(predictions, 15, resamples=20, seed=0)
                column = INTERVALS.index("nll")
                assert resamples["nll"] == pytest.approx(expected[:, column].tolist(), abs=1e-6)


@pytest.mark.parametrize("schema", [3, SCHEMA])
def test_shift_of_the_same_settings_is_kept(run, monkeypatch, schema):
    set_evaluation(run, bootstrap=0, shift={"corruptions": ["contrast"], "severities": [3]})
    before = [row["shift"] for row in evaluate_run(run)["rows"]]
    for path in run.glob("seed-*/evaluation.json"):
        path.write_text(path.read_text().replace(f'"schema": {SCHEMA}', f'"schema": {schema}', 1))
    monkeypatch.setattr("semix.calib.evaluate.predictions.load_stages", None)  # would be called
    set_evaluation(run, bins=4)
    assert [row["shift"] for row in evaluate_run(run)["rows"]] == before
    set_evaluation(run, shift={"corruptions": ["contrast"], "severities": [4]})
    with pytest.raises(TypeError, match="not callable"):
        evaluate_run(run)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"shift": {"corruptions": ["fogg"]}}, r"^evaluation\.shift\.corruptions = fogg: choose"),
        ({"shift": {"corruptions": []}}, r"^evaluation\.shift\.corruptions = \[\]: name at"),
        ({"shift": {"severities": [0]}}, r"^evaluation\.shift\.severities = 0: choose from 1 to 5"),
        ({"shift": {"severities": [2, 2]}}, r"^evaluation\.shift\.severities = \[2, 2\]: give"),
        (
            {"ood": {"own": {"name": "digits"}}},
            r"^evaluation\.ood\.own classes = zero, .* and 5 more: ",
        ),
        ({"ood": {"mean": {"name": "digits"}}}, r"^evaluation\.ood = mean: .*; rename this one"),
        (
            {"ood": {"gone": {"name": "imagefolder", "path": "nowhere"}}},
            r"^evaluation\.ood\.gone: real\.path = .*nowhere: there is no such folder",
        ),
    ],
)
def test_what_cannot_be_measured_is_named(run, settings, text):
    set_evaluation(run, **settings)
    with pytest.raises(InputError, match=text):
        evaluate_run(run)


def test_classes_are_the_same_in_any_spelling(tmp_path):
    for name in ("Aircraft-Carrier", "tree"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "test" / name).mkdir(parents=True)
    ood_data = OODDataConfig(name="imagefolder", path=str(tmp_path))
    config = EvaluationConfig(ood={"x": ood_data})
    with pytest.raises(InputError, match=r"^evaluation\.ood\.x classes = Aircraft-Carrier: "):
        check_evaluation(config, ["aircraft_carrier", "car"], image_size=32)
    check_evaluation(config, ["car", "cat"], image_size=32)
    small = EvaluationConfig(shift={"images": 3})
    with pytest.raises(
        InputError, match=r"^real\.image_size = 8: corruptions need sides of 16 pixels"
    ):
        check_evaluation(small, ["car", "cat"], image_size=8)


def test_logits_that_are_not_finite_name_run_and_stage(run):
    path = run / "seed-2" / "head.safetensors"
    tensors = load_file(path)
    name = next(name for name, value in tensors.items() if value.is_floating_point())
    tensors[name].fill_(math.inf)
    save_tensors(path, tensors, metadata=read_metadata(path))
    text = r"^run = .*/run seed 2 stage head: gives NaN or infinite logits for 50 of 50 validation"
    with pytest.raises(InputError, match=text):
        evaluate_run(run)


WORKER = """
import sys, torch
from accelerate import Accelerator
from pathlib import Path
from semix.calib.config import TrainConfig
from semix.calib.evaluate import evaluate_seed
from semix.calib.real_data import open_data
from semix.data.settings import load_settings
from semix.data.splits import in_grey
run = Path(sys.argv[1])
config, accelerator = load_settings(TrainConfig, run / "config.json"), Accelerator(cpu=True)
assert accelerator.num_processes == 2
data = open_data(config)
evaluate_seed(config, data, run, seed=0, seconds=0, device=accelerator.device,
              accelerator=accelerator, fresh=True)
accelerator.wait_for_everyone()
accelerator.end_training()
"""


@pytest.mark.process
def test_two_processes_share_the_predictions_out(run, measured, tmp_path):
    set_evaluation(run, bootstrap=0, shift={"corruptions": ["contrast"], "severities": [3]})
    for path in run.glob("seed-0/logits-*"):
        path.unlink()
    run_two(WORKER, tmp_path, run)
    for stage in ("base", "head"):
        stored, alone = (
            load_file(folder / "seed-0" / f"logits-{stage}.safetensors")
            for folder in (run, measured)
        )
        # 1,697 test images: chunks of 500, of which each process runs two; the last is short.
        assert stored.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(stored[name], value, rtol=0, atol=0)
    together = json.loads((run / "seed-0" / "evaluation.json").read_text())["rows"]
    rows = evaluate_run(run, fresh=True)["rows"][:2]
    assert [row["shift"] for row in rows] == [row["shift"] for row in together]


def test_the_temperature_comes_from_validation_and_measures_from_test():
    # Validation: 3 of 4 right, each with the same gap of 2 between two classes. The best
    # temperature makes the confidence 3/4, so 2 / T = log 3.
    validation = torch.tensor([[2.0, 0.0]] * 4)
    test = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    held_out = validation, torch.tensor([0, 0, 0, 1])
    predictions = {
        "validation_logits": held_out[0],
        "validation_targets": held_out[1],
        "test_logits": test,
        "test_targets": torch.tensor([0, 0]),
    }
    result = measure(predictions, Calibration.fit(*held_out), EvaluationConfig())
    temperature = 2 / math.log(3)
    assert result["temperature"] == pytest.approx(temperature, rel=1e-4)
    nll = (math.log1p(math.exp(-4)) + math.log1p(math.exp(4))) / 2
    plain, scaled = result["kinds"]["plain"], result["kinds"]["scaled"]
    assert plain["nll"] == pytest.approx(nll, rel=1e-5)
    gap = 4 / temperature
    nll = (math.log1p(math.exp(-gap)) + math.log1p(math.exp(gap))) / 2
    assert scaled["nll"] == pytest.approx(nll, rel=1e-4)
    assert plain["accuracy"] == scaled["accuracy"] == 0.5


def test_every_posthoc_method_is_fitted_on_validation_alone():
    rng = torch.Generator().manual_seed(0)
    tensors = {}
    for name, count in (("validation", 300), ("test", 200)):
        tensors[f"{name}_logits"] = 3 * torch.randn(count, 4, generator=rng)
        tensors[f"{name}_targets"] = torch.randint(4, (count,), generator=rng)
    held_out = tensors["validation_logits"], tensors["validation_targets"]
    row = measure(tensors, Calibration.fit(*held_out), EvaluationConfig(bins=6, bootstrap=20))
    temperature = fit_temperature(*held_out)
    for kind in ("scaled", *STANDARD):
        logits = CALIBRATORS[kind].fit(*held_out, temperature)(tensors["test_logits"])
        expected = calibration_metrics(logits, tensors["test_targets"], bins=6)
        assert row["kinds"][kind] == expected.as_dict()
        low, high = row["intervals"][kind]["nll"]
        assert low < row["kinds"][kind]["nll"] < high
    assert (
        row["kinds"]["plain"]["nll"] > row["kinds"]["scaled"]["nll"]
    )  # random logits are worth little


def test_what_is_not_trained_is_named(measured, tmp_path):
    with pytest.raises(InputError, match=r"seed-7/model\.safetensors: is missing; train this"):
        load_trained(measured, 7)
    with pytest.raises(InputError, match=r"^run = .*config\.json: is missing"):
        load_trained(tmp_path, 0)


def test_weights_of_other_settings_are_named(run):
    config = json.loads((run / "config.json").read_text())
    config["model"]["width"] = 3
    (run / "config.json").write_text(json.dumps(config))
    text = r"model\.safetensors: backbone\.features\.stem\.0\.weight = \(2, 3, 3, 3\): the model"
    with pytest.raises(InputError, match=text):
        load_trained(run, 0)


def test_the_float32_of_measured_logits_is_never_tf32(measured, precisions):
    evaluate_run(measured, fresh=True)
    assert precisions == {"ieee"}
