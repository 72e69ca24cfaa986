"""The Prefect relabel flow: prototypes, then one task run a slot that reads images.

As in a build, Prefect shows, starts again and gives up; what is done the store says.
"""

import logging
import threading
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

from data.label_sets import LabelSet
from data.root import Root
from flows.artifacts import progress_artifact
from flows.progress import shown
from flows.relabel import refuse_gaps
from flows.slot import RECORD
from flows.slots import follow, start_workers
from pipeline.relabel.prototypes import ensure_set_prototypes

log = logging.getLogger("semix.relabel")


@task(task_run_name="prototypes", **RECORD)
def prototypes(url: str, digest: str) -> None:
    ensure_set_prototypes(LabelSet(Root(url), digest))


def run_relabel(labels: LabelSet, slots: int) -> None:
    """Run the flow under a name that a person recognises. Raises RelabelFailed."""
    name = f"{Path(labels.root.url).name}, labels {labels.digest[:12]}"
    runner: Any = ThreadPoolTaskRunner(max_workers=slots)
    relabel_flow.with_options(flow_run_name=name, task_runner=runner)(
        labels.root.url, labels.digest, slots
    )


@flow(name="semix relabel", persist_result=False, result_serializer="json")
def relabel_flow(url: str, digest: str, slots: int) -> None:
    """Label all images that this set does not cover yet."""
    labels = LabelSet(Root(url), digest)
    prototypes(url, digest)
    stop = threading.Event()
    try:
        futures = start_workers(url, slots, stop=stop, labels=digest)
        with shown("label") as show, progress_artifact(key="semix-relabel") as publish:
            follow(futures, labels, listeners=(show, publish))
    finally:
        stop.set()  # an interrupt passes here; the flow ends when its workers have
    results = [future.result(raise_on_failure=False) for future in futures]
    errors = [str(result) for result in results if isinstance(result, Exception)]
    refuse_gaps(labels, errors)
