"""The Prefect evaluate flow: one task that measures a trained run in this process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow, task

from semix.calib.results import methods_of
from semix.calib.run_folder import Evaluation
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, link_to, result_table
from semix.flows.calling import from_caller
from semix.flows.evaluate import PreparedEvaluation, measure_run, prepare_evaluation
from semix.flows.flow_runs import base_name, flow_options, run_context
from semix.flows.slots.slot import RECORD


def run_name(parameters: Mapping[str, Any]) -> str:
    """`evaluate csm: evaluation.bins=20`."""
    changes = f": {' '.join(parameters['overrides'])}" if parameters["overrides"] else ""
    return f"evaluate {base_name(parameters['run'])}{changes[:80]}"


@flow(**flow_options("evaluate", run_name))
def evaluate_flow(
    run: p.TrainedRun,
    overrides: p.EvaluationOverrides = [],  # noqa: B006 - Prefect copies it
    to: p.EvaluationFile = "",
    device: p.Device = "auto",
    fresh: p.Fresh = False,
) -> dict[str, Any]:
    """Evaluate a trained run again: other bins, intervals, corrupted or out-of-distribution images.

    Nothing is trained, and stored logits are used again.
    """
    with run_context("evaluate"):
        folder = Path(run).absolute()
        prepared = from_caller(PreparedEvaluation) or prepare_evaluation(
            folder, overrides, to=to, device=device
        )
        evaluation = measure(prepared, folder, device=device, fresh=fresh)
        key = artifact_key("evaluate", run)
        result_table(methods_of(folder, evaluation), key=key)
        link_to(prepared.path, key=key)
        return {"evaluation": str(prepared.path), "rows": len(evaluation["rows"])}


@task(task_run_name="measure", **RECORD)
def measure(prepared: PreparedEvaluation, run: Path, *, device: str, fresh: bool) -> Evaluation:
    """The content of the written file."""
    return measure_run(prepared, run, device=device, fresh=fresh)
