import json
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageColor

from data.errors import InputError
from data.images import encode_image
from data.pages import LIGHT
from data.root import Root
from data.series import (
    CELL,
    GAP,
    NAME_WIDTH,
    contact_sheet,
    some_of_all_pairs,
    spread_over_sets,
)
from data.store import Store
from data.tar import GroupSample
from tests.data.whole_roots import commit_record
from tests.handmade import make_plan, record, series_of

PAIRS, TURNS = 10, 12  # every twelfth of 120 series, which is even, would meet five pairs alone


def root_of(folder: Path, committed: range, turns: int | None = TURNS) -> Root:
    plan = make_plan(24, PAIRS * TURNS)
    plan["config"]["mixing"]["groups_per_pair"] = turns
    store = Store(str(folder))
    store.create("plan.json", json.dumps(plan).encode())
    for shard in committed:
        record = commit_record(shard, groups=5)
        store.create(f"shards/0000/{shard:07d}.json", record.written())
    return Root(str(folder))


@pytest.mark.parametrize("committed", [range(24), range(2, 4), range(1, 24, 2)])
def test_what_is_shown_is_of_different_pairs_however_they_are_numbered(
    tmp_path: Path, committed: range
):
    root = root_of(tmp_path, committed)
    groups = some_of_all_pairs(root)
    there = {group for shard in committed for group in root.layout.groups_of(shard)}
    assert there >= set(groups) and groups == some_of_all_pairs(root)
    assert {group % PAIRS for group in groups} == {group % PAIRS for group in there}
    assert len(groups) == 10


def test_a_plan_that_does_not_say_how_its_pairs_return(tmp_path: Path):
    with pytest.raises(InputError, match=r"config\.mixing\.groups_per_pair = None"):
        some_of_all_pairs(root_of(tmp_path, range(2), None))


def test_each_set_is_taken_before_a_set_twice():
    sets = np.array([0, 0, 1, 2, 2])
    assert spread_over_sets(sets, 4) == [0, 2, 3, 1]
    assert spread_over_sets(sets, 9) == [0, 2, 3, 1, 4]
    assert spread_over_sets(np.arange(8), 4) == [1, 3, 5, 7]
    assert spread_over_sets(np.array([0, 1, 0, 1]), 2) == [0, 3]  # and from all of the dataset


def test_images_stand_in_the_order_of_alpha_over_the_bar_of_their_label():
    pixels = [np.full((8, 8, 3), value, dtype=np.uint8) for value in (250, 10)]
    values = record(
        0,
        classes=[4, 2],
        names=["four", "two"],
        alphas=[1.0, 0.0],
        weights=[0.9, 0.2],
        labels=[[[4, 0.75], [2, 0.25]], [[4, 0.0], [2, 1.0]]],
    )
    sample = GroupSample(series_of(values), [encode_image(p, "webp") for p in pixels], "webp")
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
    other = GroupSample(series_of(values | {"group": 123456}), sample.images, "webp")
    numbers = (0, GAP + CELL, NAME_WIDTH - GAP, GAP + CELL + 16)  # differ where nothing else does
    other_sheet = contact_sheet([other, other])
    assert sheet.crop(numbers).tobytes() != other_sheet.crop(numbers).tobytes()
