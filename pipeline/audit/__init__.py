"""Audit one index: metrics, checks and flags, from one pass over its shards."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from semix.data.formats import SeriesFlags
from semix.data.pinned import PinnedRoot
from semix.pipeline.audit.concepts import ConceptFindings, Concepts
from semix.pipeline.audit.findings import (
    ClassMetrics,
    Findings,
    Overall,
    PairMetrics,
    class_metrics,
    find,
    overall_metrics,
    pair_metrics,
)
from semix.pipeline.audit.limits import Check, checks
from semix.pipeline.audit.read import AuditFacts, Judge, read_facts

SCHEMA = 1


class AuditFile(TypedDict):
    """The content of audit.json; `schema` is its version.

    Attributes:
        unreadable: fault of each shard that cannot be read, by its number.
        left_out: series that a build could not store.
        duplicates: each duplicate series, and the earlier series that it resembles.
        flags: group numbers, by flag.
        concepts: what was found of each concept; None if none was asked for.
    """

    schema: int
    root: str
    index: str
    digest: str
    labels: str | None
    judge: str | None
    shards: int
    series: int
    images: int
    image_size: list[int]
    unreadable: dict[int, str]
    left_out: list[dict[str, Any]]
    checks: list[dict[str, Any]]
    overall: Overall
    classes: list[ClassMetrics]
    pairs: PairMetrics
    duplicates: list[dict[str, int | bool]]
    flags: dict[str, list[int]]
    concepts: ConceptFindings | None


@dataclass(frozen=True)
class Audit:
    """The results of an audit, with the index that was audited.

    Attributes:
        judge: describes the classifier that judged end points (unmixed images); None without one.
    """

    source: PinnedRoot
    facts: AuditFacts
    findings: Findings
    checks: list[Check]
    flags: SeriesFlags
    judge: str | None
    values: AuditFile


def audit(
    source: PinnedRoot,
    *,
    judge: Judge | None = None,
    judge_name: str | None = None,
    concepts: Concepts | None = None,
    heartbeat: Callable[[int], None] = lambda groups: None,
) -> Audit:
    """Read an index once and audit it.

    Shards that cannot be read are named in `facts.unreadable`, and the metrics leave them out.

    Args:
        judge: classifies unmixed images; `judge_name` describes it.
        concepts: flag series with an image that shows one.
        heartbeat: called after each shard with its number of groups.
    Raises:
        Unreadable: no shard can be read.
    """
    facts = read_facts(source, judge=judge, concepts=concepts, heartbeat=heartbeat)
    findings = find(facts.series)
    overall = overall_metrics(facts, findings)
    classes = class_metrics(facts, findings, source.class_names)
    left_out = [series for shard in source.shards for series in shard.left_out]
    found = concepts and concepts.findings(facts.series.group, facts.series.concepts)
    near_concept = int(findings.flags["concept"].sum()) if found else None
    results = checks(
        overall,
        classes,
        unreadable=facts.unreadable,
        left_out=left_out,
        near_concept=near_concept,
    )
    flags = SeriesFlags(
        index=source.index,
        digest=source.digest,
        labels=source.label_set.digest if source.label_set else None,
        flags={str(flag): groups for flag, groups in findings.groups(facts.series).items()},
    )
    values: AuditFile = {
        "schema": SCHEMA,
        "root": source.root.url,
        "index": source.index,
        "digest": source.digest,
        "labels": flags.labels,
        "judge": judge_name,
        "shards": len(source.shards),
        "series": len(facts.series.group),
        "images": facts.series.alphas.size,
        "image_size": list(facts.size),
        "unreadable": facts.unreadable,
        "left_out": [series.model_dump() for series in left_out],
        "checks": [asdict(check) for check in results],
        "overall": overall,
        "classes": classes,
        "pairs": pair_metrics(facts.series, findings),
        "duplicates": _duplicate_pairs(facts, findings),
        "flags": flags.flags,
        "concepts": found or None,
    }
    return Audit(source, facts, findings, results, flags, judge_name, values)


def as_json(values: AuditFile) -> bytes:
    """Encode as JSON, one line per section, because 1,000 classes have half a million pairs."""
    lines = (
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
        for key, value in values.items()
    )
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _duplicate_pairs(facts: AuditFacts, findings: Findings) -> list[dict[str, int | bool]]:
    groups, duplicates = facts.series.group, findings.duplicates
    return [
        {"group": int(groups[row]), "like": int(groups[earlier]), "same_pixels": bool(same)}
        for row, earlier, same in zip(duplicates.rows, duplicates.of, duplicates.same, strict=True)
    ]
