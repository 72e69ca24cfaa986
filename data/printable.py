"""Text from anywhere as what may go to a terminal, into Markdown, or into a spreadsheet.

All that semix prints passes here: names and reasons come from files that others wrote.
"""

import logging
import sys
import traceback
import unicodedata
from typing import TextIO

KEPT = "\n\t"
# Control characters steer a terminal; format characters turn text around or hide it.
STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")
MARKUP = r"\`*_[]<>|#&~"  # of Markdown; raw HTML is a part of it
# With these begins what a spreadsheet takes for a formula, the wide forms of East Asia included.
FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def printable(text: str) -> str:
    """The text with characters that steer a terminal spelled out, as JSON spells them."""
    return "".join(_spelled(character) for character in text)


def printable_line(text: str) -> str:
    """Likewise in one line, so that no name begins a line of its own; for a value in a sentence."""
    return printable(text).replace("\n", r"\n").replace("\t", r"\t")


def print_line(text: str, *, file: TextIO | None = None) -> None:
    """Print one line at once, on standard output unless told otherwise."""
    print(printable(text).replace("\n", "\n  "), file=file, flush=True)


def print_traceback() -> None:
    """The traceback of the error at hand, on standard error."""
    print(printable(traceback.format_exc()), file=sys.stderr, end="", flush=True)


def markdown_text(text: str) -> str:
    """The text in one line of Markdown that shows it as it is, in a cell of a table too."""
    line = " ".join(text.split())
    plain = "".join(f"\\{letter}" if letter in MARKUP else letter for letter in line)
    return printable(plain)


def spreadsheet_text(text: str) -> str:
    """A cell of a CSV file that a spreadsheet shows and does not calculate."""
    line = printable_line(text)  # a line break would begin another row
    return f"'{line}" if line.startswith(FORMULA) else line


class OncePerRun(logging.Filter):
    """Lets a warning pass once: each seed, stage and process of a run has the same to say.

    Warnings of one kind are one, whatever numbers they give.

    Args:
        loggers: whose warnings pass once; all others pass.
    """

    def __init__(self, loggers: tuple[str, ...] = ("semix",)) -> None:
        super().__init__()
        self.loggers = loggers
        self._said: set[tuple[str, object]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or not record.name.startswith(self.loggers):
            return True
        kind = record.name, record.getMessage() if record.msg == "%s" else record.msg
        first = kind not in self._said
        self._said.add(kind)
        return first


def _spelled(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in STEERING:
        return character
    code = ord(character)
    units = (code,) if code < 0x10000 else _surrogates(code)
    return "".join(f"\\u{unit:04x}" for unit in units)


def _surrogates(code: int) -> tuple[int, int]:
    high, low = divmod(code - 0x10000, 0x400)
    return 0xD800 + high, 0xDC00 + low
