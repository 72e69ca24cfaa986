"""Look at the series of a root, one at a time or as pages of a table, and exclude some of them.

Everything is read when it is shown: the newest index when a root is opened, records and images when
their series is. Only `measure` reads all records, for filters and orders by how good a series is.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from semix.data.browser.series_reader import SeriesReader
from semix.data.browser.table import MEASURES, NOT_STORED, UNKNOWN, Query, SeriesTable, measures_of
from semix.data.errors import InputError
from semix.data.exclusion import newest_flags
from semix.data.flags import flag_series, read_excluded
from semix.data.formats import SeriesFlags, SeriesLabels, SeriesRecord, ShardEntry
from semix.data.index import open_index
from semix.data.label_sets import LabelSet, label_sets
from semix.data.printable import printable_line
from semix.data.root import Root
from semix.data.threads import mapped

MAX_PAGE = 200  # series
MAX_PROBLEMS = 100
REFRESH_S = 2.0  # how old the excluded series of a page may be, which other people change, too
MAX_LABEL_FILES = 8  # kept in memory, each with the labels of one shard
SHARD_LABELS = ""  # name of the labels in the shards, beside digests of label sets

Facts = dict[str, Any]  # plain values, for JSON


class Browser:
    """A root that is looked at, by several threads.

    Attributes:
        root: the root; shards: its committed shards, ascending; table: their series.
        problems: damage that was met, as lines of text; what is intact is shown all the same.

    Args:
        classes: the classes of each planned group, int [num_groups, k]; None if only the records
            of the series tell.
    Raises:
        InputError: nothing is committed, flags are damaged, or a newer version wrote a file.
        ValueError: the newest index is damaged.
    """

    def __init__(self, root: Root, *, classes: np.ndarray | None = None) -> None:
        self.root = root
        self.problems: list[str] = []
        self.index, self.shards = self._committed()
        self.table = SeriesTable(
            self.shards, root.layout, classes=classes, mixed=root.plan.classes_per_group
        )
        self.measured_shards = 0
        self._reader = SeriesReader(root.store, root.plan)
        self._lock = threading.Lock()
        self._excluded, self._refreshed = read_excluded(root), time.monotonic()
        self._flags = self._audit_flags()
        self._sets = {digest: LabelSet(root, digest) for digest in self._readable_sets()}
        self._labels: OrderedDict[tuple[str, int], dict[int, SeriesLabels]] = OrderedDict()

    def facts(self) -> Facts:
        """What stays the same while the root is looked at: names, rounds, label sets, flags."""
        plan = self.root.plan
        rounds = [r["by"] for r in self.root.rounds()] or ["even"]
        return {
            "url": printable_line(self.root.url),
            "classes": [printable_line(name) for name in plan.class_names],
            "images": plan.images_per_group,
            "rounds": [printable_line(by) for by in rounds],
            "label_sets": [
                {"digest": digest, "text": _set_in_words(labels)}
                for digest, labels in self._sets.items()
            ],
            "flags": {name: len(groups) for name, groups in self._flags.items()},
            "planned": plan.num_groups,
            "bytes": sum(entry.bytes for entry in self.shards),
        }

    def state(self) -> Facts:
        """What changes: how many series are excluded and measured, and the problems so far."""
        return {
            "series": len(self.table),
            "left_out": int((self.table.rows == NOT_STORED).sum()),
            "num_excluded": len(self.excluded()),
            "shards": len(self.shards),
            "measured_shards": self.measured_shards,
            "problems": [printable_line(problem) for problem in self.problems],
        }

    def page(self, query: Query, *, offset: int, limit: int) -> Facts:
        """Some series that a query asks for, and how many there are.

        Args:
            limit: number of series, at most MAX_PAGE.
        """
        excluded = self.excluded()
        flagged = self._flags.get(query.flag, frozenset())
        positions = self.table.select(query, excluded=excluded, flagged=flagged)
        shown = positions[offset : offset + min(limit, MAX_PAGE)]
        return {
            "total": len(positions),
            "offset": offset,
            "rows": self._rows(shown, excluded),
            **self.state(),
        }

    def neighbours(self, query: Query, group: int) -> Facts:
        """Where a series stands among those that a query asks for, and the ones beside it.

        `position` is None if it is not among them.
        """
        flagged = self._flags.get(query.flag, frozenset())
        positions = self.table.select(query, excluded=self.excluded(), flagged=flagged)
        numbers = self.table.numbers[positions]
        places = np.flatnonzero(numbers == group)
        if not len(places):
            return {"position": None, "total": len(numbers), "previous": None, "next": None}
        place = int(places[0])
        return {
            "position": place,
            "total": len(numbers),
            "previous": int(numbers[place - 1]) if place else None,
            "next": int(numbers[place + 1]) if place + 1 < len(numbers) else None,
        }

    def series(self, group: int, label_names: Sequence[str] = (SHARD_LABELS,)) -> Facts:
        """One series: what is recorded of it, with labels of one or more sets.

        Args:
            label_names: digests of label sets, or SHARD_LABELS.
        Returns:
            plain values; texts are printable, except in `noise`, which is as it is stored.
        Raises:
            InputError: no such series or label set.
            ValueError: its shard or its labels are damaged.
        """
        position = self._position(group)
        (row,) = self._rows(np.array([position]), self.excluded())
        if row["left_out"]:
            return row
        entry = self.shards[int(self.table.shards[position])]
        record = self._reader.record(entry, int(self.table.rows[position]))
        names = [printable_line(name) for name in record.names]
        measures = {name: _finite(getattr(measures_of([record]), name)[0]) for name in MEASURES}
        return row | {
            "classes": record.classes,
            "names": names,
            "seed": str(record.seed),  # of 64 bits, more than a number of JavaScript has
            "noise": record.noise,
            "alphas": record.alphas,
            "mixtures": record.mixtures,
            "order": np.argsort(record.alphas, kind="stable").tolist(),
            "labels": [self._labels_of(entry, record, name) for name in label_names],
            "shard": entry.shard,
            "tar": entry.tar,
            **measures,
        }

    def image(self, group: int, position: int) -> tuple[bytes, str]:
        """One stored image, and its media type. Raises as `series`."""
        if not 0 <= position < self.root.plan.images_per_group:
            raise InputError("image", position, f"a series has {self.root.plan.images_per_group}")
        return self._reader.image(*self._stored(group), position)

    def strip(self, group: int) -> tuple[bytes, str]:
        """A small picture of all images of a series, and its media type. Raises as `series`."""
        return self._reader.strip(*self._stored(group))

    def set_excluded(self, group: int, excluded: bool) -> Facts:
        """Exclude a series, or take that back; nothing is written if it is so already.

        Raises:
            InputError: no such series.
            OSError: the root cannot be written.
        """
        self._position(group)
        if (group in self.excluded(max_age_s=0)) != excluded:
            change = {"excluded" if excluded else "restored": [group]}
            flag_series(self.root, **change)
        return {"group": group, "excluded": group in self.excluded(max_age_s=0), **self.state()}

    def excluded(self, *, max_age_s: float = REFRESH_S) -> frozenset[int]:
        """Numbers of all excluded series; files that were read before are not read again."""
        with self._lock:
            if time.monotonic() - self._refreshed >= max_age_s:
                self._excluded = read_excluded(self.root, after=self._excluded)
                self._refreshed = time.monotonic()
            return self._excluded.groups

    def measure(self, stop: threading.Event) -> None:
        """Read all records and fill the table, shard by shard; damaged shards become problems."""
        for number, entry in enumerate(self.shards):
            if stop.is_set():
                return
            try:
                self.table.record(number, list(self._reader.records(entry)))
            except (ValueError, OSError) as error:
                self._add_problem(str(error))
            self.measured_shards = number + 1

    def _rows(self, positions: np.ndarray, excluded: frozenset[int]) -> list[Facts]:
        table, measures = self.table, self.table.measures(positions)
        rows = []
        for index, position in enumerate(positions.tolist()):
            group = int(table.numbers[position])
            entry = self.shards[int(table.shards[position])]
            left_out = int(table.rows[position]) == NOT_STORED
            row: Facts = {
                "group": group,
                "classes": [k for k in table.classes[position].tolist() if k != UNKNOWN],
                "round": int(table.rounds[position]),
                "left_out": _reason(entry, group) if left_out else None,
                "excluded": group in excluded,
                "flags": [name for name, groups in self._flags.items() if group in groups],
                "measured": bool(table.measured[position]),
                "version": entry.sha256[:8],
            }
            for name in MEASURES:
                row[name] = _finite(getattr(measures, name)[index])
            rows.append(row)
        return rows

    def _position(self, group: int) -> int:
        position = self.table.position(group)
        if position is None:
            last = self.root.plan.num_groups - 1
            remedy = f"is in no committed shard; the plan of {self.root.url} has groups 0 to {last}"
            raise InputError("group", group, remedy)
        return position

    def _stored(self, group: int) -> tuple[ShardEntry, int]:
        """The shard of a series, and its position there."""
        position = self._position(group)
        entry = self.shards[int(self.table.shards[position])]
        row = int(self.table.rows[position])
        if row == NOT_STORED:
            raise InputError("group", group, f"was left out: {_reason(entry, group)}")
        return entry, row

    def _labels_of(self, entry: ShardEntry, record: SeriesRecord, name: str) -> Facts:
        """The labels of one series in a set, or why there are none."""
        if name != SHARD_LABELS:
            if name not in self._sets:
                raise InputError("labels", name, f"is no label set of {self.root.url}")
            try:
                labels = self._shard_labels(entry, name)[record.group]
                record = record.with_labels(labels)
            except KeyError:
                return {"set": name, "problem": "the set has no labels of this series"}
            except ValueError as error:  # damaged, or of other images
                return {"set": name, "problem": printable_line(str(error))}
        agreement = record.agreement
        return {
            "set": name,
            "weights": record.weights,
            "labels": record.labels,
            "difference": agreement.difference if agreement else None,
        }

    def _shard_labels(self, entry: ShardEntry, digest: str) -> dict[int, SeriesLabels]:
        key = digest, entry.shard
        with self._lock:
            if key in self._labels:
                self._labels.move_to_end(key)
                return self._labels[key]
        labels = self._sets[digest].labels(entry.shard, images=entry.sha256)
        with self._lock:
            self._labels[key] = labels
            while len(self._labels) > MAX_LABEL_FILES:
                self._labels.popitem(last=False)
        return labels

    def _committed(self) -> tuple[str | None, list[ShardEntry]]:
        """The newest index, and the committed shards: those it pins, and those made since."""
        names = self.root.indices()
        pinned: dict[int, ShardEntry] = {}
        if names:
            index = open_index(self.root.store, names[-1])
            if index.plan != self.root.plan.digest:
                raise ValueError(f"{names[-1]}: belongs to another plan")
            pinned = {entry.shard: entry for entry in index.shards}
        since = [shard for shard in self.root.done() if shard not in pinned]
        shards = self._planned(pinned | self._recorded(since))
        if not shards:
            remedy = "holds no finished series yet; run `semix resume`"
            raise InputError("url", self.root.url, remedy)
        return names[-1] if names else None, [shards[number] for number in sorted(shards)]

    def _recorded(self, shards: Iterable[int]) -> dict[int, ShardEntry]:
        """The entries of shards by their commit records; damaged ones become problems."""

        def read(shard: int) -> ShardEntry | None:
            try:
                record = self.root.record(shard)
            except ValueError as error:
                self._add_problem(str(error))
                return None
            return record.entry if record else None

        entries = mapped(read, shards, threads=self.root.store.parallel)
        return {entry.shard: entry for entry in entries if entry is not None}

    def _planned(self, shards: dict[int, ShardEntry]) -> dict[int, ShardEntry]:
        """Those that hold the groups which the plan has for them; others become problems."""
        planned = {}
        for number, entry in shards.items():
            size = entry.groups + len(entry.left_out)
            try:
                groups = self.root.layout.groups_of(number)
            except IndexError as error:
                self._add_problem(str(error))
                continue
            if (entry.first, size) == (groups.start, len(groups)):
                planned[number] = entry
            else:
                self._add_problem(f"shard {number}: holds other groups than the plan has for it")
        return planned

    def _audit_flags(self) -> dict[str, frozenset[int]]:
        """Groups by flag, of the last audit of the newest index."""
        try:
            flags: SeriesFlags | None = newest_flags(self.root, self.index) if self.index else None
        except ValueError as error:
            self._add_problem(str(error))
            return {}
        return {} if flags is None else {k: frozenset(v) for k, v in flags.flags.items() if v}

    def _readable_sets(self) -> list[str]:
        readable = []
        for digest in label_sets(self.root):
            try:
                LabelSet(self.root, digest)
                readable.append(digest)
            except ValueError as error:
                self._add_problem(str(error))
        return readable

    def _add_problem(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


def _set_in_words(labels: LabelSet) -> str:
    """`3fa9c1d2e3f4: projection, scale 4, ViT-L-14`: the settings that sets differ by."""
    annotation = labels.record.annotation
    model = str(annotation.get("model", "")).rpartition("/")[2]  # of a folder, its name
    texts = [str(annotation.get("rule", "")), model]
    if annotation.get("scale") is not None:
        texts.insert(1, f"scale {annotation['scale']}")
    return printable_line(f"{labels.digest[:12]}: {', '.join(filter(None, texts))}")


def _reason(entry: ShardEntry, group: int) -> str:
    """Why a series was left out of its shard."""
    reasons = (series.reason for series in entry.left_out if series.group == group)
    return printable_line(next(reasons))


def _finite(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None
