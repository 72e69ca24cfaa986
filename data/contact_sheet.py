"""Series of a mixed dataset as one picture: what a person looks at first."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from data.images import decode_image
from data.shards import GroupSample

CELL = 72  # pixels, side of each image shown
GAP = 6
NAME_WIDTH = 92
TEXT = 30  # pixels below an image: alpha and weight, then the bar of the soft label
FIRST, SECOND, INK, DIM, PAPER = "#2f6fb0", "#e08a2e", "#202020", "#707070", "#ffffff"


def contact_sheet(samples: Sequence[GroupSample]) -> Image.Image:
    """One row a group, alpha growing to the right, a class name at either end.

    Below each image stand its alpha and its raw CLIP weight; the bar shows the soft label, the
    share of the right-hand class in blue.
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
    draw.text((NAME_WIDTH - GAP, middle), "\n".join(others), SECOND, font, anchor="rm")
    for column, position in enumerate(order):
        _draw_image(sheet, sample, position, (NAME_WIDTH + column * (CELL + GAP), top))
    end = NAME_WIDTH + len(order) * (CELL + GAP)
    draw.text((end, middle), first, FIRST, font, anchor="lm")


def _draw_image(
    sheet: Image.Image, sample: GroupSample, position: int, corner: tuple[int, int]
) -> None:
    draw, record, (left, top) = ImageDraw.Draw(sheet), sample.record, corner
    small = ImageFont.load_default(10)
    image = Image.fromarray(decode_image(sample.images[position]), "RGB")
    sheet.paste(image.resize((CELL, CELL), Image.Resampling.BICUBIC), corner)
    text = f"{record['alphas'][position]:.2f}  {record['weights'][position]:.2f}"
    draw.text((left + CELL // 2, top + CELL + 3), text, INK, small, anchor="mt")
    share = dict(record["labels"][position])[record["classes"][0]]
    split = left + round(CELL * share)
    bar = top + CELL + 18
    draw.rectangle((left, bar, left + CELL - 1, bar + 5), SECOND)
    if split > left:
        draw.rectangle((left, bar, split - 1, bar + 5), FIRST)
