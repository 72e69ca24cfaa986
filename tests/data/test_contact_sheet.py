"""Which series a contact sheet shows and how; series that a shard lacks, in every reader."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ImageColor

from semix.data.contact_sheet import (
    CELL,
    GAP,
    NAME_WIDTH,
    contact_sheet,
    read_series,
    relative_entropy,
    sample_series,
    spread_over_sets,
)
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.export import image_rows, write_image_folder
from semix.data.formats import record_name
from semix.data.images import encode_image
from semix.data.label_sets import LabelSet
from semix.data.pages import LIGHT
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.store import Store
from semix.data.stream import mixed_pipeline
from semix.data.tar import GroupSample
from semix.data.verify import damage, verify
from tests import featured, handmade
from tests.data.whole_roots import commit_record
from tests.handmade import make_plan, record, series_of

PAIRS, TURNS = 10, 12  # every twelfth of 120 series would show five of the ten pairs alone


def root_of(folder: Path, committed: range, turns: int = TURNS) -> Root:
    plan = make_plan(24, PAIRS * TURNS)
    plan["groups_per_pair"] = turns
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
    shown_series = sample_series(root)
    committed_series = {group for shard in committed for group in root.layout.groups_of(shard)}
    assert committed_series >= set(shown_series) and shown_series == sample_series(root)
    assert {group % PAIRS for group in shown_series} == {
        group % PAIRS for group in committed_series
    }
    assert len(shown_series) == 10


def test_each_set_is_taken_before_a_set_twice():
    class_sets = np.array([0, 0, 1, 2, 2])
    assert spread_over_sets(class_sets, 4) == [0, 2, 3, 1]
    assert spread_over_sets(class_sets, 9) == [0, 2, 3, 1, 4]
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
    image_y = GAP + CELL // 2
    first_x, second_x = NAME_WIDTH + CELL // 2, NAME_WIDTH + CELL + GAP + CELL // 2
    assert sheet.getpixel((first_x, image_y)) == (10, 10, 10)  # alpha 0
    assert sheet.getpixel((second_x, image_y)) == (250, 250, 250)  # alpha 1
    bar_y = GAP + CELL + 20
    first_colour, second_colour = map(ImageColor.getrgb, (LIGHT.first, LIGHT.second))
    assert sheet.getpixel((first_x, bar_y)) == second_colour
    bar_start = (
        NAME_WIDTH + CELL + GAP
    )  # 0.75 of the first class, on the side where its name stands
    assert sheet.getpixel((bar_start + int(0.2 * CELL), bar_y)) == second_colour
    assert sheet.getpixel((bar_start + int(0.3 * CELL), bar_y)) == first_colour
    renumbered = GroupSample(series_of(values | {"group": 123456}), sample.images, "webp")
    number_box = (0, GAP + CELL, NAME_WIDTH - GAP, GAP + CELL + 16)  # only there the sheets differ
    other_sheet = contact_sheet([renumbered, renumbered])
    assert sheet.crop(number_box).tobytes() != other_sheet.crop(number_box).tobytes()


LONG = "Donaudampfschifffahrtsgesellschaftskapit"


def sheet_of(first: str, second: str) -> np.ndarray:
    """Pixels of a sheet that has one series of one dark image."""
    labels = [[[4, 0.5], [2, 0.5]]]
    fields = {"classes": [4, 2], "names": [first, second], "labels": labels}
    values = record(0, alphas=[0.5], weights=[0.5], **fields)
    picture = encode_image(np.zeros((8, 8, 3), dtype=np.uint8), "webp")
    return np.asarray(contact_sheet([GroupSample(series_of(values), [picture], "webp")]))


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("K\u00e4se", "K\u00f6se"),
        ("\u0416\u0443\u043a", "\u0420\u0430\u043a"),  # Cyrillic
        ("\u732b", "\u72ac"),  # cat and dog in Chinese, of which a machine may have no font
        ("\U0001f408", "\U0001f415"),  # likewise, as pictures
        ("\U000f0001", "\U000f0002"),  # for private use: no font has them
        ("a\u202eb", "ab"),
        (f"{LONG}\u00e4n", f"{LONG}in"),
        ("great_white_crested_cormorant", "great_white_crested_corncrake"),
        (250 * "x", 249 * "x"),
    ],
)
def test_names_are_whole_and_differ_on_the_sheet_in_any_script(name: str, similar: str):
    for names in ((name, "cat"), ("cat", name)):
        sheet = sheet_of(*names)
        changed = sheet_of(*(similar if label == name else label for label in names))
        assert sheet.shape != changed.shape or (sheet != changed).any()
        edges = [sheet[0], sheet[-1], sheet[:, 0], sheet[:, -1]]
        assert all((edge == 255).all() for edge in edges)  # nothing goes beyond the paper
        left_margin, right_margin = sheet[:, :NAME_WIDTH], sheet[:, NAME_WIDTH + CELL + 1 :]
        assert (left_margin != 255).any() and (right_margin != 255).any()
        beside = sheet[:, [NAME_WIDTH - 1, NAME_WIDTH + CELL]]
        assert (beside == 255).all()  # nor over the image


OMITTED = [{1: "image 0 is flat"}, {3: "image 1 holds no numbers"}]  # per shard of three series
KEPT = [0, 2, 4, 5]
AWAY = {4: featured.VECTORS[[0, 0]]}  # shows dog and fox as cats


@pytest.fixture
def lacking(tmp_path) -> Root:
    samples = [handmade.sample(group) for group in KEPT]
    shards = [samples[:2], samples[2:]]
    return featured.root_of(tmp_path / "root", shards, left_out=OMITTED, features=AWAY)


def test_their_shard_is_sound(lacking):
    assert list(verify(lacking)) == list(verify(lacking, full=True)) == []
    progress = lacking.progress()
    assert (lacking.missing(), lacking.totals().left_out, progress.groups_done) == ([], 2, 6)
    reopened = Root(lacking.url)
    assert [entry.group_numbers for entry in reopened.records()] == [[0, 2], [4, 5]]
    assert (reopened.progress(), list(verify(reopened, full=True))) == (progress, [])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"left_out": []}, "shard 0: holds 2 groups from 0 on, the plan says otherwise"),
        (
            {"left_out": [{"group": 0, "reason": "flat"}]},
            "holds group 0, its record says",
        ),
        ({"first": 1, "left_out": [{"group": 2, "reason": "flat"}]}, "holds 2 groups from 1 on"),
    ],
)
def test_a_record_that_names_others_is_damage(lacking, change, text):
    values = json.loads(lacking.store.get(record_name(0))) | change
    lacking.store.put(record_name(0), json.dumps(values).encode())
    (problem,) = damage(Root(lacking.url), full=True)
    assert (problem.shard, problem.kind) == (0, "shard") and text in str(problem)


def test_a_dataset_has_the_others_under_their_numbers(lacking):
    for limit in (0, 2**30):
        mixed = MixedDataset(lacking.url, memory_limit=limit)
        assert (mixed.numbers.tolist(), mixed.shard_sizes) == (KEPT, [2, 2])
        for row, group in enumerate(KEPT):
            stored = torch.from_numpy(handmade.pixels(group, 2, 8))
            assert torch.equal(mixed[row]["images"], stored)
            assert mixed[row]["group"] == group


def test_a_stream_and_an_export_have_the_others(lacking, tmp_path):
    samples = list(mixed_pipeline(lacking.url, series=True, shuffle=0))
    assert sorted(sample["group"] for sample in samples) == KEPT
    for sample in samples:
        np.testing.assert_array_equal(sample["images"], handmade.pixels(sample["group"], 2, 8))
    rows = [(row.group, row.position) for row in image_rows(PinnedRoot(lacking))]
    assert rows == [(group, position) for group in KEPT for position in range(2)]
    assert write_image_folder(PinnedRoot(lacking), tmp_path / "out") == 8
    with (tmp_path / "out" / "labels.csv").open(newline="") as file:
        assert {int(row["group"]) for row in csv.DictReader(file)} == {*KEPT}


def test_features_are_those_of_the_series_that_are_there(lacking):
    """Compared row by row, for series before and after one that is left out."""
    source = PinnedRoot(lacking)
    for shard in source.shards:
        for features, group in zip(source.features(shard), shard.group_numbers, strict=True):
            expected = AWAY.get(group, featured.features_of(handmade.sample(group).record))
            np.testing.assert_array_equal(features, expected)
    mixed = MixedDataset(lacking.url, exclude=Exclusion(end_points=True))
    assert mixed.numbers.tolist() == [0, 2, 5]


def test_a_label_set_labels_the_others(lacking):
    digest = featured.label_set(lacking, {})
    labels = LabelSet(lacking, digest)
    assert (labels.missing(), labels.progress().groups_done) == ([], 6)
    assert damage(lacking, full=True) == []
    assert MixedDataset(lacking.url, labels=digest).numbers.tolist() == KEPT


def test_single_series_are_found_or_say_why_they_are_not_there(lacking):
    assert [sample.record.group for sample in read_series(lacking, [5, 0])] == [5, 0]
    for group, reason in {**OMITTED[0], **OMITTED[1]}.items():
        with pytest.raises(InputError, match=f"^group = {group}: was left out: {reason}$"):
            read_series(lacking, [5, group])
    with pytest.raises(InputError, match=r"^group = 6: .* has groups 0 to 5$"):
        read_series(lacking, [6])
    assert sorted(sample_series(lacking, 9)) == KEPT
    lacking.discard(1)
    with pytest.raises(InputError, match=r"^group = 3: is not made yet; run .* --shards 1`$"):
        read_series(lacking, [0, 3])
    assert sample_series(lacking, 9) == [0, 2]


def test_the_entropy_of_labels_is_told_in_that_of_even_ones():
    """Five images from class to class have 0, 0.8113, 1, 0.8113 and 0 bits."""
    samples = [GroupSample(series_of(record(0, 5)), [], "webp")]
    assert relative_entropy(samples) == pytest.approx(2.6226 / 5, abs=1e-4)
