"""Measure trained classifiers: logits, what validation decides, then evaluation.json."""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from semix.calib.check import check_evaluation
from semix.calib.config import EvaluationConfig, TrainConfig
from semix.calib.evaluate.predictions import TrainedSeed
from semix.calib.evaluate.shift_ood import measure_ood, measure_shift
from semix.calib.metrics.bootstrap import INTERVALS, intervals_of, resampled
from semix.calib.metrics.conformal import SCORES, conformal_sets
from semix.calib.metrics.measures import summarise
from semix.calib.metrics.one_pass import as_given, read_predictions
from semix.calib.posthoc import fit_isotonic, fit_temperature, fit_vector
from semix.calib.processes import broadcast_from_main
from semix.calib.real_data import TrainingData, open_data
from semix.calib.replicates import COMPARED, DRAWN
from semix.calib.run_folder import (
    EVALUATION,
    KINDS,
    SCHEMA,
    Evaluation,
    Intervals,
    Kind,
    Measures,
    Row,
    SeedEvaluation,
    StageName,
    measured_seed,
    pinned_index,
    read_data,
    run_digest,
    seed_evaluation,
    stored_settings,
)
from semix.calib.structured import fit_ensemble, fit_sms, fit_svs
from semix.data.files import read_json, write_json
from torch import Tensor

FITS: dict[Kind, Any] = {
    "ets": fit_ensemble,
    "vector": fit_vector,
    "svs": fit_svs,
    "sms": fit_sms,
    "isotonic": fit_isotonic,
}
MISS = 0.1  # share of conformal sets that may lack the true class
LIBRARIES = ("torch", "accelerate", "safetensors", "numpy", "scipy", "scikit-learn", "pydantic")


def evaluate_run(
    run: Path,
    *,
    config: TrainConfig | None = None,
    beside: Path | None = None,
    device: str = "cpu",
    fresh: bool = False,
) -> Evaluation:
    """Measure every seed of a trained run anew and write its `evaluation.json`.

    Stored logits are taken where they came from the weights at hand, and so are figures under
    shift and for foreign images if their settings are the same; other bins or resamples then run
    no network.

    Args:
        config: the run's settings, with those of `evaluation` to measure under; None: its own.
        beside: a file that is written instead; the run's own evaluation, and that of its seeds,
            stay as they are.
        fresh: run the networks whatever is stored.
    Raises:
        InputError: a seed or stage is not trained, the data is not there any more, or the
            settings under `evaluation` cannot be measured.
    """
    config = config or stored_settings(run)
    weights = read_data(run).get("weights")
    data = open_data(config, pinned=pinned_index(run), weights=weights, compare_splits=False)
    seeds = []
    for seed in config.seeds:
        trained = TrainedSeed(config, data, run, seed, torch.device(device))
        measured = measure_seed(trained, fresh=fresh)
        if beside is None:
            write_json(seed_evaluation(run, seed), measured)
        seeds.append(measured)
    evaluation = gathered(config, data, seeds)
    write_json(beside or run / EVALUATION, evaluation)
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
    """Measure the stages of one seed; writes their logits, then the seed's `evaluation.json`.

    Args:
        seconds: spent on training; None: as many as an earlier evaluation says, if there is one.
        accelerator: shares the predictions out among its processes, which must all call; the
            main one measures and writes. Without it, the one process that calls does all.
        fresh: as for `evaluate_run`.
    Raises:
        InputError: settings that cannot be measured, or a classifier that gives NaN.
    """
    trained = TrainedSeed(config, data, run, seed, device, accelerator)
    found = measure_seed(trained, seconds=seconds, fresh=fresh)
    if trained.is_main:
        write_json(seed_evaluation(run, seed), found)


