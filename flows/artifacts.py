"""What a flow shows in Prefect's pages: the progress of its shards."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from data.progress import Progress

ARTIFACT_EVERY_S = 5.0

log = logging.getLogger("semix.build")


@contextmanager
def progress_artifact(*, key: str = "semix-build") -> Iterator[Callable[[Progress], None]]:
    """One Prefect artifact for the run; yields a function that updates it now and then."""
    artifact: Any = create_progress_artifact(0.0, key=key, description="shards")
    latest, due = None, 0.0

    def publish(progress: Progress) -> None:
        nonlocal latest, due
        latest = progress
        if time.monotonic() >= due:
            due = time.monotonic() + ARTIFACT_EVERY_S
            _send(artifact, progress)

    yield publish
    if latest is not None:
        _send(artifact, latest)


def _send(artifact: Any, progress: Progress) -> None:
    text = f"{progress.done} of {progress.shards} shards, {progress.failed} failed"
    try:
        update_progress_artifact(artifact, 100 * progress.done / progress.shards, text)
    except Exception as error:  # the picture in Prefect is not worth the run
        log.warning("Prefect took no progress: %s", error)
