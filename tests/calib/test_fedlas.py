"""FeDLaS-LS: statistics, gate, gradients and state."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from calib.losses import build_loss
from calib.losses.fedlas import FeDLaSLabelSmoothing

ROOT = Path(__file__).parents[2]


def batch(seed: int = 0, samples: int = 32, classes: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(samples, classes, generator=rng)
    targets = torch.randint(classes, (samples,), generator=rng)
    return logits, targets, 5 * torch.rand(samples, 8, generator=rng)


def fedlas(classes: int = 10, **params: object) -> FeDLaSLabelSmoothing:
    torch.manual_seed(0)
    loss = build_loss("fedlas_ls", classes, **params)
    assert isinstance(loss, FeDLaSLabelSmoothing)
    return loss


def lean_to(loss: FeDLaSLabelSmoothing, output: int) -> None:
    """Make the gate choose this output whatever the logits."""
    with torch.no_grad():
        loss.gate[2].weight.zero_()
        loss.gate[2].bias.copy_(torch.tensor([1.0, 0.0] if output == 0 else [0.0, 1.0]))


def test_statistics_after_one_batch_by_hand():
    # L1 norms 6 and 10: mean 8, unbiased deviation sqrt(8). From mean 20 and deviation 100.
    loss = fedlas(2, momentum=0.95)
    features = torch.tensor([[1.0, -2.0, 3.0], [10.0, 0.0, 0.0]])
    loss(torch.zeros(2, 2), torch.tensor([0, 1]), features=features)
    torch.testing.assert_close(loss.norm_mean, torch.tensor([0.95 * 8 + 0.05 * 20]))
    torch.testing.assert_close(loss.norm_std, torch.tensor([0.95 * 8**0.5 + 0.05 * 100]))


def test_statistics_can_start_from_the_first_batch():
    loss = fedlas(2, momentum=0.5, norm_start="first_batch")
    features = torch.tensor([[6.0], [10.0]])
    loss(torch.zeros(2, 2), torch.tensor([0, 1]), features=features)
    torch.testing.assert_close(loss.norm_mean, torch.tensor([8.0]))
    torch.testing.assert_close(loss.norm_std, torch.tensor([8**0.5]))
    loss(torch.zeros(2, 2), torch.tensor([0, 1]), features=2 * features)
    torch.testing.assert_close(loss.norm_mean, torch.tensor([12.0]))


@pytest.mark.parametrize(("variant", "rising"), [("code", 1), ("paper", 0)])
def test_smoothing_by_hand(variant: str, rising: int):
    # eps 0.001 is added to the deviation 1.999: z-scores of the norms 24 and 16 are 2 and -2.
    loss = fedlas(2, smoothing=0.05, beta=0.5, variant=variant)
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


def test_no_gradient_reaches_logits_or_features_through_the_smoothing():
    loss = fedlas()
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
    # So the gradient is that of a fixed a: softmax minus the smoothed label, over N.
    loss.eval()
    loss(logits, targets, features=features).backward()
    label = (1 - a[:, None]) * torch.eye(10)[targets] + a[:, None] / 10
    torch.testing.assert_close(logits.grad, ((logits.softmax(1) - label) / 32).detach())
    assert features.grad is None


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


def test_autocast_does_not_round_what_the_gate_learns():
    loss = fedlas().eval()
    logits, targets, features = batch()
    weight = loss.gate[0].weight
    expected = torch.autograd.grad(loss(logits, targets, features=features), weight)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(logits, targets, features=features)
    got = torch.autograd.grad(value, weight)  # outside, as autocast asks for
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_batch_of_one_is_finite_and_leaves_the_statistics():
    loss = fedlas(norm_start="first_batch")
    logits, targets, features = batch(samples=1)
    got = loss(logits, targets, features=features)
    assert got.isfinite()
    assert (loss.norm_mean.item(), loss.norm_std.item()) == (20, 100)
    assert loss.norm_batches.item() == 0


def test_neither_eval_nor_smoothing_of_updates_anything():
    loss = fedlas()
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    logits, targets, features = batch()
    loss.smoothing_of(logits, features)
    loss.eval()(logits, targets, features=features)
    torch.testing.assert_close(dict(loss.state_dict()), before, rtol=0, atol=0)
    assert loss.pop_health()["smoothing"] is None


def test_state_survives_save_and_load(tmp_path: Path):
    logits, targets, features = batch(1)
    loss = fedlas()
    loss(logits, targets, features=features)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    torch.manual_seed(1)
    again = build_loss("fedlas_ls", 10)
    again.load_state_dict(torch.load(tmp_path / "loss.pt"))
    more = batch(2)
    torch.testing.assert_close(
        again(more[0], more[1], features=more[2]),
        loss(more[0], more[1], features=more[2]),
        rtol=0,
        atol=0,
    )
    assert again.norm_mean != 20


@pytest.mark.parametrize("classes", [2, 3, 4, 11])
def test_gate_keeps_two_hidden_units_at_least(classes: int):
    gate = fedlas(classes).gate
    assert gate[0].weight.shape == (max(2, classes // 2), classes)
    assert gate[2].weight.shape == (2, max(2, classes // 2))


def test_health_by_hand():
    loss = fedlas(2, smoothing=0.05, beta=0.5, momentum=1e-6)
    loss.norm_std.fill_(1.999)
    lean_to(loss, 1)
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    features = torch.tensor([[24.0], [16.0], [16.0]])  # z-scores 2, -2, -2
    loss(logits, torch.tensor([0, 0, 1]), features=features)
    high, low = (0.1 * torch.tensor([1.0, -1.0]).sigmoid()).tolist()
    health = loss.pop_health()
    assert health == pytest.approx(
        {
            "gate_positive": 1,
            "smoothing_raised": 1 / 3,
            "smoothing": (high + 2 * low) / 3,
            "smoothing_correct": (high + low) / 2,
            "smoothing_wrong": low,
        },
        rel=1e-4,
    )
    lean_to(loss, 0)  # the figures start anew
    loss(logits[:2], torch.tensor([0, 0]), features=features[:2])
    health = loss.pop_health()
    assert (health["gate_positive"], health["smoothing_raised"]) == (0, 0.5)
    assert health["smoothing_wrong"] is None


@pytest.mark.parametrize("features", [None, torch.zeros(31, 8), torch.zeros(32)])
def test_missing_or_misshaped_features_are_named(features: Tensor | None):
    logits, targets, _ = batch()
    with pytest.raises(ValueError, match=r"features are .*: FeDLaS needs \[32, D\]"):
        fedlas()(logits, targets, features=features)


WORKER = """
import sys, torch
from torch import distributed
from calib.losses import build_loss
rank, place = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
features = torch.tensor([[6.0], [10.0]]) if rank == 0 else torch.tensor([[1.0]])
targets = torch.zeros(len(features), dtype=torch.long)
loss = build_loss("fedlas_ls", 2, momentum=1.0)
loss(torch.zeros(len(features), 2), targets, features=features)
torch.save((loss.norm_mean, loss.norm_std), f"{place}/{rank}.pt")
distributed.destroy_process_group()
"""


def test_two_processes_share_their_statistics(tmp_path: Path):
    command = [sys.executable, "-c", WORKER]
    workers = [subprocess.Popen([*command, str(r), str(tmp_path)], cwd=ROOT) for r in range(2)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    norms = torch.tensor([6.0, 10.0, 1.0])  # of both processes, one of which has a single sample
    for rank in range(2):
        mean, std = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(mean, norms.mean()[None])
        torch.testing.assert_close(std, norms.std()[None])
