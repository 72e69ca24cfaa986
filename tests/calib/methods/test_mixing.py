"""Blends, Mixup, CutMix, RegMixup, RankMixup and MIT by hand and in NumPy; what PLP freezes."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from semix.calib.losses import build_loss
from semix.calib.losses.base import RealLoss
from semix.calib.methods import build_method
from semix.calib.methods.mixing import (
    blend,
    blended_labels,
    draw_apart,
    draw_partners,
    draw_weight,
    freezing_epoch,
    margin_ranking,
    ndcg_shortfall,
    recover,
)
from semix.calib.models import build_model
from semix.calib.models.base import ImageClassifier
from semix.data.errors import InputError


def test_a_blend_by_hand():
    images = torch.tensor([[40], [80], [120]], dtype=torch.uint8)
    got = blend(images, torch.tensor([1, 2, 0]), 0.75)
    torch.testing.assert_close(got, torch.tensor([[50.0], [90.0], [100.0]]))


def test_labels_of_a_blend_by_hand():
    got = blended_labels(torch.tensor([0, 2, 2]), torch.tensor([1, 2, 0]), 0.7, 3)
    expected = torch.tensor([[0.7, 0.0, 0.3], [0.0, 0.0, 1.0], [0.3, 0.0, 0.7]])
    torch.testing.assert_close(got, expected)


def test_partners_are_each_image_once():
    torch.manual_seed(0)
    assert sorted(draw_partners(torch.zeros(50)).tolist()) == list(range(50))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 20.0])
def test_weights_have_the_moments_of_the_beta_distribution(alpha: float):
    torch.manual_seed(0)
    weights = torch.tensor([draw_weight(alpha) for _ in range(1000)])
    variance = 1 / (4 * (2 * alpha + 1))
    torch.testing.assert_close(weights.mean(), torch.tensor(0.5), atol=0.04, rtol=0)
    torch.testing.assert_close(weights.var(), torch.tensor(variance), atol=0, rtol=0.2)


CE = build_loss("ce", 5)


def mixup(linear, batch, seed: int = 0, **params):
    torch.manual_seed(seed)
    return build_method("mixup", 5, **params)(linear, batch, CE)


def blend_fraction(linear, batch) -> float:
    """Lambda of the last blends that the network saw: x = lambda image + (1 - lambda) partner."""
    images = batch.images.double()
    partners = images.roll(1, 0)
    difference = images - partners
    return float(((linear.inputs[-1] - partners) * difference).sum() / difference.square().sum())


@pytest.mark.parametrize("seed", range(5))
def test_mixup_and_its_gradient_are_those_of_the_blends(linear, make_batch, peer, seed):
    batch = make_batch(seed=seed)
    outcome = mixup(linear, batch, seed, alpha=1.0)
    fraction = blend_fraction(linear, batch)
    images = fraction * batch.images.double() + (1 - fraction) * batch.images.double().roll(1, 0)
    torch.testing.assert_close(linear.inputs[-1].double(), images, atol=1e-3, rtol=0)
    one_hot = peer.one_hot(batch.targets)
    labels = fraction * one_hot + (1 - fraction) * np.roll(one_hot, 1, axis=0)
    expected = peer.cross_entropy(peer.logits(linear, images), labels)
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5)
    outcome.loss.backward()
    gradient = torch.from_numpy(peer.weight_gradient(linear, images, labels)).float()
    torch.testing.assert_close(linear.layer.weight.grad, gradient, atol=1e-6, rtol=1e-5)
    assert outcome.targets.tolist() == labels.argmax(1).tolist()


def test_heavier_mixup_keeps_the_larger_share(linear, make_batch):
    batch = make_batch()
    fractions = {
        heavier: [
            mixup(linear, batch, seed, heavier=heavier) and blend_fraction(linear, batch)
            for seed in range(20)
        ]
        for heavier in (False, True)
    }
    assert min(fractions[False]) < 0.4
    assert min(fractions[True]) >= 0.5 - 1e-6
    assert fractions[True] == pytest.approx(
        [max(fraction, 1 - fraction) for fraction in fractions[False]]
    )


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_a_seed_draws_the_same_blends(linear, make_batch, name):
    method, batch, losses = build_method(name, 5), make_batch(), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        losses.append(method(linear, batch, CE).loss.item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("seed", range(8))
def test_a_box_of_the_image_before_and_its_share_of_the_label(linear, make_batch, peer, seed):
    batch = make_batch(seed=seed)
    torch.manual_seed(seed)
    outcome = build_method("cutmix", 5)(linear, batch, CE)
    before = batch.images.roll(1, 0)
    box = (linear.inputs[-1] != batch.images).any(-1).any(0)  # [S, S]: the box, of all images
    assert torch.equal(torch.where(box[..., None], before, batch.images), linear.inputs[-1])
    rows, columns = box.any(1), box.any(0)
    assert box.sum() == rows.sum() * columns.sum()  # it is a rectangle
    fraction = 1 - box.double().mean().item()
    one_hot = torch.from_numpy(peer.one_hot(batch.targets))
    labels = (fraction * one_hot + (1 - fraction) * one_hot.roll(1, 0)).numpy()
    expected = peer.cross_entropy(peer.logits(linear, linear.inputs[-1]), labels)
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5)
    assert outcome.targets.tolist() == labels.argmax(1).tolist()


@pytest.mark.parametrize(("variant", "scale"), [("code", 0.5), ("paper", 1.0)])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_clean_half_of_regmixup_is_one_hot(linear, make_batch, peer, variant, scale, weight):
    batch = make_batch()
    torch.manual_seed(1)
    outcome = build_method("regmixup", 5, variant=variant, weight=weight)(linear, batch, CE)
    torch.manual_seed(1)
    fraction, partners = draw_weight(20.0), draw_partners(batch.targets).numpy()
    images, one_hot = batch.images.double(), peer.one_hot(batch.targets)
    blends = fraction * images + (1 - fraction) * images[partners]
    blended = fraction * one_hot + (1 - fraction) * one_hot[partners]
    torch.testing.assert_close(
        linear.inputs[0].double(), torch.cat([images, blends]), atol=1e-3, rtol=0
    )

    halves = [(images, one_hot, 1.0), (blends, blended, weight)]
    expected = sum(w * peer.cross_entropy(peer.logits(linear, x), y) for x, y, w in halves)
    assert outcome.loss.item() == pytest.approx(scale * expected, rel=1e-5)
    outcome.loss.backward()
    gradient = sum(w * peer.weight_gradient(linear, x, y) for x, y, w in halves)
    expected = torch.from_numpy(scale * gradient).float()
    torch.testing.assert_close(linear.layer.weight.grad, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(outcome.targets, batch.targets)


class Recording(RealLoss):
    """Keeps the arguments of its last call."""

    def forward(self, logits, targets, *, features=None, indices=None):
        self.arguments = logits, targets, features, indices
        return logits.sum() * 0


@pytest.mark.parametrize("name", ["regmixup", "rankmixup", "plp", "plain"])
def test_a_loss_with_features_never_sees_a_blend(linear, make_batch, name):
    batch, loss = make_batch(), Recording()
    build_method(name, 5)(linear, batch, loss)
    logits, targets, features, indices = loss.arguments
    expected_logits, expected_features = linear(batch.images)
    torch.testing.assert_close(logits, expected_logits)
    torch.testing.assert_close(features, expected_features)
    assert torch.equal(targets, batch.targets)
    assert torch.equal(indices, batch.indices)


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
        blends = [(labels[m * samples + n].max(), mixed[m * samples + n]) for m in range(mixes)]
        ranked = sorted(blends, key=lambda pair: -pair[0])
        gains = [softmax_max(logits[n]), *(softmax_max(z) for _, z in ranked)]
        ideals = [1.0, *(label for label, _ in ranked)]
        discounts = [math.log2(rank + 2) for rank in range(mixes + 1)]
        gain, ideal = (sum(np.divide(values, discounts)) for values in (gains, ideals))
        total += 1 - min(gain / ideal, ideal / gain)
    return total / samples


def numeric_gradient(function, logits: np.ndarray, mixed: np.ndarray, labels: np.ndarray):
    """Central differences with respect to the logits of the blends."""
    gradient = np.zeros_like(mixed)
    for index in np.ndindex(*mixed.shape):
        step = np.zeros_like(mixed)
        step[index] = 1e-6
        ends = [function(logits, mixed + sign * step, labels) for sign in (1, -1)]
        gradient[index] = (ends[0] - ends[1]) / 2e-6
    return gradient


def random_blends(mixes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
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
    logits, mixed, labels = random_blends(mixes, seed)
    arrays = [tensor.double().numpy() for tensor in (logits, mixed, labels)]
    mixed.requires_grad_()
    got = ranking(logits, mixed, labels)
    assert got.item() == pytest.approx(peer_of(*arrays), rel=1e-5)
    got.backward()
    expected = torch.from_numpy(numeric_gradient(peer_of, *arrays)).float()
    torch.testing.assert_close(mixed.grad, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "mixes", "num_blends"), [("mrl", None, 1), ("mndcg", None, 3), ("mrl", 2, 2)]
)
def test_rankmixup_is_the_loss_of_the_images_and_a_share_of_the_ranking(
    linear, make_batch, kind, mixes, num_blends
):
    batch = make_batch()
    method = build_method("rankmixup", 5, kind=kind, weight=0.3, mixes=mixes, margin=0.01)
    torch.manual_seed(2)
    outcome = method(linear, batch, CE)
    torch.manual_seed(2)
    blends, labels = [], []
    for _ in range(num_blends):
        fraction, partners = draw_weight(2.0), draw_partners(batch.targets)
        blends.append(linear(blend(batch.images, partners, fraction))[0])
        labels.append(blended_labels(batch.targets, partners, fraction, 5))
    logits, _ = linear(batch.images)
    inputs = (
        logits.repeat(num_blends, 1) if kind == "mrl" else logits,
        torch.cat(blends),
        torch.cat(labels),
    )
    ranked = margin_ranking(*inputs, margin=0.01) if kind == "mrl" else ndcg_shortfall(*inputs)
    torch.testing.assert_close(outcome.loss, CE(logits, batch.targets) + 0.3 * ranked)
    torch.testing.assert_close(outcome.logits, logits)


def test_recovery_by_hand():
    # a = 4 and b = 8, mixed as 3/4 and 1/4.
    a, b = recover(torch.tensor([[5.0]]), torch.tensor([[7.0]]), (0.75, 0.25))
    assert (a.item(), b.item()) == (4.0, 8.0)


def test_recovery_is_exact_for_a_linear_network():
    torch.manual_seed(0)
    layer, images = torch.nn.Linear(7, 5).double(), torch.rand(2, 9, 7).double()
    weights = (0.9, 0.2)
    blends = [layer(w * images[0] + (1 - w) * images[1]) for w in weights]
    for got, inputs in zip(recover(*blends, weights), images, strict=True):
        torch.testing.assert_close(got, layer(inputs).float())


@pytest.mark.parametrize("seed", range(5))
def test_mit_of_a_linear_network_is_plain_cross_entropy(linear, make_batch, peer, seed):
    batch = make_batch(seed=seed)
    torch.manual_seed(seed)
    outcome = build_method("mit", 5)(linear, batch, CE)
    images, labels = batch.images.double(), peer.one_hot(batch.targets)
    expected = peer.cross_entropy(peer.logits(linear, images), labels)
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5)
    outcome.loss.backward()
    gradient = torch.from_numpy(peer.weight_gradient(linear, images, labels)).float()
    torch.testing.assert_close(linear.layer.weight.grad, gradient, atol=1e-6, rtol=1e-4)
    assert len(linear.inputs) == 2
    assert not torch.allclose(*linear.inputs)
    assert torch.equal(outcome.targets, batch.targets)
    plain = torch.from_numpy(peer.logits(linear, images)).float()
    torch.testing.assert_close(outcome.logits, plain, atol=1e-5, rtol=1e-4)


def test_each_half_has_the_class_of_its_own_image(make_batch):
    """A network that is not linear: its square tells the two halves apart."""
    batch = make_batch()

    def network(images):
        logits = images.float().flatten(1)[:, :5].square() / 1e4
        return logits, logits

    torch.manual_seed(1)
    outcome = build_method("mit", 5, alpha=0.5, margin=0.2)(network, batch, CE)
    torch.manual_seed(1)
    weights = draw_apart(0.5, 0.2)
    partners = torch.randperm(8)
    images = batch.images.double()
    first, second = (network(w * images + (1 - w) * images[partners])[0] for w in weights)
    matrix = torch.tensor([[w, 1 - w] for w in weights]).inverse()
    first_half, second_half = (row[0] * first + row[1] * second for row in matrix)
    expected = (CE(first_half, batch.targets) + CE(second_half, batch.targets[partners])) / 2
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("margin", [0.0, 0.5, 0.8])
def test_weights_lie_on_both_sides_and_apart(margin: float):
    torch.manual_seed(0)
    weights = torch.tensor([draw_apart(0.5, margin) for _ in range(300)])
    assert (weights[:, 0] >= 0.5).all()
    assert (weights[:, 1] <= 0.5).all()
    assert (weights[:, 0] - weights[:, 1]).min() >= margin
    assert (weights[:, 0] - weights[:, 1]).min() < margin + 0.1


def test_weights_that_would_never_be_drawn_are_refused():
    with pytest.raises(InputError, match=r"method\.margin = 0\.9: with alpha 50 lambdas so far"):
        build_method("mit", 5, alpha=50.0, margin=0.9)


@pytest.mark.parametrize(
    ("parts", "epochs", "gamma", "expected"),
    [
        (4, 8, 1.0, [2, 4, 6]),
        (4, 16, 2.0, [1, 4, 9]),
        (4, 16, 0.5, [8, 11, 13]),
        (10, 350, 1.0, [35, 70, 105, 140, 175, 210, 245, 280, 315]),  # 350 * 0.7 is 244.99...
        (11, 200, 1.0, [18, 36, 54, 72, 90, 109, 127, 145, 163, 181]),  # their ResNet-18
        (4, 2, 1.0, [1, 1, 1]),  # every part is trained for an epoch
    ],
)
def test_freezing_epochs_by_hand(parts, epochs, gamma, expected):
    assert [freezing_epoch(i, parts, epochs, gamma) for i in range(1, parts)] == expected


class TwoLayers(ImageClassifier):
    """Two hidden layers with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.num_features = 6
        self.stem = nn.Sequential(nn.Linear(48, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.features = nn.Sequential(nn.Flatten(), self.stem, self.block)
        self.classifier = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(images.float() / 255)

    def freezing_order(self) -> list[nn.Module]:
        return [self.classifier, self.block, self.stem]


@pytest.mark.parametrize(
    "optimiser",
    [
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
        lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
    ],
)
def test_frozen_weights_stay_and_statistics_follow(make_batch, optimiser):
    torch.manual_seed(0)
    backbone, method = TwoLayers(), build_method("plp", 5)
    steps = optimiser(backbone.parameters())
    moved = []
    for epoch in range(6):
        before = {name: value.clone() for name, value in backbone.state_dict().items()}
        method.start_epoch(backbone, epoch, 6)
        method(backbone, make_batch(seed=epoch), CE).loss.backward()
        method.after_backward(backbone)
        steps.step()
        steps.zero_grad()
        changed = {n for n, v in backbone.state_dict().items() if not torch.equal(v, before[n])}
        assert {"stem.1.running_mean", "block.1.running_mean", "stem.0.weight"} <= changed
        moved.append(("block.0.weight" in changed, "classifier.bias" in changed))
    assert moved == [(True, True)] * 2 + [(True, False)] * 2 + [(False, False)] * 2


def test_what_is_frozen_is_a_function_of_the_epoch_alone():
    resumed = build_method("plp", 5)
    resumed.start_epoch(TwoLayers(), 5, 6)
    assert resumed.num_frozen == 2
    resumed.start_epoch(TwoLayers(), 0, 6)
    assert resumed.num_frozen == 0


def test_a_resnet_is_frozen_down_to_its_stem():
    backbone = build_model("resnet8", 5, width=2)
    method = build_method("plp", 5)
    method.start_epoch(backbone, 999, 1000)
    for parameter in backbone.parameters():
        parameter.grad = torch.ones_like(parameter)
    method.after_backward(backbone)
    trained = [name for name, value in backbone.named_parameters() if value.grad is not None]
    assert trained
    assert all(name.startswith("features.stem") for name in trained)
