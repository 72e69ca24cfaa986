"""Measure a trained run anew, under other settings of `evaluation` if wanted."""

from collections.abc import Sequence
from pathlib import Path

from calib.check import check_evaluation
from calib.config import TrainConfig
from calib.run_folder import CONFIG, EVALUATION, Evaluation, stored_settings, trained_run
from data.errors import InputError
from data.files import read_json, write_json
from data.real import class_names
from flows.calling import run_flow
from flows.gpus import settled_device


def evaluate(
    run: str | Path, *, overrides: Sequence[str] = (), device: str = "auto", fresh: bool = False
) -> Evaluation:
    """Measure all seeds of a run; nothing is trained.

    Args:
        run: folder of a run whose seeds are trained.
        overrides: as `evaluation.bins=20`; are kept in the run's config.json.
        device: auto, cpu or cuda.
        fresh: run the networks even where logits of the same weights are stored.
    Returns:
        What the run's evaluation.json now holds.
    Raises:
        InputError: no run, or settings that cannot be measured or that training decided.
    """
    run = Path(run)
    run_flow(
        "flows.evaluate_flow.evaluate_flow",
        ready=checked(run, overrides, device=device),
        run=str(run.absolute()),
        overrides=list(overrides),
        device=device,
        fresh=fresh,
    )
    found: Evaluation = read_json(run / EVALUATION)
    return found


def exported(run: Path, format: str) -> list[Path]:
    """Files below the run's folder in another benchmark's layout; none where no format is asked.

    Raises:
        InputError: a library that it needs is not installed.
    """
    if not format:
        return []
    from calib.calarena import export_calarena

    return export_calarena(run, run / format)


def measured(config: TrainConfig, run: Path, *, device: str, fresh: bool) -> Evaluation:
    """As `evaluate`, in this process, under settings that are checked."""
    from calib.evaluate import evaluate_run
    from data.device import resolve_device

    settings = config.model_dump(mode="json")
    if settings != read_json(run / CONFIG):
        write_json(run / CONFIG, settings)
    return evaluate_run(run, device=resolve_device(settled_device(device)), fresh=fresh)


def checked(run: Path, overrides: Sequence[str], *, device: str) -> TrainConfig:
    """The settings to measure a run under. Raises InputError."""
    begun = trained_run(run)
    config = stored_settings(run, overrides)
    _refuse_training_settings(begun, config, overrides)
    names, size = class_names(config.real), config.real.image_size
    check_evaluation(config.evaluation, names, image_size=size)
    if (settled := settled_device(device)).startswith("cuda"):
        from data.device import resolve_device  # torch costs seconds: not before it is needed

        resolve_device(settled)
    return config


def _refuse_training_settings(
    begun: TrainConfig, config: TrainConfig, overrides: Sequence[str]
) -> None:
    if config.model_copy(update={"evaluation": begun.evaluation}) != begun:
        other = [text for text in overrides if not text.startswith("evaluation.")]
        remedy = "was decided by training; only evaluation.* can be measured anew"
        raise InputError("--set", ", ".join(other), remedy)
