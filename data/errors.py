"""The one error that means: the input must change, not the program."""

from data.printable import printable_line

MOST_SHOWN = 500  # characters of a value; more would hide what is wrong with it


class InputError(Exception):
    """Something the user gave cannot be used.

    The text reads `field = value: remedy`, so that one line says what is wrong, where, and what
    to do about it. The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        text = printable_line(str(value))
        if len(text) > MOST_SHOWN:
            text = f"{text[:MOST_SHOWN]}... ({len(text)} characters)"
        super().__init__(f"{printable_line(field)} = {text}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["InputError"], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.remedy)


class TooLarge(InputError, ValueError):
    """A file is larger than any of its kind can be; nothing of it was read.

    Damage like other, to who looks for that; to a user, a file to restore.
    """

    @classmethod
    def refused(cls, where: object, size: int, most: int) -> "TooLarge":
        """Of the file at this place, of `size` bytes where `most` are read."""
        remedy = f"at most {most:,} bytes of it are read; restore it from a copy"
        return cls(str(where), f"{size:,} bytes", remedy)
