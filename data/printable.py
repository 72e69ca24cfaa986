"""Safe text for a terminal, Markdown or a spreadsheet, whatever its source.

All output of semix passes through here, because names and reasons come from users' files.
"""

import logging
import sys
import traceback
import unicodedata
from typing import Any, TextIO

ALLOWED = "\n\t"
# Control characters steer a terminal; format characters reverse or hide text.
ESCAPED_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
MARKUP = r"\`*_[]<>|#&~"  # characters with a meaning in Markdown, which includes raw HTML
# First characters of formulas in spreadsheets, including the wide forms of East Asia.
FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def printable(text: str) -> str:
    """The text with characters that steer a terminal escaped as in JSON."""
    if text.isprintable():  # nearly every text, and ten times as fast
        return text
    return "".join(_escape(character) for character in text)


def printable_line(text: str) -> str:
    """`printable` in one line, for a value in a sentence: no name can begin a new line."""
    return printable(text).replace("\n", r"\n").replace("\t", r"\t")


def print_line(text: str, *, file: TextIO | None = None) -> None:
    """Print one line without buffering, by default on standard output."""
    print(printable(text).replace("\n", "\n  "), file=file, flush=True)


def print_traceback() -> None:
    """Print the traceback of the current error on standard error."""
    print(printable(traceback.format_exc()), file=sys.stderr, end="", flush=True)


def markdown_text(text: str) -> str:
    """One line of Markdown that shows the text literally, also in a cell of a table."""
    line = " ".join(text.split())
    escaped = "".join(f"\\{letter}" if letter in MARKUP else letter for letter in line)
    return printable(escaped)


def spreadsheet_text(text: str) -> str:
    """The text of a CSV cell that no spreadsheet takes for a formula."""
    line = printable_line(text)  # a line break would begin another row
    return f"'{line}" if line.startswith(FORMULA) else line


class OncePerRun(logging.Filter):
    """Log filter that passes each warning once, because all seeds and processes of a run repeat it.

    Warnings that differ only in their arguments count as the same.

    Args:
        loggers: prefixes of the names of filtered loggers; records of other loggers always pass.
    """

    def __init__(self, loggers: tuple[str, ...] = ("semix",)) -> None:
        super().__init__()
        self.loggers = loggers
        self._passed: set[tuple[str, object]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or not record.name.startswith(self.loggers):
            return True
        kind = record.name, record.getMessage() if record.msg == "%s" else record.msg
        is_first = kind not in self._passed
        self._passed.add(kind)
        return is_first


def _escape(character: str) -> str:
    if character in ALLOWED or unicodedata.category(character) not in ESCAPED_CATEGORIES:
        return character
    code = ord(character)
    units = (code,) if code < 0x10000 else _surrogates(code)
    return "".join(f"\\u{unit:04x}" for unit in units)


def _surrogates(code: int) -> tuple[int, int]:
    high, low = divmod(code - 0x10000, 0x400)
    return 0xD800 + high, 0xDC00 + low


def noise_in_words(facts: dict[str, Any]) -> str:
    """`select, stability 0.812, scores (0.812, 0.64)`: the strategy, then the known values."""
    measured = (item for item in facts.items() if item[0] != "strategy")
    values = {key: value for key, value in measured if value is not None}
    texts = [f"{key.replace('_', ' ')} {_value_text(value)}" for key, value in values.items()]
    return ", ".join([str(facts.get("strategy", "unknown")), *texts])


def _value_text(value: Any) -> str:
    """A value as text: numbers to three digits, lists in brackets, None as `unknown`."""
    if isinstance(value, list):
        return f"({', '.join(map(_value_text, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_value_text(item)}' for key, item in value.items())})"
    return (
        f"{value:.3g}" if isinstance(value, float) else "unknown" if value is None else str(value)
    )
