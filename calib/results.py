"""Results of runs: all measures, and what the evaluations in run folders hold."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter

from semix.calib.calibrators import PLAIN, split_kind
from semix.calib.config import TrainConfig
from semix.calib.replicates import Comparison, Unit, centre_resamples
from semix.calib.run_folder import (
    CONFIG,
    EVALUATION,
    SCHEMA,
    Evaluation,
    Row,
    Shift,
    StageName,
    check_stored_settings,
    has_evaluation_settings,
    is_measured,
    read_data,
    read_seed_evaluation,
    report_damage,
    require_trained,
)
from semix.calib.shown_measures import Measure, Summary
from semix.data.errors import InputError
from semix.data.files import read_json

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import Tensor

EvalSplit = Literal["test", "validation"]
Values = Mapping[str, float]  # by measure
REQUIRED_KINDS = {"plain", "scaled"}  # that every row has
LOGITS = re.compile(r"(seed-\d+|ensemble)/logits-(base|head)\.safetensors")  # below the run


# Reading run folders


@dataclass(frozen=True)
class StageResult:
    """One stage of one seed, or of the ensemble of all seeds: a row of evaluation.json.

    Attributes:
        seed: None for the ensemble.
        bins: number of bins of all binned measures.
        logits: path of the file with its logits.
        kinds: measures on test images, by kind: "plain", as trained, or a calibrator.
        intervals: 95 % bootstrap intervals, by kind and measure; empty if not measured.
        resamples: measures on bootstrap resamples, by kind and measure.
        conformal: coverage and average size of conformal sets, by nonconformity score.
        shift, ood: measures on corrupted and on OOD images; None or empty if not measured.
    """

    stage: StageName
    seed: int | None
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
        """Read a row of evaluation.json.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: the row is damaged.
        """
        if not LOGITS.fullmatch(row["logits"]):
            raise ValueError(f"logits are at {row['logits']}, which is not a file of a run")
        if not row["kinds"].keys() >= REQUIRED_KINDS:
            raise ValueError(f"kinds are {', '.join(row['kinds'])}; plain and scaled are needed")
        values = {
            "stage": row["stage"],
            "seed": row["seed"],
            "bins": row["bins"],
            "temperature": row["temperature"],
            "logits": run / row["logits"],
            "kinds": row["kinds"],
            "intervals": row.get("intervals", {}),
            "resamples": row.get("resamples", {}),
            "conformal": row.get("conformal", {}),
            "shift": row.get("shift"),
            "ood": row.get("ood", {}),
        }
        return _stage_result_adapter().validate_python(values)

    def predictions(self, split: EvalSplit) -> "tuple[Tensor, Tensor]":
        """Logits [N, K] and targets [N]. Raises InputError if the file is missing or damaged."""
        from semix.calib.checkpoint import load_tensors

        if not self.logits.is_file():
            run = self.logits.parents[1]
            raise InputError("logits", self.logits, f"missing; run `semix evaluate {run}` again")
        tensors = load_tensors(self.logits)
        with report_damage(self.logits):
            return tensors[f"{split}_logits"], tensors[f"{split}_targets"]

    @cached_property
    def values(self) -> Mapping[tuple[str, str], Values]:
        """All that was measured, by kind and part; `results` says what these are."""
        parts: list[tuple[str, str, Values]] = [
            *((kind, "test", values) for kind, values in self.kinds.items()),
            *((score, "conformal", values) for score, values in self.conformal.items()),
        ]
        if self.shift is not None:
            parts.append((PLAIN, "shift", self.shift["mean"]))
            for name, by_severity in self.shift["corruptions"].items():
                parts += [(PLAIN, f"shift {name} {s}", v) for s, v in by_severity.items()]
        parts += [
            (PLAIN, "ood" if name == "mean" else f"ood {name}", values)
            for name, values in self.ood.items()
        ]
        values: dict[tuple[str, str], dict[str, float]] = {}
        for kind, part, measured in parts:
            for key, value in measured.items():
                if key != "images":  # a number of OOD images, not a measure
                    # Under shift, measures after calibration have its kind in their name.
                    calibrated, measure = split_kind(key)
                    actual = kind if calibrated == PLAIN else calibrated
                    values.setdefault((actual, part), {})[measure] = value
        return values

    def images(self, split: EvalSplit) -> int:
        return len(self.predictions(split)[1])

    @cached_property
    def on_validation(self) -> Values:
        """Measures on validation images, as trained, and the mean confidence."""
        from semix.calib.metrics import calibration_metrics

        logits, targets = self.predictions("validation")
        confidence = logits.softmax(1).amax(1).mean().item()
        measures = calibration_metrics(logits, targets, bins=self.bins).as_dict()
        return {**measures, "confidence": confidence}


@cache
def _stage_result_adapter() -> TypeAdapter[StageResult]:
    return TypeAdapter(StageResult)


HEADS = {"mac_cal": "MaC-Cal", "tst": "TST", "vtst": "VTST"}


@dataclass(frozen=True)
class MethodResult:
    """One stage of a run over its measured seeds, as trained or with post-hoc calibration.

    A row of a study has the seeds of all its replicates.

    Attributes:
        kind: of calibration; used where a method of this class is called without a kind.
        data: digest of the real images; only methods with the same digest can be compared.
        dataset: name of the real images.
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

    def values(
        self,
        measure: Measure,
        kind: str | None = None,
        part: str = "test",
        split: EvalSplit = "test",
    ) -> dict[Unit, float]:
        """The measure of each seed that has this kind and part; see `results`.

        Post-hoc calibration is fitted on validation images and therefore not measured on them.

        Raises:
            InputError: a seed has the kind on test images, but not the measure.
        """
        kind = kind or self.kind
        values = {
            unit: _values_of(result, kind, part, split) for unit, result in self.seeds.items()
        }
        measured = {unit: each for unit, each in values.items() if each is not None}
        if part == "test":
            for unit, each in measured.items():
                if measure.key not in each:
                    remedy = (
                        f"seed {unit.seed} has no such measure; run `semix evaluate {self.run}`"
                    )
                    raise InputError(f"{self.run / EVALUATION} {kind}", measure.key, remedy)
        return {unit: each[measure.key] for unit, each in measured.items() if measure.key in each}

    def resamples(
        self, measure: Measure, kind: str | None = None, split: EvalSplit = "test"
    ) -> dict[Unit, Sequence[float]]:
        """The measure of each seed on bootstrap resamples, for `compare`; else its single value."""
        kind = kind or self.kind
        resamples = {
            unit: result.resamples.get(kind, {}).get(measure.key, ()) if split == "test" else ()
            for unit, result in self.seeds.items()
        }
        values = self.values(measure, kind, split=split)
        return {unit: centre_resamples(value, resamples[unit]) for unit, value in values.items()}

    def summary(self, measure: Measure, kind: str | None = None, part: str = "test") -> Summary:
        return Summary.of(self.values(measure, kind, part).values())

    def temperature(self) -> Summary:
        return Summary.of(result.temperature for result in self.seeds.values())

    def has(self, kind: str, part: str = "test") -> bool:
        """Whether this was measured for every seed."""
        measured = [(kind, part) in result.values for result in self.seeds.values()]
        return bool(measured) and all(measured)

    def parts(self, name: str) -> list[tuple[str, str]]:
        """Kinds and parts that every seed has, of the parts whose first word is this name."""
        first = next(iter(self.seeds.values()))
        return [key for key in first.values if key[1].split()[0] == name and self.has(*key)]

    def intervals(self, measure: Measure, kind: str) -> list[Sequence[float]]:
        """The bootstrap interval of each seed; empty if a seed has none."""
        limits = [r.intervals.get(kind, {}).get(measure.key, ()) for r in self.seeds.values()]
        return limits if all(limits) else []


