"""Which epoch is kept and when training ends, on made-up measures."""

import pytest
import torch
from torch import nn

from semix.calib.config import EarlyStopConfig
from semix.calib.loop import Diverged
from semix.calib.losses.base import Outputs
from semix.calib.selection import EpochSelection, is_better, validation_measures


def note(selection: EpochSelection, name: str, values: list[float]) -> list[bool]:
    """Note epochs whose weight is their number; returns `finished` after each of them."""
    network, finished = nn.Linear(1, 1), []
    for epoch, value in enumerate(values):
        nn.init.constant_(network.weight, epoch)
        selection.note({name: value}, network, epoch)
        finished.append(selection.finished)
    return finished


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("accuracy", [0.1, 0.5, 0.5, 0.3], 1),
        ("nll", [2.0, 1.0, 0.5, 0.5], 2),
        ("ece", [0.3, 0.1, 0.2, 0.4], 1),
        ("nll", [float("nan"), 2.0, 3.0, float("nan")], 1),
    ],
)
def test_the_first_of_the_best_epochs_is_kept(name, values, best):
    selection = EpochSelection(name, None)
    assert note(selection, name, values) == [False] * 4
    torch.testing.assert_close(selection.best["weight"], torch.full((1, 1), float(best)))


def test_it_ends_after_so_many_epochs_without_an_improvement():
    selection = EpochSelection("last", EarlyStopConfig(measure="nll", patience=2))
    values = [3.0, 2.0, 2.5, 1.9, 1.9, 2.0]
    assert note(selection, "nll", values) == [False] * 5 + [True]
    assert selection.best == {}


def test_it_goes_on_from_its_state():
    early_stop = EarlyStopConfig(measure="nll", patience=2)
    first, second = EpochSelection("nll", early_stop), EpochSelection("nll", early_stop)
    note(first, "nll", [1.0, 1.5])
    second.load_state_dict(first.state_dict(), first.best)
    assert note(second, "nll", [1.2]) == [True]
    torch.testing.assert_close(second.best["weight"], torch.zeros(1, 1))


def test_nothing_is_watched_by_default():
    assert not EpochSelection("last", None).needs_validation
    assert EpochSelection("brier", None).needs_validation
    assert EpochSelection("last", EarlyStopConfig()).needs_validation


def test_only_accuracy_is_better_when_higher():
    assert is_better("accuracy", {"accuracy": 0.6}, 0.5)
    assert not is_better("brier", {"brier": 0.6}, 0.5)


def test_infinite_logits_of_finite_weights_are_a_divergence():
    logits = torch.tensor([[1.0, 0.0], [float("inf"), 0.0]])
    outputs = Outputs(logits, torch.zeros(2, 1), torch.tensor([0, 1]))
    with pytest.raises(Diverged, match="a logit of a validation image is NaN or infinite"):
        validation_measures(outputs)
