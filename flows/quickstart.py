"""The quickstart on bundled digits: small models, mixed datasets, training, a report."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from semix.calib.config import TrainConfig
from semix.calib.run_folder import DATA, EVALUATION, is_measured
from semix.calib.study import Cell
from semix.configs import FOLDER as CONFIG_FOLDER
from semix.data.errors import InputError
from semix.data.files import read_json, write_json
from semix.data.fingerprint import file_digest
from semix.data.formats import PLAN
from semix.data.index import open_index
from semix.data.real import load_real
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.splits import RealDataset
from semix.data.store import Store
from semix.flows.calling import run_flow
from semix.flows.gpus import visible_gpus
from semix.flows.paths import training_folder
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import Build
from semix.pipeline.root import create_build
from semix.pipeline.standins import StandIns, find_standins, train_standins
from semix.pipeline.standins.recipe import Report

SECONDS = "seconds.json"  # duration of each step when it last ran
REPORT, LOG, PICTURE = "report.html", "quickstart.log", "series.png"
CONFIGS = CONFIG_FOLDER / "quickstart"
# Two datasets with equally many series: from random noise, and from the most stable candidate.
RANDOM, SELECTED = "mixed", "mixed-chosen-noise"
NOISE: dict[str, tuple[str, tuple[str, ...]]] = {
    RANDOM: ("random noise", ()),
    SELECTED: ("selected noise", ("noise.strategy=select", "noise.candidates=4")),
}
# Methods and their mixed datasets. The MaC-Cal head stage of csm.yaml counts as another method.
METHODS = {"ce": None, "csm": RANDOM, "csm-fedlas": RANDOM, "csm-chosen-noise": SELECTED}


def main(out: Path, *, seeds: int) -> dict[str, Any]:
    """Run every step of the quickstart in `out`; finished steps are not run again.

    Returns:
        The report's path, the rows of its table, the share of unmixed images in which a
        classifier sees the intended class, and for each step the seconds that it took when it last
        ran.
    Raises:
        InputError: the folder cannot be used, or holds a quickstart with other settings; a GPU's
            driver does not work.
        RunFailed: a build or a training run failed; the same command goes on.
    """
    out = training_folder(out)
    page = out / REPORT
    if not is_complete(out, seeds):
        store = Store(str(out))
        store.require_empty_or_own("quickstart", own=LOG)  # the flow begins with its log
        store.check_writable()
        visible_gpus()  # raises if the driver does not work
        run_flow("semix.flows.quickstart_flow.quickstart_flow", out=str(out), seeds=seeds)
    results = read_json(page.with_suffix(".json"))
    return {"report": str(page), "seconds": Clock(out / SECONDS).seconds, **results}


def is_complete(out: Path, seeds: int) -> bool:
    """Whether the report shows the current models, images and runs; torch is not imported."""
    results = (out / REPORT).with_suffix(".json")
    if not ((out / REPORT).is_file() and results.is_file()):
        return False
    models = find_standins(real_digits(), out / "standins")
    if models is None:
        return False
    for name, overrides in mixed_settings(models).items():
        path = out / name
        if not (path / PLAN).is_file() or not Root(str(path)).indices():
            return False
        config = load_settings(BuildConfig, CONFIGS / "build.yaml", overrides)
        if create_build(config, str(path)).root.missing():
            return False
    cells = quickstart_cells(out, seeds)
    if not all(is_measured(cell.config, cell.run(out)) for cell in cells):
        return False
    return bool(read_json(results)["runs"] == [file_digest(c.run(out) / EVALUATION) for c in cells])


def quickstart_cells(out: Path, seeds: int) -> list[Cell]:
    """One training run per method, with its mixed dataset if it has one."""
    cells = []
    for name, mixed in METHODS.items():
        overrides = [f"seeds={list(range(seeds))}"]
        if mixed is not None:
            overrides.append(f"mixed.url={out / mixed}")
        config = load_settings(TrainConfig, CONFIGS / f"{name}.yaml", overrides)
        cells.append(Cell("runs", name, config))
    return cells


class Clock:
    """Seconds per step, on disk: a step that does not run again keeps its time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = read_json(path) if path.is_file() else {}

    def record(self, step: str, seconds: float) -> None:
        """Record the seconds of a step; 0 means that it did not run."""
        if seconds:
            self.seconds[step] = round(seconds, 1)
            write_json(self.path, self.seconds)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.record(name, time.monotonic() - start)


def make_models(out: Path, clock: Clock, progress: Report = lambda *_: None) -> StandIns:
    """Train the small models, or load them if they are trained."""
    start = time.monotonic()
    models = train_standins(real_digits(), out / "standins", progress=progress)
    if models.seconds:
        clock.record("small models", time.monotonic() - start)
    return models


def real_digits() -> RealDataset:
    return load_real(load_settings(BuildConfig, CONFIGS / "build.yaml").real)


def mixed_settings(models: StandIns) -> dict[str, list[str]]:
    """The overrides of `build.yaml` for each mixed dataset."""
    paths = [f"generator.model={models.diffusion}", f"annotation.model=local-dir:{models.clip}"]
    return {name: [*paths, *noise] for name, (_, noise) in NOISE.items()}


def open_builds(models: StandIns, out: Path) -> dict[str, Build]:
    """The builds of both mixed datasets, started if they are new."""
    configs = {
        name: load_settings(BuildConfig, CONFIGS / "build.yaml", overrides)
        for name, overrides in mixed_settings(models).items()
    }
    return {name: create_build(config, str(out / name)) for name, config in configs.items()}


def check_same_data(run: Path, root: Root) -> None:
    """Raise InputError if a run was trained on an earlier state of the mixed dataset."""
    pinned = read_json(run / DATA)["mixed"]
    if pinned["digest"] != open_index(root.store, root.indices()[-1]).digest:
        remedy = f"was trained on earlier content of {root.url}; remove this folder and run again"
        raise InputError("out", run, remedy)
