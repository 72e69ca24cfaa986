"""Mixup against itself written in NumPy."""

import numpy as np
import pytest
import torch

from calib.losses import build_loss
from calib.methods import build_method

CE = build_loss("ce", 5)


def outcome_of(linear, batch, seed: int = 0, **params):
    torch.manual_seed(seed)
    return build_method("mixup", 5, **params)(linear, batch, CE)


def share_seen(linear, batch) -> float:
    """The lambda that the images say: x = lambda own + (1 - lambda) before."""
    own = batch.images.double()
    before = own.roll(1, 0)
    difference = own - before
    return float(((linear.seen[-1] - before) * difference).sum() / difference.square().sum())


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_the_blends(linear, make_batch, peer, seed):
    batch = make_batch(seed=seed)
    outcome = outcome_of(linear, batch, seed, alpha=1.0)
    share = share_seen(linear, batch)
    images = share * batch.images.double() + (1 - share) * batch.images.double().roll(1, 0)
    torch.testing.assert_close(linear.seen[-1].double(), images, atol=1e-3, rtol=0)
    one_hot = peer.one_hot(batch.targets)
    labels = share * one_hot + (1 - share) * np.roll(one_hot, 1, axis=0)
    expected = peer.cross_entropy(peer.logits(linear, images), labels)
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5)
    outcome.loss.backward()
    gradient = torch.from_numpy(peer.weight_gradient(linear, images, labels)).float()
    torch.testing.assert_close(linear.layer.weight.grad, gradient, atol=1e-6, rtol=1e-5)
    assert outcome.targets.tolist() == labels.argmax(1).tolist()


def test_heavier_keeps_the_larger_share(linear, make_batch):
    batch = make_batch()
    shares = {
        heavier: [
            outcome_of(linear, batch, seed, heavier=heavier) and share_seen(linear, batch)
            for seed in range(20)
        ]
        for heavier in (False, True)
    }
    assert min(shares[False]) < 0.4
    assert min(shares[True]) >= 0.5 - 1e-6
    assert shares[True] == pytest.approx([max(share, 1 - share) for share in shares[False]])


def test_a_seed_draws_the_same_blends(linear, make_batch):
    batch = make_batch()
    first, again, other = (outcome_of(linear, batch, seed).loss for seed in (3, 3, 4))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert first != other
