"""FeDLaS-LS and FeDLaS-MbLS: statistics, gate, gradients and state."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from semix.calib.losses import build_loss
from semix.calib.losses.fedlas import FeDLaS
from tests.calib.runs import run_two

BOTH = pytest.mark.parametrize("name", ["fedlas_ls", "fedlas_mbls"])
STRENGTH = {"fedlas_ls": "smoothing", "fedlas_mbls": "weight"}


def batch(seed: int = 0, samples: int = 32, classes: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(samples, classes, generator=rng)
    targets = torch.randint(classes, (samples,), generator=rng)
    return logits, targets, 5 * torch.rand(samples, 8, generator=rng)


def fedlas(classes: int = 10, name: str = "fedlas_ls", **params: object) -> FeDLaS:
    torch.manual_seed(0)
    loss = build_loss(name, classes, **params)
    assert isinstance(loss, FeDLaS)
    return loss


def lean_to(loss: FeDLaS, output: int) -> None:
    """Make the gate choose this output whatever the logits."""
    with torch.no_grad():
        loss.gate[2].weight.zero_()
        loss.gate[2].bias.copy_(torch.tensor([1.0, 0.0] if output == 0 else [0.0, 1.0]))


@BOTH
def test_statistics_after_one_batch_by_hand(name: str):
    # L1 norms 6 and 10: mean 8, unbiased deviation sqrt(8). From mean 20 and deviation 100.
    loss = fedlas(2, name, momentum=0.95)
    features = torch.tensor([[1.0, -2.0, 3.0], [10.0, 0.0, 0.0]])
    loss(torch.zeros(2, 2), torch.tensor([0, 1]), features=features)
    torch.testing.assert_close(loss.norm_mean, torch.tensor([0.95 * 8 + 0.05 * 20]))
    torch.testing.assert_close(loss.norm_std, torch.tensor([0.95 * 8**0.5 + 0.05 * 100]))


@BOTH
def test_statistics_can_start_from_the_first_batch(name: str):
    loss = fedlas(2, name, momentum=0.5, norm_start="first_batch")
    features = torch.tensor([[6.0], [10.0]])
    loss(torch.zeros(2, 2), torch.tensor([0, 1]), features=features)
    torch.testing.assert_close(loss.norm_mean, torch.tensor([8.0]))
    torch.testing.assert_close(loss.norm_std, torch.tensor([8**0.5]))
    loss(torch.zeros(2, 2), torch.tensor([0, 1]), features=2 * features)
    torch.testing.assert_close(loss.norm_mean, torch.tensor([12.0]))


@BOTH
@pytest.mark.parametrize(("variant", "rising"), [("code", 1), ("paper", 0)])
def test_smoothing_by_hand(name: str, variant: str, rising: int):
    # eps 0.001 is added to the deviation 1.999: z-scores of the norms 24 and 16 are 2 and -2.
    loss = fedlas(2, name, beta=0.5, variant=variant, **{STRENGTH[name]: 0.05})
    loss.norm_std.fill_(1.999)
    features = torch.tensor([[-24.0], [16.0]])
    high, low = 0.1 * torch.tensor([1.0, -1.0]).sigmoid()
    lean_to(loss, rising)
    torch.testing.assert_close(
        loss.smoothing_of(torch.zeros(2, 2), features), torch.stack([high, low])
    )
    lean_to(loss, 1 - rising)
    torch.testing.assert_close(
        loss.smoothing_of(torch.zeros(2, 2), features), torch.stack([low, high])
    )


@pytest.mark.parametrize(("variant", "value"), [("code", 0.05), ("paper", 0.1 / (1 + 2.71828**4))])
def test_a_tie_of_the_gate(variant: str, value: float):
    loss = fedlas(2, smoothing=0.05, beta=4.0, variant=variant)
    loss.norm_std.fill_(3.999)
    with torch.no_grad():
        loss.gate[2].weight.zero_()
        loss.gate[2].bias.zero_()
    got = loss.smoothing_of(torch.zeros(1, 2), torch.tensor([[24.0]]))  # z-score 1
    torch.testing.assert_close(got, torch.tensor([value]))


def test_the_statistics_are_updated_before_they_are_used():
    loss = fedlas(momentum=1.0)
    logits, targets, features = batch()
    norms = features.abs().sum(1)
    score = (norms - norms.mean()) / (norms.std() + 1e-3)
    choice = loss.gate(logits).softmax(1)
    a = 0.1 * torch.sigmoid(4 * (choice[:, 1] - choice[:, 0]).sign() * score)
    log_p = logits.log_softmax(1)
    hard, uniform = -log_p[torch.arange(32), targets], -log_p.mean(1)
    got = loss(logits, targets, features=features)
    torch.testing.assert_close(got, ((1 - a) * hard + a * uniform).mean())


@pytest.mark.parametrize("smoothing", [0.05, 0.1])
def test_beta_zero_is_label_smoothing_exactly(smoothing: float):
    logits, targets, features = batch()
    plain = build_loss("ls", 10, smoothing=smoothing)(logits, targets)
    got = fedlas(smoothing=smoothing, beta=0)(logits, targets, features=features)
    torch.testing.assert_close(got, plain, rtol=0, atol=0)


@BOTH
def test_no_gradient_reaches_logits_or_features_through_the_smoothing(name: str):
    loss = fedlas(name=name)
    logits, targets, features = batch()
    logits.requires_grad_()
    features.requires_grad_()
    a = loss.smoothing_of(logits, features)
    assert torch.autograd.grad(a.sum(), (logits, features), allow_unused=True) == (None, None)
    assert (
        torch.autograd.grad(loss.smoothing_of(logits, features).sum(), loss.gate[0].weight)[0]
        .abs()
        .sum()
    )
    loss(logits, targets, features=features).backward()
    assert features.grad is None


def test_gradient_of_label_smoothing_is_that_of_a_fixed_smoothing():
    loss = fedlas().eval()
    logits, targets, features = batch()
    logits.requires_grad_()
    a = loss.smoothing_of(logits, features)
    loss(logits, targets, features=features).backward()
    label = (1 - a[:, None]) * torch.eye(10)[targets] + a[:, None] / 10
    torch.testing.assert_close(logits.grad, ((logits.softmax(1) - label) / 32).detach())


def test_gradient_of_margin_smoothing_is_that_of_a_fixed_smoothing():
    loss = fedlas(name="fedlas_mbls", margin=2).eval()
    logits, targets, features = batch()
    logits.requires_grad_()
    a = loss.smoothing_of(logits, features)[:, None].detach()
    loss(logits, targets, features=features).backward()
    with torch.no_grad():
        rows = torch.arange(32)
        beyond = (logits.amax(1, keepdim=True) - logits > 2).float()
        push = -beyond  # each logit beyond the margin is pulled up, the largest down by them all
        push[rows, logits.argmax(1)] += beyond.sum(1)
        expected = (1 - a) * (logits.softmax(1) - torch.eye(10)[targets]) + a * push / 10
    torch.testing.assert_close(logits.grad, expected / 32)


@pytest.mark.parametrize(("variant", "divisor"), [("code", 3), ("paper", 1)])
def test_margin_smoothing_by_hand(variant: str, divisor: int):
    # Distances from the largest logit are 0, 7, 10; beyond the margin of 6 they are 0, 1, 4.
    loss = fedlas(3, "fedlas_mbls", margin=6, beta=0, weight=0.3, variant=variant)
    logits, targets = torch.tensor([[10.0, 3.0, 0.0]]), torch.tensor([1])
    cross_entropy = build_loss("ce", 3)(logits, targets)
    got = loss(logits, targets, features=torch.ones(1, 4))
    torch.testing.assert_close(got, 0.7 * cross_entropy + 0.3 * 5 / divisor)


def test_margin_smoothing_with_beta_zero_is_not_mbls_but_a_mean_of_its_two_terms():
    logits, targets, features = batch()
    cross_entropy = build_loss("ce", 10)(logits, targets)
    penalty = build_loss("mbls", 10, weight=1)(logits, targets) - cross_entropy
    got = fedlas(name="fedlas_mbls", weight=0.1, beta=0)(logits, targets, features=features)
    torch.testing.assert_close(got, 0.9 * cross_entropy + 0.1 * penalty)
    assert (got - build_loss("mbls", 10)(logits, targets)).abs() > 0.01


def test_margin_smoothing_weighs_each_sample_by_its_own_share():
    loss = fedlas(name="fedlas_mbls", margin=2, beta=3).eval()
    logits, targets, features = batch()
    a = loss.smoothing_of(logits, features)
    total = torch.zeros(())
    for n in range(32):
        cross_entropy = -logits[n].log_softmax(0)[targets[n]]
        beyond = sum(max(0.0, (logits[n].max() - z).item() - 2) for z in logits[n]) / 10
        total += (1 - a[n]) * cross_entropy + a[n] * beyond
    torch.testing.assert_close(loss(logits, targets, features=features), total / 32)


@pytest.mark.parametrize("norm", [12.0, 28.0])  # z-score below and above 0
@pytest.mark.parametrize("target", [0, 1])  # fitted and misfitted: E > CE and E < CE
def test_descent_moves_the_gate_against_the_gain(norm: float, target: int):
    loss = fedlas(4).eval()
    loss.norm_std.fill_(10.0)
    logits, targets = torch.tensor([[4.0, -1.0, 0.5, 0.0]]), torch.tensor([target])
    loss(logits, targets, features=torch.tensor([[norm]])).backward()
    log_p = logits.log_softmax(1)
    gain = (log_p[0, target] - log_p.mean()) * (norm - 20)  # (E - CE) gamma
    descent = -loss.gate[2].bias.grad  # output 1 minus output 0 is what the sign is taken of
    assert descent[1] != 0
    assert descent[1].sign() == -gain.sign()
    torch.testing.assert_close(descent[0], -descent[1])


@BOTH
def test_autocast_does_not_round_what_the_gate_learns(name: str):
    loss = fedlas(name=name).eval()
    logits, targets, features = batch()
    weight = loss.gate[0].weight
    expected = torch.autograd.grad(loss(logits, targets, features=features), weight)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(logits, targets, features=features)
    got = torch.autograd.grad(value, weight)  # outside, as autocast asks for
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@BOTH
def test_a_batch_of_one_is_finite_and_leaves_the_statistics(name: str):
    loss = fedlas(name=name, norm_start="first_batch")
    logits, targets, features = batch(samples=1)
    got = loss(logits, targets, features=features)
    assert got.isfinite()
    assert (loss.norm_mean.item(), loss.norm_std.item()) == (20, 100)
    assert loss.norm_batches.item() == 0


@BOTH
def test_neither_eval_nor_smoothing_of_updates_anything(name: str):
    loss = fedlas(name=name)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    logits, targets, features = batch()
    loss.smoothing_of(logits, features)
    loss.eval()(logits, targets, features=features)
    torch.testing.assert_close(dict(loss.state_dict()), before, rtol=0, atol=0)
    assert loss.pop_diagnostics()["smoothing"] is None


@BOTH
@pytest.mark.parametrize("classes", [2, 3, 4, 11])
def test_gate_keeps_two_hidden_units_at_least(name: str, classes: int):
    gate = fedlas(classes, name).gate
    assert gate[0].weight.shape == (max(2, classes // 2), classes)
    assert gate[2].weight.shape == (2, max(2, classes // 2))


@BOTH
def test_diagnostics_by_hand(name: str):
    loss = fedlas(2, name, beta=0.5, momentum=1e-6, **{STRENGTH[name]: 0.05})
    loss.norm_std.fill_(1.999)
    lean_to(loss, 1)
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    features = torch.tensor([[24.0], [16.0], [16.0]])  # z-scores 2, -2, -2
    loss(logits, torch.tensor([0, 0, 1]), features=features)
    high, low = (0.1 * torch.tensor([1.0, -1.0]).sigmoid()).tolist()
    diagnostics = loss.pop_diagnostics()
    assert diagnostics == pytest.approx(
        {
            "gate_positive": 1,
            "smoothing_raised": 1 / 3,
            "smoothing": (high + 2 * low) / 3,
            "smoothing_correct": (high + low) / 2,
            "smoothing_wrong": low,
        },
        rel=1e-4,
    )
    lean_to(loss, 0)  # the sums start anew
    loss(logits[:2], torch.tensor([0, 0]), features=features[:2])
    diagnostics = loss.pop_diagnostics()
    assert (diagnostics["gate_positive"], diagnostics["smoothing_raised"]) == (0, 0.5)
    assert diagnostics["smoothing_wrong"] is None


@BOTH
@pytest.mark.parametrize("features", [None, torch.zeros(31, 8), torch.zeros(32)])
def test_missing_or_misshaped_features_are_named(name: str, features: Tensor | None):
    logits, targets, _ = batch()
    with pytest.raises(ValueError, match=r"features are .*: FeDLaS needs \[32, D\]"):
        fedlas(name=name)(logits, targets, features=features)


WORKER = """
import os, sys, torch
from torch import distributed
from semix.calib.losses import build_loss
rank = int(os.environ["RANK"])
distributed.init_process_group("gloo")
features = torch.tensor([[6.0], [10.0]]) if rank == 0 else torch.tensor([[1.0]])
targets = torch.zeros(len(features), dtype=torch.long)
loss = build_loss("fedlas_ls", 2, momentum=1.0)
loss(torch.zeros(len(features), 2), targets, features=features)
torch.save((loss.norm_mean, loss.norm_std), f"{sys.argv[1]}/{rank}.pt")
distributed.destroy_process_group()
"""


@pytest.mark.process
def test_two_processes_share_their_statistics(tmp_path: Path):
    run_two(WORKER, tmp_path, tmp_path)
    norms = torch.tensor([6.0, 10.0, 1.0])  # of both processes, one of which has a single sample
    for rank in range(2):
        mean, std = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(mean, norms.mean()[None])
        torch.testing.assert_close(std, norms.std()[None])
