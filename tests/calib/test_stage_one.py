"""Stage one: a step by its definition, micro-batches, averages, selection, stopping, resuming."""

import threading

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from semix.calib.checkpoint import latest_checkpoint, save_checkpoint
from semix.calib.divergence import Diverged
from semix.calib.metrics import calibration_metrics
from semix.calib.network import Classifier, predict
from semix.calib.real_data import open_data
from semix.calib.real_images import decode
from semix.calib.stopping import Stopped
from semix.data.fingerprint import derived_seed
from tests.calib.runs import stop_after

PLAIN_SGD = (
    "optimiser={learning_rate: 0.1, momentum: 0, weight_decay: 0, clip_norm: null,"
    " schedule: constant}"
)
NO_NORMS = "model={name: lenet}"


def test_a_step_follows_the_gradient_of_real_plus_weighted_mixed_loss(make_stage):
    stage = make_stage(
        "loss={name: ce}",
        "epochs=1",
        "batch_size=60",
        "mixed.weight=0.5",
        PLAIN_SGD,
    )
    generator = torch.Generator().manual_seed(derived_seed(0, "base", 0))
    [batch] = stage.batches.epoch(generator)
    network = stage.network.train()
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    real = functional.cross_entropy(network(batch.images)[0], batch.targets)
    p = network(batch.mixed_images)[0].softmax(1)
    mixed = sum(((p - batch.mixed_labels) ** 2).sum(1)) / 120
    gradients = torch.autograd.grad(real + 0.5 * mixed, list(network.parameters()))
    metrics = stage.train_epoch(0)
    for (name, value), gradient in zip(network.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(value.detach(), before[name] - 0.1 * gradient)
    assert metrics["loss"] == pytest.approx(real.item(), rel=1e-5)
    assert metrics["mixed_loss"] == pytest.approx(mixed.item(), rel=1e-5)
    label, largest = batch.mixed_labels.max(1)
    confidence = p.detach().gather(1, largest[:, None])[:, 0]
    for first, kind in enumerate(("end", "interior")):  # they alternate: two images per series
        mean = confidence[first::2].mean().item()
        assert metrics[f"mixed_confidence_{kind}"] == pytest.approx(mean, rel=1e-5)
        mean = label[first::2].mean().item()
        assert metrics[f"mixed_label_{kind}"] == pytest.approx(mean, rel=1e-5)
    assert metrics["mixed_label_end"] == pytest.approx(1.0)
    assert metrics["mixed_label_interior"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("override", "expected"), [("mixed=null", set()), ("mixed.per_real=1", {"mixed_loss"})]
)
def test_what_no_mixed_image_tells_is_absent(make_stage, override, expected):
    metrics = make_stage("loss={name: ce}", override).train_epoch(0)
    assert {name for name in metrics if name.startswith("mixed_")} == expected


def test_batch_norms_see_real_then_mixed_and_fedlas_real_alone(make_stage):
    stage = make_stage()
    stage.train_epoch(0)
    assert stage.loss.norm_batches.item() == 3  # 60 images in batches of 20
    [count, *_] = [value for name, value in stage.network.named_buffers() if "num_batches" in name]
    assert count.item() == 6


def test_a_seed_decides_the_first_weights(make_stage):
    first, same, other = (
        make_stage(seed=seed).network.state_dict()["backbone.classifier.weight"]
        for seed in (0, 0, 1)
    )
    torch.testing.assert_close(first, same, rtol=0, atol=0)
    assert (first - other).abs().max() > 0.01


def test_clipping_leaves_the_gate_of_the_loss_alone(make_stage):
    stage = make_stage(
        "optimiser={learning_rate: 1.0, momentum: 0, weight_decay: 0, clip_norm: 1e-9,"
        " schedule: constant}",
        "loss.smoothing=0.5",
    )
    network = {name: p.detach().clone() for name, p in stage.network.named_parameters()}
    gate = [p.detach().clone() for p in stage.loss.parameters()]
    stage.train_epoch(0)
    for name, parameter in stage.network.named_parameters():
        torch.testing.assert_close(parameter.detach(), network[name], rtol=0, atol=1e-7)
    moved = [(a - b).abs().max().item() for a, b in zip(stage.loss.parameters(), gate, strict=True)]
    assert max(moved) > 1e-4


@pytest.mark.parametrize("accumulate", [2, 5])
def test_parts_of_a_batch_train_as_the_whole_does(make_stage, accumulate):
    settings = ("loss={name: ce}", NO_NORMS, PLAIN_SGD, "mixed.per_real=1.5", "augment.shift=0")
    plain, in_parts = make_stage(*settings), make_stage(*settings, f"accumulate={accumulate}")
    for epoch in range(2):
        expected, metrics = plain.train_epoch(epoch), in_parts.train_epoch(epoch)
        assert metrics == pytest.approx(expected, rel=1e-5)
    for name, value in plain.network.state_dict().items():
        torch.testing.assert_close(in_parts.network.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def snapshots(stage) -> list[dict]:
    """States of the network after each step; filled while it trains."""
    states: list[dict] = []

    def note(*_) -> None:
        states.append({name: v.clone() for name, v in stage.network.state_dict().items()})

    stage.optimiser.optimizer.register_step_post_hook(note)
    return states


def test_averaged_weights_follow_every_step_and_are_what_is_measured_and_kept(make_stage, tmp_path):
    stage = make_stage("ema=0.8", "select=nll")
    states = snapshots(stage)
    metrics = [stage.train_epoch(epoch) for epoch in range(2)]
    assert len(states) == 6
    average = states[0]
    for state in states[1:]:
        average = {
            name: 0.8 * average[name] + 0.2 * value if value.is_floating_point() else value
            for name, value in state.items()
        }
    torch.testing.assert_close(dict(stage.average.network.state_dict()), average)
    network = stage.network.state_dict()
    assert (network["backbone.classifier.weight"] - average["backbone.classifier.weight"]).any()
    data = open_data(stage.config).real.validation
    logits = predict(
        Classifier(stage.average.network).eval(), decode(data), device=torch.device("cpu")
    )
    measures = calibration_metrics(logits, torch.from_numpy(data.targets))
    assert metrics[1]["validation_nll"] == pytest.approx(measures.nll, rel=1e-6)
    assert metrics[1]["validation_nll"] < metrics[0]["validation_nll"], "choose other settings"
    stage.export(tmp_path / "model.safetensors", digest="d")
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), average)


