import numpy as np
from PIL import Image

from data.contact_sheet import CELL, FIRST, GAP, NAME_WIDTH, SECOND, contact_sheet
from data.images import encode_image
from data.shards import GroupSample


def test_images_stand_in_the_order_of_alpha_over_the_bar_of_their_label():
    pixels = [np.full((8, 8, 3), value, dtype=np.uint8) for value in (250, 10)]
    record = {
        "group": 0,
        "classes": [4, 2],
        "names": ["four", "two"],
        "alphas": [1.0, 0.0],
        "weights": [0.9, 0.2],
        "labels": [[[4, 0.75], [2, 0.25]], [[4, 0.0], [2, 1.0]]],
    }
    sample = GroupSample(record, [encode_image(p, "webp") for p in pixels], "webp")
    sheet = contact_sheet([sample, sample])
    middle = GAP + CELL // 2
    first, second = NAME_WIDTH + CELL // 2, NAME_WIDTH + CELL + GAP + CELL // 2
    assert sheet.getpixel((first, middle)) == (10, 10, 10)  # alpha 0
    assert sheet.getpixel((second, middle)) == (250, 250, 250)  # alpha 1
    bar = GAP + CELL + 20
    blue, orange = (Image.new("RGB", (1, 1), c).getpixel((0, 0)) for c in (FIRST, SECOND))
    assert sheet.getpixel((first, bar)) == orange
    left = NAME_WIDTH + CELL + GAP
    assert sheet.getpixel((left + int(0.7 * CELL), bar)) == blue
    assert sheet.getpixel((left + int(0.8 * CELL), bar)) == orange
