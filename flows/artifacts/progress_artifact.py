"""The one artifact of a run that grows while it works."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from data.root import Progress
from flows.artifacts.publishing import only_shown
from flows.progress import Rate, counted, describe, to_come

ARTIFACT_EVERY_S = 5.0


@contextmanager
def growing_artifact(key: str) -> Iterator[Callable[[float, str], None]]:
    """Yields a function of a share, 0 to 1, and a few words; Prefect gets them now and then."""
    artifact: Any = None
    with only_shown():
        artifact = create_progress_artifact(0.0, key=key, description="begins")
    latest, due = None, 0.0

    def publish(share: float, words: str) -> None:
        nonlocal latest, due
        latest = (share, words)
        if time.monotonic() >= due:
            _send(artifact, *latest)
            due = time.monotonic() + ARTIFACT_EVERY_S  # after a send that may have waited

    yield publish  # where that is interrupted, nothing may hold up the end
    if latest is not None:
        _send(artifact, *latest)


@contextmanager
def progress_artifact(key: str) -> Iterator[Callable[[Progress], None]]:
    """Yields a function that shows how many images there are."""
    rate = Rate()
    with growing_artifact(key) as publish:

        def show(progress: Progress) -> None:
            rate.update(progress.images_done, time.monotonic())
            words = filter(None, (counted(progress), describe(progress, rate.value)))
            total = progress.images_done + to_come(progress)
            publish(progress.images_done / max(1, total), ", ".join(words))

        yield show


def _send(artifact: Any, share: float, words: str) -> None:
    if artifact is None:
        return
    # A server that is being restarted must not hold up the loop that watches the slots.
    with only_shown(), temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        update_progress_artifact(artifact, 100 * share, words)
