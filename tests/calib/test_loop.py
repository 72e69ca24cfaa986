"""The loop over steps: its metrics, its compiler, and a host that never waits for the device."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from semix.calib.batches import Batches, TrainingBatch
from semix.calib.config import AugmentConfig
from semix.calib.config.loss import LOSSES
from semix.calib.config.method import METHODS
from semix.calib.divergence import Diverged
from semix.calib.epoch_lines import EpochLines
from semix.calib.losses import build_mixed_loss, build_training_loss
from semix.calib.network import Network, WeightAverage
from semix.calib.optimiser import build_optimiser
from semix.calib.real_images import InMemoryImages
from semix.calib.training_step import (
    CHECK_EVERY,
    STEP_METRICS,
    EpochRecord,
    TrainingStep,
    check_compiler,
    confidence_and_label,
)
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError


def test_means_are_over_the_steps(accelerator):
    record = EpochRecord(2, accelerator)
    record.note(0, torch.tensor([1.0, 0.5, 0.25, 0.5, 1.0, 0.25, 0.75]))
    record.note(1, torch.tensor([3.0, 0.0, 0.75, 1.0, 1.0, 0.75, 0.25]))
    record.check()
    assert record.means() == {
        "loss": 2.0,
        "mixed_loss": 0.25,
        "accuracy": 0.5,
        "mixed_confidence_end": 0.75,
        "mixed_label_end": 1.0,
        "mixed_confidence_interior": 0.5,
        "mixed_label_interior": 0.5,
    }


def test_a_line_of_progress_is_read_at_a_glance_whatever_an_epoch_measures(capsys):
    metrics = dict.fromkeys(
        [*STEP_METRICS, "learning_rate", "norm_mean", "validation_nll"], 0.123456
    )
    counts = {"epochs": 40, "images": 6000, "steps": 60, "first": 0}
    lines = EpochLines("CSM seed 0 base", **counts, printing=True)
    lines.show_epoch(40, metrics, last=True)
    line = capsys.readouterr().out
    assert len(line) < 140
    assert "40/40  loss 0.1235  accuracy 0.1235  validation_nll 0.1235  " in line
    lines.show_epoch(40, {"loss": 1.0, "mixed_loss": None, "learning_rate": 0.1}, last=True)
    assert "40/40  loss 1  learning_rate 0.1  " in capsys.readouterr().out


def test_confidence_and_label_by_hand():
    # Probabilities of the labels' class: 3/4 and 1/4 of end points, 1/2 and 1/2 of inner images.
    logits = torch.tensor([[3.0, 1.0], [1.0, 1.0], [3.0, 1.0], [1.0, 1.0]]).log()
    labels = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7], [0.8, 0.2]])
    kinds = torch.tensor([[0.5, 0.0], [0.0, 0.5], [0.5, 0.0], [0.0, 0.5]])
    result = confidence_and_label(logits.requires_grad_(), labels, kinds)
    torch.testing.assert_close(result, torch.tensor([0.5, 0.8, 0.5, 0.7]))
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({(4, 0): float("nan")}, r"^step 5 of 60: the real loss is NaN or infinite"),
        ({(4, 1): float("inf"), (5, 0): float("nan")}, r"^step 5 of 60: the mixed loss is NaN"),
        ({(7, 0): float("-inf"), (7, 1): float("inf")}, r"^step 8 of 60: the real loss is NaN"),
    ],
)
def test_the_first_loss_that_is_no_number_is_named(accelerator, bad, text):
    record = EpochRecord(60, accelerator)
    for (step, part), value in bad.items():
        record.metrics[step, part] = value
    with pytest.raises(Diverged, match=text):
        record.check()


def test_an_epoch_does_not_go_on_for_long(accelerator):
    record = EpochRecord(10 * CHECK_EVERY, accelerator)
    record.note(0, torch.tensor([float("nan"), *[0.0] * 6]))
    with pytest.raises(Diverged, match=r"^step 1 of 500"):
        for step in range(1, CHECK_EVERY):
            record.note(step, torch.zeros(7))
    assert step == CHECK_EVERY - 1


def test_without_a_compiler_it_is_refused_by_name(make_stage, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    text = r"^compile = True: needs the compiler no-such-compiler, which is missing; .* CXX,"
    with pytest.raises(InputError, match=text):
        make_stage("compile=true")
    monkeypatch.setenv("CC", "no-such-one")
    with pytest.raises(InputError, match=r"no-such-one, .* CC, or leave compile off$"):
        check_compiler(torch.device("cuda"))


@pytest.mark.slow
def test_a_compiled_network_trains_as_the_plain_one(make_stage):
    settings = ("loss={name: ce}", "model={name: lenet}", "ema=0.8", "select=nll")
    plain, compiled = make_stage(*settings), make_stage(*settings, "compile=true")
    for epoch in range(2):
        expected, metrics = plain.train_epoch(epoch), compiled.train_epoch(epoch)
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert list(compiled.network.state_dict()) == list(plain.network.state_dict())
    assert list(compiled.trained.state_dict()) == list(plain.trained.state_dict())


# The meta device has no values: reading one fails there, and so does an operation whose shape
# depends on values. Copies between it and the host are noted.
META = torch.device("meta")
CLASSES = 10


class Waits(TorchDispatchMode):
    """Notes what waits: a number made a tensor on the device, a copy that is not `non_blocking`."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func.overloadpacket
        if name is torch.ops.aten.lift_fresh and result.is_meta:
            self.noted.append("a number made a tensor")
        if name in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            tensor = args[0] if name is torch.ops.aten._to_copy else args[1]
            if tensor.device != result.device and not (kwargs or {}).get("non_blocking"):
                self.noted.append("a copy between host and device")
        return result


