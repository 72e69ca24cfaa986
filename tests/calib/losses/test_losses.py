"""All losses: by name, called alike, in any precision, across processes; those of mixed images."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.config.loss import LOSSES as LOSS_SETTINGS
from semix.calib.losses import build_loss, build_mixed_loss, build_training_loss
from semix.calib.losses.base import Outputs, RealLoss, gather_rows
from semix.data.errors import InputError
from tests.calib.losses.small_training import LOSSES, train

POINTWISE = ("ce", "ls", "mbls", "acls", "focal", "flsd53", "dual_focal", "ecp", "brier")
SINGLE = (*POINTWISE, "fedlas_ls", "fedlas_mbls")


def random_batch(
    seed: int = 0, samples: int = 16, classes: int = 10
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and features of one random batch."""
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(samples, classes, generator=rng)
    targets = torch.randint(classes, (samples,), generator=rng)
    return logits, targets, torch.rand(samples, 8, generator=rng)


def test_cross_entropy_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]).log()
    got = build_loss("ce", 3)(logits, torch.tensor([0, 2]))
    torch.testing.assert_close(got, torch.tensor(-(math.log(0.5) + math.log(0.7)) / 2))


def build_eval(name: str) -> RealLoss:
    """A loss in eval mode for 10 classes and 16 training images, with a history if it has one."""
    loss = build_training_loss(LOSS_SETTINGS[name](), 10, num_samples=16).eval()
    if name == "crl":
        loss.right.copy_(torch.arange(16) % 3)
    if name == "ada_focal":
        loss.gammas.copy_(torch.linspace(-2, 5, 15))
    return loss


@pytest.mark.parametrize("name", LOSS_SETTINGS)
def test_every_loss_is_called_alike(name: str):
    logits, targets, features = random_batch()
    logits.requires_grad_()
    loss = build_eval(name).train()(logits, targets, features=features, indices=torch.arange(16))
    loss.backward()
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


@pytest.mark.parametrize("name", LOSS_SETTINGS)
def test_autocast_does_not_round_the_loss(name: str):
    logits, targets, features = random_batch()
    loss, inputs = build_eval(name), {"features": features, "indices": torch.arange(16)}
    expected = loss(logits, targets, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = loss(logits, targets, **inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSS_SETTINGS)
def test_half_precision_logits_are_summed_in_float32(name: str):
    logits, targets, features = random_batch()
    loss, indices = build_eval(name), torch.arange(16)
    logits, features = logits.bfloat16(), features.bfloat16()
    got = loss(logits, targets, features=features, indices=indices)
    expected = loss(logits.float(), targets, features=features.float(), indices=indices)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSS_SETTINGS)
def test_settings_are_checked_without_memory(name: str):
    with torch.device("meta"):
        loss = build_training_loss(LOSS_SETTINGS[name](), 10, num_samples=1)
    assert all(tensor.is_meta for tensor in loss.state_dict().values())


@pytest.mark.parametrize("name", ["fedlas_ls", "fedlas_mbls", "crl", "ada_focal"])
def test_state_survives_save_and_load(name: str, tmp_path: Path):
    """After an epoch of one step the state differs from that of a fresh loss."""
    logits, targets, features = random_batch()
    targets[::2] = logits[::2].argmax(1)  # right, for what is learned from that
    inputs = {"features": 5 * features, "indices": torch.arange(16)}

    def fresh(seed: int) -> RealLoss:
        torch.manual_seed(seed)
        return build_training_loss(LOSS_SETTINGS[name](), 10, num_samples=16)

    loss, restored, other = fresh(0), fresh(1), fresh(1)
    loss(logits, targets, **inputs)
    loss.end_epoch(SimpleNamespace(outputs=lambda split: Outputs(logits, features, targets)))
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    restored.load_state_dict(torch.load(tmp_path / "loss.pt"))
    expected, got, unlike = (one(logits, targets, **inputs) for one in (loss, restored, other))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert got != unlike


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "params"),
    [(name, {}) for name in SINGLE]
    + [(name, {"gamma": gamma}) for name in ("focal", "dual_focal") for gamma in (0, 0.01, 0.5)],
)
def test_extreme_logits_stay_finite(name: str, params: dict, dtype: torch.dtype):
    # p_y is 1, 0, 0, 1/3, 1/3, and 1 to the last bit of float32.
    rows = [[1e4, -1e4, 0], [1e4, -1e4, 0], [-1e4, 1e4, 1e4], [0] * 3, [1e4] * 3, [50, 0, 0]]
    logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
    targets, features = torch.tensor([0, 1, 0, 2, 1, 0]), torch.ones(6, 4)
    value = build_loss(name, 3, **params)(logits, targets, features=features)
    value.backward()
    assert value.isfinite()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", POINTWISE)
