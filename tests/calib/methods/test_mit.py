"""MIT: what is recovered from two blends."""

import pytest
import torch

from calib.losses import build_loss
from calib.methods import build_method
from calib.methods.mixing import draw_apart, recover
from data.errors import InputError

CE = build_loss("ce", 5)


def test_recovery_by_hand():
    # a = 4 and b = 8 in shares of 3/4 and 1/4.
    a, b = recover(torch.tensor([[5.0]]), torch.tensor([[7.0]]), (0.75, 0.25))
    assert (a.item(), b.item()) == (4.0, 8.0)


def test_recovery_is_exact_for_a_linear_network():
    torch.manual_seed(0)
    layer, images = torch.nn.Linear(7, 5).double(), torch.rand(2, 9, 7).double()
    weights = (0.9, 0.2)
    blends = [layer(w * images[0] + (1 - w) * images[1]) for w in weights]
    for got, own in zip(recover(*blends, weights), images, strict=True):
        torch.testing.assert_close(got, layer(own).float())


@pytest.mark.parametrize("seed", range(5))
def test_with_a_linear_network_it_is_plain_cross_entropy(linear, make_batch, peer, seed):
    batch = make_batch(seed=seed)
    torch.manual_seed(seed)
    outcome = build_method("mit", 5)(linear, batch, CE)
    images, labels = batch.images.double(), peer.one_hot(batch.targets)
    expected = peer.cross_entropy(peer.logits(linear, images), labels)
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5)
    outcome.loss.backward()
    gradient = torch.from_numpy(peer.weight_gradient(linear, images, labels)).float()
    torch.testing.assert_close(linear.layer.weight.grad, gradient, atol=1e-6, rtol=1e-4)
    assert len(linear.seen) == 2
    assert not torch.allclose(*linear.seen)
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
    own, other = (row[0] * first + row[1] * second for row in matrix)
    expected = (CE(own, batch.targets) + CE(other, batch.targets[partners])) / 2
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("margin", [0.0, 0.5, 0.8])
def test_weights_lie_on_both_sides_and_apart(margin: float):
    torch.manual_seed(0)
    drawn = torch.tensor([draw_apart(0.5, margin) for _ in range(300)])
    assert (drawn[:, 0] >= 0.5).all()
    assert (drawn[:, 1] <= 0.5).all()
    assert (drawn[:, 0] - drawn[:, 1]).min() >= margin
    assert (drawn[:, 0] - drawn[:, 1]).min() < margin + 0.1


def test_weights_that_would_never_be_drawn_are_refused():
    with pytest.raises(InputError, match=r"method\.margin = 0\.9: with alpha 50 lambdas so far"):
        build_method("mit", 5, alpha=50.0, margin=0.9)
