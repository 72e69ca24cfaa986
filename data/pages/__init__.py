"""Self-contained HTML pages: their frame, and the colours that all pages and pictures share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """Colours on a light or a dark page.

    Attributes:
        first: the first class of a series (alpha = 1), and whatever is measured of it, such as
            its CLIP weight.
        second: the other classes. Blue and orange differ for colour-blind eyes too.
    """

    page: str
    card: str
    ink: str
    muted: str
    line: str
    first: str
    second: str
    mark: str


LIGHT = Theme(
    page="#fbfaf7",
    card="#ffffff",
    ink="#1d2733",
    muted="#5b6775",
    line="#dfe2e6",
    first="#2f6db5",
    second="#c4620f",
    mark="#fbe9c4",
)
DARK = Theme(
    page="#14181d",
    card="#1b2027",
    ink="#e8ebef",
    muted="#a3adb9",
    line="#323a44",
    first="#74aef0",
    second="#f0a052",
    mark="#50401d",
)
