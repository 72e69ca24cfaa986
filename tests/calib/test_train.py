"""Training: the step by its definition; interrupted, resumed, shared out, and still the same."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.nn import functional

from calib.base_stage import BaseStage
from calib.checkpoint import latest_checkpoint
from calib.classifier import load_classifier
from calib.epochs import Interrupted
from calib.head_stage import HeadStage
from calib.run_folder import claim_run
from calib.train import main, parser, train
from calib.training_data import open_data
from data.errors import InputError
from data.fingerprint import derived_seed

WEIGHTS = ("model.safetensors", "head.safetensors", "logits-base.safetensors")


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def make_stage(make_config, accelerator):
    """make_stage(*overrides, seed=0): stage one before its first epoch."""

    def make(*overrides, seed=0):
        config = make_config(*overrides)
        return BaseStage(config, open_data(config), seed=seed, accelerator=accelerator)

    return make


@pytest.fixture(scope="module")
def unbroken(make_config, tmp_path_factory):
    """A run that nothing interrupted."""
    run = claim_run(make_config(), tmp_path_factory.mktemp("unbroken")).parent
    train(run)
    return run


def history(run: Path, seed: int = 0) -> list[dict]:
    text = (run / f"seed-{seed}" / "history.jsonl").read_text()
    return [{**json.loads(line), "seconds": 0} for line in text.splitlines()]


def assert_same_results(run: Path, other: Path, seed: int = 0) -> None:
    for name in WEIGHTS:
        found = [load_file(folder / f"seed-{seed}" / name) for folder in (run, other)]
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert history(run, seed) == history(other, seed)


def stop_after(epochs: int):
    calls = iter(range(1, 1000))
    return lambda: next(calls) == epochs


def test_a_step_follows_the_gradient_of_real_plus_weighted_mixed_loss(make_stage):
    stage = make_stage(
        "loss={name: ce}",
        "epochs=1",
        "batch_size=60",
        "mixed.weight=0.5",
        "optimiser={learning_rate: 0.1, momentum: 0, weight_decay: 0, clip_norm: null,"
        " schedule: constant}",
    )
    generator = torch.Generator().manual_seed(derived_seed(0, "base", 0))
    [batch] = stage.batches.epoch(generator)
    network = stage.network.train()
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    real = functional.cross_entropy(network(batch.images)[0], batch.targets)
    p = network(batch.mixed_images)[0].softmax(1)
    mixed = sum(((p - batch.mixed_labels) ** 2).sum(1)) / 120
    gradients = torch.autograd.grad(real + 0.5 * mixed, list(network.parameters()))
    figures = stage.train_epoch(0)
    for (name, value), gradient in zip(network.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(value.detach(), before[name] - 0.1 * gradient)
    assert figures["loss"] == pytest.approx(real.item(), rel=1e-5)
    assert figures["mixed_loss"] == pytest.approx(mixed.item(), rel=1e-5)


def test_batch_norms_see_real_then_mixed_and_fedlas_real_alone(make_stage):
    stage = make_stage()
    stage.train_epoch(0)
    assert stage.loss.norm_batches.item() == 3  # of 60 images by 20
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


def test_health_of_the_loss_is_in_the_history(unbroken):
    base = [line for line in history(unbroken) if line["stage"] == "base"]
    head = [line for line in history(unbroken) if line["stage"] == "head"]
    assert len(base) == len(head) == 4
    assert all(0 < line["smoothing"] < 0.1 for line in base)
    assert head[0]["p"] == 0.5
    assert len({line["p"] for line in head}) > 1


@pytest.mark.parametrize("epoch", [1, 3, 4, 6, 8])
def test_stopped_and_resumed_is_the_unbroken_run(unbroken, make_run, epoch):
    """After an epoch of stage one, its last, one of the head's, the very last."""
    broken = make_run("broken")
    with pytest.raises(Interrupted, match=rf"stopped after epoch {(epoch - 1) % 4 + 1}$"):
        train(broken, stop=stop_after(epoch))
    assert not (broken / "evaluation.json").exists()
    with pytest.raises(InputError, match=r"^run = .*: seed 0 is unfinished; add --resume"):
        train(broken)
    train(broken, resume=True)
    assert_same_results(unbroken, broken)


