"""Figures of an epoch's steps: their means, and the first that is no number."""

import pytest
import torch

from calib.loop import CHECK_EVERY, Diverged, EpochRecord


def test_means_are_over_the_steps(accelerator):
    record = EpochRecord(2, accelerator)
    record.note(0, torch.tensor([1.0, 0.5, 0.25]))
    record.note(1, torch.tensor([3.0, 0.0, 0.75]))
    record.check()
    assert record.means() == {"loss": 2.0, "mixed_loss": 0.25, "accuracy": 0.5}


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({(4, 0): float("nan")}, r"^step 5 of 60: the real loss is NaN or infinite"),
        ({(4, 1): float("inf"), (5, 0): float("nan")}, r"^step 5 of 60: the mixed loss is NaN"),
        ({(7, 0): float("-inf"), (7, 1): float("inf")}, r"^step 8 of 60: the real loss is NaN"),
    ],
)
def test_the_first_loss_that_is_no_number_is_named(accelerator, bad, text):
    record = EpochRecord(60, accelerator)
    for (step, part), value in bad.items():
        record.figures[step, part] = value
    with pytest.raises(Diverged, match=text):
        record.check()


def test_an_epoch_does_not_go_on_for_long(accelerator):
    record = EpochRecord(10 * CHECK_EVERY, accelerator)
    record.note(0, torch.tensor([float("nan"), 0.0, 0.0]))
    with pytest.raises(Diverged, match=r"^step 1 of 500"):
        for step in range(1, CHECK_EVERY):
            record.note(step, torch.zeros(3))
    assert step == CHECK_EVERY - 1
