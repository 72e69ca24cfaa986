"""Results of runs: the list of measures, and the reader of run folders."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pydantic import TypeAdapter

from semix.calib.config import TrainConfig
from semix.calib.replicates import Comparison, Unit, centred
from semix.calib.run_folder import (
    CONFIG,
    EVALUATION,
    KINDS,
    SCHEMA,
    Evaluation,
    Row,
    Shift,
    StageName,
    check_stored_settings,
    damage_of,
    measured_as,
    measured_seed,
    read_data,
    trained_run,
)
from semix.data.errors import InputError
from semix.data.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

EvalSplit = Literal["test", "validation"]
Values = Mapping[str, float]  # by measure
LOGITS = re.compile(r"seed-\d+/logits-(base|head)\.safetensors")  # below the run
TableName = Literal["page", "run", "study", "shift", "ood", "selective", "conformal"]


@dataclass(frozen=True)
class Measure:
    """A figure of evaluation.json and how tables show it.

    Attributes:
        short: its title in tables of many columns.
        tables: those that show it. "page": methods side by side, on the HTML page and as records;
            "run": every kind of a method, with intervals; "study": a study's; "shift" and "ood":
            corrupted and out-of-distribution images.
        ranked: counts in the mean rank of a study; tested: against a study's baseline.
        marked: its best value is marked. Half of an error is not better for being smaller.
    """

    key: str
    title: str
    short: str
    tables: tuple[TableName, ...]
    percent: bool = False
    higher_is_better: bool = False
    ranked: bool = False
    tested: bool = False
    marked: bool = True

    @property
    def unit(self) -> str:
        return " %" if self.percent else ""

    def text(self, value: float, *, signed: bool = False) -> str:
        """The value as printed: two decimals in percent, three otherwise."""
        shown, digits = (100 * value, 2) if self.percent else (value, 3)
        text = f"{round(shown, digits) + 0.0:{'+' if signed else ''}.{digits}f}"
        return text.replace("-", "\N{MINUS SIGN}")

    def deviation(self, summary: "Summary") -> str:
        """ "± 0.52"; empty if it is undefined."""
        return "" if summary.sd is None else f"± {self.text(summary.sd)}"

    def spread(self, summary: "Summary") -> str:
        """ "4.81 ± 0.52", without the unit."""
        return f"{self.text(summary.mean)} {self.deviation(summary)}".rstrip()

    def improves(self, old: float, new: float) -> bool:
        return new > old if self.higher_is_better else new < old

    def best(self, means: Iterable[float]) -> str | None:
        """The best as printed, so that equal texts share the mark; None for a single value."""
        known = list(means)
        if len(known) < 2:
            return None
        return self.text(max(known) if self.higher_is_better else min(known))


ALL: tuple[TableName, ...] = ("page", "run", "study")
EVERY_MEASURE = (
    Measure(
        *("accuracy", "Accuracy", "Acc.", (*ALL, "shift")),
        percent=True,
        higher_is_better=True,
        tested=True,
    ),
    Measure("ece", "ECE", "ECE", (*ALL, "shift"), percent=True, ranked=True, tested=True),
    Measure("scaled_ece", "ECE + TS", "ECE + TS", ("shift",), percent=True),
    Measure("adaptive_ece", "Adaptive ECE", "AECE", ALL, percent=True, ranked=True),
    Measure("classwise_ece", "Classwise ECE", "cwECE", ("run", "study"), percent=True, ranked=True),
    Measure("mce", "MCE", "MCE", ("page",), percent=True),
    Measure("over_ece", "Over-ECE", "O-ECE", ("page", "study"), percent=True, marked=False),
    Measure("under_ece", "Under-ECE", "U-ECE", ("page", "study"), percent=True, marked=False),
    Measure("nll", "NLL", "NLL", (*ALL, "shift"), ranked=True, tested=True),
    Measure("brier", "Brier", "Brier", (*ALL, "shift"), ranked=True),
    Measure("auroc", "AUROC", "AUROC", ("ood",), percent=True, higher_is_better=True),
    Measure("fpr95", "FPR95", "FPR95", ("ood",), percent=True),
    Measure(
        *("entropy_auroc", "AUROC by entropy", "AUROC, entropy", ("ood",)),
        percent=True,
        higher_is_better=True,
    ),
    Measure("entropy_fpr95", "FPR95 by entropy", "FPR95, entropy", ("ood",), percent=True),
    Measure("aurc", "AURC", "AURC", ("selective",), percent=True),
    Measure("augrc", "AUGRC", "AUGRC", ("selective",), percent=True),
    Measure(
        *("coverage_at_5_risk", "Coverage at 5 % risk", "Cov@5", ("selective",)),
        percent=True,
        higher_is_better=True,
    ),
    Measure(
        *("risk_at_80_coverage", "Risk at 80 % coverage", "Risk@80", ("selective",)),
        percent=True,
    ),
    Measure("variational_ece", "Variational ECE", "vECE", ("selective",), percent=True),
    Measure("coverage", "Coverage", "Coverage", ("conformal",), percent=True, marked=False),
    Measure("size", "Average set size", "Set size", ("conformal",)),
)
MEASURE = {measure.key: measure for measure in EVERY_MEASURE}
ACCURACY, ECE, NLL = (MEASURE[key] for key in ("accuracy", "ece", "nll"))
RANKED = tuple(measure for measure in EVERY_MEASURE if measure.ranked)  # ECE first
TESTED = tuple(measure for measure in EVERY_MEASURE if measure.tested)


def shown_in(table: TableName) -> tuple[Measure, ...]:
    """The measures of a table, in the order of its columns."""
    return tuple(measure for measure in EVERY_MEASURE if table in measure.tables)


class SummaryRecord(TypedDict):
    """A `Summary` as JSON."""

    mean: float
    sd: float | None


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (n - 1), which is None for a single value."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Summary":
        known = list(values)
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    def record(self) -> SummaryRecord:
        return {"mean": self.mean, "sd": self.sd}


# Reading run folders


@dataclass(frozen=True)
class StageResult:
    """One stage of one seed: a row of evaluation.json.

    Attributes:
        bins: number of bins of every binned measure.
        logits: the file of its logits.
        kinds: measures on test images, by kind of KINDS.
        intervals: 95 % bootstrap intervals, by kind and measure; empty if not measured.
        resamples: measures on bootstrap resamples, likewise.
        conformal: coverage and size of the conformal sets, by score.
        shift, ood: figures on corrupted and on OOD images; None or empty if not measured.
    """

    stage: StageName
    seed: int
    bins: int
    temperature: float
    logits: Path
    kinds: Mapping[str, Values]
    intervals: Mapping[str, Mapping[str, Sequence[float]]]
    resamples: Mapping[str, Mapping[str, Sequence[float]]]
    conformal: Mapping[str, Values]
    shift: Shift | None
    ood: Mapping[str, Values]

    @classmethod
    def read(cls, row: Row, run: Path) -> "StageResult":
        """
        Raises:
            ValueError, KeyError, TypeError, AttributeError: the row is damaged.
        """
        if not LOGITS.fullmatch(row["logits"]):
            raise ValueError(f"logits are at {row['logits']}, which is not a file of a run")
        plain = {"plain": row["intervals"]} if row.get("intervals") else {}
        values = {
            "stage": row["stage"],
            "seed": row["seed"],
            "bins": row["bins"],
            "temperature": row["temperature"],
            "logits": run / row["logits"],
            "kinds": {kind: row[kind] for kind in KINDS if kind in row},
            "intervals": plain | row.get("posthoc_intervals", {}),
            "resamples": row.get("drawn", {}),
            "conformal": row.get("conformal", {}),
            "shift": row.get("shift"),
            "ood": row.get("ood", {}),
        }
        return _measured().validate_python(values)

    def predictions(self, split: EvalSplit) -> "tuple[Tensor, Tensor]":
        """Logits [N, K] and targets [N]. Raises InputError if the file is missing or damaged."""
        from semix.calib.checkpoint import load_tensors

        if not self.logits.is_file():
            run = self.logits.parents[1]
            raise InputError("logits", self.logits, f"missing; run `semix evaluate {run}` again")
        tensors = load_tensors(self.logits)
        with damage_of(self.logits):
            return tensors[f"{split}_logits"], tensors[f"{split}_targets"]

    def mean_of(self, part: Literal["shift", "ood"]) -> Values:
        """Means over all corruptions and severities, or over OOD sets; empty if not measured."""
        of_shift = self.shift["mean"] if part == "shift" and self.shift else {}
        return self.ood.get("mean", {}) if part == "ood" else of_shift

    def images(self, split: EvalSplit) -> int:
        return len(self.predictions(split)[1])

    @cached_property
    def on_validation(self) -> Values:
        """Measures as trained on validation images, with their mean confidence."""
        from semix.calib.metrics import calibration_metrics

        logits, targets = self.predictions("validation")
        confidence = logits.softmax(1).amax(1).mean().item()
        measured = calibration_metrics(logits, targets, bins=self.bins).as_dict()
        return {**measured, "confidence": confidence}


@cache
def _measured() -> TypeAdapter[StageResult]:
    return TypeAdapter(StageResult)


HEADS = {"mac_cal": "MaC-Cal", "tst": "TST", "vtst": "VTST"}


@dataclass(frozen=True)
class MethodResult:
    """One stage of one run over its measured seeds, as trained or with post-hoc calibration.

    A row of a study has the seeds of all replicates.

    Attributes:
        kind: one of KINDS, the default of the methods below.
        data, dataset: digest and name of the real images; only methods of equal data compare.
    """

    label: str
    stage: str
    run: Path
    seeds: Mapping[Unit, StageResult]
    kind: str = "plain"
    data: str = ""
    dataset: str = ""

    @property
    def bins(self) -> int:
        return next(iter(self.seeds.values())).bins

    def figures(self, kind: str | None = None, split: EvalSplit = "test") -> dict[Unit, Values]:
        """All measures of each seed that has this kind, in the units of evaluation.json.

        Post-hoc methods are fitted on validation images and have no figures there.
        """
        kind = kind or self.kind
        if split == "validation":
            return {s: m.on_validation for s, m in self.seeds.items() if kind == "plain"}
        return {s: m.kinds[kind] for s, m in self.seeds.items() if kind in m.kinds}

    def values(
        self, measure: Measure, kind: str | None = None, split: EvalSplit = "test"
    ) -> dict[Unit, float]:
        """One value for each seed of `figures`. Raises InputError if one was not measured."""
        figures = self.figures(kind, split)
        lacking = [unit.seed for unit, measures in figures.items() if measure.key not in measures]
        if lacking:
            remedy = f"seed {lacking[0]} has no such measure; run `semix evaluate {self.run}`"
            raise InputError(f"{self.run / EVALUATION} {kind or self.kind}", measure.key, remedy)
        return {unit: measures[measure.key] for unit, measures in figures.items()}

    def resamples(
        self, measure: Measure, kind: str | None = None, split: EvalSplit = "test"
    ) -> dict[Unit, Sequence[float]]:
        """Values on bootstrap resamples, for `compare`; without resamples one value per unit."""
        kind = kind or self.kind
        resamples = {
            unit: result.resamples.get(kind, {}).get(measure.key, ()) if split == "test" else ()
            for unit, result in self.seeds.items()
        }
        values = self.values(measure, kind, split)
        return {unit: centred(value, resamples[unit]) for unit, value in values.items()}

    def summary(self, measure: Measure, kind: str | None = None) -> Summary:
        return Summary.of(self.values(measure, kind).values())

    def temperature(self) -> Summary:
        return Summary.of(row.temperature for row in self.seeds.values())

    def each(
        self,
        part: Literal["kinds", "intervals", "conformal", "shift", "ood"],
        key: str = "",
    ) -> list[Any]:
        """A part of every seed, or its value under `key`; empty if a seed has none."""
        parts = [getattr(row, part) for row in self.seeds.values()]
        parts = [one.get(key) for one in parts] if key else parts
        return parts if all(parts) else []


def load_methods(runs: Sequence[Path]) -> list[MethodResult]:
    """Read the finished runs, in the order given: the stages of each, base before head.

    Raises:
        InputError: no run, a run without evaluation.json or of another schema, two runs of one
            name, whose rows would look alike, or of other bins, whose errors are not the same
            measure.
    """
    if not runs:
        raise InputError("runs", "[]", "name at least one finished run folder")
    evaluations = [(Path(run), load_evaluation(Path(run))) for run in runs]
    methods = _with_datasets([method for each in evaluations for method in methods_of(*each)])
    labels = [method.label for method in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError("name", label, "two runs have this name; give each its own")
    _check_same_bins(methods)
    return methods


def _check_same_bins(methods: Sequence[MethodResult]) -> None:
    bins = {str(m.run): sorted({row.bins for row in m.seeds.values()}) for m in methods}
    if len(known := sorted({count for counts in bins.values() for count in counts})) < 2:
        return
    which = "; ".join(f"{run}: {', '.join(map(str, counts))}" for run, counts in bins.items())
    way = f"semix train RUN/{CONFIG} --out RUN --set evaluation.bins={known[0]}"
    remedy = f"errors of different bins cannot be compared ({which}); give them the same with"
    raise InputError("bins", known, f"{remedy} `{way}`, which measures again without training")


def by_data(methods: Sequence[MethodResult]) -> list[list[MethodResult]]:
    """The methods by real images: only those compare. Each group begins with its baseline."""
    groups: dict[str, list[MethodResult]] = {}
    for method in methods:
        groups.setdefault(method.data, []).append(method)
    return list(groups.values())


def load_evaluation(run: Path, path: Path | None = None) -> Evaluation:
    """The evaluation.json of a finished run, or another evaluation of it.

    Args:
        path: of the other evaluation.
    Raises:
        InputError: it is missing, or of another schema; the folder is not a run, or the run is
            not finished.
    """
    path = path or run / EVALUATION
    if not path.exists():
        trained_run(run)
        raise InputError("evaluation", path, f"missing; run `semix evaluate {run}` first")
    with damage_of(path):
        evaluation: Evaluation = read_json(path)
        schema = evaluation.get("schema")
    if schema != SCHEMA:
        text = f"schema {schema} where {SCHEMA} is read"
        raise InputError("evaluation", path, f"{text}; run `semix evaluate {run}` again")
    return evaluation


def merged_versions(versions: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Versions by library, joined in one text if runs had several."""
    merged: dict[str, dict[str, None]] = {}
    for of_run in versions:
        for library, version in of_run.items():
            merged.setdefault(library, {})[str(version)] = None
    return {library: " / ".join(merged[library]) for library in sorted(merged)}


