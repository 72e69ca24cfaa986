"""Parts of a batch: all of it once, and shares with which means add up."""

import pytest
import torch

from calib.batches import Batch, micro_batches
from calib.check import check_shares
from data.errors import InputError


def make_batch(real: int = 6, mixed: int | None = 7) -> Batch:
    images = torch.arange(real).view(real, 1, 1, 1)
    batch = (images, torch.arange(real), torch.arange(real) + 100)
    if mixed is None:
        return Batch(*batch)
    return Batch(*batch, torch.arange(mixed).view(mixed, 1, 1, 1), torch.rand(mixed, 3))


def test_parts_hold_everything_once_and_means_add_up():
    batch = make_batch()
    parts = list(micro_batches(batch, 3))
    for name in ("images", "targets", "indices", "mixed_images", "mixed_labels"):
        joined = torch.cat([getattr(part.batch, name) for part in parts])
        torch.testing.assert_close(joined, getattr(batch, name))
    assert [len(part.batch.mixed_images) for part in parts] == [3, 2, 2]
    mean = sum(part.mixed * part.batch.mixed_labels.mean() for part in parts)
    torch.testing.assert_close(mean, batch.mixed_labels.mean())
    assert [part.real for part in parts] == [1 / 3] * 3


def test_one_part_is_the_batch_itself():
    batch = make_batch(mixed=None)
    [part] = micro_batches(batch, 1)
    assert part.batch is batch
    assert part.real == 1


def test_parts_without_mixed_images():
    parts = list(micro_batches(make_batch(mixed=None), 2))
    assert [part.batch.indices.tolist() for part in parts] == [[100, 101, 102], [103, 104, 105]]
    assert all(part.batch.mixed_images is None for part in parts)


@pytest.mark.parametrize(
    ("mixed", "count", "text"),
    [
        (None, 4, r"^accumulate = 4: the 6 real images of a process make no such number of equal"),
        (None, 6, r"^accumulate = 6: .* equal parts of 2 images or more"),
        (5, 3, r"^accumulate = 3: the 5 mixed images of a step leave fewer than 2 for each part"),
    ],
)
def test_parts_that_cannot_be_are_refused(mixed, count, text):
    with pytest.raises(InputError, match=text):
        list(micro_batches(make_batch(mixed=mixed), count))


@pytest.mark.parametrize(
    ("overrides", "processes", "text"),
    [
        (
            ["batch_size=21"],
            2,
            r"^batch_size = 21: 2 processes share it equally; choose a multiple",
        ),
        (["batch_size=4"], 4, r"^batch_size = 4: .* with 2 images for each at least"),
        (["head.batch_size=21"], 2, r"^head\.batch_size = 21: 2 processes"),
        (["accumulate=4"], 2, r"^accumulate = 4: the 10 real images of a process"),
    ],
)
def test_shares_are_checked_before_anything_is_read(make_config, overrides, processes, text):
    check_shares(make_config(), processes)
    with pytest.raises(InputError, match=text):
        check_shares(make_config(*overrides), processes)