def measure_seed(
    trained: TrainedSeed, *, seconds: float | None = None, fresh: bool
) -> SeedEvaluation:
    """As `evaluate_seed`, which writes what this returns; without rows where a process helps."""
    started = time.perf_counter()
    config, data = trained.config, trained.data
    if seconds is None:
        known = measured_seed(trained.run, trained.seed)
        seconds = known.get("training_seconds", 0.0) if known else 0.0
    names, size = data.real.class_names, config.real.image_size
    check_evaluation(config.evaluation, names, image_size=size)
    rows = rows_of(trained, fresh=fresh)
    return {
        "schema": SCHEMA,
        "config": config.identity(),
        "evaluation": config.evaluation.model_dump(mode="json"),
        "digest": run_digest(config, data.record),
        "training_seconds": seconds,
        "seconds": seconds + time.perf_counter() - started,  # and of this measuring alone
        "rows": rows,
    }


def write_evaluation(config: TrainConfig, data: TrainingData, run: Path) -> Evaluation:
    """Gather the seeds' evaluations in the run's `evaluation.json`, which is written last."""
    seeds = [read_json(seed_evaluation(run, seed)) for seed in config.seeds]
    evaluation = gathered(config, data, seeds)
    write_json(run / EVALUATION, evaluation)
    return evaluation


def gathered(
    config: TrainConfig, data: TrainingData, seeds: Sequence[SeedEvaluation]
) -> Evaluation:
    """The rows of all seeds; its seconds are those of training and of the last measuring."""
    rows = [row for seed in seeds for row in seed["rows"]]
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


MOST_LOST = 0.02  # of validation accuracy: a head is trained for calibration, not at this price
CHANGES = {  # that bring it back, by method
    "mac_cal": "lower head.optimiser.learning_rate, give it more steps by a smaller "
    "head.batch_size, raise head.p_start and head.p_min",
    "tst": "give it more steps by head.epochs or a smaller head.batch_size, raise head.latent",
}


def head_warnings(config: TrainConfig, rows: Sequence[Row], *, images: int) -> list[str]:
    """A sentence where the head costs more validation accuracy than MOST_LOST, in some seed.

    Args:
        images: of validation.
    """
    if config.head is None:
        return []
    found: dict[StageName, dict[int, float]] = {"base": {}, "head": {}}
    for row in rows:
        if "validation_accuracy" in row:  # not in rows of before there were any
            found[row["stage"]][row["seed"]] = row["validation_accuracy"]
    lost = [
        f"seed {seed}: {100 * before:.1f} % to {100 * after:.1f} %"
        for seed, after in found["head"].items()
        if (before := found["base"][seed]) - after > MOST_LOST
    ]
    if not lost:
        return []
    method = config.head.method
    text = f"the {method} head loses more than {100 * MOST_LOST:g} points of validation accuracy"
    change = CHANGES["mac_cal" if method == "mac_cal" else "tst"]
    return [
        f"{config.name}: {text} ({'; '.join(lost)}; {images} images): {change}, or leave it out"
    ]


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def rows_of(trained: TrainedSeed, *, fresh: bool) -> list[Row]:
    """Measure the stages, base before head; no rows in a process that only helps.

    Args:
        fresh: run the networks whatever is stored.
    """
    config = trained.config.evaluation
    previous = (
        None if fresh else broadcast_from_main(lambda: _previous(trained), trained.accelerator)
    )
    found = trained.logits(fresh=fresh)
    rows: dict[StageName, Row] = {}
    if trained.is_main:
        rows = {stage: _row(trained, stage, measure(found[stage], config)) for stage in found}
    if config.shift is not None:
        shift = _kept(previous, "shift", trained) or measure_shift(
            trained, config.shift, {stage: row["temperature"] for stage, row in rows.items()}
        )
        for stage, row in rows.items():
            row["shift"] = shift[stage]
    if config.ood:
        test = {stage: tensors["test_logits"] for stage, tensors in found.items()}
        ood = _kept(previous, "ood", trained) or measure_ood(trained, config.ood, test)
        for stage, row in rows.items():
            row["ood"] = ood[stage]
    return list(rows.values())


