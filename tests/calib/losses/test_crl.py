"""CRL: history, ranking, gradients and state."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from calib.losses import build_loss, build_training_loss
from calib.losses.penalties import CorrectnessRanking
from data.errors import InputError
from tests.calib.losses.formulas import batch
from tests.calib.losses.whole_batch import assert_agrees, cross_entropy, probabilities

NOTHING = SimpleNamespace()  # CRL asks nothing of the classifier after an epoch


def crl(num_samples: int = 8, classes: int = 5, **params: object) -> CorrectnessRanking:
    loss = build_loss("crl", classes, num_samples=num_samples, **params)
    assert isinstance(loss, CorrectnessRanking)
    return loss


def remember(loss: CorrectnessRanking, right: list[int], seen: list[int], epochs: int) -> None:
    loss.right.copy_(torch.tensor(right))
    loss.seen.copy_(torch.tensor(seen))
    loss.epochs.fill_(epochs)


def test_history_counts_right_predictions_by_index():
    loss = crl(4, 2)
    sure = torch.tensor([[1.0, 0.0]] * 2)
    loss(sure, torch.tensor([0, 1]), indices=torch.tensor([3, 0]))
    assert loss.right.tolist() == [0, 0, 0, 1]
    assert loss.seen.tolist() == [1, 0, 0, 1]
    loss.end_epoch(NOTHING)
    loss(sure, torch.tensor([0, 0]), indices=torch.tensor([3, 2]))
    assert loss.right.tolist() == [0, 0, 1, 2]
    assert loss.seen.tolist() == [1, 0, 1, 2]
    assert loss.epochs.item() == 1


def test_ranking_by_hand():
    # After 4 epochs shares are (r - 1) / (4 - 1): 0, 1, 1/3 of samples 1, 2, 0.
    loss = crl(3, 2, weight=2.0).eval()
    remember(loss, [2, 1, 4], [4, 4, 4], 4)
    logits = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]).log()
    got = loss(logits, torch.tensor([0, 0, 0]), indices=torch.tensor([1, 2, 0]))
    pairs = [
        1 + (0.9 - 0.7),  # the first was right less often than the second, and is more confident
        2 / 3 - (0.7 - 0.6),
        1 / 3 - (0.6 - 0.9),
    ]
    wanted = -math.log(0.9 * 0.7 * 0.4) / 3 + 2 * (pairs[0] + pairs[1] + pairs[2]) / 3
    torch.testing.assert_close(got, torch.tensor(wanted))


def test_a_batch_is_not_judged_by_itself():
    loss = crl(2, 2)
    logits, targets = torch.tensor([[3.0, 0.0], [2.0, 0.0]]), torch.tensor([1, 0])
    plain = build_loss("ce", 2)(logits, targets)
    first = loss(logits, targets, indices=torch.tensor([0, 1]))
    torch.testing.assert_close(first, plain)  # nothing is known yet
    assert loss(logits, targets, indices=torch.tensor([0, 1])) > plain


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("confidence", ["softmax", "entropy", "margin"])
def test_agrees_with_its_formula(confidence: str, variant: str):
    right, seen = [5, 1, 4, 4, 6, 1, 3, 2], [6, 5, 7, 8, 6, 6, 3, 7]
    loss = crl(confidence=confidence, variant=variant, weight=1.5).eval()
    remember(loss, right, seen, 6)
    logits, targets = batch(samples=6, classes=5, scale=1.0)
    indices = [2, 3, 7, 0, 5, 1]  # in the code's way 2 and 3 tie, as do 5 and 1

    def of(p: list[float]) -> float:
        if confidence == "entropy":
            return sum(q * math.log(q) for q in p) / math.log(5)
        largest = sorted(p)[::-1]
        return largest[0] - (largest[1] if confidence == "margin" else 0)

    def share(n: int) -> float:
        return right[n] / seen[n] if variant == "paper" else (right[n] - 1) / (6 - 1)

    def formula(z: np.ndarray) -> float:
        c = [of(p) for p in probabilities(z)]
        total = 0.0
        for i in range(6):
            j = (i + 1) % 6
            ahead = share(indices[i]) - share(indices[j])
            total += max(0.0, abs(ahead) - np.sign(ahead) * (c[i] - c[j]))
        return cross_entropy(z, targets) + 1.5 * total / 6

    assert_agrees(loss, formula, logits, targets, indices=torch.tensor(indices))


@pytest.mark.parametrize(("epochs", "margin"), [(0, 1.0), (1, 1.0), (2, 0.5), (3, 1 / 3)])
def test_the_first_two_epochs_divide_by_one(epochs: int, margin: float):
    loss = crl(2, 2).eval()
    for _ in range(epochs):
        loss.end_epoch(NOTHING)
    loss.right.copy_(torch.tensor([0, 1]))
    equal = torch.tensor([[1.0, 0.0]] * 2)
    got = loss(equal, torch.tensor([0, 0]), indices=torch.tensor([0, 1]))
    torch.testing.assert_close(
        got - build_loss("ce", 2)(equal, torch.tensor([0, 0])), margin + 0 * got
    )


def test_always_right_throughout_ranks_nothing():
    # r and its minimum equal the number of epochs: the official code divides 0 by 0 here.
    loss = crl(2, 2).eval()
    remember(loss, [3, 3], [3, 3], 3)
    logits, targets = torch.tensor([[3.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0])
    got = loss(logits, targets, indices=torch.tensor([1, 0]))
    torch.testing.assert_close(got, build_loss("ce", 2)(logits, targets))


def test_eval_leaves_the_history():
    loss = crl().eval()
    logits, targets = batch(samples=4)
    loss(logits, targets, indices=torch.arange(4))
    assert loss.seen.sum() == 0


def test_state_survives_save_and_load(tmp_path: Path):
    loss = crl(12)
    logits, targets = batch()
    loss(logits, targets, indices=torch.arange(12))
    loss.end_epoch(NOTHING)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    again = crl(12)
    again.load_state_dict(torch.load(tmp_path / "loss.pt"))
    expected = loss(logits, targets, indices=torch.arange(12))
    got = again(logits, targets, indices=torch.arange(12))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert got > build_loss("ce", 5)(logits, targets)


def test_the_trainer_says_how_many_samples_there_are():
    loss = build_training_loss("crl", 5, num_samples=17, params={"weight": 0.5})
    assert loss.state_dict()["right"].shape == (17,)


def test_bad_input_is_named():
    logits, targets = batch(samples=4)
    with pytest.raises(ValueError, match=r"indices are None: CRL needs \[4\], one a sample"):
        crl()(logits, targets)
    with pytest.raises(ValueError, match=r"indices are \(3,\): CRL needs \[4\]"):
        crl()(logits, targets, indices=torch.arange(3))
    with pytest.raises(IndexError, match=r"index 8 is out of bounds"):
        crl()(logits, targets, indices=torch.tensor([0, 1, 2, 8]))
    with pytest.raises(ValueError, match=r"logits have 1 row: CRL compares pairs of samples"):
        crl()(logits[:1], targets[:1], indices=torch.tensor([0]))


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, r"loss\.num_samples = 0: give the number of training images, at least 1"),
        ({"num_samples": 4, "weight": -1}, r"loss\.weight = -1: must be 0 or more"),
        ({"num_samples": 4, "confidence": "x"}, r"loss\.confidence = x: choose one of softmax, e"),
        ({"num_samples": 4, "variant": "x"}, r"loss\.variant = x: choose one of code, paper"),
    ],
)
def test_bad_settings_are_named(params: dict, text: str):
    with pytest.raises(InputError, match=text):
        build_loss("crl", 5, **params)
