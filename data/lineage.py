"""Where shards come from: the plan they follow, the models that made them, each one's hash."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypedDict

from semix.data.fingerprint import fingerprint
from semix.data.formats import BakedFrom, Plan, ShardEntry
from semix.data.ranges import format_ranges

DIGITS = 12  # of a digest, where people read it


class Source(TypedDict):
    """What all shards of a root share.

    Attributes:
        models: by part, its name and the digest of its files or commit.
        baked_from: the plan and label set that a root of baked labels came from.
    """

    plan: str
    models: dict[str, str]
    baked_from: BakedFrom | None


class Lineage(Source):
    """Of a run that read shards.

    Attributes:
        index: that pins them.
        prototypes: shards by the SHA-256 of the prototypes they were labelled with.
        shards: number and SHA-256 of every one, all made before the run.
    """

    url: str
    index: str
    prototypes: dict[str, int]
    shards: list[tuple[int, str]]


def source(plan: Plan) -> Source:
    """Of a root's plan."""
    models = {part: _model(found) for part, found in plan.models.items()}
    return {"plan": plan.digest, "models": models, "baked_from": plan.baked_from}


def read_shards(plan: Plan, entries: Iterable[ShardEntry], *, url: str, index: str) -> Lineage:
    """The lineage of what an index pins."""
    shards, prototypes = [], dict[str, int]()
    for entry in entries:
        shards.append((entry.shard, entry.sha256))
        prototypes[entry.prototypes] = prototypes.get(entry.prototypes, 0) + 1
    pinned = {"url": url, "index": index, "prototypes": prototypes, "shards": shards}
    return Lineage(**source(plan), **pinned)  # type: ignore[typeddict-item]


def made_now(before: Collection[int], after: Collection[int]) -> dict[str, str]:
    """Of a build: which shards it made and which it found, as `0-4,7`."""
    known = set(before)
    return {
        "made": format_ranges([shard for shard in after if shard not in known]),
        "reused": format_ranges([shard for shard in after if shard in known]),
    }


def in_words(told: Source) -> str:
    """`plan 1a2b3c4d5e6f; generator NAME 9f8e7d6c5b4a; annotation NAME 0a1b2c3d4e5f`."""
    parts = [f"plan {told['plan'][:DIGITS]}", *(f"{k} {v}" for k, v in told["models"].items())]
    if told["baked_from"]:
        parts.append(f"baked from {str(told['baked_from'].get('plan', ''))[:DIGITS]}")
    return "; ".join(parts)


def _model(found: Any) -> str:
    """Name and digest of one, with all that is added to it."""
    if not isinstance(found, Mapping):
        return str(found)
    content = {name: value for name, value in found.items() if name != "model"}
    return f"{found.get('model', '')} {fingerprint(content)[:DIGITS]}".strip()
