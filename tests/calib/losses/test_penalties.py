"""ECP, CPC, MDCA, CRL and MMCE by hand and by formula; the Brier score against scikit-learn."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from sklearn.metrics import brier_score_loss

from semix.calib.losses import build_loss
from semix.calib.losses.penalties import CorrectnessRanking
from tests.calib.losses.formulas import (
    assert_agrees,
    assert_batch_agrees,
    batch,
    confidences,
    cross_entropy,
    softmax,
)


def test_brier_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    got = build_loss("brier", 3)(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(got, torch.tensor((0.25 + 0.09 + 0.04 + 0.01 + 0.81 + 0.64) / 2))


def test_brier_equals_scikit_learn():
    logits, targets = batch(samples=30)
    probabilities = logits.double().softmax(1).numpy()
    peer = brier_score_loss(targets.numpy(), probabilities, labels=range(5), scale_by_half=False)
    got = build_loss("brier", 5)(logits, targets)
    torch.testing.assert_close(got.double(), torch.tensor(peer).double(), rtol=1e-5, atol=0)


def test_brier_equals_its_formula():
    def formula(z, y, detached):
        return sum((p - (k == y)) ** 2 for k, p in enumerate(softmax(z)))

    assert_agrees(build_loss("brier", 5), formula, *batch())


@pytest.mark.parametrize(("variant", "fraction"), [("paper", 1), ("code", 1 / 4)])
def test_ecp_by_hand(variant: str, fraction: float):
    got = build_loss("ecp", 4, weight=0.3, variant=variant)(torch.zeros(1, 4), torch.tensor([1]))
    torch.testing.assert_close(got, torch.tensor((1 - 0.3 * fraction) * math.log(4)))


def test_ecp_averages_over_classes_unless_told():
    logits, targets = batch()
    plain = build_loss("ce", 5)(logits, targets)
    peer = torch.tensor(entropy(logits.softmax(1).numpy(), axis=1)).mean()
    torch.testing.assert_close(build_loss("ecp", 5)(logits, targets), plain - 0.1 * peer / 5)


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_ecp_equals_its_formula(variant: str):
    def formula(z, y, detached):
        p = softmax(z)
        terms = [-p_k * math.log(p_k) for p_k in p]
        amount = sum(terms) if variant == "paper" else sum(terms) / len(terms)
        return -math.log(p[y]) - 0.4 * amount

    loss = build_loss("ecp", 5, weight=0.4, variant=variant)
    assert_agrees(loss, formula, *batch())


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("variant", ["code", "paper"])
def test_cpc_by_hand(variant: str):
    # True class 1 with logit 2; the others 0 and 1. K = 3, so one unordered pair of others.
    loss = build_loss("cpc", 3, binary_weight=0.5, exclusion_weight=4.0, variant=variant)
    got = loss(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([1]))
    cross_entropy = math.log(1 + math.exp(2) + math.exp(1)) - 2
    binary = (softplus(-2) + softplus(-1)) / 2
    exclusion = (softplus(1) + softplus(-1)) / 2 / 2
    if variant == "code":
        exclusion += math.log(2) / 2
    torch.testing.assert_close(got, torch.tensor(cross_entropy + 0.5 * binary + 4 * exclusion))


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("classes", [3, 6])
def test_cpc_equals_its_formula(classes: int, variant: str):
    def formula(z: np.ndarray, y: int, detached: np.ndarray) -> float:
        others = [k for k in range(classes) if k != y]
        total = -math.log(softmax(z)[y])
        total += 0.1 * sum(softplus(z[k] - z[y]) for k in others) / (classes - 1)
        for j in others:
            for k in others:
                if j != k or variant == "code":
                    total += softplus(z[k] - z[j]) / 2 / (classes - 1) / (classes - 2)
        return total

    logits, targets = batch(classes=classes)
    assert_agrees(build_loss("cpc", classes, variant=variant), formula, logits, targets)


def test_cpc_of_two_classes_has_no_others_to_compare():
    got = build_loss("cpc", 2)(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    torch.testing.assert_close(got, torch.tensor(1.1 * softplus(-1)))


def test_mdca_by_hand():
    logits = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]).log()
    # Mean probabilities 0.4, 0.5, 0.1; frequencies of the classes 0.5, 0, 0.5.
    got = build_loss("mdca", 3, weight=6.0)(logits, torch.tensor([0, 2]))
    cross_entropy = -(math.log(0.7) + math.log(0.1)) / 2
    torch.testing.assert_close(got, torch.tensor(cross_entropy + 6 * (0.1 + 0.5 + 0.4) / 3))


@pytest.mark.parametrize(("base", "gamma"), [("ce", 0.0), ("focal", 1.0), ("focal", 2.5)])
def test_mdca_equals_its_formula(base: str, gamma: float):
    logits, targets = batch(samples=6, classes=4)

    def formula(z: np.ndarray) -> float:
        p, n = softmax(z), len(z)
        total = 0.0
        for row, y in zip(p, targets.tolist(), strict=True):
            total -= (1 - row[y]) ** gamma * math.log(row[y]) / n
        for k in range(4):
            fraction = sum(y == k for y in targets.tolist()) / n
            total += 1.5 * abs(sum(row[k] for row in p) / n - fraction) / 4
        return total

    assert_batch_agrees(
        build_loss("mdca", 4, weight=1.5, base=base, gamma=gamma), formula, logits, targets
    )


def test_mdca_of_one_sample_is_the_distance_from_its_class():
    logits = torch.tensor([[0.7, 0.2, 0.1]]).log()
    got = build_loss("mdca", 3)(logits, torch.tensor([0]))
    torch.testing.assert_close(got, torch.tensor(-math.log(0.7) + 0.6 / 3))


# Confidence 0.8 and right, confidence 0.6 and wrong.
LOGITS = torch.tensor([[0.8, 0.2], [0.4, 0.6]]).log()
TARGETS = torch.tensor([0, 0])
CE = -(math.log(0.8) + math.log(0.4)) / 2


@pytest.mark.parametrize("variant", ["code", "paper"])
def test_mmce_by_hand(variant: str):
    # Gaps 0.2 and -0.6; the kernel of 0.8 and 0.6 is exp(-0.2 / 0.5).
    error = (0.2**2 + 0.6**2 - 2 * 0.2 * 0.6 * math.exp(-0.4)) / 4
    if variant == "paper":
        error = math.sqrt(error)
    loss = build_loss("mmce", 2, weight=3.0, bandwidth=0.5, variant=variant)
    torch.testing.assert_close(loss(LOGITS, TARGETS), torch.tensor(CE + 3 * error))


def test_weighted_mmce_by_hand():
    # One right, one wrong: means are sums, and the second division is by 1 + 1e-5.
    error = (0.2**2 + 0.6**2 - 2 * 0.2 * 0.6 * math.exp(-0.4)) / (1 + 1e-5)
    loss = build_loss("mmce_weighted", 2, weight=3.0, bandwidth=0.5)
    got = loss(LOGITS, TARGETS)
    torch.testing.assert_close(got, torch.tensor(CE + 3 * math.sqrt(error + 1e-10)))


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mmce_equals_its_formula(seed: int, variant: str):
    logits, targets = batch(samples=7, classes=4, seed=seed)

    def formula(z: np.ndarray) -> float:
        total = 0.0
        for c, a in confidences(z, targets):
            for d, b in confidences(z, targets):
                total += (a - c) * (b - d) * math.exp(-abs(c - d) / 0.4)
        error = total / 49 if variant == "code" else math.sqrt(total / 49 + 1e-10)
        return cross_entropy(z, targets) + error

    assert_batch_agrees(build_loss("mmce", 4, variant=variant), formula, logits, targets)


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_weighted_mmce_equals_its_formula(seed: int, variant: str):
    logits, targets = batch(samples=7, classes=4, seed=seed)

    def of_pairs(left: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
        total = sum(v * w * math.exp(-abs(c - d) / 0.4) for c, v in left for d, w in other)
        pairs = len(left) * len(other)
        return total / pairs if variant == "paper" else total / pairs / (pairs + 1e-5)

    def formula(z: np.ndarray) -> float:
        samples = confidences(z, targets)
        right = [(c, 1 - c) for c, a in samples if a]
        wrong = [(c, c) for c, a in samples if not a]
        assert right
        assert wrong
        error = of_pairs(right, right) + of_pairs(wrong, wrong) - 2 * of_pairs(right, wrong)
        return cross_entropy(z, targets) + 2 * math.sqrt(error + 1e-10)

    assert_batch_agrees(build_loss("mmce_weighted", 4, variant=variant), formula, logits, targets)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("variant", ["code", "paper"])
def test_weighted_mmce_is_cross_entropy_where_all_are_right_or_all_wrong(right: bool, variant: str):
    logits, _ = batch(samples=6)
    targets = logits.argmax(1) if right else logits.argmin(1)
    slopes = []
    for loss in (build_loss("mmce_weighted", 5, variant=variant), build_loss("ce", 5)):
        inputs = logits.clone().requires_grad_()
        slopes.append(torch.autograd.grad(loss(inputs, targets), inputs)[0])
    torch.testing.assert_close(slopes[0], slopes[1], rtol=0, atol=0)


def test_mmce_of_certain_and_right_samples_has_a_finite_gradient():
    logits = (200 * torch.eye(3)).requires_grad_()
    for name in ("mmce", "mmce_weighted"):
        loss = build_loss(name, 3, variant="paper")(logits, torch.tensor([0, 1, 1]))
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()
        loss = build_loss(name, 3, variant="paper")(logits, torch.tensor([0, 1, 2]))
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_the_root_of_mmce_is_of_a_little_more():
    logits, targets = 200 * torch.eye(3), torch.tensor([0, 1, 2])  # certain and right: M = 0
    got = build_loss("mmce", 3, weight=1e5, variant="paper")(logits, targets)
    torch.testing.assert_close(got, torch.tensor(1.0))


def test_mmce_of_one_sample():
    # MMCE of one is its squared gap; weighted MMCE has nothing to compare.
    got = build_loss("mmce", 2)(LOGITS[:1], TARGETS[:1])
    torch.testing.assert_close(got, torch.tensor(-math.log(0.8) + 0.2**2))
    with pytest.raises(ValueError, match=r"logits have 1 row: weighted MMCE compares .* give 2"):
        build_loss("mmce_weighted", 2)(LOGITS[:1], TARGETS[:1])


NOTHING = SimpleNamespace()  # CRL asks nothing of the classifier after an epoch


def crl(num_samples: int = 8, classes: int = 5, **params: object) -> CorrectnessRanking:
    loss = build_loss("crl", classes, num_samples=num_samples, **params)
    assert isinstance(loss, CorrectnessRanking)
    return loss


def remember(loss: CorrectnessRanking, right: list[int], seen: list[int], epochs: int) -> None:
    loss.right.copy_(torch.tensor(right))
    loss.seen.copy_(torch.tensor(seen))
    loss.epochs.fill_(epochs)


def test_crl_counts_right_predictions_by_index():
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


def test_crl_by_hand():
    # After 4 epochs the fractions are (r - 1) / (4 - 1): 0, 1, 1/3 of samples 1, 2, 0.
    loss = crl(3, 2, weight=2.0).eval()
    remember(loss, [2, 1, 4], [4, 4, 4], 4)
    logits = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]).log()
    got = loss(logits, torch.tensor([0, 0, 0]), indices=torch.tensor([1, 2, 0]))
    pairs = [
        1 + (0.9 - 0.7),  # the first was right less often than the second, and is more confident
        2 / 3 - (0.7 - 0.6),
        1 / 3 - (0.6 - 0.9),
    ]
    expected = -math.log(0.9 * 0.7 * 0.4) / 3 + 2 * (pairs[0] + pairs[1] + pairs[2]) / 3
    torch.testing.assert_close(got, torch.tensor(expected))


def test_crl_does_not_judge_a_batch_by_itself():
    loss = crl(2, 2)
    logits, targets = torch.tensor([[3.0, 0.0], [2.0, 0.0]]), torch.tensor([1, 0])
    plain = build_loss("ce", 2)(logits, targets)
    first = loss(logits, targets, indices=torch.tensor([0, 1]))
    torch.testing.assert_close(first, plain)  # nothing is known yet
    assert loss(logits, targets, indices=torch.tensor([0, 1])) > plain


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("confidence", ["softmax", "entropy", "margin"])
def test_crl_equals_its_formula(confidence: str, variant: str):
    right, seen = [5, 1, 4, 4, 6, 1, 3, 2], [6, 5, 7, 8, 6, 6, 3, 7]
    loss = crl(confidence=confidence, variant=variant, weight=1.5).eval()
    remember(loss, right, seen, 6)
    logits, targets = batch(samples=6, classes=5, scale=1.0)
    indices = [2, 3, 7, 0, 5, 1]  # in the variant "code" 2 and 3 tie, as do 5 and 1

    def of(p: list[float]) -> float:
        if confidence == "entropy":
            return sum(q * math.log(q) for q in p) / math.log(5)
        largest = sorted(p)[::-1]
        return largest[0] - (largest[1] if confidence == "margin" else 0)

    def fraction(n: int) -> float:
        return right[n] / seen[n] if variant == "paper" else (right[n] - 1) / (6 - 1)

    def formula(z: np.ndarray) -> float:
        c = [of(p) for p in softmax(z)]
        total = 0.0
        for i in range(6):
            j = (i + 1) % 6
            ahead = fraction(indices[i]) - fraction(indices[j])
            total += max(0.0, abs(ahead) - np.sign(ahead) * (c[i] - c[j]))
        return cross_entropy(z, targets) + 1.5 * total / 6

    assert_batch_agrees(loss, formula, logits, targets, indices=torch.tensor(indices))


@pytest.mark.parametrize(("epochs", "margin"), [(0, 1.0), (1, 1.0), (2, 0.5), (3, 1 / 3)])
def test_crl_divides_by_one_in_the_first_two_epochs(epochs: int, margin: float):
    loss = crl(2, 2).eval()
    for _ in range(epochs):
        loss.end_epoch(NOTHING)
    loss.right.copy_(torch.tensor([0, 1]))
    equal = torch.tensor([[1.0, 0.0]] * 2)
    got = loss(equal, torch.tensor([0, 0]), indices=torch.tensor([0, 1]))
    torch.testing.assert_close(
        got - build_loss("ce", 2)(equal, torch.tensor([0, 0])), margin + 0 * got
    )


def test_crl_ranks_nothing_that_was_always_right():
    # r and its minimum equal the number of epochs: the official code divides 0 by 0 here.
    loss = crl(2, 2).eval()
    remember(loss, [3, 3], [3, 3], 3)
    logits, targets = torch.tensor([[3.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0])
    got = loss(logits, targets, indices=torch.tensor([1, 0]))
    torch.testing.assert_close(got, build_loss("ce", 2)(logits, targets))


def test_crl_leaves_its_history_in_eval_mode():
    loss = crl().eval()
    logits, targets = batch(samples=4)
    loss(logits, targets, indices=torch.arange(4))
    assert loss.seen.sum() == 0


def test_bad_input_of_crl_is_named():
    logits, targets = batch(samples=4)
    with pytest.raises(ValueError, match=r"indices are None: CRL needs \[4\]"):
        crl()(logits, targets)
    with pytest.raises(ValueError, match=r"indices are \(3,\): CRL needs \[4\]"):
        crl()(logits, targets, indices=torch.arange(3))
    with pytest.raises(IndexError, match=r"index 8 is out of bounds"):
        crl()(logits, targets, indices=torch.tensor([0, 1, 2, 8]))
    with pytest.raises(ValueError, match=r"logits have 1 row: CRL compares pairs of samples"):
        crl()(logits[:1], targets[:1], indices=torch.tensor([0]))
