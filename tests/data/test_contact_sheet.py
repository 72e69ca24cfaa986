import numpy as np
from PIL import ImageColor

from data.contact_sheet import CELL, GAP, NAME_WIDTH, contact_sheet
from data.images import encode_image
from data.pages import LIGHT
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
    first_colour, second_colour = map(ImageColor.getrgb, (LIGHT.first, LIGHT.second))
    assert sheet.getpixel((first, bar)) == second_colour
    left = NAME_WIDTH + CELL + GAP  # 0.75 of the first class, on the side where its name stands
    assert sheet.getpixel((left + int(0.2 * CELL), bar)) == second_colour
    assert sheet.getpixel((left + int(0.3 * CELL), bar)) == first_colour
    other = GroupSample({**record, "group": 123456}, sample.images, "webp")
    numbers = (0, GAP + CELL, NAME_WIDTH - GAP, GAP + CELL + 16)  # differ where nothing else does
    other_sheet = contact_sheet([other, other])
    assert sheet.crop(numbers).tobytes() != other_sheet.crop(numbers).tobytes()
