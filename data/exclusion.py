"""Exclusion: which series a reader leaves out, by rule; nothing is ever deleted."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from data.errors import InputError
from data.flags import flagged_groups, newest_flags
from data.indices import open_index
from data.root import Root
from data.settings import Settings

if TYPE_CHECKING:  # torch costs seconds
    from torch import Tensor

Record = Mapping[str, Any]

log = logging.getLogger("semix.data")


class Exclusion(Settings):
    """Rules for series to leave out while reading; all are off by default."""

    min_correlation: float | None = Field(
        None,
        ge=-1,
        le=1,
        description="leave out pairs' series whose Spearman correlation of alpha and weight is "
        "lower; 0 leaves out those that run backwards",
    )
    monotone: bool = Field(
        False, description="leave out pairs' series whose weight falls somewhere along alpha"
    )
    end_points: bool = Field(
        False,
        description="leave out series with an unmixed image whose stored CLIP features are "
        "nearest to the prototype of another class",
    )
    max_disagreement: float | None = Field(
        None,
        ge=0,
        description="leave out series with an image whose weights by the two encoders differ more",
    )
    min_stability: float | None = Field(
        None, ge=-1, le=1, description="leave out series whose noise is less stable"
    )
    flagged: tuple[Literal["duplicate", "still", "degenerate"], ...] = Field(
        (), description="leave out what `semix audit` flagged so"
    )

    def rules(self) -> dict[str, Any]:
        """The rules that are on, by name."""
        off = Exclusion().model_dump()
        return {name: value for name, value in self.model_dump().items() if value != off[name]}


def kept(exclusion: Exclusion, records: Sequence[Record], *, root: Root, index: str) -> list[bool]:
    """Which of these series to read.

    Logs once how many each rule leaves out.

    Args:
        records: `KEY.json` of each series, with the labels that are in use.
        index: name of the index that the records come from.
    Returns:
        One entry a record, in their order.
    Raises:
        InputError: a rule that does not apply to these series, or no series left.
        ValueError: stored features or flags that cannot be read.
    """
    rules = exclusion.rules()
    if not rules or not records:
        return [True] * len(records)
    left_out = {
        name: RULES[name](records, value, root=root, index=index) for name, value in rules.items()
    }
    keep = [not any(row) for row in zip(*left_out.values(), strict=True)]
    counts = {name: sum(row) for name, row in left_out.items()}
    log.info("%s", describe(counts, left=sum(keep), series=len(keep)))
    if not any(keep):
        given = ", ".join(f"{name} {value}" for name, value in rules.items())
        raise InputError("exclude", given, f"leaves none of {len(keep)} series; ease a rule")
    return keep


def describe(counts: Mapping[str, int], *, left: int, series: int) -> str:
    """`exclusion keeps 131 of 135 series; left out: monotone 3, flagged 2`; rules may overlap."""
    each = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"exclusion keeps {left:,} of {series:,} series; left out: {each}"


def _uncorrelated(records: Sequence[Record], least: float, *, root: Root, index: str) -> list[bool]:
    from data.quality import spearman

    return (spearman(*_alphas_and_weights("min_correlation", least, records)) < least).tolist()


def _falling(records: Sequence[Record], wanted: bool, *, root: Root, index: str) -> list[bool]:
    from data.quality import falls

    return falls(*_alphas_and_weights("monotone", wanted, records)).tolist()


def _alphas_and_weights(
    rule: str, value: object, records: Sequence[Record]
) -> "tuple[Tensor, Tensor]":
    import torch

    classes = max(len(record["classes"]) for record in records)
    if classes > 2:
        raise InputError(f"exclude.{rule}", value, f"is for pairs; these mix {classes} classes")
    rows = ([record[key] for record in records] for key in ("alphas", "weights"))
    alphas, weights = (torch.tensor(row, dtype=torch.float32) for row in rows)
    return alphas, weights


def _unlike_their_class(
    records: Sequence[Record], wanted: bool, *, root: Root, index: str
) -> list[bool]:
    from data.end_points import strayed_groups

    strayed = strayed_groups(root, list(open_index(root.store, index).shards()), records)
    return [record["group"] in strayed for record in records]


def _disagreeing(records: Sequence[Record], most: float, *, root: Root, index: str) -> list[bool]:
    if any("agreement" not in record for record in records):
        remedy = "has no weights of a second encoder; `semix relabel` can add them"
        raise InputError("exclude.max_disagreement", most, f"{root.url} {remedy}")
    return [max(record["agreement"]["difference"]) > most for record in records]


def _unstable(records: Sequence[Record], least: float, *, root: Root, index: str) -> list[bool]:
    scores = [record["noise"].get("stability") for record in records]
    unknown = scores.count(None)
    if unknown:
        remedy = f"the noise of {unknown:,} of {len(scores):,} series in {root.url} has no score"
        raise InputError("exclude.min_stability", least, remedy)
    return [score < least for score in scores]


def _flagged(
    records: Sequence[Record], wanted: Sequence[Any], *, root: Root, index: str
) -> list[bool]:
    flags = newest_flags(root, index)
    if flags is None or flags.digest != open_index(root.store, index).digest:
        remedy = f"{index} was not audited; run `semix audit {root.url} --index {index}`"
        raise InputError("exclude.flagged", ", ".join(wanted), remedy)
    groups = flagged_groups(flags, wanted)
    return [record["group"] in groups for record in records]


RULES: dict[str, Callable[..., list[bool]]] = {
    "min_correlation": _uncorrelated,
    "monotone": _falling,
    "end_points": _unlike_their_class,
    "max_disagreement": _disagreeing,
    "min_stability": _unstable,
    "flagged": _flagged,
}
