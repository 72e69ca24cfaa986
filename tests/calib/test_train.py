"""Whole runs: interrupted, resumed, diverged, stopped early; and what each leaves behind."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from semix.calib.checkpoint import latest_checkpoint
from semix.calib.metrics import calibration_metrics
from semix.calib.run_folder import claim_run
from semix.calib.stopping import Interrupted
from semix.calib.train import main, parser, train_run
from semix.data.errors import InputError
from semix.data.root import Root
from tests.calib.runs import STEPS, WEIGHTS, assert_same_results, history, stop_after


@pytest.fixture(scope="module")
def unbroken(make_config, tmp_path_factory):
    """A run that nothing interrupted."""
    run = claim_run(make_config(), tmp_path_factory.mktemp("unbroken")).parent
    train_run(run)
    return run


def test_a_run_lists_every_shard_that_it_relied_on(unbroken):
    mixed = json.loads((unbroken / "data.json").read_text())["mixed"]
    lineage = json.loads((unbroken / "lineage.json").read_text())
    root = Root(mixed["url"])
    assert lineage["shards"] == [[entry.shard, entry.sha256] for entry in root.records()]
    assert (lineage["index"], lineage["plan"]) == (mixed["index"], root.plan.digest)
    assert lineage["models"].keys() == root.plan.models.keys()


def test_diagnostics_of_the_loss_are_in_the_history(unbroken):
    base = [line for line in history(unbroken) if line["stage"] == "base"]
    head = [line for line in history(unbroken) if line["stage"] == "head"]
    assert len(base) == len(head) == 4
    assert all(0 < line["smoothing"] < 0.1 for line in base)
    assert head[0]["p"] == 0.5
    assert len({line["p"] for line in head}) > 1


@pytest.mark.parametrize(
    ("epochs", "steps", "where"),
    [
        (0, 1, "base: stopped in epoch 1 after step 1"),
        (1, 0, "base: stopped after epoch 1"),
        (4, 0, "base: stopped after epoch 4"),
        (6, 0, "head: stopped after epoch 2"),
        (6, 2, "head: stopped in epoch 3 after step 2"),
        (8, 0, "head: stopped after epoch 4"),
    ],
)
def test_stopped_and_resumed_is_the_unbroken_run(unbroken, make_run, epochs, steps, where):
    broken = make_run("broken")
    with pytest.raises(Interrupted, match=rf"^all seed 0 {where}$"):
        train_run(broken, stop=stop_after(epochs, steps=steps))
    assert not (broken / "evaluation.json").exists()
    assert len(history(broken)) == epochs
    checkpoint = latest_checkpoint(broken / "seed-0" / "checkpoint")
    progress = {name: checkpoint.state[name] for name in ("position", "step")}
    assert progress == {"position": epochs, "step": steps}
    train_run(broken)
    assert_same_results(unbroken, broken)


def test_an_epoch_that_was_stopped_twice_has_one_line_and_all_its_seconds(unbroken, make_run):
    broken = make_run("broken")
    progress = []
    for step in (1, 1, STEPS):  # the second call is after the second step
        with pytest.raises(Interrupted):
            train_run(broken, stop=stop_after(steps=step))
        state = latest_checkpoint(broken / "seed-0" / "checkpoint").state
        progress.append((state["step"], state["begun_s"]))
    assert [step for step, _ in progress] == [1, 2, 2]
    assert 0 < progress[0][1] < progress[1][1]
    train_run(broken)
    assert_same_results(unbroken, broken)
    lines = (broken / "seed-0" / "history.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["seconds"] > progress[1][1]


def test_resuming_from_an_earlier_checkpoint_drops_the_history_after_it(unbroken, make_run):
    broken = make_run("broken", "checkpoint_every=2")
    with pytest.raises(RuntimeError, match="power cut"):  # after epoch 3, which has none
        train_run(broken, stop=power_cut_after(3))
    with (broken / "seed-0" / "history.jsonl").open("a") as file:
        file.write('{"stage": "ba')
    train_run(broken)
    assert_same_results(unbroken, broken)


def power_cut_after(epochs: int):
    calls = iter(range(1, 1000))

    def stop() -> bool:
        if next(calls) == epochs * STEPS:
            raise RuntimeError("power cut")
        return False

    return stop


def test_an_epochs_checkpoint_is_there_before_its_line(make_run, monkeypatch):
    """The reader of the line may be gone, so that printing it fails."""

    def show(*arguments, **options) -> None:
        raise BrokenPipeError("nobody reads")

    monkeypatch.setattr("semix.calib.loop.EpochLines.show_epoch", show)
    run = make_run("unheard", "checkpoint_every=1")
    with pytest.raises(BrokenPipeError):
        train_run(run)
    assert latest_checkpoint(run / "seed-0" / "checkpoint").state["epoch"] == 1


def test_a_training_says_what_it_costs_and_how_far_a_long_epoch_is(make_run, monkeypatch, capsys):
    monkeypatch.setattr("semix.calib.epoch_lines.MAX_PAUSE_S", 0.0)
    train_run(make_run("run", "mixed=null", "epochs=2", "head.epochs=1", "real.image_size=8"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("all: resnet8: ") and "GMAC per image of 8 pixels" in lines[0]
    for text in ("base epoch 1/2  step 2 of 3", "base epoch 2/2  step 3 of 3", "head epoch 1/1"):
        (line,) = [line for line in lines if f"all seed 0 {text}" in line][:1]
        assert re.search(r"  [\d.e-]+ s per epoch  [\d.]+ s left$", line)
    assert "all seed 0 head features of 60 of 60 images" in lines
    ends = [line for line in lines if line.startswith("all seed 0 base 2/2  loss ")]
    assert re.search(r"images/s  [\d.e-]+ s per epoch  0 s left$", ends[0])
    assert not any(line.startswith("warning: model") for line in lines)


def test_a_stem_that_does_not_fit_is_warned_of(make_run, capsys):
    small = ("mixed=null", "head=null", "epochs=1", "real.train_per_class=2", "batch_size=10")
    train_run(make_run("run", *small, "real.image_size=96", "model={name: resnet8, width: 1}"))
    warnings = [s for s in capsys.readouterr().out.splitlines() if s.startswith("warning: ")]
    assert len(warnings) == 1
    assert "model.name = resnet8: its stem is for smaller images: the last map" in warnings[0]


def test_the_chosen_epoch_and_the_early_stop_survive_a_resume(make_run):
    overrides = (
        "select=nll",
        "early_stop={measure: accuracy, patience: 2}",
        "optimiser.learning_rate=0.05",
        "epochs=30",
    )
    unbroken, broken = make_run("unbroken", *overrides), make_run("broken", *overrides)
    train_run(unbroken)
    base = [line for line in history(unbroken) if line["stage"] == "base"]
    assert 3 <= len(base) < 30
    assert [line["stage"] for line in history(unbroken)[len(base) :]] == ["head"] * 4
    with pytest.raises(Interrupted):
        train_run(broken, stop=stop_after(len(base) - 1))
    train_run(broken)
    assert_same_results(unbroken, broken)
    logits = load_file(unbroken / "seed-0" / "logits-base.safetensors")
    measures = calibration_metrics(logits["validation_logits"], logits["validation_targets"])
    assert measures.nll == pytest.approx(min(line["validation_nll"] for line in base), rel=1e-6)


def test_a_loss_that_is_no_number_stops_at_once_and_leaves_the_last_checkpoint(make_run, capsys):
    run = make_run(
        "run",
        "loss={name: ce}",
        "mixed=null",
        "head=null",
        "model={name: lenet}",
        "epochs=40",
        "optimiser={learning_rate: 1, momentum: 0, weight_decay: 5, schedule: constant}",
    )
    assert main(["--config", str(run / "config.json")]) == 3
    checkpoint = latest_checkpoint(run / "seed-0" / "checkpoint")
    epochs = len(history(run))
    assert checkpoint.state["epoch"] == epochs >= 2
    assert all(value.isfinite().all() for value in checkpoint.tensors("network").values())
    text = capsys.readouterr().err
    assert text.startswith(f"diverged: all seed 0 base epoch {epochs + 1}: step ")
    assert "the real loss is NaN or infinite; lower optimiser.learning_rate" in text
    assert sorted(path.name for path in (run / "seed-0").iterdir()) == [
        ".lock",
        "checkpoint",
        "history.jsonl",
        "tensorboard",
    ]


def test_a_batch_that_cannot_be_shared_out_is_refused_before_data_is_read(make_run):
    run = make_run("run", "accumulate=7")
    with pytest.raises(InputError, match=r"^accumulate = 7: the 20 real images of a process"):
        train_run(run)
    assert [path.name for path in run.iterdir()] == ["config.json"]


def test_a_seed_does_not_depend_on_the_others(unbroken, make_run):
    together = make_run("together", "seeds=[1,0]")
    train_run(together)
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
    train_run(run)
    assert (run / "seed-0" / "model.safetensors").stat().st_mtime_ns == before
    assert "all seed 0: done already" in capsys.readouterr().out
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    order = [(row["seed"], row["stage"]) for row in rows]
    assert order == [(0, "base"), (0, "head"), (1, "base"), (1, "head")]


def test_seeds_are_measured_again_under_other_settings(unbroken, make_run, tmp_path):
    run = Path(shutil.copytree(unbroken, tmp_path / "run"))
    before = (run / "seed-0" / "model.safetensors").stat().st_mtime_ns
    make_run("run", "evaluation.bins=7")
    train_run(run)
    assert (run / "seed-0" / "model.safetensors").stat().st_mtime_ns == before
    records = [json.loads((run / name / "evaluation.json").read_text()) for name in ("", "seed-0")]
    assert [record["evaluation"]["bins"] for record in records] == [7, 7]


@pytest.mark.parametrize("state", ["half done", "done"])
def test_settings_changed_by_hand_are_refused(unbroken, make_config, tmp_path, state):
    run = Path(shutil.copytree(unbroken, tmp_path / "run"))
    if state == "half done":
        (run / "seed-0" / "evaluation.json").unlink()
    changed = make_config("mixed.weight=3").model_dump(mode="json")
    (run / "config.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match=r"other settings \(mixed\.weight: 1\.0 there, 3\.0 now\)"):
        train_run(run)


def test_images_read_when_they_are_drawn_train_the_same_network(unbroken, make_run):
    run = make_run("run", "mixed.memory_gib=0")
    train_run(run)
    for name in ("model.safetensors", "head.safetensors"):
        expected, weights = (load_file(folder / "seed-0" / name) for folder in (unbroken, run))
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=0)


def test_mixed_images_of_another_size_are_scaled_to_the_real_ones(make_run):
    run = make_run("run", "real.image_size=24", "epochs=1", "head=null")
    train_run(run)
    (row,) = json.loads((run / "evaluation.json").read_text())["rows"]
    assert math.isfinite(row["kinds"]["plain"]["nll"])


def test_bf16_trains_and_keeps_losses_in_float32(make_run):
    AcceleratorState._reset_state(reset_partial_state=True)
    run = make_run("run", "mixed_precision=bf16")
    try:
        train_run(run)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert all(
        value.dtype != torch.bfloat16 for value in load_file(run / "seed-0" / WEIGHTS[0]).values()
    )
    assert history(run)[3]["loss"] < history(run)[0]["loss"]


def launch(*arguments: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(arguments, env=environment, **pipes, **options)


def wait_for_epochs(run: Path, count: int, process: subprocess.Popen) -> None:
    path, deadline = run / "seed-0" / "history.jsonl", time.monotonic() + 120
    while not path.is_file() or len(path.read_bytes().splitlines()) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.smoke
def test_killed_and_resumed_is_the_unbroken_run(make_run):
    long = ("epochs=30", "checkpoint_every=3", "head.p_start=0.9")  # else the head ends at chance
    unbroken, broken = make_run("unbroken", *long), make_run("broken", *long)
    train_run(unbroken)
    config = ["--config", str(broken / "config.json")]
    killed = launch(sys.executable, "-m", "semix.calib.train", *config)
    wait_for_epochs(broken, 4, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert latest_checkpoint(broken / "seed-0" / "checkpoint").state["epoch"] < 30
    train_run(broken)
    assert_same_results(unbroken, broken)


@pytest.mark.process
def test_sigterm_writes_a_checkpoint_and_exits_143(make_run):
    run = make_run("run", "epochs=3000", "checkpoint_every=1000")
    process = launch(
        sys.executable, "-m", "semix.calib.train", "--config", str(run / "config.json")
    )
    wait_for_epochs(run, 3, process)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "the same command goes on" in output
    checkpoint = latest_checkpoint(run / "seed-0" / "checkpoint")
    assert checkpoint.state["epoch"] == len(history(run)) >= 3


def test_the_command_line_says_what_is_wrong(make_run, capsys):
    run = make_run("run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"loss": {"name": "foo"}}))
    assert main(["--config", str(run / "config.json")]) == 2
    assert "loss.name = foo: choose one of" in capsys.readouterr().err
    assert main(["--config", str(make_run("gpu") / "config.json"), "--device=cuda"]) == 2
    assert capsys.readouterr().err.startswith("error: device = cuda: torch sees no GPU here")
    for arguments in ([], ["--config", "settings.yaml"]):
        with pytest.raises(SystemExit, match="2"):
            parser().parse_args(arguments)
    assert "settings.yaml: give the config.json of a run folder" in capsys.readouterr().err


def test_seeds_that_are_trained_apart_are_one_run(make_run):
    run = make_run("apart", "epochs=1", "head=null", "seeds=[0, 1]")
    train_run(run, only=[1])
    assert not (run / "evaluation.json").exists()
    assert not (run / "seed-0").exists()
    train_run(run, only=[0])
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    assert [row["seed"] for row in rows] == [0, 1]
    with pytest.raises(InputError, match=r"^--seeds = 7: choose one of 0, 1"):
        train_run(run, only=[7])
