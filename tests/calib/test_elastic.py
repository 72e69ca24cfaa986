"""A run that is stopped in the middle of an epoch goes on with more or fewer processes."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from semix.calib.batches import Batches
from semix.calib.checkpoint import MidEpochState
from semix.calib.config import AugmentConfig
from semix.calib.losses.fedlas import FeDLaSDiagnostics
from semix.calib.real_images import InMemoryImages
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from tests.calib.runs import history, run_two

pytestmark = pytest.mark.process

# Stops after so many steps, then ends.
SCRIPT = """
import itertools
import sys
from pathlib import Path
from semix.calib import processes
from semix.calib.stopping import Interrupted
from semix.calib.train import train_run

processes.VOTE_INTERVAL_S = 0  # vote after every step
run, last = Path(sys.argv[1]), int(sys.argv[2])
steps = itertools.count(1)
try:
    train_run(run, stop=lambda: next(steps) == last)
except Interrupted as error:
    print(f"interrupted: {error}", flush=True)
"""
# No batch norm and no dropout, whose results depend on the images of each process.
LENET = ("model={name: lenet}", "epochs=2", "loss={name: fedlas_ls}")
HEAD = "head={method: mac_cal, batch_size: 20, epochs: 2}"
RESNET = ("epochs=2", "loss={name: ce}", "method={name: mixup}", "head=null")


def resume_each(run, counts: list[int], stops: list[int], folder) -> list[str]:
    """Launch with each count in turn; returns one message per interruption, the same of all."""
    messages = []
    for processes, last in zip(counts, [*stops, 0], strict=True):
        output = run_two(SCRIPT, folder, run, last, processes=processes)
        messages += {line for line in output.splitlines() if "interrupted" in line}
    return messages


@pytest.mark.parametrize(
    "counts",
    [
        [2, 1, 2],
        *(pytest.param(counts, marks=pytest.mark.slow) for counts in ([4, 2, 1], [1, 4, 2])),
    ],
)
def test_another_number_of_processes_goes_on_to_the_same_model(make_config, tmp_path, counts):
    unbroken = claim_run(make_config(*LENET, HEAD), tmp_path / "whole").parent
    train_run(unbroken)
    run = claim_run(make_config(*LENET, HEAD), tmp_path / "elastic").parent
    stops = resume_each(run, counts, [2, 6], tmp_path)
    assert "base: stopped in epoch 1 after step 2" in stops[0]
    assert " head: stopped in epoch" in stops[-1] or " base: stopped in epoch" in stops[-1]
    for name in ("model.safetensors", "head.safetensors"):
        weights, expected = (load_file(folder / "seed-0" / name) for folder in (run, unbroken))
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-3, atol=1e-4)
    for line, other in zip(history(run), history(unbroken), strict=True):
        assert line.keys() == other.keys()
        for key in ("loss", "accuracy", "gate_positive", "smoothing"):
            if isinstance(other.get(key), float):
                assert line[key] == pytest.approx(other[key], rel=1e-3, abs=1e-4), (line, key)
    results = [json.loads((folder / "evaluation.json").read_text()) for folder in (run, unbroken)]
    assert len(results[0]["rows"]) == len(results[1]["rows"]) == 2


@pytest.mark.slow
def test_with_batch_norms_and_draws_of_each_process_it_goes_on_too(make_config, tmp_path):
    run = claim_run(make_config(*RESNET), tmp_path / "elastic").parent
    stops = resume_each(run, [2, 4, 1], [1, 3], tmp_path)
    assert len(stops) == 2 and "after step" in stops[0]
    lines = history(run)
    assert [line["epoch"] for line in lines] == [0, 1]
    assert (run / "evaluation.json").is_file()


def test_every_image_comes_once_an_epoch_whoever_goes_on():
    images = torch.arange(60, dtype=torch.uint8).view(60, 1, 1, 1).expand(60, 4, 4, 3).contiguous()
    targets = torch.arange(60) % 3

    def epoch(processes: int, done: int, generator_state, steps: int):
        """Images of some steps of all processes, and the generator state after them."""
        pixels, states = [], []
        for process in range(processes):
            batches = Batches(
                InMemoryImages(images),
                targets,
                batch_size=12,
                augment=AugmentConfig(shift=1),
                device=torch.device("cpu"),
                process=process,
                processes=processes,
            )
            generator = torch.Generator().manual_seed(5)
            iterator = batches.epoch(generator, steps_done=done, generator_state=generator_state)
            for _, batch in zip(range(steps), iterator, strict=False):
                pixels += batch.images.amax((1, 2, 3)).int().tolist()
                state = batch.generator_state
            iterator.close()
            states.append(state)
        assert all(torch.equal(state, states[0]) for state in states)
        return pixels, states[0]

    first, generator_state = epoch(4, 0, None, 2)
    second, generator_state = epoch(2, 2, generator_state, 2)
    third, _ = epoch(1, 4, generator_state, 1)
    unbroken, _ = epoch(1, 0, None, 5)
    assert sorted(first + second + third) == sorted(unbroken) == list(range(60))


def test_sums_of_an_epoch_are_counted_once_and_statistics_are_averaged():
    def process_state(value: float) -> dict:
        buffers = {
            "network.running_mean": torch.full([2], value),
            "network.running_var": torch.ones(2),
            "loss.sums": torch.full([3, 2], value).double(),
            "loss.count": torch.full([2], value).double(),
        }
        state = {"cpu": torch.Generator().manual_seed(int(value)).get_state()}
        return {"random": state, "buffers": buffers, "kept": {"seen": value}}

    mid_epoch = MidEpochState(3, [process_state(1.0), process_state(3.0)])
    for index, count in ((0, 4), (1, 4), (3, 4), (0, 1)):
        modules = {"network": torch.nn.BatchNorm1d(2), "loss": FeDLaSDiagnostics()}
        accelerator = SimpleNamespace(process_index=index, num_processes=count)
        torch.manual_seed(77)
        restored = mid_epoch.restore(
            modules, accelerator, reshard=lambda states, index: {"all": states}
        )
        assert restored == {"all": [{"seen": 1}, {"seen": 3}]}
        assert modules["network"].running_mean.tolist() == [2, 2]
        assert modules["loss"].count.tolist() == ([4, 4] if index == 0 else [0, 0])
        seeds = {0: 1, 1: 3, 3: 77}
        assert torch.get_rng_state().equal(torch.Generator().manual_seed(seeds[index]).get_state())
