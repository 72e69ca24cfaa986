"""Two processes: one model, the loss curve of one process, and an end together."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from semix.calib.network import load_trained
from semix.calib.real_data import open_data
from semix.calib.run_folder import claim_run
from semix.calib.stage_two import HeadStage
from semix.calib.train import train_run
from tests.calib.runs import assert_same_results, history, run_two

EPOCHS = 3
# Without batch norms, which see only a process's own images: with them the curve of two
# processes would be that of half the batch size.
CURVES = {
    "ce": ("loss={name: ce}", "mixed=null"),
    "csm": ("loss={name: ce}",),
    "fedlas_ls": ("loss={name: fedlas_ls}",),
    "fedlas_mbls": ("loss={name: fedlas_mbls}",),
    "crl": ("loss={name: crl}", "mixed=null"),
    "ada_focal": ("loss={name: ada_focal}", "mixed=null"),
    "in parts": ("loss={name: ce}", "accumulate=2"),
    "averaged": ("loss={name: ce}", "ema=0.8", "select=nll", "real.validation_per_class=3"),
    "plp": ("loss={name: ce}", "method={name: plp}"),
}
# Without clipping, which would hide a sum over too few images.
SUMMED = (
    "head.reduction=sum",
    "head.optimiser={learning_rate: 0.001, clip_norm: null}",
    "head.loss={name: fedlas_ls, smoothing: 0.5}",
)
SMALL_STEPS = "optimiser={learning_rate: 0.02, schedule: constant}"

# A second run like the one of this name is stopped after so many steps, then after so many more.
STOPPED = {"all": (2, 9), "mixup": (1, 9)}
DRAWS = ("loss={name: ce}", "method={name: mixup}", "head={method: vtst, batch_size: 20}")

SCRIPT = """
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
import torch
from accelerate.utils import gather
from safetensors.torch import save_file
from semix.calib import processes
from semix.calib.config import TrainConfig
from semix.calib.divergence import Diverged
from semix.calib.network import SplitOutputs, load_trained
from semix.calib.real_data import open_data
from semix.calib.training_data import TrainingData
from semix.calib.real_images import decode
from semix.calib.run_folder import claim_run
from semix.calib.stage_one import BaseStage
from semix.calib.stage_two import HeadStage
from semix.calib.processes import StopVote
from semix.calib.stopping import Interrupted
from semix.calib.train import main, make_accelerator, train_run
from semix.data.settings import load_settings

run, settings = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())

def agree(module):
    for name, value in module.state_dict().items():
        both = gather(value.float().flatten()[None].contiguous())
        assert len(both) == 2 and torch.equal(both[0], both[1]), name

def ask_process_1_at_step_500():
    step = 0
    vote = StopVote(lambda: accelerator.process_index == 1 and step >= 500, accelerator)
    while not vote():
        step += 1
    print(f"both stop after step {step}", flush=True)

def ask_process_1_after(last, run):
    steps = itertools.count(1)
    try:
        train_run(run, stop=lambda: next(steps) == last and accelerator.process_index == 1)
    except Interrupted as error:
        print(f"interrupted: {error}", flush=True)

train_run(run)
train_run(run.with_name("mixup"))
accelerator = make_accelerator(load_settings(TrainConfig, run / "config.json"), run)
ask_process_1_at_step_500()
processes.VOTE_INTERVAL_S = 0  # vote after every step
for name, steps in settings["stopped"].items():
    for last in steps:
        ask_process_1_after(last, run.with_name(f"{name}-stopped"))
    train_run(run.with_name(f"{name}-stopped"))
config = load_settings(TrainConfig, run / "config.json", settings["summed"])
accelerator, data = make_accelerator(config, run), open_data(config)
head = HeadStage(
    config, data, network=load_trained(run, 0).network, seed=0, accelerator=accelerator
)
head.train_epoch(0)
agree(head.head)
if accelerator.is_main_process:
    save_file(head.head.state_dict(), run / "summed.safetensors")
curves = {}
for name, values in settings["curves"].items():
    config = load_settings(TrainConfig, values)
    stage = BaseStage(config, open_data(config), seed=0, accelerator=accelerator)
    curves[name] = [stage.train_epoch(epoch) for epoch in range(settings["epochs"])]
    agree(stage.network)
    agree(stage.loss)
    if accelerator.is_main_process:
        state = {k: v.contiguous() for k, v in stage.loss.state_dict().items()}
        save_file(state, run / f"{name}.safetensors")
