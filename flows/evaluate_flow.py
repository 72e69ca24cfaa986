"""The Prefect evaluate flow: one task that measures a trained run in this process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow, task
from semix.calib.results import methods_of
from semix.calib.run_folder import Evaluation
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, link_to, result_table
from semix.flows.calling import handed
from semix.flows.evaluate import Measuring, checked, measured
from semix.flows.flow_runs import flow_options, name_of, running
from semix.flows.slots.slot import RECORD


def run_name(given: Mapping[str, Any]) -> str:
    """`evaluate csm: evaluation.bins=20`."""
    changes = f": {' '.join(given['overrides'])}" if given["overrides"] else ""
    return f"evaluate {name_of(given['run'])}{changes[:80]}"


@flow(**flow_options("evaluate", run_name))
def evaluate_flow(
    run: p.TrainedRun,
    overrides: p.EvaluationOverrides = [],  # noqa: B006 - Prefect copies it
    to: p.EvaluationFile = "",
    device: p.Device = "auto",
    fresh: p.Fresh = False,
) -> dict[str, Any]:
    """Measure a trained run anew: other bins, intervals, corrupted or foreign images.

    Nothing is trained, and logits that are stored are used again.
    """
    with running("evaluate"):
        place = Path(run).absolute()
        measuring = handed(Measuring) or checked(place, overrides, to=to, device=device)
        found = measure(measuring, place, device=device, fresh=fresh)
        key = artifact_key("evaluate", run)
        result_table(methods_of(place, found), key=key)
        link_to(measuring.path, key=key)
        return {"evaluation": str(measuring.path), "rows": len(found["rows"])}


@task(task_run_name="measure", **RECORD)
def measure(measuring: Measuring, run: Path, *, device: str, fresh: bool) -> Evaluation:
    """What was written."""
    return measured(measuring, run, device=device, fresh=fresh)
