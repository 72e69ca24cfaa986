"""InputError, for inputs that the user must change; all other errors are faults of semix."""

import difflib
from collections.abc import Iterable

from semix.data.printable import printable_line

MAX_SHOWN = 500  # characters of a value; more would hide what is wrong with it
NOT_SHOWN = "as given"  # shown instead of a value that may be a secret, or fills the screen
NEAR = 0.7  # smallest similarity, of 1, of a misspelling; gpu and cpu are less similar


class InputError(Exception):
    """An input from the user that cannot be used.

    The text reads `field = value: remedy`, so that one line says what is wrong, where, and what
    to do about it. The command line prints it without a traceback and exits with status 2.

    Attributes:
        problem: the text without the remedy; only the field if the value is NOT_SHOWN.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        text = printable_line(str(value))
        if len(text) > MAX_SHOWN:
            text = f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
        shown = printable_line(field)
        self.problem = shown if text == NOT_SHOWN else f"{shown} = {text}"
        super().__init__(f"{self.problem}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["InputError"], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.remedy)


class TooLarge(InputError, ValueError):
    """A file is larger than any file of its kind can be; none of it was read.

    Code that checks for damage catches it as a ValueError; a user sees which file to restore.
    """

    @classmethod
    def for_file(cls, where: object, size: int, max_bytes: int) -> "TooLarge":
        """The error for a file of `size` bytes where at most `max_bytes` are read."""
        remedy = f"at most {max_bytes:,} bytes of it are read; restore it from a copy"
        return cls(str(where), f"{size:,} bytes", remedy)


def choices(value: object, known: Iterable[str]) -> str:
    """The remedy for an unknown value: the most similar known value, and a list of all."""
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=NEAR)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}choose one of {', '.join(names)}"
