"""The whole story on bundled handwriting: small models, mixed datasets, methods, a report."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.config import TrainConfig
from calib.run_folder import DATA, EVALUATION, is_measured
from calib.study import Cell
from data.errors import InputError
from data.files import read_json, write_json
from data.fingerprint import file_digest
from data.formats import PLAN
from data.index import open_index
from data.real import load_real
from data.root import Root
from data.settings import load_settings
from data.splits import SPLITS, RealDataset
from data.store import Store
from flows.gpus import visible_gpus
from flows.places import training_folder
from flows.run_server import run_flow
from pipeline.config import BuildConfig
from pipeline.root import create_root
from pipeline.standins import StandIns, find_standins, train_standins
from pipeline.standins.recipe import Report

if TYPE_CHECKING:  # torch costs seconds that a run with nothing to do need not spend
    from data.dataset import MixedDataset

SECONDS = "seconds.json"  # of each step, when it was last made
REPORT, LOG, PICTURE = "report.html", "quickstart.log", "series.png"
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
    page = out / REPORT
    if not is_complete(out, seeds):
        place = Store(str(out))
        place.refuse_strangers("quickstart", own=LOG)  # the flow begins with its log
        place.check_writable()
        visible_gpus()  # or why that cannot be known
        run_flow("flows.quickstart_flow.quickstart_flow", out=str(out), seeds=seeds)
    shown = read_json(page.with_suffix(".json"))
    return {"report": str(page), "seconds": Clock(out / SECONDS).seconds, **shown}


def is_complete(out: Path, seeds: int) -> bool:
    """Whether the report shows these very models, images and trainings, found without torch."""
    shown = (out / REPORT).with_suffix(".json")
    if not ((out / REPORT).is_file() and shown.is_file()):
        return False
    models = find_standins(real_digits(), out / "standins")
    if models is None:
        return False
    for name, changes in mixed_settings(models).items():
        place = out / name
        if not (place / PLAN).is_file() or not Root(str(place)).indices():
            return False
        root = create_root(load_settings(BuildConfig, CONFIGS / "build.yaml", changes), str(place))
        if root.missing():
            return False
    cells = cells_of_story(out, seeds)
    if not all(is_measured(cell.config, cell.run(out)) for cell in cells):
        return False
    return bool(read_json(shown)["runs"] == [file_digest(c.run(out) / EVALUATION) for c in cells])


def cells_of_story(out: Path, seeds: int) -> list[Cell]:
    """A training run for each method, with its mixed dataset where it has one."""
    cells = []
    for name, mixed in METHODS.items():
        overrides = [f"seeds={list(range(seeds))}"]
        if mixed is not None:
            overrides.append(f"mixed.url={out / mixed}")
        config = load_settings(TrainConfig, CONFIGS / f"{name}.yaml", overrides)
        cells.append(Cell("runs", name, config))
    return cells


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
        start = time.monotonic()
        yield
        self.note(name, time.monotonic() - start)


def make_models(out: Path, clock: Clock, progress: Report = lambda *_: None) -> StandIns:
    """Train the small models, or find them trained."""
    start = time.monotonic()
    models = train_standins(real_digits(), out / "standins", progress=progress)
    if models.seconds:
        clock.note("small models", time.monotonic() - start)
    return models


def real_digits() -> RealDataset:
    return load_real(load_settings(BuildConfig, CONFIGS / "build.yaml").real)


def mixed_settings(models: StandIns) -> dict[str, list[str]]:
    """Changes to `build.yaml` that make each mixed dataset."""
    given = [f"generator.model={models.diffusion}", f"annotation.model=local-dir:{models.clip}"]
    return {name: [*given, *changes] for name, (_, changes) in NOISE.items()}


def begun_roots(models: StandIns, out: Path) -> dict[str, Root]:
    """The roots of both mixed datasets, begun where they are new."""
    configs = {
        name: load_settings(BuildConfig, CONFIGS / "build.yaml", changes)
        for name, changes in mixed_settings(models).items()
    }
    return {name: create_root(config, str(out / name)) for name, config in configs.items()}


def first_picture(root: Root, path: Path) -> bool:
    """Draw some series of what is committed, if anything is; whether there is a picture."""
    from data.series import contact_sheet, read_series, some_of_all_pairs

    if not root.done():
        return False
    contact_sheet(read_series(root, some_of_all_pairs(root))).save(path)
    return True


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
        from calib.page import Compared, write_report
        from calib.tables import summary_table
        from data.dataset import MixedDataset

        compared = []
        for name, root in roots.items():
            mixed = MixedDataset(root.url)
            compared.append(Compared(NOISE[name][0], mixed, measure_agreement(mixed, runs[0])))
        agreement, real = compared[0].agreement, real_digits()
        facts = {
            "seconds": clock.seconds,
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
