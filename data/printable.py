"""Text from anywhere as what may go to a terminal."""

import unicodedata

KEPT = "\n\t"
# Control characters steer a terminal; format characters turn text around or hide it.
STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    """The text with characters that steer a terminal spelled out, as JSON spells them."""
    return "".join(_spelled(character) for character in text)


def _spelled(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in STEERING:
        return character
    code = ord(character)
    units = (code,) if code < 0x10000 else _surrogates(code)
    return "".join(f"\\u{unit:04x}" for unit in units)


def _surrogates(code: int) -> tuple[int, int]:
    high, low = divmod(code - 0x10000, 0x400)
    return 0xD800 + high, 0xDC00 + low
