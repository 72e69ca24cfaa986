"""Lineage of shards: their plan, the models that made them, and the hash of each."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypedDict

from semix.data.fingerprint import fingerprint
from semix.data.formats import BakedFrom, Plan, ShardEntry
from semix.data.ranges import format_ranges

DIGITS = 12  # of a digest, where people read it


class Source(TypedDict):
    """What all shards of a root share.

    Attributes:
        models: name, and digest of files or commit, by part.
        baked_from: the plan and the label set of a root with baked labels.
    """

    plan: str
    models: dict[str, str]
    baked_from: BakedFrom | None


class Lineage(Source):
    """The shards that a run read, and their source.

    Attributes:
        index: the index that pins them.
        prototypes: number of shards by the SHA-256 of the prototypes in their labels.
        shards: number and SHA-256 of each shard, all made before the run.
    """

    url: str
    index: str
    prototypes: dict[str, int]
    shards: list[tuple[int, str]]


def source(plan: Plan) -> Source:
    """The source of a root's shards, from its plan."""
    models = {part: _model(identity) for part, identity in plan.models.items()}
    return {"plan": plan.digest, "models": models, "baked_from": plan.baked_from}


def read_shards(plan: Plan, entries: Iterable[ShardEntry], *, url: str, index: str) -> Lineage:
    """The lineage of the shards that an index pins."""
    shards, prototypes = [], dict[str, int]()
    for entry in entries:
        shards.append((entry.shard, entry.sha256))
        prototypes[entry.prototypes] = prototypes.get(entry.prototypes, 0) + 1
    pinned = {"url": url, "index": index, "prototypes": prototypes, "shards": shards}
    return Lineage(**source(plan), **pinned)  # type: ignore[typeddict-item]


def made_now(before: Collection[int], after: Collection[int]) -> dict[str, str]:
    """Which shards a build made and which it reused, as `0-4,7`."""
    known = set(before)
    return {
        "made": format_ranges([shard for shard in after if shard not in known]),
        "reused": format_ranges([shard for shard in after if shard in known]),
    }


def in_words(origin: Source) -> str:
    """`plan 1a2b3c4d5e6f; generator NAME 9f8e7d6c5b4a; annotation NAME 0a1b2c3d4e5f`."""
    parts = [f"plan {origin['plan'][:DIGITS]}", *(f"{k} {v}" for k, v in origin["models"].items())]
    if origin["baked_from"]:
        parts.append(f"baked from {str(origin['baked_from'].get('plan', ''))[:DIGITS]}")
    return "; ".join(parts)


def _model(identity: Any) -> str:
    """Name of a model, and digest of its identity with all additions."""
    if not isinstance(identity, Mapping):
        return str(identity)
    content = {name: value for name, value in identity.items() if name != "model"}
    return f"{identity.get('model', '')} {fingerprint(content)[:DIGITS]}".strip()
