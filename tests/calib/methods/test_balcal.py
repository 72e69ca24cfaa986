"""BalCAL: the frame, the balance, and the loss in NumPy."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from semix.calib.batches import TrainingBatch
from semix.calib.config.loss import LOSSES
from semix.calib.losses import build_loss, build_mixed_loss
from semix.calib.losses.base import Outputs
from semix.calib.methods import build_method
from semix.calib.methods.balcal import (
    BalancedClassifier,
    BalCAL,
    find_balance,
    frequency_scale,
    simplex_frame,
)
from semix.calib.models import build_model
from semix.data.errors import InputError

CE = build_loss("ce", 4)
TARGETS = torch.tensor([0, 1, 1, 1, 2, 2, 0, 1])


def adapted(*, start: float = 0.8, scale: float = 1.0) -> tuple[BalCAL, nn.Module]:
    torch.manual_seed(0)
    method = build_method("balcal", 4, start=start, etf_scale=scale)
    backbone = build_model("resnet8", 4, width=2)
    method.adapt(backbone)
    return method, backbone


def features(samples: int = 8) -> Tensor:
    return torch.rand(samples, 8, generator=torch.Generator().manual_seed(1))


def test_the_frame_has_unit_vectors_at_equal_angles():
    frame = simplex_frame(9, 4)
    expected = torch.full((4, 4), -1 / 3) + torch.eye(4) * 4 / 3
    torch.testing.assert_close(frame.T @ frame, expected)


def test_rare_classes_of_a_batch_have_longer_vectors():
    # Counts 2, 4, 2 of three classes present: 8/3 on average.
    expected = torch.tensor([8 / 3 / 2, 8 / 3 / 4, 8 / 3 / 2, 1.0]).sqrt()
    torch.testing.assert_close(frequency_scale(TARGETS, 4), expected)


@pytest.mark.parametrize("start", [0.8, 0.0, 1.0])
def test_loss_and_gradient_in_numpy(peer, start):
    method, backbone = adapted(start=start)
    head, inputs = backbone.classifier, features()
    batch = TrainingBatch(torch.zeros(8, 4, 4, 3), TARGETS, torch.arange(8))
    outcome = method(lambda images: (head(inputs), inputs), batch, CE)
    with torch.no_grad():
        directions = head.adaptor(inputs).double().numpy()  # batch norms see the same batch again
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    linear = (inputs @ head.linear.weight.T + head.linear.bias).detach().double().numpy()
    counts = np.bincount(TARGETS, minlength=4)
    scale = np.sqrt(8 / 3 / np.maximum(counts, 1)) * (counts > 0) + (counts == 0)
    frame = directions @ head.frame.double().numpy()
    labels = np.eye(4)[TARGETS]
    losses = [peer.cross_entropy(linear, labels), peer.cross_entropy(frame * scale, labels)]
    assert outcome.loss.item() == pytest.approx(
        start * losses[0] + (1 - start) * losses[1], rel=1e-5
    )
    mixture = torch.from_numpy(start * linear + (1 - start) * frame).float()
    torch.testing.assert_close(outcome.logits, mixture, atol=1e-5, rtol=1e-4)

    outcome.loss.backward()
    errors = start * (peer.softmax(linear) - labels) / 8
    expected = torch.from_numpy(errors.T @ inputs.double().numpy()).float()
    torch.testing.assert_close(head.linear.weight.grad, expected, atol=1e-6, rtol=1e-4)
    frame_learns = sum(p.grad.abs().sum().item() for p in head.adaptor.parameters())
    assert (frame_learns > 0) == (start < 1)
    assert not head.frame.requires_grad


def test_the_classifier_is_the_balance_of_both_in_eval_mode():
    _, backbone = adapted(start=0.3, scale=5.0)
    head = backbone.classifier.eval()
    linear, frame = head.both(features())
    torch.testing.assert_close(head(features()), 0.3 * linear + 0.7 * frame)
    assert frame.abs().max() <= 5.0
    assert frame.abs().max() > 1.0
    assert head.train()(features()).shape == (8, 8)


def logits_of(confidence: float, right: list[bool]) -> Tensor:
    """Two classes; sure of the right one or of the other by the same confidence."""
    odds = torch.tensor(confidence / (1 - confidence)).log()
    return torch.stack([odds if hit else -odds for hit in right])[:, None] * torch.tensor(
        [1.0, 0.0]
    )


def test_a_linear_head_that_is_not_sure_enough_stays_alone():
    right = [True, True, True, False]
    targets = torch.zeros(4, dtype=torch.long)
    timid = logits_of(0.7, right)  # less than 0.95 of an accuracy of 0.75
    assert find_balance(timid, timid / 2, targets, delta=0.95) == 1.0
    assert find_balance(logits_of(0.72, right), timid / 2, targets, delta=0.95) < 1.0


def test_the_balance_makes_confidence_delta_times_accuracy():
    torch.manual_seed(0)
    targets = torch.randint(6, (400,))
    sure = nn.functional.one_hot(targets, 6) * 4 + 3 * torch.randn(400, 6)
    frame = nn.functional.one_hot(targets, 6) * 0.5 + 0.1 * torch.randn(400, 6)
    balance = find_balance(sure, frame, targets, delta=0.95)
    confidence, predicted = (balance * sure + (1 - balance) * frame).softmax(1).max(1)
    accuracy = (predicted == targets).float().mean()
    assert 0.05 < balance < 0.95
    torch.testing.assert_close(confidence.mean(), 0.95 * accuracy, atol=2e-3, rtol=0)


def test_a_frame_that_is_surer_still_does_not_help():
    right = [True, True, False]
    targets = torch.zeros(3, dtype=torch.long)
    bold, bolder = logits_of(0.9, right), logits_of(0.99, right)
    assert find_balance(bold, bolder, targets, delta=0.95) == 1.0


class FixedFeedback:
    """Feedback that returns these features and targets."""

    def __init__(self, features: Tensor, targets: Tensor) -> None:
        self.features, self.targets = features, targets

    def outputs(self, split: str) -> Outputs:
        assert split == "train"
        return Outputs(torch.zeros(len(self.features), 4), self.features, self.targets)


def test_after_an_epoch_loss_and_classifier_have_the_new_balance():
    method, backbone = adapted()
    head, inputs = backbone.classifier, features()
    with torch.no_grad():
        head.linear.weight.mul_(40)
    targets = head.linear(inputs).argmax(1).detach()
    targets[:3] = (targets[:3] + 1) % 4  # an accuracy of 5/8
    backbone.train()
    state = {name: value.clone() for name, value in head.state_dict().items()}
    method.end_epoch(backbone, FixedFeedback(inputs, targets))
    assert head.training
    linear, frame = head.eval().both(inputs)
    expected = find_balance(linear, frame, targets, delta=0.95)
    assert 0 < expected < 0.8
    assert method.balance.item() == head.balance.item() == pytest.approx(expected)
    for name, value in head.state_dict().items():  # nothing else has moved
        assert torch.equal(value, state[name]) == (name != "balance")


def test_one_balance_is_kept_and_the_network_saves_it():
    method, backbone = adapted(start=0.3)
    assert method.balance is backbone.classifier.balance
    assert method.state_dict() == {}
    assert backbone.state_dict()["classifier.balance"] == pytest.approx(0.3)
    other = BalancedClassifier(nn.Linear(8, 4), 8, 4, balance=0.8, scale=1.0)
    other.load_state_dict(backbone.classifier.state_dict())
    torch.testing.assert_close(other.eval()(features()), backbone.classifier.eval()(features()))


def test_mixed_images_train_both_heads():
    method, backbone = adapted()
    head, inputs = backbone.classifier, features()
    labels, loss = torch.rand(8, 4).softmax(1), build_mixed_loss("l2")
    got, logits = method.on_mixed(
        lambda images: (head(inputs), inputs), torch.zeros(8, 4, 4, 3), labels, loss
    )
    linear, frame = head.both(inputs)
    torch.testing.assert_close(got, 0.8 * loss(linear, labels) + 0.2 * loss(frame, labels))
    torch.testing.assert_close(logits, 0.8 * linear + 0.2 * frame)


def test_too_few_features_are_named():
    method = build_method("balcal", 10)
    with pytest.raises(InputError, match=r"method\.name = balcal: needs 10 features or more, the"):
        method.adapt(build_model("resnet8", 10, width=2))


def test_its_losses_are_there():
    assert set(BalCAL.losses) <= set(LOSSES)
