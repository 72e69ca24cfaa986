"""Series of a mixed dataset as one picture: what a person looks at first."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from data.images import decode_image
from data.pages import LIGHT
from data.shards import GroupSample

CELL = 72  # pixels, side of each image shown
GAP = 6
NAME_WIDTH = 92
SMALL = ImageFont.load_default(10)
TEXT = 30  # pixels below an image: alpha and weight, then the bar of the soft label
PAPER = "#ffffff"  # a picture of its own, which viewers show on any ground


def contact_sheet(samples: Sequence[GroupSample]) -> Image.Image:
    """One row a series with its number, alpha growing to the right, a class name at either end.

    Below each image stand its alpha and its raw CLIP weight; the bar shows the soft label in
    the colours of the two names.
    """
    columns = max(len(sample.images) for sample in samples)
    width = 2 * NAME_WIDTH + columns * (CELL + GAP) + GAP
    row_height = CELL + TEXT + 2 * GAP
    sheet = Image.new("RGB", (width, row_height * len(samples) + GAP), PAPER)
    for row, sample in enumerate(samples):
        _draw_series(sheet, sample, top=GAP + row * row_height)
    return sheet


def _draw_series(sheet: Image.Image, sample: GroupSample, *, top: int) -> None:
    draw, record = ImageDraw.Draw(sheet), sample.record
    font = ImageFont.load_default(14)
    first, *others = record["names"]
    middle = top + CELL // 2
    order = sorted(range(len(sample.images)), key=lambda position: record["alphas"][position])
    draw.text((NAME_WIDTH - GAP, middle), "\n".join(others), LIGHT.second, font, anchor="rm")
    number = (NAME_WIDTH - GAP, top + CELL + 3)
    draw.text(number, f"series {record['group']}", LIGHT.muted, SMALL, anchor="rt")
    for column, position in enumerate(order):
        _draw_image(sheet, sample, position, (NAME_WIDTH + column * (CELL + GAP), top))
    end = NAME_WIDTH + len(order) * (CELL + GAP)
    draw.text((end, middle), first, LIGHT.first, font, anchor="lm")


def _draw_image(
    sheet: Image.Image, sample: GroupSample, position: int, corner: tuple[int, int]
) -> None:
    draw, record, (left, top) = ImageDraw.Draw(sheet), sample.record, corner
    image = Image.fromarray(decode_image(sample.images[position]), "RGB")
    sheet.paste(image.resize((CELL, CELL), Image.Resampling.BICUBIC), corner)
    text = f"{record['alphas'][position]:.2f}  {record['weights'][position]:.2f}"
    draw.text((left + CELL // 2, top + CELL + 3), text, LIGHT.ink, SMALL, anchor="mt")
    share = dict(record["labels"][position])[record["classes"][0]]
    split = left + CELL - round(CELL * share)
    bar = top + CELL + 18
    draw.rectangle((left, bar, left + CELL - 1, bar + 5), LIGHT.second)
    if split < left + CELL:
        draw.rectangle((split, bar, left + CELL - 1, bar + 5), LIGHT.first)
