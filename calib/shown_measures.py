"""All measures as tables show them: titles, units, which way is better, in which tables."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict

TableName = Literal["page", "run", "study", "shift", "ood", "selective", "conformal"]


@dataclass(frozen=True)
class Measure:
    """A measure in evaluation.json, and how tables show it.

    Attributes:
        short: title in tables with many columns.
        tables: tables that show it. "page": methods side by side, on the HTML page and as records;
            "run": every calibration of a method, with intervals; "study": tables of a study;
            "shift" and "ood": corrupted and out-of-distribution images.
        ranked: whether it is part of the mean rank in a study.
        marked: whether its best value is marked. A part of an error, such as over-ECE, is not
            better for being smaller.
    """

    key: str
    title: str
    short: str
    tables: tuple[TableName, ...]
    percent: bool = False
    higher_is_better: bool = False
    ranked: bool = False
    marked: bool = True

    @property
    def unit(self) -> str:
        return " %" if self.percent else ""

    def text(self, value: float, *, signed: bool = False) -> str:
        """The value as text: two decimals in percent, else three."""
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
        """The best mean as text, so that means of equal text are marked; None for a single mean."""
        values = list(means)
        if len(values) < 2:
            return None
        return self.text(max(values) if self.higher_is_better else min(values))


MAIN_TABLES: tuple[TableName, ...] = ("page", "run", "study")
ALL_MEASURES = (
    Measure(
        *("accuracy", "Accuracy", "Acc.", (*MAIN_TABLES, "shift")),
        percent=True,
        higher_is_better=True,
    ),
    Measure("ece", "ECE", "ECE", (*MAIN_TABLES, "shift"), percent=True, ranked=True),
    Measure("adaptive_ece", "Adaptive ECE", "AECE", MAIN_TABLES, percent=True, ranked=True),
    Measure("classwise_ece", "Classwise ECE", "cwECE", ("run", "study"), percent=True, ranked=True),
    Measure("mce", "MCE", "MCE", ("page",), percent=True),
    Measure("over_ece", "Over-ECE", "O-ECE", ("page", "study"), percent=True, marked=False),
    Measure("under_ece", "Under-ECE", "U-ECE", ("page", "study"), percent=True, marked=False),
    Measure("nll", "NLL", "NLL", (*MAIN_TABLES, "shift"), ranked=True),
    Measure("brier", "Brier", "Brier", (*MAIN_TABLES, "shift"), ranked=True),
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
MEASURE = {measure.key: measure for measure in ALL_MEASURES}
ACCURACY, ECE, NLL = (MEASURE[key] for key in ("accuracy", "ece", "nll"))
RANKED = tuple(measure for measure in ALL_MEASURES if measure.ranked)  # ECE first


def measures_in(table: TableName) -> tuple[Measure, ...]:
    """The measures of a table, in the order of its columns."""
    return tuple(measure for measure in ALL_MEASURES if table in measure.tables)


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
        numbers = list(values)
        return cls(
            statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None
        )

    def record(self) -> SummaryRecord:
        return {"mean": self.mean, "sd": self.sd}
