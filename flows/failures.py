"""Errors of runs that did not finish although the input was fine, and reasons of failed shards."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from uuid import UUID

from semix.data.errors import InputError
from semix.data.formats import Failure
from semix.data.printable import printable_line
from semix.data.ranges import format_ranges

MAX_RANGES = 20  # in one message, as Prefect stores and shows it


class RunFailed(RuntimeError):
    """Part of a run failed. The text says what, why, and how to go on.

    Args:
        exit_status: of `semix`; 2 if a child process refused the input after all.
    """

    def __init__(self, text: str, *, exit_status: int = 1) -> None:
        super().__init__(text)
        self.exit_status = exit_status


class RunCancelled(RunFailed):
    """Somebody cancelled the run in Prefect.

    Args:
        run: its id there.
    """

    def __init__(self, text: str, run: UUID) -> None:
        super().__init__(text)
        self.run = run


class ServerLost(RunFailed):
    """Prefect's server could not record how a run ended; the text says what is safe."""


@contextmanager
def translate_damage(url: str) -> Iterator[None]:
    """Turn errors of damaged files, in a block that reads a root, into a message with remedies.

    Raises:
        RunFailed: a file is damaged or missing; names the commands that show and repair damage.
    """
    try:
        yield
    except InputError:
        raise
    except (ValueError, FileNotFoundError) as error:
        hint = f"`semix verify {url} --full` shows all damage, `semix resume {url} --full` mends it"
        raise RunFailed(f"{error}\n{hint}") from error


def few_ranges(shards: Iterable[int]) -> str:
    """`3,7-9`; only the first MAX_RANGES ranges."""
    ranges = format_ranges(shards).split(",")
    more = f" and {len(ranges) - MAX_RANGES} more ranges" if len(ranges) > MAX_RANGES else ""
    return ",".join(ranges[:MAX_RANGES]) + more


def reasons(
    failures: Mapping[int, Sequence[Failure]], missing: Container[int], max_reasons: int = 3
) -> list[str]:
    """`shard 3: OSError: disk full` for the first `max_reasons` missing shards that failed."""
    failed_shards = ((shard, attempts) for shard, attempts in failures.items() if shard in missing)
    return [
        f"shard {shard}: {printable_line(f'{attempts[-1].error}: {attempts[-1].message}')}"
        for shard, attempts in islice(failed_shards, max_reasons)
    ]
