"""Applies the exclusion rules of a config to an index: decides which series are left out."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from semix.data.errors import InputError
from semix.data.exclusion import Exclusion, flagged_groups, newest_flags
from semix.data.fingerprint import fingerprint
from semix.data.formats import SeriesRecord, ShardEntry
from semix.data.pinned import PinnedRoot
from semix.data.quality import has_decrease, read_end_points, spearman

log = logging.getLogger("semix.data")


class SeriesFilter:
    """Applies an exclusion to one index, shard by shard.

    Attributes:
        digest: of all that decides which series are left out.

    Raises:
        InputError: a rule needs flags, and the index was not audited, or flags are damaged.
        ValueError: the file of flags is damaged; the message names it.
    """

    def __init__(self, exclusion: Exclusion, source: PinnedRoot) -> None:
        self.rules = exclusion.rules()
        self._source = source
        flag_names = exclusion.audit_flags
        self._flagged = _groups_with_flags(flag_names, source) if flag_names else frozenset()
        if exclusion.reads_flags:
            self._flagged |= source.excluded.groups
        labels = None if source.label_set is None else source.label_set.digest
        decides = {"rules": exclusion.model_dump(), "flagged": sorted(self._flagged)}
        self.digest = fingerprint(decides | {"labels": labels, "scale": source.scale})
        self._features: tuple[int, Tensor] | None = None  # of the last shard
        self._counts = dict.fromkeys(self.rules, 0)
        self._num_series = self._num_kept = 0

    def keep(self, shard: ShardEntry, records: Sequence[SeriesRecord]) -> list[bool]:
        """Whether to read each of these series of a shard.

        Args:
            shard: its entry in the index.
            records: the records (files `KEY.json` of the tar) of some or all series of the shard,
                with the labels in use.
        Raises:
            InputError: a rule that does not apply to these series.
            ValueError: stored features that cannot be read.
        """
        keep = [True] * len(records)
        for rule, value in self.rules.items() if records else ():
            left_out = self._left_out(rule, value, shard, records)
            self._counts[rule] += sum(left_out)
            keep = [kept and not omitted for kept, omitted in zip(keep, left_out, strict=True)]
        self._num_series, self._num_kept = self._num_series + len(keep), self._num_kept + sum(keep)
        return keep

    def conclude(self, *, whole: bool = True) -> None:
        """Log how many series each rule left out since the last call; called after the last shard.

        Args:
            whole: whether all shards of the index were read, not those of one process.
        Raises:
            InputError: no series of the whole index remains.
        """
        if not self.rules:
            return
        counts, remaining, series = self._counts, self._num_kept, self._num_series
        self._counts, self._num_kept, self._num_series = dict.fromkeys(self.rules, 0), 0, 0
        log.info("%s", describe(counts, remaining=remaining, series=series))
        if whole and not remaining:
            rules = ", ".join(f"{name} {value}" for name, value in self.rules.items())
            raise InputError("exclude", rules, f"leaves none of {series} series; ease a rule")

    def _left_out(
        self, rule: str, value: Any, shard: ShardEntry, records: Sequence[SeriesRecord]
    ) -> list[bool]:
        """Whether one rule leaves out each series."""
        match rule:
            case "min_correlation" | "monotone":
                return _out_of_order(rule, value, records)
            case "end_points":
                return self._end_points_misclassified(shard, records)
            case "max_disagreement":
                differences = [r.agreement.difference for r in records if r.agreement]
                if len(differences) < len(records):
                    remedy = (
                        "stores no CLIP weights by a second encoder; `semix relabel` can add them"
                    )
                    raise InputError(f"exclude.{rule}", value, f"{self._source.root.url} {remedy}")
                return [max(difference) > value for difference in differences]
            case "min_stability":
                scores = [r.stability for r in records if r.stability is not None]
                if unknown := len(records) - len(scores):
                    series = f"{unknown:,} of {len(records):,} series in {shard.tar}"
                    remedy = f"{series} have no stability score for their noise"
                    raise InputError(f"exclude.{rule}", value, remedy)
                return [score < value for score in scores]
            case "flagged":
                return [record.group in self._flagged for record in records]
        raise AssertionError(rule)

    def _end_points_misclassified(
        self, shard: ShardEntry, records: Sequence[SeriesRecord]
    ) -> list[bool]:
        # Read once per shard, also if its series are passed one by one.
        if self._features is None or self._features[0] != shard.shard:
            self._features = shard.shard, self._source.features(shard)
        features, misclassified = self._features[1], []
        rows = {group: row for row, group in enumerate(shard.group_numbers)}
        for record in records:
            end_points = read_end_points(
                record.mixtures,
                record.classes,
                features[rows[record.group]],
                self._source.prototypes,
            )
            misclassified.append(bool((end_points.intended != end_points.nearest).any()))
        return misclassified


def describe(counts: Mapping[str, int], *, remaining: int, series: int) -> str:
    """`exclusion keeps 131 of 135 series; left out: monotone 3, flagged 2`; rules may overlap."""
    counts_text = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"exclusion keeps {remaining:,} of {series:,} series; left out: {counts_text}"


def _out_of_order(rule: str, value: float, records: Sequence[SeriesRecord]) -> list[bool]:
    """Whether the weights of each series of a pair do not follow alpha."""
    classes = max(len(record.classes) for record in records)
    if classes > 2:
        raise InputError(f"exclude.{rule}", value, f"is for pairs; these mix {classes} classes")
    alphas, weights = (
        torch.tensor(rows, dtype=torch.float32)
        for rows in ([r.alphas for r in records], [r.weights for r in records])
    )
    if rule == "monotone":
        return has_decrease(alphas, weights).tolist()
    return (spearman(alphas, weights) < value).tolist()


def _groups_with_flags(flag_names: Sequence[Any], source: PinnedRoot) -> frozenset[int]:
    audit = newest_flags(source.root, source.index)
    if audit is None or audit.digest != source.digest:
        url, index = source.root.url, source.index
        remedy = f"{index} was not audited; run `semix audit {url} --index {index}`"
        raise InputError("exclude.flagged", ", ".join(flag_names), remedy)
    if unknown := [name for name in flag_names if name not in audit.flags]:
        remedy = "the last audit did not look for it; run `semix audit` again"
        raise InputError("exclude.flagged", ", ".join(unknown), remedy)
    return flagged_groups(audit, flag_names)