def test_resuming_from_an_earlier_checkpoint_drops_the_history_after_it(unbroken, make_run):
    broken = make_run("broken", "checkpoint_every=2")
    with pytest.raises(RuntimeError, match="power cut"):  # after epoch 3, before its checkpoint
        train(broken, stop=power_cut_after(3))
    with (broken / "seed-0" / "history.jsonl").open("a") as file:
        file.write('{"stage": "ba')
    train(broken, resume=True)
    assert_same_results(unbroken, broken)


def power_cut_after(epochs: int):
    calls = iter(range(1, 1000))

    def stop() -> bool:
        if next(calls) == epochs:
            raise RuntimeError("power cut")
        return False

    return stop


def test_best_accuracy_survives_a_resume_and_is_what_is_exported(make_run):
    overrides = ("select=best_accuracy", "optimiser.learning_rate=0.05", "epochs=8")
    unbroken, broken = make_run("unbroken", *overrides), make_run("broken", *overrides)
    train(unbroken)
    found = [line.get("validation_accuracy", 0) for line in history(unbroken)]
    best = max(found)
    after_best = found.index(best) + 1
    assert after_best < 8, "the last epoch is the best: the test needs other settings"
    with pytest.raises(Interrupted):
        train(broken, stop=stop_after(after_best))
    train(broken, resume=True)
    assert_same_results(unbroken, broken)
    logits = load_file(unbroken / "seed-0" / "logits-base.safetensors")
    right = logits["validation_logits"].argmax(1) == logits["validation_targets"]
    assert right.float().mean().item() == pytest.approx(best)


def test_a_seed_does_not_depend_on_the_others(unbroken, make_run):
    together = make_run("together", "seeds=[1,0]")
    train(together)
    assert_same_results(unbroken, together, seed=0)
    models = [load_file(together / f"seed-{seed}" / "model.safetensors") for seed in (0, 1)]
    name = "backbone.classifier.weight"
    assert (models[0][name] - models[1][name]).abs().max() > 0.01


def test_a_measured_seed_is_not_trained_again_and_new_seeds_join(
    unbroken, make_run, tmp_path, capsys
):
    run = Path(shutil.copytree(unbroken, tmp_path / "run"))
    before = (run / "seed-0" / "model.safetensors").stat().st_mtime_ns
    make_run("run", "seeds=[0,1]")
    train(run)
    assert (run / "seed-0" / "model.safetensors").stat().st_mtime_ns == before
    assert "all seed 0: done already" in capsys.readouterr().out
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    places = [(row["seed"], row["stage"]) for row in rows]
    assert places == [(0, "base"), (0, "head"), (1, "base"), (1, "head")]


@pytest.mark.parametrize("state", ["half done", "done"])
def test_settings_changed_by_hand_are_refused(unbroken, make_config, tmp_path, state):
    run = Path(shutil.copytree(unbroken, tmp_path / "run"))
    if state == "half done":
        (run / "seed-0" / "evaluation.json").unlink()
    changed = make_config("mixed.weight=3").model_dump(mode="json")
    (run / "config.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match=r"other settings \(mixed\.weight: 1\.0 there, 3\.0 now\)"):
        train(run, resume=True)


def test_images_read_when_they_are_drawn_train_the_same_network(unbroken, make_run):
    run = make_run("run", "mixed.memory_gib=0")
    train(run)
    for name in ("model.safetensors", "head.safetensors"):
        expected, found = (load_file(folder / "seed-0" / name) for folder in (unbroken, run))
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0)


def test_mixed_images_of_another_size_are_refused(make_run):
    run = make_run("run", "real.image_size=24")
    with pytest.raises(InputError, match=r"^mixed\.url = .* 16x16 pixels, the real ones 24x24"):
        train(run)
    assert [path.name for path in run.iterdir()] == ["config.json"]


