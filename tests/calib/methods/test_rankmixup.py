"""RankMixup: both rankings by hand and in NumPy, and the loss they are part of."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from calib.losses import build_loss
from calib.methods import build_method
from calib.methods.mixing import (
    blend,
    blended_labels,
    draw_partners,
    draw_weight,
    margin_ranking,
    ndcg_shortfall,
)

CE = build_loss("ce", 5)
LOGITS = torch.tensor([[4.0, 1.0], [0.0, 3.0]])
MIXED = torch.tensor([[3.0, 0.0], [0.5, 2.5]])  # by 1 and by 0.5 below
TWO, ONE = [0.7, 0.3], [0.0, 1.0]  # labels of blends of two classes and of one


@pytest.mark.parametrize(
    ("labels", "variant", "expected"),
    [
        ([TWO, TWO], "code", (1.0 + 1.5) / 2),
        ([TWO, TWO], "paper", (1.0 + 1.5) / 2),
        ([TWO, ONE], "paper", 1.0 / 2),
        ([TWO, ONE], "code", 0.5 * (1.0 + 1.5) / 2),  # half of the blends count, all are averaged
        ([ONE, ONE], "code", 0.0),
        ([ONE, ONE], "paper", 0.0),
    ],
)
def test_margin_ranking_by_hand(labels, variant, expected):
    got = margin_ranking(LOGITS, MIXED, torch.tensor(labels), margin=2.0, variant=variant)
    torch.testing.assert_close(got, torch.tensor(expected))


def test_images_surer_by_the_margin_cost_nothing():
    labels = torch.tensor([TWO, TWO])
    assert margin_ranking(LOGITS, MIXED, labels, margin=0.5) == 0


def test_a_label_off_by_rounding_is_of_one_class():
    labels = torch.tensor([[0.0, 1 - 1e-7]])
    assert margin_ranking(LOGITS[:1], MIXED[:1], labels, margin=2.0) == 0


def test_ndcg_by_hand():
    first, second = [0.6, 0.4], [0.9, 0.1]  # confidences of the two blends
    logits = torch.tensor([[0.8, 0.2]]).log()
    mixed = torch.tensor([first, second]).log()
    labels = torch.tensor([[0.6, 0.4], [0.75, 0.25]])  # the second ranks before the first
    gain = 0.8 + 0.9 / math.log2(3) + 0.6 / 2
    ideal = 1 + 0.75 / math.log2(3) + 0.6 / 2
    torch.testing.assert_close(
        ndcg_shortfall(logits, mixed, labels), torch.tensor(1 - gain / ideal)
    )


def test_a_gain_above_the_ideal_is_a_shortfall_too():
    logits, mixed = torch.tensor([[20.0, 0.0]]), torch.tensor([[20.0, 0.0]])
    labels = torch.tensor([[0.5, 0.5]])  # too sure of the blend
    expected = 1 - (1 + 0.5 / math.log2(3)) / (1 + 1 / math.log2(3))
    torch.testing.assert_close(ndcg_shortfall(logits, mixed, labels), torch.tensor(expected))


def softmax_max(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).max(-1)


def margin_peer(logits: np.ndarray, mixed: np.ndarray, labels: np.ndarray) -> float:
    skipped = np.isclose(labels.max(1), 1, atol=1e-6)
    terms = np.maximum(mixed.max(1) - logits.max(1) + 2.0, 0)
    return float(np.outer(~skipped, terms).mean())  # as the official code broadcasts


def ndcg_peer(logits: np.ndarray, mixed: np.ndarray, labels: np.ndarray) -> float:
    total, samples, mixes = 0.0, len(logits), len(mixed) // len(logits)
    for n in range(samples):
        own = [(labels[m * samples + n].max(), mixed[m * samples + n]) for m in range(mixes)]
        ranked = sorted(own, key=lambda pair: -pair[0])
        gains = [softmax_max(logits[n]), *(softmax_max(z) for _, z in ranked)]
        ideals = [1.0, *(label for label, _ in ranked)]
        discounts = [math.log2(rank + 2) for rank in range(mixes + 1)]
        gain, ideal = (sum(np.divide(part, discounts)) for part in (gains, ideals))
        total += 1 - min(gain / ideal, ideal / gain)
    return total / samples


def numeric_gradient(function, logits: np.ndarray, mixed: np.ndarray, labels: np.ndarray):
    """Central differences after the logits of the blends."""
    gradient = np.zeros_like(mixed)
    for place in np.ndindex(*mixed.shape):
        step = np.zeros_like(mixed)
        step[place] = 1e-6
        ends = [function(logits, mixed + sign * step, labels) for sign in (1, -1)]
        gradient[place] = (ends[0] - ends[1]) / 2e-6
    return gradient


def drawn(mixes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of images, of their blends, and these blends' labels."""
    torch.manual_seed(seed)
    targets = torch.randint(5, (6,))
    labels = [
        blended_labels(targets, draw_partners(targets), draw_weight(2.0), 5) for _ in range(mixes)
    ]
    return 3 * torch.randn(6, 5), 3 * torch.randn(6 * mixes, 5), torch.cat(labels)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("peer_of", "ranking", "mixes"),
    [
        (margin_peer, lambda *parts: margin_ranking(*parts, margin=2.0), 1),
        (ndcg_peer, ndcg_shortfall, 1),
        (ndcg_peer, ndcg_shortfall, 3),
    ],
)
def test_rankings_and_their_gradients_in_numpy(peer_of, ranking, mixes, seed):
    logits, mixed, labels = drawn(mixes, seed)
    arrays = [part.double().numpy() for part in (logits, mixed, labels)]
    mixed.requires_grad_()
    got = ranking(logits, mixed, labels)
    assert got.item() == pytest.approx(peer_of(*arrays), rel=1e-5)
    got.backward()
    expected = torch.from_numpy(numeric_gradient(peer_of, *arrays)).float()
    torch.testing.assert_close(mixed.grad, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "mixes", "used"), [("mrl", None, 1), ("mndcg", None, 3), ("mrl", 2, 2)]
)
def test_the_loss_is_that_of_the_images_and_a_share_of_the_ranking(
    linear, make_batch, kind, mixes, used
):
    batch = make_batch()
    method = build_method("rankmixup", 5, kind=kind, weight=0.3, mixes=mixes, margin=0.01)
    torch.manual_seed(2)
    outcome = method(linear, batch, CE)
    torch.manual_seed(2)
    blends, labels = [], []
    for _ in range(used):
        share, partners = draw_weight(2.0), draw_partners(batch.targets)
        blends.append(linear(blend(batch.images, partners, share))[0])
        labels.append(blended_labels(batch.targets, partners, share, 5))
    logits, _ = linear(batch.images)
    parts = (
        logits.repeat(used, 1) if kind == "mrl" else logits,
        torch.cat(blends),
        torch.cat(labels),
    )
    ranked = margin_ranking(*parts, margin=0.01) if kind == "mrl" else ndcg_shortfall(*parts)
    torch.testing.assert_close(outcome.loss, CE(logits, batch.targets) + 0.3 * ranked)
    torch.testing.assert_close(outcome.logits, logits)