def test_validation_decides_when_it_ends_and_which_epoch_is_kept(make_stage, tmp_path):
    stage = make_stage(
        "loss={name: ce}",
        "mixed=null",
        NO_NORMS,
        "optimiser={name: adamw, learning_rate: 0.02, schedule: constant}",
        "epochs=40",
        "select=nll",
        "early_stop={measure: accuracy, patience: 3}",
    )
    epochs, states = [], []
    while not stage.finished:
        epochs.append(stage.train_epoch(len(epochs)))
        states.append({name: v.clone() for name, v in stage.network.state_dict().items()})
    accuracy = [metrics["validation_accuracy"] for metrics in epochs]
    nll = [metrics["validation_nll"] for metrics in epochs]
    assert accuracy.index(max(accuracy)) == len(epochs) - 4
    best = nll.index(min(nll))
    assert best < len(epochs) - 1, "the last epoch is the best: the test needs other settings"
    stage.export(tmp_path / "model.safetensors", digest="d")
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), states[best])


def test_validation_is_left_alone_where_no_setting_asks(make_stage):
    assert not any(name.startswith("validation") for name in make_stage().train_epoch(0))


RESUMED = {
    "ce": ("loss={name: ce}", "mixed=null"),
    "csm": ("loss={name: ce}",),
    "fedlas_ls": (),
    "fedlas_mbls": ("loss={name: fedlas_mbls}",),
    "crl": ("loss={name: crl}", "mixed=null"),
    "ada_focal": ("loss={name: ada_focal}", "mixed=null"),
    "mixup": ("loss={name: ce}", "method={name: mixup}"),
    "balcal": ("loss={name: ce}", "method={name: balcal}", "model.width=4"),
    "plp": ("loss={name: ce}", "method={name: plp}"),
    "separate norms": ("mixed.batch_norm=separate",),
    "in parts": ("accumulate=2",),
    "averaged": ("ema=0.9", "select=nll", "early_stop={measure: ece, patience: 9}"),
    "sgd": ("optimiser={learning_rate: 0.1, milestones: [1]}", "select=brier"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_is_unbroken_to_the_last_bit(make_stage, tmp_path, name):
    """After an epoch, then after a step of the next one."""
    unbroken, stopped, resumed = (make_stage(*RESUMED[name]) for _ in range(3))
    unbroken.train_epoch(0)
    hand_over(unbroken, stopped, tmp_path / "epoch")
    expected = unbroken.train_epoch(1)
    with pytest.raises(Stopped):
        stopped.train_epoch(1, stop_after(steps=2))
    hand_over(stopped, resumed, tmp_path / "step")
    assert resumed.train_epoch(1) == expected
    assert_same_state(unbroken, resumed)


def hand_over(stage, other, folder):
    """Pass the state on through a checkpoint alone: the global random state is changed."""
    save_checkpoint(folder, 1, tensors=stage.tensors(), objects=stage.objects(), state={})
    other.load(latest_checkpoint(folder))
    torch.manual_seed(99)


def assert_same_state(stage, other):
    states = [(dict(one.tensors()), one.objects()) for one in (stage, other)]
    torch.testing.assert_close(*[all_values(*state) for state in states], rtol=0, atol=0)


def test_no_thread_reads_on_after_a_stop(make_stage):
    stage, before = make_stage(), threading.active_count()
    with pytest.raises(Stopped) as stopped:
        stage.train_epoch(0, stop_after(steps=1))
    assert threading.active_count() == before, stopped  # which still holds the epoch's frames


def test_the_very_first_epoch_can_be_stopped_before_any_is_the_best(make_stage, tmp_path):
    unbroken, stopped, resumed = (make_stage(*RESUMED["averaged"]) for _ in range(3))
    expected = unbroken.train_epoch(0)
    with pytest.raises(Stopped):
        stopped.train_epoch(0, stop_after(steps=1))
    hand_over(stopped, resumed, tmp_path)
    assert resumed.train_epoch(0) == expected
    assert_same_state(unbroken, resumed)


def all_values(tensors, objects):
    """State as nested plain dictionaries."""
    moments = {str(k): v for k, v in objects["optimiser"]["state"].items()}
    selection = {k: -1.0 if v is None else v for k, v in objects["selection"].items()}
    return {k: dict(v) for k, v in tensors.items()} | {"optimiser": moments, "chosen": selection}


def test_weights_that_are_no_numbers_any_more_end_the_training(make_stage):
    stage = make_stage(
        "mixed=null",
        "batch_size=60",
        "optimiser={learning_rate: 1e38, weight_decay: 1e3, schedule: constant}",
    )
    with pytest.raises(
        Diverged,
        match=r"^after the epoch's last step backbone\..* is NaN or infinite; lower optimiser",
    ):
        stage.train_epoch(0)