def _values_of(result: StageResult, kind: str, part: str, split: EvalSplit) -> Values | None:
    if split == "validation":
        return result.on_validation if (kind, part) == (PLAIN, "test") else None
    return result.values.get((kind, part))


def load_methods(runs: Sequence[Path]) -> list[MethodResult]:
    """Read finished runs; returns the stages of each run in turn, base before head.

    Raises:
        InputError: there is no run, a run has no evaluation.json or one of another schema, two runs
            have the same name, so that their rows could not be distinguished, or other numbers of
            bins, so that their errors cannot be compared.
    """
    if not runs:
        raise InputError("runs", "[]", "name at least one finished run folder")
    evaluations = [(Path(run), load_evaluation(Path(run))) for run in runs]
    methods = _add_datasets_to_labels(
        [method for each in evaluations for method in methods_of(*each)]
    )
    labels = [method.label for method in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError("name", label, "two runs have this name; give each its own")
    _check_same_bins(methods)
    return methods


RESULT_COLUMNS = (
    *("dataset", "row", "stage", "split", "draw", "seed", "kind", "part", "measure", "value"),
)


def results(runs: Sequence[str | Path]) -> "DataFrame":
    """All measured values of finished runs, one per line, for plots and tables of one's own.

    Columns: `dataset`, the name of the real images; `row`, the method's label; `stage`, base or
    head; `split` and `draw`, the replicate of a study, 0 and none for single runs; `seed`; `kind`,
    "plain" as trained, or the calibrator, of conformal sets the score; `part`, the images: "test",
    "conformal" (sets on test images), "shift" (means over corruptions and severities), "shift NAME
    SEVERITY", "ood" (means over datasets) or "ood NAME"; `measure`; `value`. Rates are fractions,
    never per cent.

    Args:
        runs: run folders.
    Raises:
        InputError: as `load_methods`.
    """
    return value_table(load_methods([Path(run) for run in runs]))


def value_table(methods: Sequence[MethodResult]) -> "DataFrame":
    """The values of these methods, as `results` describes them."""
    from pandas import DataFrame

    lines = [
        (m.dataset, m.label, m.stage, *unit, kind, part, measure, value)
        for m in methods
        for unit, result in m.seeds.items()
        for (kind, part), values in result.values.items()
        for measure, value in values.items()
    ]
    return DataFrame(lines, columns=list(RESULT_COLUMNS))


def _check_same_bins(methods: Sequence[MethodResult]) -> None:
    bins = {str(m.run): sorted({row.bins for row in m.seeds.values()}) for m in methods}
    if len(distinct := sorted({count for counts in bins.values() for count in counts})) < 2:
        return
    bins_by_run = "; ".join(f"{run}: {', '.join(map(str, counts))}" for run, counts in bins.items())
    command = f"semix train RUN/{CONFIG} --out RUN --set evaluation.bins={distinct[0]}"
    remedy = f"errors of different bins cannot be compared ({bins_by_run}); give them the same with"
    raise InputError(
        "bins", distinct, f"{remedy} `{command}`, which measures again without training"
    )


def by_data(methods: Sequence[MethodResult]) -> list[list[MethodResult]]:
    """Group methods by real images, as only these can be compared; the first is the baseline."""
    groups: dict[str, list[MethodResult]] = {}
    for method in methods:
        groups.setdefault(method.data, []).append(method)
    return list(groups.values())


def load_evaluation(run: Path, path: Path | None = None) -> Evaluation:
    """Read the evaluation.json of a finished run, or another evaluation of it.

    Args:
        path: of the other evaluation; None reads evaluation.json.
    Raises:
        InputError: the file is missing or has another schema, the folder is not that of a run, or
            the run is not finished.
    """
    path = path or run / EVALUATION
    if not path.exists():
        require_trained(run)
        raise InputError("evaluation", path, f"missing; run `semix evaluate {run}` first")
    with report_damage(path):
        evaluation: Evaluation = read_json(path)
        schema = evaluation.get("schema")
    if schema != SCHEMA:
        text = f"has schema {schema} where {SCHEMA} is needed"
        raise InputError("evaluation", path, f"{text}; run `semix evaluate {run}` again")
    return evaluation


def merge_versions(versions: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Versions by library; if runs had several versions, they are joined in one text."""
    merged: dict[str, dict[str, None]] = {}
    for run_versions in versions:
        for library, version in run_versions.items():
            merged.setdefault(library, {})[str(version)] = None
    return {library: " / ".join(merged[library]) for library in sorted(merged)}


def read_seed_results(
    config: TrainConfig, run: Path, *, stage: str
) -> dict[int | None, StageResult]:
    """One stage of every seed that is measured under these settings; others may be missing.

    With None the ensemble of all seeds, if it is measured.

    Raises:
        InputError: a seed was trained under other settings.
    """
    results: dict[int | None, StageResult] = {}
    for seed in config.seeds:
        evaluation = read_seed_evaluation(run, seed)
        if evaluation is not None:
            check_stored_settings(evaluation["config"], config.identity(), run)
            if has_evaluation_settings(config, evaluation):
                rows = (StageResult.read(row, run) for row in evaluation["rows"])
                results[seed] = next(row for row in rows if row.stage == stage)
    if config.evaluation.ensemble and is_measured(config, run):
        for each in read_json(run / EVALUATION)["rows"]:
            if each["seed"] is None and each["stage"] == stage:
                results[None] = StageResult.read(each, run)
    return results


def methods_of(run: Path, evaluation: Evaluation) -> list[MethodResult]:
    """The stages of a run in one of its evaluations, base before head.

    Raises:
        InputError: the evaluation has no rows, or is damaged.
    """
    with report_damage(run / EVALUATION):
        name, records = evaluation["name"], evaluation["rows"]
        if not isinstance(name, str):
            raise TypeError("the name is not a string")
        rows = sorted((StageResult.read(row, run) for row in records), key=seed_order)
    if not rows:
        remedy = f"holds no rows; run `semix evaluate {run}` again"
        raise InputError("evaluation", run / EVALUATION, remedy)
    data = read_data(run)["real"]
    with report_damage(run / CONFIG):
        config = read_json(run / CONFIG)
        real, labels = config["real"], _labels(name, config.get("head"))
        folder = Path(real["path"]).name if real["path"] else real["name"]
        dataset_name = str(real.get("dataset") or folder)
    methods = []
    for stage, label in labels.items():
        units = {Unit(0, None, row.seed): row for row in rows if row.stage == stage}
        ensemble = {unit: row for unit, row in units.items() if unit.seed is None}
        seeds = {unit: row for unit, row in units.items() if unit.seed is not None}
        for name, of in ((label, seeds), (f"{label}, ensemble of {len(seeds)} seeds", ensemble)):
            if of:
                methods.append(MethodResult(name, stage, run, of, data=data, dataset=dataset_name))
    return methods


def seed_order(result: StageResult) -> int:
    """To sort results by seed, that of the ensemble last."""
    return sys.maxsize if result.seed is None else result.seed


def _add_datasets_to_labels(methods: Sequence[MethodResult]) -> list[MethodResult]:
    """Add the name of the dataset to every label if there are several."""
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
    """Labels of a run's stages; the run's name may already contain that of its head."""
    if head is None:
        return {"base": name}
    head_name = HEADS[head["method"]]
    if head_name in name:
        return {"base": f"{name}: first stage", "head": name}
    return {"base": name, "head": f"{name} + {head_name}"}


# Comparing


def significant_change(test: Comparison, measure: Measure) -> str:
    """`better` or `worse` if the interval excludes zero, for marked measures; else empty."""
    if not (test.is_clear and measure.marked):
        return ""
    return "better" if measure.improves(0.0, test.change) else "worse"


def ranks(values: Sequence[float], measure: Measure) -> list[float]:
    """Ranks of values, 1 for the best; equal values get the mean of their ranks."""
    from scipy.stats import rankdata

    signed = [-value for value in values] if measure.higher_is_better else list(values)
    return [float(rank) for rank in rankdata(signed)]
