"""Series that could not be stored: their shard is whole without them, whoever reads it."""

import csv
import json

import numpy as np
import pytest
import torch

from data.dataset import MixedDataset
from data.errors import InputError
from data.exclusion import Exclusion
from data.export import image_rows, write_image_folder
from data.formats import record_name
from data.label_sets import LabelSet
from data.pinned import Pinned
from data.root import Root
from data.series import read_series, some_of_all_pairs
from data.stream import mixed_pipeline
from data.verify import damage, verify
from tests import featured, handmade

GONE = [{1: "image 0 is flat"}, {3: "image 1 holds no numbers"}]  # of three series a shard
KEPT = [0, 2, 4, 5]
AWAY = {4: featured.VECTORS[[0, 0]]}  # shows dog and fox as cats


@pytest.fixture
def root(tmp_path) -> Root:
    samples = [handmade.sample(group) for group in KEPT]
    shards = [samples[:2], samples[2:]]
    return featured.root_of(tmp_path / "root", shards, left_out=GONE, features=AWAY)


def test_their_shard_is_sound(root):
    assert list(verify(root)) == list(verify(root, full=True)) == []
    assert (root.missing(), root.progress().left_out, root.progress().groups_done) == ([], 2, 4)
    again = Root(root.url)  # from the index
    assert [entry.group_numbers for entry in again.entries()] == [[0, 2], [4, 5]]
    assert (again.progress(), list(verify(again, full=True))) == (root.progress(), [])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"left_out": []}, "shard 0: holds 2 groups from 0 on, the plan says else"),
        ({"left_out": [{"group": 0, "reason": "flat"}]}, "holds 2 groups that are not those of"),
        ({"first": 1, "left_out": [{"group": 2, "reason": "flat"}]}, "holds 2 groups from 1 on"),
    ],
)
def test_a_record_that_names_others_is_damage(root, change, text):
    said = json.loads(root.store.get(record_name(0))) | change
    root.store.put(record_name(0), json.dumps(said).encode())
    (problem,) = damage(Root(root.url), full=True)
    assert (problem.shard, problem.kind) == (0, "shard") and text in str(problem)


def test_a_dataset_has_the_others_under_their_numbers(root):
    for limit in (0, 2**30):
        mixed = MixedDataset(root.url, memory_limit=limit)
        assert (mixed.numbers.tolist(), mixed.shard_sizes) == (KEPT, [2, 2])
        for row, group in enumerate(KEPT):
            stored = torch.from_numpy(handmade.pixels(group, 2, 8))
            assert torch.equal(mixed[row]["images"], stored)
            assert mixed[row]["group"] == group


def test_a_stream_and_an_export_have_the_others(root, tmp_path):
    samples = list(mixed_pipeline(root.url, series=True, shuffle=0))
    assert sorted(sample["group"] for sample in samples) == KEPT
    for sample in samples:
        np.testing.assert_array_equal(sample["images"], handmade.pixels(sample["group"], 2, 8))
    rows = [(row.group, row.position) for row in image_rows(Pinned(root))]
    assert rows == [(group, position) for group in KEPT for position in range(2)]
    assert write_image_folder(Pinned(root), tmp_path / "out") == 8
    with (tmp_path / "out" / "labels.csv").open(newline="") as file:
        assert {int(row["group"]) for row in csv.DictReader(file)} == {*KEPT}


def test_features_are_those_of_the_series_that_are_there(root):
    """Row by row; the series before one that is left out, and those behind it."""
    source = Pinned(root)
    for shard in source.shards:
        for features, group in zip(source.features(shard), shard.group_numbers, strict=True):
            seen = AWAY.get(group, featured.features_of(handmade.sample(group).record))
            np.testing.assert_array_equal(features, seen)
    mixed = MixedDataset(root.url, exclude=Exclusion(end_points=True))
    assert mixed.numbers.tolist() == [0, 2, 5]


def test_a_label_set_labels_the_others(root):
    digest = featured.label_set(root, {})
    labels = LabelSet(root, digest)
    assert (labels.missing(), labels.progress().groups_done) == ([], 4)
    assert damage(root, full=True) == []
    assert MixedDataset(root.url, labels=digest).numbers.tolist() == KEPT


def test_single_series_are_found_or_say_why_they_are_not_there(root):
    assert [sample.record.group for sample in read_series(root, [5, 0])] == [5, 0]
    for group, reason in {**GONE[0], **GONE[1]}.items():
        with pytest.raises(InputError, match=f"^group = {group}: was left out: {reason}$"):
            read_series(root, [5, group])
    with pytest.raises(InputError, match=r"^group = 6: .* has groups 0 to 5$"):
        read_series(root, [6])
    assert sorted(some_of_all_pairs(root, 9)) == KEPT
    root.discard(1)
    with pytest.raises(InputError, match=r"^group = 3: is not made yet; run .* --shards 1`$"):
        read_series(root, [0, 3])
    assert some_of_all_pairs(root, 9) == [0, 2]
