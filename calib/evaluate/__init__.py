"""Measure trained classifiers: logits, post-hoc calibration on validation, evaluation.json."""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from semix.calib.calibration import Calibration, read_calibration, write_calibrations
from semix.calib.calibrators import PLAIN
from semix.calib.check import check_evaluation
from semix.calib.config import EvaluationConfig, TrainConfig
from semix.calib.evaluate.ensemble import ensemble_of
from semix.calib.evaluate.predictions import TrainedSeed
from semix.calib.evaluate.shift_ood import Classifiers, measure_ood, measure_shift
from semix.calib.metrics.bootstrap import INTERVALS, intervals_of, resampled
from semix.calib.metrics.conformal import SCORES, measure_sets
from semix.calib.metrics.measures import summarise
from semix.calib.metrics.one_pass import read_predictions, validated_inputs
from semix.calib.processes import broadcast_from_main
from semix.calib.real_data import open_data
from semix.calib.replicates import COMPARED_MEASURES, STORED_RESAMPLES
from semix.calib.run_folder import (
    EVALUATION,
    SCHEMA,
    Evaluation,
    Intervals,
    Measures,
    Row,
    SeedEvaluation,
    StageName,
    evaluation_settings,
    mixed_pin,
    read_data,
    read_seed_evaluation,
    run_digest,
    seed_evaluation_path,
    stored_settings,
)
from semix.calib.training_data import TrainingData
from semix.data.files import read_json, write_json

MISCOVERAGE = 0.1  # of the conformal sets that are measured
LIBRARIES = ("torch", "accelerate", "safetensors", "numpy", "scipy", "scikit-learn", "pydantic")


def evaluate_run(
    run: Path,
    *,
    config: TrainConfig | None = None,
    output_path: Path | None = None,
    device: str = "cpu",
    fresh: bool = False,
) -> Evaluation:
    """Measure every seed of a trained run again and write its `evaluation.json`.

    Stored logits are reused if the current weights produced them, and so are the results under
    shift and for OOD images if their settings are the same; a change of bins or resamples alone
    then runs no network.

    Args:
        config: the run's settings, with the `evaluation` to measure under; None: as stored.
        output_path: another file to write; the evaluations of the run and of its seeds then stay as
            they are.
        fresh: run the networks even if their logits are stored.
    Raises:
        InputError: a seed or stage is not trained, the data no longer exists, or the settings
            under `evaluation` cannot be measured.
    """
    config = config or stored_settings(run)
    weights = read_data(run).get("weights")
    data = open_data(config, pin=mixed_pin(run), weights_digest=weights, compare_splits=False)
    seeds, members, fitted = [], [], []
    for seed in config.seeds:
        trained = TrainedSeed(config, data, run, seed, torch.device(device))
        measured, calibrations = measure_seed(trained, fresh=fresh)
        if output_path is None:
            write_seed(trained, measured, calibrations)
        seeds.append(measured)
        members.append(trained)
        fitted.append(calibrations)
    ensemble = ensemble_rows(members, fitted, fresh=fresh)
    evaluation = merged_evaluation(config, data, seeds, ensemble)
    write_json(output_path or run / EVALUATION, evaluation)
    return evaluation


def evaluate_seed(
    config: TrainConfig,
    data: TrainingData,
    run: Path,
    *,
    seed: int,
    device: torch.device,
    seconds: float | None = None,
    accelerator: Accelerator | None = None,
    fresh: bool = False,
) -> None:
    """Measure the stages of one seed; write their logits, then the seed's `evaluation.json`.

    Args:
        seconds: time spent on training; None: as an earlier evaluation recorded it, if any did.
        accelerator: divides the predictions among its processes, which must all call this; the
            main one measures and writes. Without it, the calling process does everything.
        fresh: as for `evaluate_run`.
    Raises:
        InputError: the settings cannot be measured, or a classifier returns NaN.
    """
    trained = TrainedSeed(config, data, run, seed, device, accelerator)
    evaluation, calibrations = measure_seed(trained, seconds=seconds, fresh=fresh)
    if trained.is_main:
        write_seed(trained, evaluation, calibrations)


def write_seed(
    trained: TrainedSeed,
    evaluation: SeedEvaluation,
    calibrations: Mapping[StageName, Calibration],
) -> None:
    """Write what was fitted, then the evaluation, with which the seed is done."""
    write_calibrations(trained.run, trained.seed, calibrations, trained.sources)
    write_json(seed_evaluation_path(trained.run, trained.seed), evaluation)


def measure_seed(
    trained: TrainedSeed, *, seconds: float | None = None, fresh: bool
) -> tuple[SeedEvaluation, dict[StageName, Calibration]]:
    """The evaluation that `evaluate_seed` writes, and what was fitted for each stage.

    Both have no stages in a process that only predicts.
    """
    started = time.perf_counter()
    config, data = trained.config, trained.data
    if seconds is None:
        previous = read_seed_evaluation(trained.run, trained.seed)
        seconds = previous.get("training_seconds", 0.0) if previous else 0.0
    names, size = data.real.class_names, config.real.image_size
    check_evaluation(config.evaluation, names, image_size=size)
    rows, calibrations = rows_of(trained, fresh=fresh)
    evaluation: SeedEvaluation = {
        "schema": SCHEMA,
        "config": config.identity(),
        "evaluation": config.evaluation.model_dump(mode="json"),
        "digest": run_digest(config, data.record),
        "training_seconds": seconds,
        "seconds": seconds + time.perf_counter() - started,  # of training and this evaluation
        "rows": rows,
    }
    return evaluation, calibrations


