"""Self-contained HTML pages: base template, and the colours of all pages and pictures."""

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from semix.data.formats import SeriesRecord

THUMB = 128  # pixels; larger images are shrunk for the page
PIXEL_ART = 64  # pixels; images up to this size are enlarged without smoothing


@dataclass(frozen=True)
class Theme:
    """Colours on a light or a dark page.

    Attributes:
        first: the first class of a series (alpha = 1), and values of it, such as its CLIP weight.
        second: its other classes. Colour-blind readers can distinguish blue and orange.
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


def page_environment(folder: Path) -> Environment:
    """The templates in `folder`, which extend base.html.j2, and need a page.css there.

    A page runs the variable `script`, if it is given one, and no other script.
    """
    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,  # class names, paths and settings are users' text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"fixed": fixed, "sha256": _digest_of_script}
    environment.globals |= {"light": asdict(LIGHT), "dark": asdict(DARK)}
    return environment


def _digest_of_script(text: str) -> str:
    """As a Content-Security-Policy names it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def fixed(value: float, decimals: int = 2) -> str:
    """0.756 -> "0.76", -0.001 -> "0.00", -0.5 -> "\N{MINUS SIGN}0.50"."""
    # Adding 0.0 turns a negative zero after rounding into zero.
    return f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True)
class Frame:
    """One image of a series."""

    source: str  # data URI
    alpha: float  # conditioning weight of the first class
    weight: float  # raw CLIP projection on the first class
    first: float  # soft label of the first class, in [0, 1]
    second: float  # sum of the soft labels of its other classes


@dataclass(frozen=True)
class SeriesFigure:
    """One series, from its other classes (alpha 0) to its first class (alpha 1)."""

    group: int
    first: str
    second: str
    note: str  # shown after its number
    pixelated: bool
    frames: tuple[Frame, ...]


def series_figure(record: SeriesRecord, images: Sequence[np.ndarray], *, note: str) -> SeriesFigure:
    """The values of one series that series.html.j2 shows.

    Args:
        images: uint8 [H, W, 3] each, in the order of the record's alphas.
    """
    first = record.classes[0]
    label_dicts = [dict(label) for label in record.labels]
    frames = tuple(
        Frame(
            source=_data_uri(images[position]),
            alpha=record.alphas[position],
            weight=record.weights[position],
            first=label_dicts[position].pop(first, 0.0),
            second=sum(label_dicts[position].values()),
        )
        for position in np.argsort(record.alphas, kind="stable").tolist()
    )
    first_name, *second_names = record.names
    pixelated = max(images[0].shape[:2]) <= PIXEL_ART
    return SeriesFigure(record.group, first_name, " + ".join(second_names), note, pixelated, frames)


def _data_uri(image: np.ndarray) -> str:
    """The image as WebP: lossless in its own size, lossy if it is shrunk."""
    picture = Image.fromarray(image)
    shrunk = max(picture.size) > THUMB
    if shrunk:
        picture.thumbnail((THUMB, THUMB), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=not shrunk, quality=85)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
