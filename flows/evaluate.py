"""Evaluate a trained run again, also under other settings of `evaluation`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from semix.calib.check import check_evaluation
from semix.calib.config import TrainConfig
from semix.calib.run_folder import (
    EVALUATION,
    Evaluation,
    other_evaluation_path,
    require_trained,
    stored_settings,
)
from semix.data.errors import InputError
from semix.data.files import read_json, require_own_files
from semix.data.real import class_names
from semix.flows.calling import run_flow
from semix.flows.gpus import settled_device
from semix.flows.paths import output_file


@dataclass(frozen=True)
class PreparedEvaluation:
    """An evaluation that passed all checks.

    Attributes:
        settings: settings of the run, with the section `evaluation` to use.
        path: the file to write.
    """

    settings: TrainConfig
    path: Path


def evaluate(
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    to: str | Path = "",
    device: str = "auto",
    fresh: bool = False,
) -> Evaluation:
    """Evaluate the networks of all training seeds; nothing is trained.

    Starts the flow `evaluate` in this process and waits for it. Under other settings than those of
    the run, the results are written to `evaluation-DIGEST.json`, beside the run's
    `evaluation.json`, which stays.

    Args:
        run: folder of a run whose training is complete for every seed.
        overrides: as `evaluation.bins=20`.
        to: another file to write.
        device: auto, cpu or cuda.
        fresh: run the networks even if logits of the same weights are stored.
    Returns:
        The content of the written file.
    Raises:
        InputError: no run, settings that cannot be used or that belong to training, or a file
            that cannot be written.
    """
    path = run_evaluation(run, overrides=overrides, to=to, device=device, fresh=fresh)
    evaluation: Evaluation = read_json(path)
    return evaluation


def run_evaluation(
    run: str | Path, *, overrides: Sequence[str], to: str | Path, device: str, fresh: bool
) -> Path:
    """As `evaluate`, which calls this: starts the flow; returns the path of the written file."""
    prepared = prepare_evaluation(Path(run), overrides, to=to, device=device)
    run_flow(
        "semix.flows.evaluate_flow.evaluate_flow",
        prepared=prepared,
        run=str(Path(run).absolute()),
        overrides=list(overrides),
        to=str(prepared.path),
        device=device,
        fresh=fresh,
    )
    return prepared.path


def export_results(run: Path, format: str) -> list[Path]:
    """Export the results to RUN/calarena in CalArena's layout; returns the written files.

    An empty `format` exports nothing.

    Raises:
        InputError: a required library is not installed.
    """
    if not format:
        return []
    from semix.calib.calarena import export_calarena

    return export_calarena(run, run / format)


def measure_run(prepared: PreparedEvaluation, run: Path, *, device: str, fresh: bool) -> Evaluation:
    """The work of the flow `evaluate`, which calls this: starts no flow.

    Settings were checked by `prepare_evaluation`.
    """
    from semix.calib.evaluate import evaluate_run
    from semix.data.device import resolve_device

    return evaluate_run(
        run,
        config=prepared.settings,
        output_path=None if prepared.path == run.absolute() / EVALUATION else prepared.path,
        device=resolve_device(settled_device(device)),
        fresh=fresh,
    )


def prepare_evaluation(
    run: Path, overrides: Sequence[str], *, to: str | Path = "", device: str
) -> PreparedEvaluation:
    """Check settings and paths of an evaluation. Raises InputError."""
    require_own_files("run", run)
    run_config = require_trained(run)
    config = stored_settings(run, overrides)
    _check_overrides(run_config, config, overrides)
    names, size = class_names(config.real), config.real.image_size
    check_evaluation(config.evaluation, names, image_size=size)
    if (actual_device := settled_device(device)).startswith("cuda"):
        from semix.data.device import resolve_device  # torch costs seconds: not before it is needed

        resolve_device(actual_device)
    return PreparedEvaluation(config, _output_path(run.absolute(), to, run_config, config))


def _output_path(run: Path, to: str | Path, run_config: TrainConfig, config: TrainConfig) -> Path:
    """The file to write. Raises InputError for an existing file of another kind."""
    own_path, same_settings = run / EVALUATION, config.evaluation == run_config.evaluation
    if not to:
        return own_path if same_settings else other_evaluation_path(run, config)
    path = output_file("--to", to)
    if path == own_path and not same_settings:
        remedy = "holds the evaluation under the run's own settings; name another file"
        raise InputError("--to", path, remedy)
    if path.exists() and not _is_evaluation(path):
        raise InputError("--to", path, "exists and is no evaluation; name another file")
    return path


def _is_evaluation(path: Path) -> bool:
    """Whether a file is an evaluation of a run, which may be overwritten."""
    try:
        return {"schema", "evaluation", "versions", "rows"} <= set(read_json(path))
    except (OSError, ValueError, TypeError):
        return False


def _check_overrides(
    run_config: TrainConfig, config: TrainConfig, overrides: Sequence[str]
) -> None:
    if config.model_copy(update={"evaluation": run_config.evaluation}) != run_config:
        training_overrides = [text for text in overrides if not text.startswith("evaluation.")]
        remedy = "is a setting of training; only evaluation.* can change"
        raise InputError("--set", ", ".join(training_overrides), remedy)
