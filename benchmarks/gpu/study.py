"""A whole study on one GPU, from images alone: `python -m benchmarks.gpu study --budget 20m ...`.

It trains a generator and a CLIP, makes mixed images, trains and measures every cell of study.yaml
and writes one result file. When the budget ends it stops the running step, whose output is kept,
and exits with status 75; the same command continues. Prefect is not needed. On a machine without
a package index, install diffusers, open_clip_torch, webdataset and pydantic from wheels.

Estimate for an H100, at assumed rates, since it has not run on one: the denoiser's 12,000 steps at
20 ms are four minutes, autoencoder and CLIP three more; 21,600 images at 20 guided steps on 8 x 8
latents one. A ResNet-18 sees 300,000 real images in 30 epochs and, with CSM, twice as many mixed
ones: at 15,000 a second 20 and 60 s, with a ResNet-50 four times that, for three seeds, three
trainings on real images alone and three weights of CSM: 12 and 48 minutes one after the other, and
less where several trainers share the GPU.
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semix.calib.config import TrainConfig
from semix.calib.run_folder import claim_run, is_measured
from semix.calib.study import StudyConfig, cells_of, check_cells
from semix.calib.study_jobs import Job, copy_first_stage, forget_failure, note_failure, plan_jobs
from semix.calib.study_tables import VALUES_CSV, write_study
from semix.data.errors import InputError
from semix.data.files import read_json, write_json
from semix.data.settings import load_settings
from semix.flows.child import supervise
from semix.flows.launcher import Device, Machines, run_trainer
from semix.flows.study_builds import (
    is_built,
    mixed_plans,
    models_for,
    open_mixed_root,
    write_mixed_csv,
)

CONFIG = Path(__file__).with_name("study.yaml")
UNFINISHED = 75  # EX_TEMPFAIL
GRACE_S = 60.0  # to write a checkpoint or finish a shard
SECONDS, RESULT = "seconds.json", "result.json"
# Overrides with which the study takes minutes on a CPU.
TINY = (
    "base.real.image_size=16",
    "base.real.train_per_class=20",
    "base.real.validation_per_class=10",
    "base.real.test_per_class=10",
    "base.epochs=1",
    "base.batch_size=40",
    "base.mixed_precision='no'",
    "base.evaluation={bootstrap: 20, shift: {corruptions: [fog], severities: [3], images: 20}}",
    "seeds=[0]",
    "standins=tiny",
    "datasets={resnet8: {overrides: {model: {name: resnet8, width: 2}}}}",
    "builds.random.generator.steps=2",
    "builds.random.mixing={alphas: 2, groups_per_pair: 1}",
    "builds.random.shards={groups_per_shard: 15, groups_per_batch: 15}",
    "methods.control.overrides.head.epochs=1",
    "methods.mac.overrides.head.epochs=1",
)


class OutOfTime(Exception):
    """The budget is used up; finished work is kept."""


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    overrides = [f"base.real.path={options.images}", *(TINY if options.size == "tiny" else ())]
    if name := options.benchmark:
        overrides += [f"name={name} on one GPU", "base.real.name=torchvision"]
        overrides += [f"base.real.dataset={name}"]
    deadline = time.monotonic() + options.budget
    try:
        study = load_settings(StudyConfig, CONFIG, [*overrides, *options.set])
        runner = GpuStudy(study, options.out.absolute(), options.device, options.slots, deadline)
        if options.only_mixed:  # in the child that makes one mixed dataset and can be stopped
            return runner.make_mixed(options.only_mixed)
        runner.run(arguments)
    except OutOfTime:
        print(f"the budget of {options.budget:.0f} s is used up: {runner.progress()}", flush=True)
        print("the same command goes on", flush=True)
        return UNFINISHED
    except (RuntimeError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = runner.record(options.size)
    print(f"written: {result}, study.md")
    if options.record:
        from benchmarks.measure import RESULTS

        date = read_json(result)["date"]
        shutil.copy(result, RESULTS / f"{date}-gpu-study.json")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu study", description=__doc__)
    parser.add_argument("--images", type=Path, required=True, help="folder of train/ and test/")
    parser.add_argument("--benchmark", default="", help="FashionMNIST, ...: below --images instead")
    parser.add_argument("--out", type=Path, required=True, help="folder of all outputs")
    parser.add_argument("--budget", type=_seconds, default="20m", help="as 20m or 540s")
    parser.add_argument("--size", choices=("h100", "tiny"), default="h100")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--slots", type=int, default=3, help="trainers that run at the same time")
    parser.add_argument("--set", action="append", default=[], help="a setting of study.yaml")
    parser.add_argument("--record", action="store_true", help="copy to benchmarks/results")
    parser.add_argument("--only-mixed", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([ms]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text}: write it as 20m or 540s")
    return float(match[1]) * (60 if match[2] == "m" else 1)


@dataclass
class GpuStudy:
    """The study from its first network to its result file, each step once."""

    study: StudyConfig
    out: Path
    device: Device
    slots: int
    deadline: float

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.cells = cells_of(self.study, self.out)
        self.plans = mixed_plans(self.study, self.cells)

    def run(self, arguments: Sequence[str]) -> None:
        """Make all models, mixed datasets and trainings that are missing.

        Args:
            arguments: of this command, for the children that make mixed datasets.
        Raises:
            OutOfTime: the budget ended first.
            RuntimeError: a child failed.
        """
        check_cells(self.cells)
        for plan in self.plans:
            if not is_built(plan):
                command = [sys.executable, "-m", "benchmarks.gpu", "study", *arguments]
                with self._timed("models and mixed images"):
                    self._run([*command, "--only-mixed", plan.url])
        if self.plans:
            write_mixed_csv(self.plans, self.out)
        missing = [cell for cell in self.cells if not is_measured(cell.config, cell.run(self.out))]
        for cell in missing:
            claim_run(cell.config, cell.run(self.out))
        with self._timed("trainings"), ThreadPoolExecutor(self.slots) as pool:
            list(pool.map(self._train, plan_jobs(missing, slots=self.slots)))

    def make_mixed(self, url: str) -> int:
        """Make the models and one mixed dataset; returns the exit status."""
        from semix.pipeline.worker import main as work

        plan = next(plan for plan in self.plans if plan.url == url)
        models = models_for(plan, self.plans, self.study, self.out, device=self.device)
        root, _ = open_mixed_root(plan, models)
        status = work([root.url, "--device", self.device])
        if status == 0:
            root.write_index()
        return status

    def progress(self) -> str:
        """How many mixed datasets and cells are done, of how many."""
        built = sum(map(is_built, self.plans))
        measured = sum(is_measured(cell.config, cell.run(self.out)) for cell in self.cells)
        mixed = f"{built} of {len(self.plans)} mixed datasets are made"
        return f"{mixed}, {measured} of {len(self.cells)} cells measured"

    def record(self, size: str) -> Path:
        """Write the study's tables and one file with the values of every seed; returns its path."""
        import pandas
        import torch

        from benchmarks.measure import Result, contents

        tables = write_study(self.study, self.cells, self.out)
        values = pandas.read_csv(self.out / VALUES_CSV)
        result = Result("study", f"{self.study.name}, {size}")
        result.figures = {
            "seconds": read_json(self.out / SECONDS),
            "missing": tables["missing"],
            "values": json.loads(values.to_json(orient="records")),
        }
        on_gpu = self.device != "cpu"
        name = torch.cuda.get_device_name() if on_gpu else "cpu"
        config: dict[str, Any] = self.study.model_dump(mode="json")
        write_json(self.out / RESULT, contents([result], device=name, config=config))
        return self.out / RESULT

    def _train(self, job: Job) -> None:
        for name in job.runs:
            run = self.out / name
            for seed in job.seeds:
                copy_first_stage(run, seed=seed)
            if self.is_set():
                raise OutOfTime
            forget_failure(run)
            ended = run_trainer(
                load_settings(TrainConfig, run / "config.json"),
                run,
                Machines(device=self.device),
                on_line=print,
                seeds=job.seeds if job.shares_runs else (),
                trainers=self.slots,
                stop=self,
            )
            if self.is_set():
                raise OutOfTime
            if ended.outcome.returncode:  # other runs continue, and the tables name the failure
                note_failure(run, str(ended), last_lines=ended.outcome.last_lines)

    def is_set(self) -> bool:
        """Whether the budget is spent, which stops the trainers; they write checkpoints first."""
        return time.monotonic() >= self.deadline

    def _run(self, command: Sequence[str]) -> None:
        """Run a child process until it ends, or stop it when the budget ends."""
        if self.is_set():
            raise OutOfTime
        # The working folder is not on the import path of a child.
        path = {"PYTHONPATH": str(Path(__file__).parents[2])}
        ended = supervise(command, on_line=print, environment=path, stop=self, grace_s=GRACE_S)
        if self.is_set():
            raise OutOfTime
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command[2:6])} ... ended: {ended}")

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to the seconds of the stage, which all commands add up."""
        start = time.monotonic()
        try:
            yield
        finally:
            path = self.out / SECONDS
            seconds: dict[str, float] = read_json(path) if path.is_file() else {}
            seconds[stage] = round(seconds.get(stage, 0.0) + time.monotonic() - start, 1)
            write_json(path, seconds)
