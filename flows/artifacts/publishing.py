"""Artifacts' keys, and the rule that none of them costs the run."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from prefect import runtime
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from data.fingerprint import fingerprint

log = logging.getLogger("semix.prefect")

_warned: set[str] = set()  # runs that were told that something is not shown


def artifact_key(kind: str, url: str, *identity: str) -> str:
    """Under which an artifact is found: `semix-build-mixed-1a2b3c4d`.

    Prefect shows the newest artifact of a key, and takes lower-case letters, digits and dashes.

    Args:
        url: of what is shown; its last part is the name.
        identity: what else tells it from others, as a plan's digest.
    """
    name = re.sub("[^a-z0-9]+", "-", PurePosixPath(url).name.lower()).strip("-")[:40].strip("-")
    return "-".join(filter(None, ("semix", kind, name, fingerprint([url, *identity])[:8])))


@contextmanager
def only_shown() -> Iterator[None]:
    """What fails in the block is not shown in Prefect, which a run says once and goes on."""
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # nor a minute's patience
            yield
    except Exception as error:
        run = str(runtime.flow_run.id)
        if run not in _warned:
            _warned.add(run)
            reason = str(error) or type(error).__name__
            log.warning("Prefect does not show all of this run: %s", reason)
