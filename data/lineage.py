"""Lineage of shards: their plan, the models that made them, and their hashes."""

from collections.abc import Collection, Mapping
from typing import Any, NotRequired, TypedDict

from semix.data.fingerprint import fingerprint
from semix.data.formats import BakedFrom, Plan
from semix.data.index import Index
from semix.data.licences import licences, without_cards
from semix.data.ranges import format_ranges
from semix.data.root import Root, Round

DIGITS = 12  # of a digest in a text


class Source(TypedDict):
    """The origin that all shards of a root have in common.

    Attributes:
        models: name and digest of the identity of each model, by role, such as `generator`.
        licences: of the same models and those added to them, as their model cards state; missing in
            what an earlier version wrote.
        baked_from: plan and label set of a root whose labels were baked in.
    """

    plan: str
    models: dict[str, str]
    licences: NotRequired[dict[str, str]]
    baked_from: BakedFrom | None


class Lineage(Source):
    """The shards that a training run read, and their source.

    Attributes:
        index: the index that pins them.
        prototypes: SHA-256 of the prototypes that the labels were made with.
        shards: number and SHA-256 of each shard, all made before the run.
        rounds: which shards were planned together, and how; missing where all were planned at once.
    """

    url: str
    index: str
    prototypes: str
    shards: list[tuple[int, str]]
    rounds: NotRequired[list[Round]]


def source(plan: Plan) -> Source:
    """The source of a root's shards, from its plan."""
    models = {role: _model(identity) for role, identity in plan.models.items()}
    return {
        "plan": plan.digest,
        "models": models,
        "licences": licences(plan.models),
        "baked_from": plan.baked_from,
    }


def read_shards(root: Root, index: Index, *, url: str) -> Lineage:
    """The lineage of the shards that an index pins."""
    lineage = Lineage(
        **source(root.plan),
        url=url,
        index=index.name,
        prototypes=index.prototypes,
        shards=[(shard.shard, shard.sha256) for shard in index.shards],
    )
    if rounds := root.rounds():
        lineage["rounds"] = rounds
    return lineage


def made_and_reused(before: Collection[int], after: Collection[int]) -> dict[str, str]:
    """The shards that a build made and those that it reused, as ranges such as `0-4,7`."""
    existing = set(before)
    return {
        "made": format_ranges([shard for shard in after if shard not in existing]),
        "reused": format_ranges([shard for shard in after if shard in existing]),
    }


def describe_source(lineage: Source) -> str:
    """`plan 1a2b3c4d5e6f; generator NAME 9f8e7d6c5b4a; annotation NAME 0a1b2c3d4e5f; licences:
    generator openrail, annotation mit`."""
    models = (f"{role} {model}" for role, model in lineage["models"].items())
    parts = [f"plan {lineage['plan'][:DIGITS]}", *models]
    if known := lineage.get("licences"):
        licence_texts = (f"{role} {licence}" for role, licence in known.items())
        parts.append(f"licences: {', '.join(licence_texts)}")
    if lineage["baked_from"]:
        parts.append(f"baked from {str(lineage['baked_from'].get('plan', ''))[:DIGITS]}")
    return "; ".join(parts)


def _model(identity: Any) -> str:
    """Name of a model, and a digest of its identity, which includes models added to it."""
    if not isinstance(identity, Mapping):
        return str(identity)
    content = without_cards({name: value for name, value in identity.items() if name != "model"})
    return f"{identity.get('model', '')} {fingerprint(content)[:DIGITS]}".strip()