def write_evaluation(
    config: TrainConfig, data: TrainingData, run: Path, *, device: torch.device
) -> Evaluation:
    """Merge the seeds' evaluations into the run's `evaluation.json`, which is written last."""
    seeds = [read_json(seed_evaluation_path(run, seed)) for seed in config.seeds]
    members = [TrainedSeed(config, data, run, seed, device) for seed in config.seeds]
    fitted = [
        {stage: read_calibration(run, member.seed, stage) for stage in member.stages}
        for member in (members if config.evaluation.ensemble else ())
    ]
    evaluation = merged_evaluation(config, data, seeds, ensemble_rows(members, fitted))
    write_json(run / EVALUATION, evaluation)
    return evaluation


def ensemble_rows(
    members: Sequence[TrainedSeed],
    calibrations: Sequence[Mapping[StageName, Calibration]],
    *,
    fresh: bool = False,
) -> list[Row]:
    """The rows of the ensemble of these seeds; none unless it is asked for, or of one seed.

    Args:
        calibrations: what was fitted for each seed.
        fresh: as for `evaluate_run`.
    """
    if len(members) < 2 or not members[0].config.evaluation.ensemble:
        return []
    return rows_of(ensemble_of(members, calibrations), fresh=fresh)[0]


def merged_evaluation(
    config: TrainConfig,
    data: TrainingData,
    seeds: Sequence[SeedEvaluation],
    ensemble: Sequence[Row],
) -> Evaluation:
    """The run's evaluation: rows of all seeds, seconds of training and the last evaluation."""
    rows = [*(row for seed in seeds for row in seed["rows"]), *ensemble]
    return {
        "schema": SCHEMA,
        "name": config.name,
        "digest": run_digest(config, data.record),
        "evaluation": config.evaluation.model_dump(mode="json"),
        "seconds": sum(seed["seconds"] for seed in seeds),
        "versions": versions(),
        "warnings": head_warnings(config, rows, images=len(data.real.validation)),
        "rows": rows,
    }


MAX_LOSS = 0.02  # of validation accuracy; better calibration is not worth a greater loss
REMEDIES = {  # by method
    "mac_cal": "lower head.optimiser.learning_rate, give it more steps by a smaller "
    "head.batch_size, raise head.p_start and head.p_min",
    "tst": "give it more steps by head.epochs or a smaller head.batch_size, raise head.latent",
}


def head_warnings(config: TrainConfig, rows: Sequence[Row], *, images: int) -> list[str]:
    """Warn if the head loses more validation accuracy than MAX_LOSS in some seed.

    Args:
        images: number of validation images.
    """
    if config.head is None:
        return []
    accuracies: dict[StageName, dict[int, float]] = {"base": {}, "head": {}}
    for row in rows:
        if row["seed"] is not None and "validation_accuracy" in row:  # older rows have none
            accuracies[row["stage"]][row["seed"]] = row["validation_accuracy"]
    losing_seeds = [
        f"seed {seed}: {100 * before:.1f} % to {100 * after:.1f} %"
        for seed, after in accuracies["head"].items()
        if (before := accuracies["base"][seed]) - after > MAX_LOSS
    ]
    if not losing_seeds:
        return []
    method = config.head.method
    problem = f"the {method} head loses more than {100 * MAX_LOSS:g} points of validation accuracy"
    remedy = REMEDIES["mac_cal" if method == "mac_cal" else "tst"]
    seeds = "; ".join(losing_seeds)
    return [f"{config.name}: {problem} ({seeds}; {images} images): {remedy}, or leave it out"]


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def rows_of(trained: Classifiers, *, fresh: bool) -> tuple[list[Row], dict[StageName, Calibration]]:
    """Measure the stages, base before head, and return what was fitted for each.

    Both are empty in a process that only predicts.

    Args:
        fresh: run the networks even if their logits are stored.
    """
    config = trained.config.evaluation
    previous = (
        None
        if fresh
        else broadcast_from_main(lambda: _earlier_evaluation(trained), trained.accelerator)
    )
    stage_tensors = trained.logits(fresh=fresh)
    rows: dict[StageName, Row] = {}
    calibrations: dict[StageName, Calibration] = {}
    if trained.is_main:
        for stage, tensors in stage_tensors.items():
            calibrations[stage] = fitted = _fit(tensors, config)
            rows[stage] = _row(trained, stage, measure(tensors, fitted, config))
    if config.shift is not None:
        shift = _reusable_results(previous, "shift", trained) or measure_shift(
            trained, config.shift, calibrations
        )
        for stage, row in rows.items():
            row["shift"] = shift[stage]
    if config.ood:
        test = {stage: tensors["test_logits"] for stage, tensors in stage_tensors.items()}
        ood = _reusable_results(previous, "ood", trained) or measure_ood(trained, config.ood, test)
        for stage, row in rows.items():
            row["ood"] = ood[stage]
    return list(rows.values()), calibrations


