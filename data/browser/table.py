"""The table of all series of a root: arrays of measures, from which pages are selected and sorted.

A series costs some fifty bytes, so that a root of a million series fits into memory, and no object
is made for a series that nobody looks at.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from semix.data.formats import MAX_MIXED, ClassIndex, Count, SeriesRecord, ShardEntry
from semix.data.layout import Layout

UNKNOWN = -1  # class of a series that was not read yet
NOT_STORED = -1  # row of a series that was left out of its shard
Sort = Literal["number", "pair", "correlation", "fall", "disagreement", "stability"]
# Sorted with the worst first: these measures are the worse the smaller they are.
WORST_IF_SMALL = ("correlation", "stability")
MEASURES = ("correlation", "fall", "disagreement", "stability")


class Query(BaseModel):
    """Which series to show, and in which order.

    Attributes:
        classes: series that mix all of these.
        round: number of the build's round, 0 being the first; None for all rounds.
        state: `kept` are stored series that nobody excluded.
        flag: name of an audit's flag; empty for any.
        max_correlation, min_fall, min_disagreement, max_stability: the limits show the series at
            or beyond them, that is, the bad ones; series that were not measured are not shown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    classes: list[ClassIndex] = Field([], max_length=MAX_MIXED)
    round: Count | None = None
    state: Literal["all", "kept", "excluded", "left_out"] = "all"
    flag: str = Field("", max_length=100)
    max_correlation: float | None = None
    min_fall: float | None = None
    min_disagreement: float | None = None
    max_stability: float | None = None
    sort: Sort = "number"


@dataclass(frozen=True)
class Measures:
    """How far n series are as they should be; float32 [n] each, NaN where there is no such value.

    Attributes:
        correlation: Spearman's rank correlation of alpha and CLIP weight, in [-1, 1]; of pairs.
        fall: largest fall of the weight from an image to the next along alpha, 0 if monotone.
        disagreement: largest difference of an image's labels by the two encoders.
        stability: inversion stability of the noise.
    """

    correlation: np.ndarray
    fall: np.ndarray
    disagreement: np.ndarray
    stability: np.ndarray