def test_losses_without_state_report_no_diagnostics(name: str):
    loss = build_loss(name, 10)
    assert loss.pop_diagnostics() == {}
    assert loss.state_dict() == {}


def test_squared_error_of_a_uniform_guess():
    labels = functional.one_hot(torch.tensor([3, 7]), 10).float()
    got = build_mixed_loss("l2")(torch.zeros(2, 10), labels)
    torch.testing.assert_close(got, torch.tensor(0.9))  # (0.9)^2 + 9 (0.1)^2


def test_squared_error_sums_over_classes_and_averages_over_rows():
    logits = torch.tensor([[0.6, 0.4, 0.0], [1.0, 0.0, 0.0]]).clamp(min=1e-30).log()
    labels = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    got = build_mixed_loss("l2")(logits, labels)
    torch.testing.assert_close(got, torch.tensor((0.02 + 2.0) / 2))


def test_soft_cross_entropy_by_hand():
    logits = torch.tensor([[0.8, 0.2], [0.5, 0.5]]).log()
    labels = torch.tensor([[0.7, 0.3], [0.1, 0.9]])
    expected = (-0.7 * math.log(0.8) - 0.3 * math.log(0.2) - math.log(0.5)) / 2
    torch.testing.assert_close(build_mixed_loss("soft_ce")(logits, labels), torch.tensor(expected))


@pytest.mark.parametrize("name", ["l2", "soft_ce"])
def test_mixed_losses_have_their_stationary_point_at_the_label(name: str):
    labels = torch.tensor([[0.7, 0.2, 0.1]])
    logits = labels.log().requires_grad_()
    build_mixed_loss(name)(logits, labels).backward()
    torch.testing.assert_close(logits.grad, torch.zeros(1, 3), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["l2", "soft_ce"])
