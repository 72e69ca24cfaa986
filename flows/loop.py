"""Rounds of training, and of series where the last classifiers confuse classes."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semix.calib.check import check_launch, check_modules, check_settings
from semix.calib.config import TrainConfig
from semix.calib.run_folder import check_same_config, is_measured
from semix.calib.study import Cell, error_prefix, replicate_name
from semix.data.errors import InputError
from semix.data.files import read_json
from semix.data.formats import MAX_GROUPS, PLAN
from semix.data.imagefolder import check_outside_images
from semix.data.root import Root
from semix.data.settings import whole_path
from semix.data.store import Store
from semix.flows.calling import run_flow
from semix.flows.configs import load_config
from semix.flows.gpus import visible_gpus
from semix.flows.loop_config import LoopConfig
from semix.flows.parameters import MAX_ROUNDS
from semix.flows.paths import check_writable, training_folder
from semix.flows.slots import MAX_SLOTS
from semix.flows.study_builds import MODELS
from semix.pipeline.plan import BuildPlan

LOOP_JSON, LOOP_MD, PAGE = "loop.json", "loop.md", "loop.html"
CHOSEN, EVEN = "mixed", "mixed-even"  # the mixed datasets, whose rounds differ

log = logging.getLogger("semix.loop")


@dataclass(frozen=True)
class LoopRun:
    """A training run of a loop.

    Attributes:
        round: its number; kind: which of the mixed datasets it trains on.
    """

    round: int
    kind: str
    config: TrainConfig
    folder: Path

    @property
    def cell(self) -> Cell:
        return Cell(self.folder.parent.name, self.folder.name, self.config)


def loop_runs(config: LoopConfig, out: Path, rounds: int) -> list[LoopRun]:
    """All runs in their order; in round 0 the mixed datasets do not differ yet, so it has one."""
    runs = []
    for number in range(rounds + 1):
        for kind in (CHOSEN, EVEN) if number else (CHOSEN,):
            how = "" if not number else ", even" if kind == EVEN else f", by {config.by}"
            settings = config.train_config(f"round {number}{how}", whole_path(out / kind))
            runs.append(LoopRun(number, kind, settings, run_folder(config, out, number, kind)))
    return runs


def run_folder(config: LoopConfig, out: Path, number: int, kind: str) -> Path:
    """`OUT/round-2/confusion`; runs of one round have a folder of their own.

    Runs side by side take over each other's first stage where their settings are equal, and those
    of two rounds differ only in the index that they pin.
    """
    return out / f"round-{number}" / (config.by if number and kind == CHOSEN else "even")


def loop(
    config: LoopConfig | str | Path,
    out: str | Path,
    *,
    rounds: int = 2,
    overrides: Sequence[str] = (),
    slots: int | None = None,
) -> dict[str, Any]:
    """Run the rounds of a loop, or continue it; more rounds may be asked for later.

    Args:
        config: settings, or the path or URL of a YAML file of them; `overrides` as in
            `section.key=value`.
        out: the loop's folder: models/, mixed/, mixed-even/, round-N/, loop.html, loop.md,
            loop.json and values.csv. With splits or draws each replicate has a folder in it, and
            the last three are over all of them.
        rounds: how often series are added.
        slots: number of workers and trainers; None means one per GPU, or one.
    Returns:
        The content of loop.json: `rounds`, of which each has the series and the measures of both.
    Raises:
        InputError: settings or folder cannot be used; nothing was started.
        RunFailed: a build or a run failed; the same command goes on.
    """
    folder = training_folder(out)
    source = config.model_dump(mode="json") if isinstance(config, LoopConfig) else config
    prepared = prepare_loop(source, folder, overrides, rounds=rounds, slots=slots or 0)
    path = "" if isinstance(config, LoopConfig) else whole_path(config)
    run_flow(
        "semix.flows.loop_flow.loop_flow",
        prepared=prepared,
        config=path,
        out=str(folder),
        overrides=list(overrides),
        rounds=rounds,
        slots=slots or 0,
    )
    record: dict[str, Any] = read_json(folder / LOOP_JSON)
    return record


@dataclass(frozen=True)
class Replicate:
    """The rounds of one split and draw.

    Attributes:
        settings: with the seeds of the split and the draw.
        split, draw: None if the loop names no such seeds.
        out: its folder, that of the loop if there is no other.
    """

    settings: LoopConfig
    split: int | None
    draw: int | None
    out: Path
    runs: Sequence[LoopRun]


@dataclass(frozen=True)
class PreparedLoop:
    """A loop that passed all checks."""

    name: str
    replicates: Sequence[Replicate]


def replicates_of(config: LoopConfig, out: Path, rounds: int) -> list[Replicate]:
    """All replicates, split by split; `OUT/loop-split0-draw1`."""
    replicates = []
    for split, draw, settings in config.replicates():
        single = split is None and draw is None
        folder = out if single else out / replicate_name("loop", split, draw)
        runs = loop_runs(settings, folder, rounds)
        replicates.append(Replicate(settings, split, draw, folder, runs))
    return replicates


def prepare_loop(
    config: str | Path | Mapping[str, Any],
    out: Path,
    overrides: Sequence[str],
    *,
    rounds: int,
    slots: int,
) -> PreparedLoop:
    """Check everything that can be checked before anything is built.

    Raises:
        InputError: names the setting or argument that cannot be used.
    """
    settings = load_config(LoopConfig, config, overrides)
    if not 1 <= rounds <= MAX_ROUNDS:
        raise InputError("--rounds", rounds, f"choose 1 to {MAX_ROUNDS}")
    if not 0 <= slots <= MAX_SLOTS:
        raise InputError("--slots", slots, f"choose 1 to {MAX_SLOTS}")
    check_outside_images(settings.real.folder, out)
    replicates = replicates_of(settings, out, rounds)
    folders = [(each.out / CHOSEN).relative_to(out).parts[0] for each in replicates]
    begun = next((name for name in folders if (out / name).exists()), folders[0])
    Store(str(out)).require_empty_or_own("loop", own=begun, leftover=MODELS)
    for replicate in replicates:
        _check_replicate(replicate, rounds)
    check_writable("out", out)
    todo = [
        run
        for replicate in replicates
        for run in replicate.runs
        if not is_measured(run.config, run.folder)
    ]
    if todo:
        check_modules(todo[0].config)
        visible_gpus()  # raises if the driver does not work
    return PreparedLoop(settings.name, replicates)


def _check_replicate(replicate: Replicate, rounds: int) -> None:
    settings, plan = replicate.settings, BuildPlan(replicate.settings.build_config())
    series = plan.num_groups + rounds * settings.series_per_pair * plan.num_pairs
    if series > MAX_GROUPS:
        remedy = f"ends with {series:,} series, and a root has at most {MAX_GROUPS:,}"
        raise InputError("--rounds", rounds, remedy)
    for run in replicate.runs:
        check_same_config(run.config, run.folder)
        with error_prefix("train"):  # the mixed dataset does not exist yet
            check_settings(run.config.model_copy(update={"mixed": None}))
            check_launch(run.config, processes=1)
    check_rounds(settings, replicate.out, pairs=plan.num_pairs)


def check_rounds(settings: LoopConfig, out: Path, *, pairs: int) -> None:
    """Refuse settings other than those by which the rounds so far were planned.

    Raises:
        InputError: names the setting.
    """
    if not (out / CHOSEN / PLAN).is_file():
        return
    for number, extension in enumerate(Root(str(out / CHOSEN)).extensions, start=1):
        planned = extension.by_run.by if extension.by_run else "even"
        if planned != settings.by:
            remedy = (
                f"round {number} was planned by {planned}; restore that, or choose a new folder"
            )
            raise InputError("by", settings.by, remedy)
        if extension.groups != settings.series_per_pair * pairs:
            remedy = f"round {number} has {extension.groups / pairs:g}; restore that, or choose a "
            raise InputError("series_per_pair", settings.series_per_pair, f"{remedy}new folder")