def _fit(tensors: Mapping[str, Tensor], config: EvaluationConfig) -> Calibration:
    mixed = (
        (tensors["mixed_logits"], tensors["mixed_labels"]) if "mixed_logits" in tensors else None
    )
    return Calibration.fit(
        tensors["validation_logits"],
        tensors["validation_targets"],
        config.calibrators,
        mixed=mixed,
    )


def _row(trained: Classifiers, stage: StageName, measures: Measures) -> Row:
    return {
        "stage": stage,
        "seed": trained.seed,
        "logits": trained.logits_file(stage).relative_to(trained.run).as_posix(),
        "source": trained.sources[stage],
        **measures,
    }


class EarlierResults(NamedTuple):
    """An earlier evaluation of the same weights: its settings, and its rows."""

    settings: EvaluationConfig
    rows: Sequence[Row]


def _earlier_evaluation(trained: Classifiers) -> EarlierResults | None:
    """The earlier evaluation of the same weights, if there is one.

    Schema 3 has the results under shift and for OOD images as this one.
    """
    path = trained.run / EVALUATION
    if trained.seed is not None:
        path = seed_evaluation_path(trained.run, trained.seed)
    evaluation: SeedEvaluation | None = read_json(path) if path.is_file() else None
    if evaluation is None or evaluation.get("schema") not in (3, SCHEMA):
        return None
    rows = [row for row in evaluation["rows"] if row["seed"] == trained.seed]
    settings = evaluation_settings(evaluation)
    if settings is None or {row["stage"]: row.get("source") for row in rows} != trained.sources:
        return None
    return EarlierResults(settings, rows)


def _reusable_results(
    previous: EarlierResults | None, key: Literal["shift", "ood"], trained: Classifiers
) -> dict[StageName, Any] | None:
    """The stages' results under `key` in an earlier evaluation, if its settings are the same."""
    settings = trained.config.evaluation
    if previous is None or getattr(previous.settings, key) != getattr(settings, key):
        return None
    return {row["stage"]: row[key] for row in previous.rows}


def measure(
    predictions: Mapping[str, Tensor], calibration: Calibration, config: EvaluationConfig
) -> Measures:
    """Measure the test logits without and with post-hoc calibration.

    Args:
        predictions: validation_logits, validation_targets, test_logits, test_targets.
        calibration: what was fitted on the validation images.
        config: numbers of bins and resamples.
    Returns:
        The measures; with `config.bootstrap` also intervals [low, high] and bootstrap resamples.
    """
    logits, targets = predictions["test_logits"], predictions["test_targets"]
    kinds: dict[str, dict[str, float]] = {}
    intervals: dict[str, Intervals] = {}
    stored_resamples: dict[str, dict[str, list[float]]] = {}
    for kind in (PLAIN, *calibration.calibrators):
        calibrated = logits if kind == PLAIN else calibration.calibrators[kind](logits)
        samples = read_predictions(*validated_inputs(calibrated, targets), config.bins)
        kinds[kind] = summarise(samples, config.bins)
        if config.bootstrap:
            resamples = resampled(samples, config.bins, resamples=config.bootstrap, seed=0)
            intervals[kind] = {name: list(ends) for name, ends in intervals_of(resamples).items()}
            stored_resamples[kind] = _stored_resamples(resamples)
    held_out = predictions["validation_logits"], predictions["validation_targets"]
    row: Measures = {
        "bins": config.bins,
        "temperature": calibration.temperature,
        "validation_accuracy": _accuracy(*held_out),
        "kinds": kinds,
        "conformal": _conformal(logits / calibration.temperature, targets, calibration),
    }
    if config.bootstrap:
        row |= {"intervals": intervals, "resamples": stored_resamples}
    return row


def _accuracy(logits: Tensor, targets: Tensor) -> float:
    return int((logits.argmax(1) == targets).sum()) / len(targets)


def _stored_resamples(resamples: Tensor) -> dict[str, list[float]]:
    """The resamples that comparisons need, by measure; 7 digits are more than enough."""
    columns = zip(INTERVALS, resamples[:STORED_RESAMPLES].T.tolist(), strict=True)
    needed = [(name, column) for name, column in columns if name in COMPARED_MEASURES]
    return {name: [round(value, 7) for value in column] for name, column in needed}


def _conformal(
    logits: Tensor, targets: Tensor, calibration: Calibration
) -> dict[str, dict[str, float]]:
    """Coverage and size of the sets of scaled test logits, by score."""
    return {
        score: asdict(
            measure_sets(
                logits, targets, score=score, limit=calibration.thresholds[score][MISCOVERAGE]
            )
        )
        for score in SCORES
    }
