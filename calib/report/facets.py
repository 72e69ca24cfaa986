"""What else was measured: other post-hoc methods, intervals, shifted and foreign images."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calib.report.methods import MEASURES, OTHER_KINDS, Measure, Method, mean_and_sd

KIND_NAMES = {"vector": "vector scaling", "isotonic": "isotonic regression"}
BY_KEY = {measure.key: measure for measure in MEASURES}
POSTHOC = tuple(BY_KEY[key] for key in ("accuracy", "ece", "adaptive_ece", "nll", "brier"))
SHIFTED = (
    *(BY_KEY[key] for key in ("accuracy", "ece")),
    Measure("scaled_ece", "ECE + TS", percent=True),
    *(BY_KEY[key] for key in ("nll", "brier")),
)
FOREIGN = (
    Measure("auroc", "AUROC", percent=True, higher_is_better=True),
    Measure("fpr95", "FPR95", percent=True),
    Measure("entropy_auroc", "AUROC by entropy", percent=True, higher_is_better=True),
    Measure("entropy_fpr95", "FPR95 by entropy", percent=True),
)


@dataclass(frozen=True)
class Facet:
    """One table: a title, what to know of it, and for each method texts in columns."""

    title: str
    note: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]


def facets(methods: Sequence[Method]) -> list[Facet]:
    """The tables of what at least one method has in all of its rows."""
    return [
        facet
        for make in (_posthoc, _intervals, shift_facet, foreign_facet)
        if (facet := make(methods)) is not None
    ]


def _posthoc(methods: Sequence[Method]) -> Facet | None:
    rows = [
        (f"{method.label} + {KIND_NAMES[kind]}", _spreads(found, POSTHOC))
        for method in methods
        for kind in OTHER_KINDS
        if (found := _each(method, kind))
    ]
    note = "Fitted on the validation split; mean ± standard deviation over seeds, on the test split"
    bins = methods[0].bins
    return _facet("Other calibration after training", f"{note}; ECE of {bins} bins.", POSTHOC, rows)


def _intervals(methods: Sequence[Method]) -> Facet | None:
    rows = [
        (method.label, [_interval(found, measure) for measure in POSTHOC])
        for method in methods
        if (found := _each(method, "intervals"))
    ]
    note = "95 % bootstrap intervals of the methods as trained, limits averaged over seeds: what "
    note += "another test set of this size would change, not another training."
    return _facet("Intervals", note, POSTHOC, rows)


def shift_facet(methods: Sequence[Method]) -> Facet | None:
    """Means under common corruptions; None if no method has them."""
    rows, kinds = [], set()
    for method in methods:
        if found := _each(method, "shift"):
            rows.append((method.label, _spreads([shift["mean"] for shift in found], SHIFTED)))
            kinds |= {_shift_words(shift) for shift in found}
    note = f"Mean over {' / '.join(sorted(kinds))}; TS: the temperature of the clean validation "
    return _facet("Shifted test images", f"{note}images.", SHIFTED, rows)


def foreign_facet(methods: Sequence[Method]) -> Facet | None:
    """Out-of-distribution datasets and their mean; None if no method has them."""
    rows = []
    for method in methods:
        if found := _each(method, "ood"):
            for name in found[0]:
                label = f"{method.label}, {'mean over sets' if name == 'mean' else name}"
                rows.append((label, _spreads([ood[name] for ood in found], FOREIGN)))
    note = "How well the largest probability, or the entropy, tells test images from those of "
    note += "other datasets. FPR95: share of foreign images accepted where 95 % of the test "
    note += "images are."
    return _facet("Foreign images", note, FOREIGN, rows)


def _shift_words(shift: dict[str, Any]) -> str:
    severities = next(iter(shift["corruptions"].values())).keys() - {"mean"}
    return (
        f"{len(shift['corruptions'])} corruptions x {len(severities)} severities of "
        f"{shift['images']:,} images, ECE of {shift['bins']} bins"
    )


def _each(method: Method, part: str) -> list[Any]:
    """A part of every row; empty if a row has none."""
    found = [row.get(part) for row in method.rows]
    return found if all(found) else []


def _spreads(found: Sequence[dict[str, float]], measures: Sequence[Measure]) -> list[str]:
    texts = []
    for measure in measures:
        mean, sd = mean_and_sd([values[measure.key] for values in found])
        texts.append(measure.text(mean) + (f" ± {measure.text(sd)}" if sd is not None else ""))
    return texts


def _interval(found: Sequence[dict[str, Sequence[float]]], measure: Measure) -> str:
    limits = [statistics.fmean(values[measure.key][end] for values in found) for end in (0, 1)]
    return " to ".join(measure.text(limit) for limit in limits)


def _facet(
    title: str, note: str, measures: Sequence[Measure], rows: list[tuple[str, list[str]]]
) -> Facet | None:
    columns = [measure.title + (" %" if measure.percent else "") for measure in measures]
    return Facet(title, note, columns, rows) if rows else None
