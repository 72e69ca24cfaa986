"""Why a cell of a study is not measured: a small file in its run folder."""

from collections.abc import Sequence
from pathlib import Path

from data.files import read_json, write_json

FAILURE = "failure.json"


def note_failure(run: Path, reason: str, *, last_lines: Sequence[str]) -> None:
    """Remember why a run ended.

    Args:
        reason: one line.
        last_lines: the end of the trainer's output.
    """
    write_json(run / FAILURE, {"reason": reason, "last_lines": list(last_lines)})


def forget_failure(run: Path) -> None:
    (run / FAILURE).unlink(missing_ok=True)


def failure_of(run: Path) -> str | None:
    """The reason; None if the run did not fail."""
    path = run / FAILURE
    return str(read_json(path)["reason"]) if path.is_file() else None