def _row(trained: TrainedSeed, stage: StageName, figures: Measures) -> Row:
    return {
        "stage": stage,
        "seed": trained.seed,
        "logits": trained.logits_file(stage).relative_to(trained.run).as_posix(),
        "source": trained.sources[stage],
        **figures,
    }


def _previous(trained: TrainedSeed) -> SeedEvaluation | None:
    """What was measured of these weights before, if anything was."""
    found = measured_seed(trained.run, trained.seed)
    if found is None or found.get("schema") != SCHEMA:
        return None
    sources = {row["stage"]: row.get("source") for row in found["rows"]}
    return found if sources == trained.sources else None


def _kept(
    previous: SeedEvaluation | None, part: Literal["shift", "ood"], trained: TrainedSeed
) -> dict[StageName, Any] | None:
    """Figures of an earlier evaluation under the same settings of this part."""
    settings = trained.config.evaluation.model_dump(mode="json")
    if previous is None or previous["evaluation"][part] != settings[part]:
        return None
    return {row["stage"]: row[part] for row in previous["rows"]}


def measure(found: Mapping[str, Tensor], config: EvaluationConfig | None = None) -> Measures:
    """Fit what is fitted on validation, and measure the test logits without and with it.

    Args:
        found: validation_logits, validation_targets, test_logits, test_targets.
        config: how many bins and resamples; by default those of `EvaluationConfig`.
    Returns:
        Intervals [low, high], and measures on test sets drawn anew, only where there are resamples.
    """
    config = config or EvaluationConfig()
    held_out = found["validation_logits"], found["validation_targets"]
    temperature = fit_temperature(*held_out)
    figures: dict[Kind, dict[str, float]] = {}
    intervals: dict[str, Intervals] = {}
    drawn: dict[str, dict[str, list[float]]] = {}
    for kind in KINDS:
        logits = _after(found, kind, temperature)
        predictions = read_predictions(*as_given(logits, found["test_targets"]), config.bins)
        figures[kind] = summarise(predictions, config.bins).as_dict()
        if config.bootstrap:
            anew = resampled(predictions, config.bins, resamples=config.bootstrap, seed=0)
            intervals[kind] = {name: list(ends) for name, ends in intervals_of(anew).items()}
            drawn[kind] = _kept_of(anew)
    row: Measures = {
        "bins": config.bins,
        "temperature": temperature,
        "validation_accuracy": _accuracy(*held_out),
        "plain": figures["plain"],
        "scaled": figures["scaled"],
        "ets": figures["ets"],
        "vector": figures["vector"],
        "svs": figures["svs"],
        "sms": figures["sms"],
        "isotonic": figures["isotonic"],
        "conformal": _conformal(found, temperature),
    }
    if config.bootstrap:
        row["intervals"] = intervals.pop("plain")
        row["posthoc_intervals"] = intervals
        row["drawn"] = drawn
    return row


def _accuracy(logits: Tensor, targets: Tensor) -> float:
    return int((logits.argmax(1) == targets).sum()) / len(targets)


def _kept_of(drawn: Tensor) -> dict[str, list[float]]:
    """By measure, what comparisons need of `resampled`, in more digits than they can tell."""
    columns = zip(INTERVALS, drawn[:DRAWN].T.tolist(), strict=True)
    return {
        name: [round(value, 7) for value in column] for name, column in columns if name in COMPARED
    }


def _after(found: Mapping[str, Tensor], kind: Kind, temperature: float) -> Tensor:
    """The test logits of one of KINDS. What is fitted sees validation images alone."""
    held_out = found["validation_logits"], found["validation_targets"]
    logits = found["test_logits"]
    if kind in FITS:
        return FITS[kind](*held_out).apply(logits)
    return logits / (temperature if kind == "scaled" else 1.0)


def _conformal(found: Mapping[str, Tensor], temperature: float) -> dict[str, dict[str, float]]:
    held_out = found["validation_logits"] / temperature, found["validation_targets"]
    test = found["test_logits"] / temperature, found["test_targets"]
    return {
        score: asdict(conformal_sets(held_out, test, score=score, miss=MISS)) for score in SCORES
    }
