"""Check the metrics of an audit against limits, which are rules of thumb, with advice."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from semix.data.contact_sheet import NEARLY_HARD_BELOW
from semix.data.formats import LeftOut
from semix.pipeline.audit.findings import (
    ClassMetrics,
    Correlation,
    EndPointMetrics,
    LabelMetrics,
    Overall,
)

CORRELATION = 0.9  # median; eight weights with one swap of neighbours have 0.98, with five 0.88
NEGATIVE = 0.01  # fraction of series
NOT_MONOTONE = 0.5
END_POINTS = 0.9
END_POINTS_OF_SERIES = 0.95  # between two classes only, so errors should be rarer
STILL = 0.01
IMBALANCE = 1.5  # largest label mass of a class over the smallest
# Maximum mean label entropy, over that of equal labels; NEARLY_HARD_BELOW is the minimum.
UNDECIDED = 0.95
DISAGREEMENT = 0.2  # mean difference of the weights of two encoders
STABILITY = 0.0  # median cosine; about 0 for a noise that inversion does not recover


@dataclass(frozen=True)
class Check:
    """One row of the table: `figure` is the value as text, `advice` what to do if `ok` is false."""

    name: str
    figure: str
    ok: bool
    advice: str


def checks(
    overall: Overall,
    classes: Sequence[ClassMetrics],
    *,
    unreadable: Mapping[int, str],
    left_out: Sequence[LeftOut],
    near_concept: int | None = None,
) -> list[Check]:
    """All checks that apply, the most informative first.

    Args:
        unreadable: fault of each shard that cannot be read.
        left_out: series that a build could not store.
        near_concept: series with an image near a concept; None if none was asked for.
    """
    rows = [
        *_readable(unreadable),
        *_stored(left_out),
        *_correlation(overall["correlation"]),
        *_end_points(overall["end_points"]),
        *_pictures(overall),
        _balance(classes),
        _entropy(overall["labels"]),
    ]
    if overall["disagreement"]:
        mean = overall["disagreement"]["mean"]
        advice = "set mixed.exclude.max_disagreement, or relabel with the encoder that you trust"
        text = f"mean {mean:.3f} of a weight"
        rows.append(Check("second encoder differs", text, mean <= DISAGREEMENT, advice))
    if overall["stability"]:
        median = overall["stability"]["median"]
        advice = "raise noise.candidates, or set mixed.exclude.min_stability"
        rows.append(Check("noise stability", f"median {median:.3f}", median > STABILITY, advice))
    if near_concept is not None:
        advice = "look at them; mixed.exclude.flagged=[concept] leaves them out"
        rows.append(Check("series near a concept", f"{near_concept:,}", not near_concept, advice))
    return rows


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _readable(unreadable: Mapping[int, str]) -> list[Check]:
    if not unreadable:
        return []
    shown = ", ".join(map(str, list(unreadable)[:5])) + (", ..." if len(unreadable) > 5 else "")
    text = f"{len(unreadable)}, number {shown}"
    return [Check("unreadable shards", text, False, "`semix resume` makes them again")]


def _stored(left_out: Sequence[LeftOut]) -> list[Check]:
    if not left_out:
        return []
    first = left_out[0]
    text = f"{len(left_out):,}; group {first.group}: {first.reason}"
    advice = "audit.json names all; another generator.dtype may lose none"
    return [Check("series left out", text, False, advice)]


def _correlation(correlation: Correlation) -> list[Check]:
    median, mean = correlation["median"], correlation["mean"]
    rows = [
        Check(
            "weight follows alpha",
            f"Spearman median {median:.3f}, mean {mean:.3f}",
            median >= CORRELATION,
            "look at the worst series; the generator or CLIP does not know these classes",
        ),
        Check(
            "series that run backwards",
            percent(correlation["negative"]),
            correlation["negative"] <= NEGATIVE,
            "leave them out with mixed.exclude.min_correlation=0",
        ),
    ]
    not_monotone = correlation["not_monotone"]
    if not_monotone is None:
        return rows
    advice = "select noise (noise.strategy), or set mixed.exclude.monotone=true"
    ok = not_monotone <= NOT_MONOTONE
    return [*rows, Check("weight falls somewhere", percent(not_monotone), ok, advice)]


def _end_points(metrics: EndPointMetrics) -> list[Check]:
    rows = [
        ("end points nearest to their class", metrics["nearest_prototype"], END_POINTS),
        ("end points within their series", metrics["nearest_of_series"], END_POINTS_OF_SERIES),
        ("end points by the judge", metrics["judge"], END_POINTS),
    ]
    advice = "try another prompt or guidance, or set mixed.exclude.end_points=true"
    return [
        Check(
            name,
            f"{percent(agreement['share'])} of {agreement['images']:,}",
            agreement["share"] >= minimum,
            advice,
        )
        for name, agreement, minimum in rows
        if agreement
    ]


def _pictures(overall: Overall) -> list[Check]:
    duplicates, still = overall["duplicates"], overall["still"]["share"]
    faults = overall["degenerate"]
    kinds = [f"{name.replace('_', ' ')} {count:,}" for name, count in faults.items() if count]
    return [
        Check(
            "series like an earlier one",
            f"{duplicates['series']:,}, {duplicates['same_pixels']:,} with the same pixels",
            not duplicates["series"],
            "look at them; mixed.exclude.flagged=[duplicate] leaves them out",
        ),
        Check(
            "neighbours that do not differ",
            f"{percent(still)} of series",
            still <= STILL,
            "use fewer alphas, or set mixed.exclude.flagged=[still]",
        ),
        Check(
            "degenerate images",
            ", ".join(kinds) or "0",
            not faults["images"],
            "look at them; mixed.exclude.flagged=[degenerate] leaves them out",
        ),
    ]


def _balance(classes: Sequence[ClassMetrics]) -> Check:
    masses = [row["mass"] for row in classes]
    smallest, largest = min(masses), max(masses)
    ratio = largest / smallest if smallest > 0 else math.inf
    num_absent = sum(1 for mass in masses if mass <= 0)
    text = (
        f"{num_absent} classes have none"
        if num_absent
        else f"largest is {ratio:.2f} x the smallest"
    )
    advice = "mix all pairs, or train with mixed.class_matched=true"
    return Check("label mass of classes", text, ratio <= IMBALANCE, advice)


def _entropy(labels: LabelMetrics) -> Check:
    ratio = labels["entropy_mean"] / labels["entropy_most"]
    setting = "annotation.temperature=T" if labels["over_all_classes"] else "annotation.scale=S"
    advice = f"change the sharpening with `semix relabel --set {setting}`"
    text = f"{ratio:.2f} of equal labels'"
    return Check("mean entropy of labels", text, NEARLY_HARD_BELOW <= ratio <= UNDECIDED, advice)
