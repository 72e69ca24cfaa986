"""Contact sheets: pictures of selected series of a mixed dataset.

Reads the series by number and draws them.
"""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from semix.data.errors import InputError
from semix.data.formats import SeriesRecord
from semix.data.pages import LIGHT
from semix.data.printable import printable
from semix.data.root import Root
from semix.data.tar import GroupSample, read_shard

CELL = 72  # pixels, side of each image shown
GAP = 6
NAME_WIDTH = 92
NAME_SIZES = (14, 10)  # the smaller one if a name would be higher than its images
SMALL = ImageFont.load_default(10)
CAPTION_HEIGHT = 30  # pixels below an image: alpha and weight, then the bar of the soft label
PAPER = "#ffffff"  # background, because a viewer may show the picture on any colour

NEARLY_HARD_BELOW = 0.05  # a `relative_entropy` below it means nearly hard labels


def sample_series(root: Root, count: int = 10) -> list[int]:
    """Numbers of up to `count` committed series, from as many class sets as possible.

    Raises:
        InputError: no shard is committed.
        ValueError: a commit record is damaged.
    """
    shards = root.done()
    if not shards:
        raise InputError("url", root.url, "holds no finished series yet; run `semix resume`")
    groups = np.concatenate([np.asarray(root.layout.groups_of(shard)) for shard in shards])
    read: set[int] = set()
    while True:  # until all chosen series are in their shards
        chosen = groups[spread_over_sets(groups % root.stored_plan.num_pairs, count)]
        unread = {root.layout.shard_of(group) for group in chosen.tolist()} - read
        if not unread:
            return sorted(chosen.tolist())
        read |= unread
        groups = groups[~np.isin(groups, [g for shard in unread for g in _not_in(root, shard)])]


def _not_in(root: Root, shard: int) -> list[int]:
    """Groups that are planned for a shard and not in it."""
    record = root.record(shard)
    present = set(record.group_numbers) if record else set()
    return [group for group in root.layout.groups_of(shard) if group not in present]


