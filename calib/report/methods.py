"""What the runs measured: one Method for each stage of each finished run."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.run_folder import EVALUATION, SCHEMA, trained_run
from data.errors import InputError
from data.files import read_json

STAGE_SUFFIX = {"base": "", "head": " + MaC-Cal"}


@dataclass(frozen=True)
class Measure:
    """A number of evaluation.json and how people read it."""

    key: str
    title: str
    percent: bool = False
    higher_is_better: bool = False

    def text(self, value: float, *, signed: bool = False) -> str:
        """The value as printed: two decimals in percent, three otherwise."""
        shown = 100 * value if self.percent else value
        rounded = round(shown, 2 if self.percent else 3)
        text = f"{rounded + 0.0:{'+' if signed else ''}.{2 if self.percent else 3}f}"
        return text.replace("-", "\N{MINUS SIGN}")

    def improves(self, old: float, new: float) -> bool:
        return new > old if self.higher_is_better else new < old


MEASURES = (
    Measure("accuracy", "Accuracy", percent=True, higher_is_better=True),
    Measure("ece", "ECE", percent=True),
    Measure("adaptive_ece", "Adaptive ECE", percent=True),
    Measure("mce", "MCE", percent=True),
    Measure("over_ece", "Over-ECE", percent=True),
    Measure("under_ece", "Under-ECE", percent=True),
    Measure("nll", "NLL"),
    Measure("brier", "Brier"),
)
ACCURACY, ECE, NLL = MEASURES[0], MEASURES[1], MEASURES[6]
KINDS = ("plain", "scaled")  # as trained; after temperature scaling
OTHER_KINDS = ("vector", "isotonic")  # other post-hoc methods, of more parameters


@dataclass(frozen=True)
class Method:
    """One stage of one run, over its seeds."""

    label: str
    stage: str
    run: Path
    rows: tuple[dict[str, Any], ...]  # the rows of evaluation.json, one a seed

    @property
    def bins(self) -> int:
        """Of every binned measure."""
        return int(self.rows[0]["bins"])

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(row["seed"] for row in self.rows)

    def values(self, measure: Measure, kind: str) -> dict[int, float]:
        """One value for each seed, in the unit of evaluation.json (fractions, not percent)."""
        return {row["seed"]: row[kind][measure.key] for row in self.rows}

    def summary(self, measure: Measure, kind: str) -> tuple[float, float | None]:
        return mean_and_sd(list(self.values(measure, kind).values()))

    def temperature(self) -> tuple[float, float | None]:
        return mean_and_sd([row["temperature"] for row in self.rows])


@dataclass(frozen=True)
class Paired:
    """A method against another on the seeds that both have."""

    change: float  # mean of new - old
    better: int  # seeds on which the method is strictly better
    shared: int


def mean_and_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1); None where one value leaves it undefined."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def paired(method: Method, baseline: Method, measure: Measure, kind: str) -> Paired | None:
    """Compare seed by seed; None if the two have no seed in common."""
    new, old = method.values(measure, kind), baseline.values(measure, kind)
    shared = sorted(new.keys() & old.keys())
    if not shared:
        return None
    better = sum(measure.improves(old[seed], new[seed]) for seed in shared)
    change = statistics.fmean(new[seed] - old[seed] for seed in shared)
    return Paired(change, better, len(shared))


def load_methods(runs: Sequence[Path]) -> list[Method]:
    """Read the finished runs, in the order given; the first method is the baseline.

    Raises:
        InputError: no run, a run without evaluation.json or of another schema, two runs of one
            name, whose rows nobody could tell apart, or of other bins, whose errors are not the
            same measure.
    """
    if not runs:
        raise InputError("runs", "[]", "give at least one finished run folder")
    methods: list[Method] = []
    for run in map(Path, runs):
        methods += _methods_of(run)
    labels = [method.label for method in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError("name", label, "two runs have this name; give each its own")
    _refuse_other_bins(methods)
    return methods


def load_evaluation(run: Path) -> dict[str, Any]:
    """The evaluation.json of a finished run.

    Raises:
        InputError: it is not there, or of another schema; the folder is no run's, or the run is
            not finished.
    """
    path = run / EVALUATION
    if not path.is_file():
        trained_run(run)
        raise InputError("evaluation", path, f"not there; run `semix evaluate {run}` first")
    evaluation: dict[str, Any] = read_json(path)
    if evaluation.get("schema") != SCHEMA:
        found = f"schema {evaluation.get('schema')} where {SCHEMA} is read"
        raise InputError("evaluation", path, f"{found}; run `semix evaluate {run}` again")
    return evaluation


def _refuse_other_bins(methods: Sequence[Method]) -> None:
    found = {row["bins"] for method in methods for row in method.rows}
    if len(found) > 1:
        remedy = "errors of different bins cannot be compared; give them the same"
        remedy = f"{remedy} with `semix evaluate RUN --set evaluation.bins={min(found)}`"
        raise InputError("bins", sorted(found), remedy)


def _methods_of(run: Path) -> list[Method]:
    evaluation = load_evaluation(run)
    methods = []
    for stage, suffix in STAGE_SUFFIX.items():
        rows = [row for row in evaluation["rows"] if row["stage"] == stage]
        if rows:
            rows.sort(key=lambda row: row["seed"])
            methods.append(Method(evaluation["name"] + suffix, stage, run, tuple(rows)))
    if not methods:
        remedy = f"holds no rows; run `semix evaluate {run}` again"
        raise InputError("evaluation", run / "evaluation.json", remedy)
    return methods
