"""The Prefect evaluate flow: one task that measures a trained run in this process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow, task

from calib.config import TrainConfig
from calib.run_folder import EVALUATION
from flows import parameters as p
from flows.artifacts import artifact_key, link_to, result_table
from flows.calling import handed
from flows.evaluate import checked, measured
from flows.flow_runs import flow_options, name_of, running
from flows.slots.slot import RECORD


def run_name(given: Mapping[str, Any]) -> str:
    """`evaluate csm: evaluation.bins=20`."""
    changes = f": {' '.join(given['overrides'])}" if given["overrides"] else ""
    return f"evaluate {name_of(given['run'])}{changes[:80]}"


@flow(**flow_options("evaluate", run_name))
def evaluate_flow(
    run: p.TrainedRun,
    overrides: p.EvaluationOverrides = [],  # noqa: B006 - Prefect copies it
    device: p.Device = "auto",
    fresh: p.Fresh = False,
) -> dict[str, Any]:
    """Measure a trained run anew: other bins, intervals, corrupted or foreign images.

    Nothing is trained, and logits that are stored are used again.
    """
    with running("evaluate"):
        place = Path(run).absolute()
        settings = handed(TrainConfig) or checked(place, overrides, device=device)
        rows = measure(settings, place, device=device, fresh=fresh)
        key = artifact_key("evaluate", run)
        result_table([place], key=key)
        link_to(place / EVALUATION, key=key)
        return {"evaluation": str(place / EVALUATION), "rows": rows}


@task(task_run_name="measure", **RECORD)
def measure(settings: TrainConfig, run: Path, *, device: str, fresh: bool) -> int:
    """How many rows evaluation.json has now."""
    return len(measured(settings, run, device=device, fresh=fresh)["rows"])
