"""Losses of a whole batch, or with a state, compute in float32 whatever they are given."""

import pytest
import torch

from calib.losses import build_training_loss
from calib.losses.base import RealLoss
from tests.calib.losses.formulas import batch

NAMES = ["mmce", "mmce_weighted", "mdca", "cpc", "crl", "ada_focal"]


def built(name: str) -> RealLoss:
    loss = build_training_loss(name, 5, num_samples=12, params={}).eval()
    if name == "crl":
        loss.right.copy_(torch.arange(12) % 3)
    if name == "ada_focal":
        loss.gammas.copy_(torch.linspace(-2, 5, 15))
    return loss


@pytest.mark.parametrize("name", NAMES)
def test_autocast_does_not_round(name: str):
    logits, targets = batch()
    loss, indices = built(name), torch.arange(12)
    expected = loss(logits, targets, indices=indices)
    with torch.autocast("cpu", torch.bfloat16):
        got = loss(logits, targets, indices=indices)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_logits_are_as_if_given_in_float32(name: str):
    logits, targets = batch()
    logits = logits.bfloat16()
    loss, indices = built(name), torch.arange(12)
    got = loss(logits, targets, indices=indices)
    expected = loss(logits.float(), targets, indices=indices)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_checked_without_memory(name: str):
    with torch.device("meta"):
        loss = build_training_loss(name, 5, num_samples=1, params={})
    assert all(tensor.is_meta for tensor in loss.state_dict().values())