if accelerator.is_main_process:
    (run / "curves.json").write_text(json.dumps(curves))
real = data.real
odd = replace(real, validation=replace(real.validation, targets=real.validation.targets[:29]))
data = TrainingData(odd, None, data.side)
outputs = SplitOutputs(stage.network, data, accelerator).outputs("validation")
with torch.no_grad():
    logits, features = stage.network.eval()(decode(odd.validation))
torch.testing.assert_close((outputs.logits, outputs.features), (logits, features))
assert outputs.targets.tolist() == odd.validation.targets.tolist()
print("outputs of an odd number of images agree", flush=True)
bad = float("nan") if accelerator.process_index else 0
stage.step = lambda batch: torch.tensor([bad, *[0] * 6])
try:
    stage.train_epoch(0)
except Diverged as error:
    print(f"ended: {error}", flush=True)
config = load_settings(TrainConfig, run / "config.json", ["evaluation.bins=7"])
if accelerator.is_main_process:
    claim_run(config, run)
accelerator.wait_for_everyone()
assert main(["--config", str(run / "config.json")]) == 0
assert not torch.distributed.is_initialized()
"""


@pytest.fixture(scope="module")
def two_processes(make_config, tmp_path_factory):
    """The run folder that two processes wrote, and what they printed."""
    folder = tmp_path_factory.mktemp("two")
    for suffix in ("", "-stopped"):
        run = claim_run(make_config("epochs=2"), folder / f"all{suffix}").parent
        claim_run(make_config("epochs=2", *DRAWS), folder / f"mixup{suffix}")
    run = folder / "all"
    curves = {name: curve_config(make_config, name).model_dump(mode="json") for name in CURVES}
    settings = {"curves": curves, "epochs": EPOCHS, "stopped": STOPPED, "summed": SUMMED}
    (folder / "settings.json").write_text(json.dumps(settings))
    return run, run_two(SCRIPT, folder, run, folder / "settings.json")


def curve_config(make_config, name):
    return make_config("model={name: lenet}", "head=null", SMALL_STEPS, *CURVES[name])


def test_a_run_of_two_processes_is_whole(two_processes):
    run, _ = two_processes
    assert [line["epoch"] for line in history(run)] == [0, 1, 0, 1, 2, 3]
    assert json.loads((run / "evaluation.json").read_text())["rows"][0]["stage"] == "base"


def test_both_processes_stop_after_the_same_step_whichever_was_asked(two_processes):
    _, output = two_processes
    steps = [int(step) for step in re.findall(r"both stop after step (\d+)", output)]
    assert len(steps) == 2
    assert steps[0] == steps[1] >= 500
    positions = ["base: stopped in epoch 1 after step 2", "head: stopped in epoch 2 after step 2"]
    for position in positions:
        assert output.count(f"interrupted: all seed 0 {position}") >= 2


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_of_two_processes_goes_on_in_the_middle_of_an_epoch(two_processes, name):
    run, _ = two_processes
    assert_same_results(run.with_name(name), run.with_name(f"{name}-stopped"))


@pytest.mark.parametrize("name", CURVES)
def test_the_loss_curve_is_that_of_one_process(two_processes, make_stage, name):
    run, _ = two_processes
    stage = make_stage("model={name: lenet}", "head=null", SMALL_STEPS, *CURVES[name])
    curve = json.loads((run / "curves.json").read_text())[name]
    for epoch in range(EPOCHS):
        assert curve[epoch] == pytest.approx(stage.train_epoch(epoch), rel=1e-4, abs=1e-6)
    tensors = load_file(run / f"{name}.safetensors")
    for key, value in stage.loss.state_dict().items():
        torch.testing.assert_close(tensors[key], value, rtol=1e-4, atol=1e-5)


def test_a_summed_loss_is_that_of_the_batch_of_all_processes(
    two_processes, make_config, accelerator
):
    run, _ = two_processes
    config = make_config("epochs=2", *SUMMED)
    network = load_trained(run, 0).network
    data = open_data(config)
    stage = HeadStage(config, data, network=network, seed=0, accelerator=accelerator)
    stage.train_epoch(0)
    tensors = load_file(run / "summed.safetensors")
    torch.testing.assert_close(tensors, dict(stage.head.state_dict()), rtol=1e-4, atol=1e-5)


def test_both_processes_hold_the_outputs_of_a_whole_split(two_processes):
    _, output = two_processes
    assert output.count("outputs of an odd number of images agree") == 2


def test_all_processes_end_when_the_loss_of_one_is_no_number(two_processes):
    _, output = two_processes
    text = "ended: step 1 of 3: the real loss is NaN or infinite; lower optimiser.learning_rate"
    assert output.count(text) == 2


# The time limit of a collective is 10 minutes with NCCL.
SLOW_MAIN = """
import sys
import time
from datetime import timedelta
from pathlib import Path
from torch import distributed
from semix.calib import evaluate, train

