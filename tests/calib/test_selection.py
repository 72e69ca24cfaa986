"""Which epoch is kept and when training ends, on made-up measures."""

import pytest
import torch
from torch import nn

from semix.calib.config import EarlyStopConfig
from semix.calib.divergence import Diverged
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


def test_the_nll_after_scaling_forgives_overconfidence_and_is_computed_where_it_is_asked_for():
    rng = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (200,), generator=rng)
    logits = nn.functional.one_hot(targets, 3) + torch.randn(200, 3, generator=rng)
    calm, loud = (
        validation_measures(Outputs(scale * logits, logits, targets), scaled=True)
        for scale in (1, 20)
    )
    assert loud["nll"] > 2 * calm["nll"]
    assert loud["scaled_nll"] == pytest.approx(calm["scaled_nll"], rel=1e-5)
    assert calm["scaled_nll"] <= calm["nll"]
    assert "scaled_nll" not in validation_measures(Outputs(logits, logits, targets))


def test_what_asks_for_a_temperature():
    by_scaled = EarlyStopConfig(measure="scaled_nll")
    assert EpochSelection("scaled_nll", None).needs_temperature
    assert EpochSelection("last", by_scaled).needs_temperature
    assert not EpochSelection("nll", EarlyStopConfig()).needs_temperature


def test_infinite_logits_of_finite_weights_are_a_divergence():
    logits = torch.tensor([[1.0, 0.0], [float("inf"), 0.0]])
    outputs = Outputs(logits, torch.zeros(2, 1), torch.tensor([0, 1]))
    with pytest.raises(Diverged, match="a logit of a validation image is NaN or infinite"):
        validation_measures(outputs)
