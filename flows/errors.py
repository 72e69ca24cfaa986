"""The errors that mean: the input was fine, the run was not finished."""

from collections.abc import Iterator
from contextlib import contextmanager

from data.errors import InputError


class RunFailed(RuntimeError):
    """Part of a run failed. The text says what, why, and how to go on.

    Args:
        exit_status: of `semix`; 2 if a child process found fault with the input after all.
    """

    def __init__(self, text: str, *, exit_status: int = 1) -> None:
        super().__init__(text)
        self.exit_status = exit_status


class RunCancelled(RunFailed):
    """Somebody cancelled the run in Prefect."""


@contextmanager
def damage_named(url: str) -> Iterator[None]:
    """Around what reads the images of a root: damage of theirs is no fault of the program.

    Raises:
        RunFailed: a file is damaged or gone; what shows all damage, and what mends it.
    """
    try:
        yield
    except InputError:
        raise
    except (ValueError, FileNotFoundError) as error:
        ways = f"`semix verify {url} --full` shows all damage, `semix resume {url} --full` mends it"
        raise RunFailed(f"{error}\n{ways}") from error