LIMIT_S = 4
measure, evaluate_seed = evaluate.measure, train.evaluate_seed

def measure_slowly(*arguments):
    time.sleep(1.5 * LIMIT_S)
    return measure(*arguments)

def evaluate_within_the_limit(*arguments, **options):  # training on a busy machine may be slower
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S))
    evaluate_seed(*arguments, **options)

evaluate.measure, train.evaluate_seed = measure_slowly, evaluate_within_the_limit
sys.exit(train.main(["--config", str(Path(sys.argv[1], "config.json"))]))
"""


@pytest.mark.process
def test_the_main_process_may_measure_for_longer_than_a_collective_may_last(make_run, tmp_path):
    shift = "evaluation.shift={corruptions: [contrast], severities: [3]}"
    settings = ("loss={name: ce}", "mixed=null", "head=null", "model={name: lenet}", "epochs=1")
    run = make_run("slow", *settings, shift)
    run_two(SLOW_MAIN, tmp_path, run)
    [row] = json.loads((run / "evaluation.json").read_text())["rows"]
    assert row["shift"]["corruptions"]["contrast"]["3"]["accuracy"] > 0


# Each process looks at a disk of its own, as on several machines before files have come over.
TWO_DISKS = """
import os
import sys
from pathlib import Path
from semix.calib.train import main

folder = Path(sys.argv[1 + int(os.environ["RANK"])])
sys.exit(main(["--config", str(folder / "config.json"), "--device", "cpu"]))
"""


@pytest.mark.process
@pytest.mark.parametrize("first", ["begun", "measured"])
def test_the_main_process_alone_decides_what_is_left_to_do(make_run, tmp_path, first):
    settings = ("loss={name: ce}", "mixed=null", "head=null", "model={name: lenet}", "epochs=1")
    runs = {"begun": make_run("begun", *settings), "measured": make_run("measured", *settings)}
    train_run(runs["measured"])
    before = (runs["measured"] / "seed-0" / "evaluation.json").read_bytes()
    second = {"begun": "measured", "measured": "begun"}[first]
    output = run_two(TWO_DISKS, tmp_path, runs[first], runs[second])
    assert ("seed 0: done already" in output) == (first == "measured")
    assert (runs["begun"] / "evaluation.json").is_file() == (first == "begun")
    assert (runs["measured"] / "seed-0" / "evaluation.json").read_bytes() == before


WARNINGS = """
import logging
import sys
from pathlib import Path
from torch import nn
from semix.calib.config import TrainConfig
from semix.calib.processes import log_from_main_process
from semix.calib.train import make_accelerator
from semix.data.settings import load_settings

sys.stderr = sys.stdout
run = Path(sys.argv[1])
log_from_main_process()
accelerator = make_accelerator(load_settings(TrainConfig, run / "config.json"), run, device="cpu")
accelerator.prepare(nn.Linear(2, 2))
for seed in range(3):
    logging.getLogger("semix.calib").warning("%d classes are undetermined", 7 + seed)
accelerator.wait_for_everyone()
"""


@pytest.mark.process
def test_what_every_process_and_seed_has_to_warn_of_is_said_once(make_run, tmp_path):
    output = run_two(WARNINGS, tmp_path, make_run("warned"))
    assert output == "warning: 7 classes are undetermined\n"