@pytest.mark.parametrize("shift", [0, 1])
def test_the_head_stage_leaves_network_and_batch_norms_alone(
    unbroken, make_config, accelerator, shift
):
    config = make_config(f"augment.shift={shift}")
    network = load_classifier(unbroken, 0).network
    before = {name: value.clone() for name, value in network.state_dict().items()}
    stage = HeadStage(config, open_data(config), network=network, seed=0, accelerator=accelerator)
    images = stage.batches.images
    for epoch in range(2):  # in the second, momentum pulls at weights that are masked now
        stage.train_epoch(epoch)
    for name, value in network.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    weight = stage.head.layer1.weight
    assert (weight[~stage.head.mask1] == 0).all()
    assert (weight[stage.head.mask1] != 0).any()
    # Features are kept exactly where every epoch would compute the same ones.
    assert (stage._cached is None) == (shift > 0)
    if stage._cached is not None:
        torch.testing.assert_close(stage._cached[:7], network.features(images[:7]))


def test_bf16_trains_and_keeps_losses_in_float32(make_run):
    AcceleratorState._reset_state(reset_partial_state=True)
    run = make_run("run", "mixed_precision=bf16")
    try:
        train(run)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert all(
        value.dtype != torch.bfloat16 for value in load_file(run / "seed-0" / WEIGHTS[0]).values()
    )
    assert history(run)[3]["loss"] < history(run)[0]["loss"]


def launched(*arguments: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(arguments, env=environment, **pipes, **options)


def wait_for_epochs(run: Path, count: int, process: subprocess.Popen) -> None:
    path, deadline = run / "seed-0" / "history.jsonl", time.monotonic() + 120
    while not path.is_file() or len(path.read_bytes().splitlines()) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_and_resumed_is_the_unbroken_run(make_run):
    long = ("epochs=30", "checkpoint_every=3")
    unbroken, broken = make_run("unbroken", *long), make_run("broken", *long)
    train(unbroken)
    config = ["--config", str(broken / "config.json")]
    killed = launched(sys.executable, "-m", "calib.train", *config)
    wait_for_epochs(broken, 4, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert latest_checkpoint(broken / "seed-0" / "checkpoint").state["epoch"] < 30
    train(broken, resume=True)
    assert_same_results(unbroken, broken)


def test_sigterm_writes_a_checkpoint_and_exits_143(make_run):
    run = make_run("run", "epochs=3000", "checkpoint_every=1000")
    process = launched(sys.executable, "-m", "calib.train", "--config", str(run / "config.json"))
    wait_for_epochs(run, 3, process)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "go on with --resume" in output
    checkpoint = latest_checkpoint(run / "seed-0" / "checkpoint")
    assert checkpoint.state["epoch"] == len(history(run)) >= 3


TWO_PROCESSES = """
import sys
import torch
from accelerate.utils import gather
from calib.base_stage import BaseStage
from calib.classifier import load_classifier
from calib.config import TrainConfig
from calib.train import make_accelerator, train
from calib.head_stage import HeadStage
from calib.training_data import open_data
from data.settings import load_settings
from pathlib import Path

run = Path(sys.argv[1])
train(run)
config = load_settings(TrainConfig, run / "config.json")
accelerator, data = make_accelerator(config), open_data(config)
base = BaseStage(config, data, seed=0, accelerator=accelerator)
network = load_classifier(run, 0).network
head = HeadStage(config, data, network=network, seed=0, accelerator=accelerator)
for stage, module in ((base, base.network), (base, base.loss), (head, head.head)):
    stage.train_epoch(0)
    for name, value in module.state_dict().items():
        both = gather(value.float().flatten()[None].contiguous())
        assert len(both) == 2 and torch.equal(both[0], both[1]), name
print("processes agree", flush=True)
"""


def test_two_processes_train_one_model(make_run, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    run = make_run("run", "epochs=2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    found = subprocess.run(
        [*command, str(script), str(run)], env=environment, capture_output=True, text=True
    )
    assert found.stdout.count("processes agree") == 2, found.stderr
    assert [line["epoch"] for line in history(run)] == [0, 1, 0, 1, 2, 3]
    assert json.loads((run / "evaluation.json").read_text())["rows"][0]["stage"] == "base"


def test_the_command_line_says_what_is_wrong(make_run, capsys):
    assert main(["--config", str(make_run("run", "loss.name=foo") / "config.json")]) == 2
    assert capsys.readouterr().err.startswith("error: loss.name = foo: choose one of")
    for arguments in ([], ["--config", "settings.yaml"]):
        with pytest.raises(SystemExit, match="2"):
            parser().parse_args(arguments)
    assert "settings.yaml: give the config.json of a run folder" in capsys.readouterr().err