def measured_seeds(config: TrainConfig, run: Path, *, stage: str) -> dict[int, StageResult]:
    """A stage of every seed measured under these settings; the run need not be finished.

    Raises:
        InputError: a seed was trained under other settings.
    """
    results = {}
    for seed in config.seeds:
        evaluation = measured_seed(run, seed)
        if evaluation is not None:
            check_stored_settings(evaluation["config"], config.identity(), run)
            if measured_as(config, evaluation):
                rows = (StageResult.read(row, run) for row in evaluation["rows"])
                results[seed] = next(row for row in rows if row.stage == stage)
    return results


def methods_of(run: Path, evaluation: Evaluation) -> list[MethodResult]:
    """The stages of a run in one of its evaluations, base before head.

    Raises:
        InputError: it holds no rows, or is damaged.
    """
    with damage_of(run / EVALUATION):
        name, records = evaluation["name"], evaluation["rows"]
        if not isinstance(name, str):
            raise TypeError("the name is not a text")
        rows = sorted((StageResult.read(row, run) for row in records), key=lambda row: row.seed)
    if not rows:
        remedy = f"holds no rows; run `semix evaluate {run}` again"
        raise InputError("evaluation", run / EVALUATION, remedy)
    data = read_data(run)["real"]
    with damage_of(run / CONFIG):
        config = read_json(run / CONFIG)
        real, labels = config["real"], _labels(name, config.get("head"))
        dataset_name = str(Path(real["path"]).name if real["path"] else real["name"])
    return [
        MethodResult(label, stage, run, seeds, data=data, dataset=dataset_name)
        for stage, label in labels.items()
        if (seeds := {Unit(0, None, row.seed): row for row in rows if row.stage == stage})
    ]