def waits_of(function):
    with Waits() as waits:
        function()
    return waits.noted


def test_what_waits_is_seen():
    values = torch.empty(3, device=META)
    assert waits_of(lambda: values.new_tensor(1.0)) == ["a number made a tensor"]
    assert waits_of(lambda: torch.zeros(3).to(META)) == ["a copy between host and device"]
    assert waits_of(lambda: values.copy_(torch.zeros(3))) == ["a copy between host and device"]
    for function in (lambda: values.sum().item(), lambda: bool(values[0] > 0), values.nonzero):
        with pytest.raises((RuntimeError, NotImplementedError)):
            function()


@pytest.fixture
def make_step(make_config, accelerator, monkeypatch):
    """make_step(*overrides): a step of stage one, its network and a batch, without values."""
    # Autocast knows no meta device.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())

    def make(*overrides):
        config = make_config("model={name: lenet}", *overrides)
        method = config.method.build(CLASSES)
        network = Network(config, CLASSES, method=method)
        loss = build_training_loss(config.loss, CLASSES, num_samples=60)
        modules = [module.to(META).train() for module in (network, method, loss)]
        parameters = [p for module in modules for p in module.parameters()]
        step = TrainingStep(
            config=config,
            network=network,
            forward=network,
            method=method,
            loss=loss,
            mixed_loss=build_mixed_loss(config.mixed.loss),
            optimiser=build_optimiser(config.optimiser, parameters),
            accelerator=accelerator,
        )
        return step, network, batch_size_for(20)

    return make


def batch_size_for(count):
    images = torch.empty(3 * count, 16, 16, 3, dtype=torch.uint8, device=META)
    numbers = torch.empty(count, dtype=torch.int64, device=META)
    labels = torch.empty(2 * count, CLASSES, device=META)
    kinds = torch.empty(2 * count, 2, device=META)
    return TrainingBatch(images[:count], numbers, numbers, images[count:], labels, kinds)


STEPS = (
    *(f"loss={{name: {name}}}" for name in LOSSES),
    *(f"method={{name: {name}}}" for name in METHODS),
    "method={name: rankmixup, kind: mndcg}",
    "loss={name: crl, variant: paper}",
    "loss={name: fedlas_ls, norm_start: first_batch}",
    "optimiser={name: sgd, schedule: constant}",
    "mixed.batch_norm=shared",
    "accumulate=2",
)


@pytest.mark.parametrize("setting", STEPS)
def test_no_step_waits_for_the_device(make_step, setting):
    loss = () if setting.startswith("loss") else ("loss={name: ce}",)
    step, _, batch = make_step(*loss, setting)
    assert waits_of(lambda: step(batch)) == []


def test_no_batch_waits_for_the_device(mixed_url):
    batches = Batches(
        InMemoryImages(torch.zeros(60, 16, 16, 3, dtype=torch.uint8)),
        torch.arange(60) % CLASSES,
        batch_size=20,
        augment=AugmentConfig(shift=1, flip=True),
        device=META,
        mixed=MixedDataset(mixed_url),
    )
    drawn_batches = []
    assert waits_of(lambda: drawn_batches.extend(batches.epoch(torch.Generator()))) == []
    assert [batch.mixed_images.device for batch in drawn_batches] == [META] * 3


def test_averaging_the_weights_does_not_wait_for_the_device(make_step):
    _, network, _ = make_step("loss={name: ce}")
    average = WeightAverage(network, 0.9)
    for _ in range(3):
        assert waits_of(lambda: average.update(network)) == []