def test_labels_that_would_be_broadcast_are_refused(name: str):
    with pytest.raises(ValueError, match=r"shapes \(4, 3\) and \(3,\): give both as \[N, K\]"):
        build_mixed_loss(name)(torch.zeros(4, 3), torch.zeros(3))


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        (
            "mbsl",
            {},
            r"loss\.name = mbsl: did you mean mbls\? choose one of ce, ls, mbls, acls, ",
        ),
        ("ls", {"smooth": 0.1}, r"loss\.smooth: unknown setting; did you mean loss\.smoothing\?$"),
        ("ce", {"smoothing": 0.1}, r"loss\.smoothing: unknown setting"),
        (
            "ls",
            {"smoothing": 1.5},
            r"loss\.smoothing = 1\.5: input should be less than or equal to 1",
        ),
        ("ls", {"smoothing": math.nan}, r"loss\.smoothing = nan: input should be a finite number"),
        ("ls", {"smoothing": "0.1"}, r"loss\.smoothing = '0\.1': input should be a valid number"),
        ("mbls", {"margin": -1}, r"loss\.margin = -1: input should be greater than or equal to 0"),
        ("mbls", {"weight": -1}, r"loss\.weight = -1: input should be greater than or equal to 0"),
        ("acls", {"margin": -1}, r"loss\.margin = -1: input should be greater than or equal to 0"),
        (
            "acls",
            {"positive": -1},
            r"loss\.positive = -1: input should be greater than or equal to 0",
        ),
        (
            "acls",
            {"negative": -1},
            r"loss\.negative = -1: input should be greater than or equal to 0",
        ),
        ("acls", {"weight": True}, r"loss\.weight = True: input should be a valid number"),
        (
            "focal",
            {"gamma": -0.5},
            r"loss\.gamma = -0\.5: input should be greater than or equal to 0",
        ),
        ("flsd53", {"gamma": 3}, r"loss\.gamma: unknown setting"),
        ("dual_focal", {"gamma": math.nan}, r"loss\.gamma = nan: input should be a finite number"),
        ("ecp", {"weight": -1}, r"loss\.weight = -1: input should be greater than or equal to 0"),
        ("ecp", {"variant": "sum"}, r"loss\.variant = 'sum': choose one of code, paper"),
        (
            "fedlas_mbls",
            {"weight": 0.6},
            r"loss\.weight = 0\.6: input should be less than or equal to 0\.5",
        ),
        (
            "fedlas_mbls",
            {"margin": -1},
            r"loss\.margin = -1: input should be greater than or equal to 0",
        ),
        (
            "fedlas_ls",
            {"smoothing": 0.6},
            r"loss\.smoothing = 0\.6: input should be less than or equal to 0\.5",
        ),
        ("fedlas_ls", {"beta": -1}, r"loss\.beta = -1: input should be greater than or equal to 0"),
        ("fedlas_ls", {"momentum": 0}, r"loss\.momentum = 0: input should be greater than 0"),
        ("fedlas_ls", {"variant": "x"}, r"loss\.variant = 'x': choose one of code, paper"),
        ("fedlas_ls", {"norm_start": "x"}, r"loss\.norm_start = 'x': choose one of fixed, first_"),
        ("ada_focal", {"bins": 0}, r"loss\.bins = 0: input should be greater than or equal to 1"),
        ("ada_focal", {"rate": -1}, r"loss\.rate = -1: input should be greater than or equal to 0"),
        ("ada_focal", {"gamma": 21}, r"loss: `gamma` is 21: must lie in \[-2, 20\]"),
        (
            "ada_focal",
            {"switch": -0.1},
            r"loss\.switch = -0\.1: input should be greater than or equal to 0",
        ),
        (
            "ada_focal",
            {"gamma_min": 0.1},
            r"loss\.gamma_min = 0\.1: input should be less than or equal to 0",
        ),
        (
            "ada_focal",
            {"gamma_max": -1},
            r"loss\.gamma_max = -1: input should be greater than or equal to 0",
        ),
        (
            "cpc",
            {"binary_weight": -1},
            r"loss\.binary_weight = -1: input should be greater than or equal to 0",
        ),
        (
            "cpc",
            {"exclusion_weight": -1},
            r"loss\.exclusion_weight = -1: input should be greater than or equal to 0",
        ),
        ("cpc", {"variant": "x"}, r"loss\.variant = 'x': choose one of code, paper"),
        ("mdca", {"base": "ls"}, r"loss\.base = 'ls': choose one of ce, focal"),
        ("mdca", {"weight": -1}, r"loss\.weight = -1: input should be greater than or equal to 0"),
        ("mdca", {"gamma": -1}, r"loss\.gamma = -1: input should be greater than or equal to 0"),
        ("mmce", {"weight": -1}, r"loss\.weight = -1: input should be greater than or equal to 0"),
        ("mmce", {"bandwidth": 0}, r"loss\.bandwidth = 0: input should be greater than 0"),
        ("mmce_weighted", {"variant": "x"}, r"loss\.variant = 'x': choose one of code, paper"),
        ("crl", {}, r"loss\.num_samples = None: give the number of training images, at least 1"),
        (
            "crl",
            {"num_samples": 4, "weight": -1},
            r"loss\.weight = -1: input should be greater than or equal to 0",
        ),
        ("crl", {"num_samples": 4, "confidence": "x"}, r"loss\.confidence = 'x': choose one of so"),
        ("crl", {"num_samples": 4, "variant": "x"}, r"loss\.variant = 'x': choose one of code, pa"),
    ],
)
def test_bad_settings_are_named(name: str, params: dict, text: str):
    with pytest.raises(InputError, match=text):
        build_loss(name, 10, **params)


def test_fewer_than_two_classes_are_refused():
    with pytest.raises(InputError, match=r"num_classes = 1: give a whole number of at least 2"):
        build_loss("ce", 1)


def test_unknown_mixed_loss_is_named():
    with pytest.raises(InputError, match=r"mixed\.loss = l1: choose one of l2, soft_ce$"):
        build_mixed_loss("l1")


ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each of two processes, for every loss."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "tests.calib.losses.small_training"]
    workers = [
        subprocess.Popen([*command, str(process), "2", str(folder)], cwd=ROOT)
        for process in range(2)
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    return [torch.load(folder / f"{process}.pt") for process in range(2)]


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_train_as_one(name: str, two_processes: list[dict[str, Any]]):
    alone = train(name)
    for result in two_processes:
        torch.testing.assert_close(result[name], alone, rtol=1e-5, atol=1e-6)
    # The state is the same to the bit, so that it cannot drift apart.
    first, second = (result[name]["state"] for result in two_processes)
    torch.testing.assert_close(dict(first), dict(second), rtol=0, atol=0)


def test_a_process_alone_keeps_its_rows():
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    assert gather_rows(rows, training=True) is rows