class SeriesTable:
    """All series of some shards, in the order of their numbers.

    Attributes:
        numbers: int64 [G], group numbers, ascending.
        classes: int32 [G, k], UNKNOWN until a series was read, unless the plan says them.
        rounds: int16 [G]; shards: int32 [G], position of the shard among `entries`.
        rows: int32 [G], position in the shard; NOT_STORED for a series that was left out.
        measured: bool [G].

    Args:
        entries: the shards, ascending.
        layout: of the root, for the rounds.
        classes: int [number of planned groups, k], the classes of each group; None if unknown.
        mixed: how many classes a series mixes.
    """

    def __init__(
        self,
        entries: Sequence[ShardEntry],
        layout: Layout,
        *,
        classes: np.ndarray | None,
        mixed: int,
    ) -> None:
        sizes = [entry.groups + len(entry.left_out) for entry in entries]
        self._starts = np.cumsum([0, *sizes])  # of each shard in the arrays
        self.numbers = np.concatenate(
            [np.arange(e.first, e.first + size) for e, size in zip(entries, sizes, strict=True)]
        )
        self.shards = np.repeat(np.arange(len(entries), dtype=np.int32), sizes)
        self.rows = np.concatenate([_rows(entry) for entry in entries])
        first_groups = [segment.first_group for segment in layout.segments]
        rounds = np.searchsorted(first_groups, self.numbers, side="right") - 1
        self.rounds = rounds.astype(np.int16)
        self.measured = np.zeros(len(self), bool)
        self._measures = {name: np.full(len(self), np.nan, np.float32) for name in MEASURES}
        self.classes = (
            np.full((len(self), mixed), UNKNOWN, np.int32)
            if classes is None
            else classes[self.numbers].astype(np.int32)
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def position(self, group: int) -> int | None:
        """Position of this series in the arrays; None if it is in no shard."""
        position = int(np.searchsorted(self.numbers, group))
        found = position < len(self) and int(self.numbers[position]) == group
        return position if found else None

    def measures(self, positions: np.ndarray) -> Measures:
        return Measures(**{name: values[positions] for name, values in self._measures.items()})

    def record(self, shard: int, records: Sequence[SeriesRecord]) -> None:
        """Fill in what the records of a whole shard say.

        Args:
            shard: its position among the entries.
        """
        positions = np.arange(self._starts[shard], self._starts[shard + 1])
        positions = positions[self.rows[positions] != NOT_STORED]
        measures = measures_of(records)
        for name, values in self._measures.items():
            values[positions] = getattr(measures, name)
        self.classes[positions] = [record.classes for record in records]
        self.measured[positions] = True

    def select(
        self, query: Query, *, excluded: Collection[int], flagged: Collection[int]
    ) -> np.ndarray:
        """Positions of the series that a query asks for, int64 [n], in its order.

        Args:
            excluded: numbers of all excluded series.
            flagged: numbers of all series with the flag of the query.
        """
        kept = np.ones(len(self), bool)
        for target in query.classes:
            kept &= (self.classes == target).any(1)
        if query.round is not None:
            kept &= self.rounds == query.round
        if query.flag:
            kept &= np.isin(self.numbers, np.fromiter(flagged, np.int64))
        if query.state == "left_out":
            kept &= self.rows == NOT_STORED
        elif query.state != "all":
            is_excluded = np.isin(self.numbers, np.fromiter(excluded, np.int64))
            if query.state == "excluded":
                kept &= is_excluded
            else:
                kept &= (self.rows != NOT_STORED) & ~is_excluded
        for name in MEASURES:
            kept &= _beyond(self._measures[name], name, query)
        return self._sorted(np.flatnonzero(kept), query.sort)

    def _sorted(self, positions: np.ndarray, sort: Sort) -> np.ndarray:
        """Stable, so that ties stay in the order of their numbers; NaN comes last."""
        if sort == "number":
            return positions
        if sort == "pair":
            keys = (self.rounds[positions], *self.classes[positions].T[::-1])
            return positions[np.lexsort(keys)]
        values = self._measures[sort][positions]
        order = np.argsort(values if sort in WORST_IF_SMALL else -values, kind="stable")
        return positions[order]


def _rows(entry: ShardEntry) -> np.ndarray:
    """Position in the tar of each planned series of a shard, int32."""
    stored = np.ones(entry.groups + len(entry.left_out), bool)
    stored[[series.group - entry.first for series in entry.left_out]] = False
    return np.where(stored, np.cumsum(stored) - 1, NOT_STORED).astype(np.int32)


def _beyond(values: np.ndarray, name: str, query: Query) -> np.ndarray | bool:
    """Which series are at or beyond the query's limit of a measure; never those without it."""
    is_maximum = name in WORST_IF_SMALL
    limit = getattr(query, f"max_{name}" if is_maximum else f"min_{name}")
    if limit is None:
        return True
    return values <= limit if is_maximum else values >= limit


def measures_of(records: Sequence[SeriesRecord]) -> Measures:
    """The measures of these series, all of which have the same number of images."""
    alphas, weights = (
        np.array([getattr(record, name) for record in records], np.float32)
        for name in ("alphas", "weights")
    )
    order = np.argsort(alphas, axis=1, kind="stable")
    falls = -np.diff(np.take_along_axis(weights, order, 1), axis=1)
    is_pair = np.array([len(record.classes) == 2 for record in records])
    return Measures(
        np.where(is_pair, rank_correlation(alphas, weights), np.nan).astype(np.float32),
        np.where(is_pair, falls.max(1, initial=0.0), np.nan).astype(np.float32),
        np.array([_largest_difference(record) for record in records], np.float32),
        np.array([_or_nan(record.stability) for record in records], np.float32),
    )


def rank_correlation(alphas: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`semix.data.quality.spearman` without torch, which takes seconds to import: [G, A] -> [G]."""
    first, second = (_centred_ranks(values) for values in (alphas, weights))
    length = np.sqrt((first**2).sum(1) * (second**2).sum(1))
    return np.where(length > 0, (first * second).sum(1) / np.maximum(length, 1e-12), 0.0)


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis, less their mean; ties share the mean of their ranks."""
    row, column = values[..., None], values[..., None, :]
    ranks = (row > column).sum(-1) + ((row == column).sum(-1) - 1) / 2
    centred: np.ndarray = ranks - ranks.mean(-1, keepdims=True)
    return centred


def _largest_difference(record: SeriesRecord) -> float:
    return max(record.agreement.difference) if record.agreement else np.nan


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value
