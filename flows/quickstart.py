"""The whole story on bundled handwriting: small models, mixed datasets, methods, a report."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.config import TrainConfig
from calib.run_folder import DATA, EVALUATION, is_measured
from data.errors import InputError
from data.files import read_json, write_json
from data.fingerprint import file_digest
from data.indices import open_index
from data.real import SPLITS, RealDataset, load_real
from data.root import Root
from data.settings import load_settings
from data.store import Store
from flows.build import build
from flows.gpus import visible_gpus
from flows.places import training_folder
from flows.server.run_server import prefect_server
from flows.train import train
from pipeline.config import BuildConfig
from pipeline.root import create_root
from pipeline.standins import StandIns, train_standins

if TYPE_CHECKING:  # torch costs seconds that a run with nothing to do need not spend
    from data.mixed import MixedDataset

SECONDS = "seconds.json"  # of each step, when it was last made
CONFIGS = Path(__file__).parents[1] / "configs" / "quickstart"
# The same number of series twice: from random noises, and from the stablest of several.
RANDOM, CHOSEN = "mixed", "mixed-chosen-noise"
NOISE: dict[str, tuple[str, tuple[str, ...]]] = {
    RANDOM: ("random noise", ()),
    CHOSEN: ("chosen noise", ("noise.strategy=select", "noise.candidates=4")),
}
# Each with its mixed dataset; csm.yaml has a MaC-Cal head stage, which is a method of its own.
METHODS = {"ce": None, "csm": RANDOM, "csm-fedlas": RANDOM, "csm-chosen-noise": CHOSEN}
LIMITS = [
    "The generator and CLIP are small models, trained for a minute or two on the same training "
    "digits; they are neither Stable Diffusion nor OpenAI's CLIP.",
    "This is one split of one small dataset. On another, close methods can change places.",
    "LeNet was chosen because plain cross-entropy is overconfident on it; a batch-normed ResNet-8 "
    "is calibrated on these digits as it is, and mixing did not help it. Settings were compared "
    "with the test figures of this split in view.",
]

log = logging.getLogger("semix.quickstart")


def main(out: Path, *, seeds: int) -> dict[str, Any]:
    """Make every step below `out`; what is there and unchanged is not made again.

    Returns:
        The report's path, the rows of its table, the end points' agreement, and the seconds of
        each step when it was last made.
    Raises:
        InputError: the folder cannot be used, or holds a quickstart of other settings; a GPU's
            driver does not work.
        RunFailed: the build or a training failed; the same command goes on.
    """
    out = training_folder(out)
    Store(str(out)).check_writable()
    visible_gpus()  # or why that cannot be known
    with prefect_server():
        from flows.calling import call_flow  # Prefect costs seconds: not to refuse
        from flows.quickstart_flow import quickstart_flow

        made = call_flow(quickstart_flow, out=str(out), seeds=seeds)
    shown = read_json(Path(made["report"]).with_suffix(".json"))
    return {"report": made["report"], "seconds": Clock(out / SECONDS).seconds, **shown}


class Clock:
    """Seconds by step, kept on disk: a step that is not made again keeps its time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = read_json(path) if path.is_file() else {}

    def note(self, step: str, seconds: float) -> None:
        """Remember what a step took; 0 means that it was not made."""
        if seconds:
            self.seconds[step] = round(seconds, 1)
            write_json(self.path, self.seconds)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        log.info("%s", name)
        start = time.monotonic()
        yield
        self.note(name, time.monotonic() - start)


def make_models(out: Path, clock: Clock) -> StandIns:
    """Train the small models, or find them trained."""
    models = train_standins(real_digits(), out / "standins")
    clock.note("small models", sum(models.seconds.values()))
    return models


def real_digits() -> RealDataset:
    return load_real(load_settings(BuildConfig, CONFIGS / "build.yaml").real)


def make_mixed(models: StandIns, place: Path, clock: Clock) -> Root:
    """Build the mixed dataset, or what is missing of it."""
    label, changes = NOISE[place.name]
    given = [
        f"generator.model={models.diffusion}",
        f"annotation.model=local-dir:{models.clip}",
        *changes,
    ]
    config = load_settings(BuildConfig, CONFIGS / "build.yaml", given)
    root = create_root(config, str(place))
    if root.missing():
        with clock.step(f"mixed dataset, {label}"):
            build(config, str(place), slots=min(2, os.cpu_count() or 1))
    root.write_index()
    return root


def train_method(name: str, root: Root | None, run: Path, seeds: int, clock: Clock) -> Path:
    """Train and measure one method, or find it measured; its run folder."""
    file = CONFIGS / f"{name}.yaml"
    overrides = [f"seeds={list(range(seeds))}"]
    if root is not None:
        overrides.append(f"mixed.url={root.url}")
    config = load_settings(TrainConfig, file, overrides)
    if not is_measured(config, run):
        with clock.step(f"training {config.name}"):
            train(config, run, resume=True)
    if root is not None:
        refuse_other_data(run, root)
    return run


def refuse_other_data(run: Path, root: Root) -> None:
    """Raises InputError if a run was trained on another mixed dataset than the one at hand."""
    pinned = read_json(run / DATA)["mixed"]
    if pinned["digest"] != open_index(root.store, root.indices()[-1]).digest:
        remedy = f"was trained on an earlier content of {root.url}; remove the folder and go on"
        raise InputError("out", run, remedy)


def make_report(
    path: Path,
    *,
    roots: Mapping[str, Root],
    runs: Sequence[Path],
    clock: Clock,
) -> Path:
    """Write the report and the table, unless they show these very runs already."""
    shown = path.with_suffix(".json")
    results = [file_digest(run / EVALUATION) for run in runs]
    if path.is_file() and shown.is_file() and read_json(shown)["runs"] == results:
        return path
    with clock.step("report"):
        from calib.report import Compared, summary_table, write_report
        from data.mixed import MixedDataset

        compared = []
        for name, root in roots.items():
            mixed = MixedDataset(root.url)
            compared.append(Compared(NOISE[name][0], mixed, measure_agreement(mixed, runs[0])))
        agreement, real = compared[0].agreement, real_digits()
        facts = {
            "seconds": {k: s for k, s in clock.seconds.items() if not k.startswith("training")},
            "splits": {split: len(getattr(real, split)) for split in SPLITS},
            "limits": LIMITS,
        }
        write_report(
            path,
            runs=runs,
            mixed=compared[0].dataset,
            agreement=agreement,
            facts=facts,
            title="semix quickstart",
            compared=compared,
        )
        table = summary_table(runs)
        write_json(shown, {"runs": results, "methods": table, "agreement": agreement})
    return path


def measure_agreement(mixed: "MixedDataset", run: Path) -> dict[str, Any]:
    """How a classifier that saw real digits alone reads the unmixed images of the series."""
    from calib.judge import Judge
    from data.quality import end_points, endpoint_agreement

    judge = Judge(run)
    group, position, intended = end_points(mixed.mixtures, mixed.classes)
    predicted = judge.classes(mixed.images[group, position])
    return {**endpoint_agreement(predicted, intended), "classifier": judge.name}
