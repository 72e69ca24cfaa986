"""Text from anywhere as what may go to a terminal, or into Markdown."""

import logging
import unicodedata

KEPT = "\n\t"
# Control characters steer a terminal; format characters turn text around or hide it.
STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")
MARKUP = r"\`*_[]<>|#&~"  # of Markdown; raw HTML is a part of it


def printable(text: str) -> str:
    """The text with characters that steer a terminal spelled out, as JSON spells them."""
    return "".join(_spelled(character) for character in text)


def markdown_text(text: str) -> str:
    """The text in one line of Markdown that shows it as it is, in a cell of a table too."""
    line = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in MARKUP else letter for letter in line)


class OncePerRun(logging.Filter):
    """Lets a warning pass once: each seed, stage and process of a run has the same to say.

    Warnings of one kind are one, whatever numbers they give.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said: set[tuple[str, object]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
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