def _with_datasets(methods: Sequence[MethodResult]) -> list[MethodResult]:
    """Name the dataset in every label if there are several."""
    datasets = {method.data: method.dataset for method in methods}
    if len(datasets) == 1:
        return list(methods)
    names = list(datasets.values())
    for data, name in datasets.items():
        if names.count(name) > 1:  # one folder, split or scaled differently
            datasets[data] = f"{name} {data[:8]}"
    return [
        replace(m, label=f"{m.label}, {datasets[m.data]}", dataset=datasets[m.data])
        for m in methods
    ]


def _labels(name: str, head: Mapping[str, str] | None) -> dict[str, str]:
    """Labels of a run's stages; the run's name may mention its head already."""
    if head is None:
        return {"base": name}
    added = HEADS[head["method"]]
    if added in name:
        return {"base": f"{name}: first stage", "head": name}
    return {"base": name, "head": f"{name} + {added}"}


# Comparing


def significant_change(test: Comparison, measure: Measure) -> str:
    """`better` or `worse` if the interval excludes zero; else, and for parts of ECE, empty."""
    if not (test.is_clear and measure.marked):
        return ""
    return "better" if measure.improves(0.0, test.change) else "worse"


def ranks(values: Sequence[float], measure: Measure) -> list[float]:
    """1 for the best; equal values share the mean of their ranks."""
    from scipy.stats import rankdata

    signed = [-value for value in values] if measure.higher_is_better else list(values)
    return [float(rank) for rank in rankdata(signed)]