def spread_over_sets(sets: np.ndarray, count: int) -> list[int]:
    """Positions of up to `count` series, spread evenly over as many class sets as possible.

    Args:
        sets: int [G], number of the set of classes that each series mixes.
    """
    order = np.argsort(sets, kind="stable")
    _, starts, sizes = np.unique(sets[order], return_index=True, return_counts=True)
    if len(starts) >= count:
        # From the first set take an early series, from the last a late one, so that the sample
        # covers the whole dataset.
        return [
            int(order[starts[class_set] + number * sizes[class_set] // count])
            for number in range(count)
            for class_set in [(2 * number + 1) * len(starts) // (2 * count)]
        ]
    num_earlier = np.arange(len(sets)) - np.repeat(starts, sizes)  # series of the same set
    positions: list[int] = order[np.lexsort((order, num_earlier))][:count].tolist()
    return positions


def shard_of(root: Root, group: int) -> int:
    """Number of the shard that holds, or will hold, this group.

    Raises InputError: no such group.
    """
    last = root.plan.num_groups - 1
    if not 0 <= group <= last:
        raise InputError("group", group, f"{root.url} has groups 0 to {last}")
    return root.layout.shard_of(group)


def read_series(root: Root, groups: Sequence[int]) -> list[GroupSample]:
    """Read the series of these groups, in their order; only their shards are read.

    Raises:
        InputError: a group that is in no committed shard, or was left out of its shard.
        ValueError: a shard is damaged.
    """
    requested = set(groups)
    series_by_group: dict[int, GroupSample] = {}
    for shard in sorted({shard_of(root, group) for group in groups}):
        record = root.record(shard)
        if record is None:
            continue
        for series in record.left_out:
            if series.group in requested:
                raise InputError("group", series.group, f"was left out: {series.reason}")
        samples = read_shard(root.store, record, num_classes=root.num_classes)
        series_by_group |= {s.record.group: s for s in samples if s.record.group in requested}
    for group in groups:
        if group not in series_by_group:
            remedy = f"is not made yet; run `semix resume {root.url} --shards "
            raise InputError("group", group, f"{remedy}{shard_of(root, group)}`")
    return [series_by_group[group] for group in groups]


def relative_entropy(samples: Sequence[GroupSample]) -> float:
    """Mean of the labels' entropy, divided by that of uniform labels over the series' classes."""
    ratios = [
        -sum(p * math.log(p) for _, p in label if p > 0) / math.log(len(sample.record.classes))
        for sample in samples
        for label in sample.record.labels
    ]
    return sum(ratios) / len(ratios)


def contact_sheet(samples: Sequence[GroupSample]) -> Image.Image:
    """Draw one row per series: its number, and its images by ascending alpha.

    The name of the second class is to their left, that of the first class to their right. Below
    each image are alpha and raw CLIP weight; a bar in two colours shows the soft label.
    """
    columns = max(len(sample.images) for sample in samples)
    width = 2 * NAME_WIDTH + columns * (CELL + GAP) + GAP
    names = [
        (WrappedNames.of(s.record.names[:1]), WrappedNames.of(s.record.names[1:])) for s in samples
    ]
    heights = [max(CELL, *(name.height for name in pair)) for pair in names]
    total = sum(height + CAPTION_HEIGHT + 2 * GAP for height in heights) + GAP
    sheet, top = Image.new("RGB", (width, total), PAPER), GAP
    for sample, pair, height in zip(samples, names, heights, strict=True):
        _draw_series(sheet, sample, *pair, top=top, height=height)
        top += height + CAPTION_HEIGHT + 2 * GAP
    return sheet


def _draw_series(
    sheet: Image.Image,
    sample: GroupSample,
    first: "WrappedNames",
    second: "WrappedNames",
    *,
    top: int,
    height: int,
) -> None:
    draw, record = ImageDraw.Draw(sheet), sample.record
    middle = top + height // 2
    order = sorted(range(len(sample.images)), key=lambda position: record.alphas[position])
    second.draw(draw, (NAME_WIDTH - GAP, middle), LIGHT.second, to_the_left=True)
    number = (NAME_WIDTH - GAP, top + height + 3)
    draw.text(number, f"series {record.group}", LIGHT.muted, SMALL, anchor="rt")
    pixels = sample.pixels()
    for column, position in enumerate(order):
        image, corner = Image.fromarray(pixels[position], "RGB"), NAME_WIDTH + column * (CELL + GAP)
        _draw_image(sheet, image, record, position, (corner, top))
    first.draw(draw, (NAME_WIDTH + len(order) * (CELL + GAP), middle), LIGHT.first)


def _draw_image(
    sheet: Image.Image,
    image: Image.Image,
    record: SeriesRecord,
    position: int,
    corner: tuple[int, int],
) -> None:
    draw, (left, top) = ImageDraw.Draw(sheet), corner
    sheet.paste(image.resize((CELL, CELL), Image.Resampling.BICUBIC), corner)
    text = f"{record.alphas[position]:.2f}  {record.weights[position]:.2f}"
    draw.text((left + CELL // 2, top + CELL + 3), text, LIGHT.ink, SMALL, anchor="mt")
    probability = dict(record.labels[position])[record.classes[0]]
    split = left + CELL - round(CELL * probability)
    bar = top + CELL + 18
    draw.rectangle((left, bar, left + CELL - 1, bar + 5), LIGHT.second)
    if split < left + CELL:
        draw.rectangle((split, bar, left + CELL - 1, bar + 5), LIGHT.first)


# Names of classes are users' text, in any script.


@dataclass(frozen=True)
class WrappedNames:
    """One or more class names, wrapped into lines that fit beside a series."""

    lines: tuple[str, ...]
    font_size: int  # pixels

    @classmethod
    def of(cls, names: Sequence[str]) -> "WrappedNames":
        """Wrap the names, each on a new line, in the largest font size that fits CELL."""
        legible_names = [_legible(name) for name in names]
        for font_size in NAME_SIZES:
            lines = chain.from_iterable(_wrapped(name, font_size) for name in legible_names)
            wrapped = cls(tuple(lines), font_size)
            if wrapped.height <= CELL:
                break
        return wrapped

    @property
    def line_height(self) -> int:
        return round(1.2 * self.font_size)

    @property
    def height(self) -> int:
        return self.line_height * len(self.lines)

    def draw(
        self,
        draw: ImageDraw.ImageDraw,
        anchor: tuple[int, int],
        colour: str,
        *,
        to_the_left: bool = False,
    ) -> None:
        """Draw the lines.

        Args:
            anchor: the middle of the text's left edge, or of its right edge if `to_the_left`.
        """
        x, y = anchor[0], anchor[1] - self.height // 2 + self.font_size
        for number, line in enumerate(self.lines):
            left = x - _width(line, self.font_size) if to_the_left else float(x)
            for font, run in _font_runs(line, self.font_size):
                draw.text((left, y + number * self.line_height), run, colour, font, anchor="ls")
                left += font.getlength(run)


def _legible(name: str) -> str:
    """The name; letters missing in all fonts are replaced by their code point: `<U+1F600>`."""
    text = printable(unicodedata.normalize("NFC", " ".join(name.split())))
    return "".join(c if _font_file(c) else f"<U+{ord(c):04X}>" for c in text)


def _wrapped(text: str, font_size: int) -> Iterator[str]:
    """Lines of at most NAME_WIDTH, broken after a space, a hyphen or `_` where possible."""
    max_width = NAME_WIDTH - 2 * GAP
    while _width(text, font_size) > max_width:
        # Letters are at least about one pixel wide, so no more than `max_width` of them can fit.
        lengths = range(1, min(len(text), max_width) + 1)
        fits = max(1, sum(_width(text[:n], font_size) <= max_width for n in lengths))
        end = max(text.rfind(mark, 0, fits) for mark in " -_") + 1
        yield text[: end or fits].rstrip()
        text = text[end or fits :]
    yield text


def _width(text: str, font_size: int) -> float:
    return sum(font.getlength(run) for font, run in _font_runs(text, font_size))


def _font_runs(text: str, font_size: int) -> Iterator[tuple[ImageFont.FreeTypeFont, str]]:
    """Split the text into runs of one font; every letter must have a font."""
    for file, letters in groupby(text, key=_font_file):
        assert file is not None
        yield _font(file, font_size), "".join(letters)


@cache
def _font(file: str, font_size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, font_size)


@cache
def _font_file(letter: str) -> str | None:
    """The first font with this letter: matplotlib's DejaVu Sans, else one of this machine."""
    return next((file for file in _font_files() if _draws_letter(file, letter)), None)


@cache
def _font_files() -> list[str]:
    """DejaVu Sans, which matplotlib installs, then the fonts of this machine, regular ones first.

    Other fonts of matplotlib are left out: they are for formulas, or have a box for every letter.
    """
    import matplotlib.font_manager  # takes a second; most commands draw nothing

    shipped = Path(matplotlib.get_data_path())
    fonts = sorted(
        (font.style != "normal", font.weight != 400, font.fname)
        for font in matplotlib.font_manager.fontManager.ttflist
        if not Path(font.fname).is_relative_to(shipped)
    )
    return [str(shipped / "fonts" / "ttf" / "DejaVuSans.ttf"), *(file for *_, file in fonts)]


def _draws_letter(file: str, letter: str) -> bool:
    """Whether a font draws this letter, or has it as white space."""
    letters = _letters(file)
    if ord(letter) not in letters:
        return False
    with suppress(OSError):  # a bitmap font without this size
        return letter.isspace() or _font(file, NAME_SIZES[0]).getmask(letter).getbbox() is not None
    return False


@cache
def _letters(file: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    with suppress(RuntimeError, OSError):  # a damaged file counts as a font without letters
        return frozenset(FT2Font(file).get_charmap())
    return frozenset()
