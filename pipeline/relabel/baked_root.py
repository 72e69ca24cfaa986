"""The root that labels are baked into: its plan, and what else is not in a shard."""

import json
from typing import Any

from data.errors import InputError
from data.extension import Extension, write_extension
from data.label_sets import LabelSet
from data.root import FIDELITY, PLAN, PROTOTYPES, Root
from data.schemas import read_plan
from data.store import Store
from pipeline.config import BuildConfig
from pipeline.plan import BuildPlan
from pipeline.relabel.sets import prototypes_name
from pipeline.root import PAIRS

Record = dict[str, Any]


def open_baked(source: Root, config: BuildConfig, labels: LabelSet | None, url: str) -> Root:
    """Start the new root, or continue it.

    Its plan is the source's with this annotation, so that everything works on it as on any root;
    it says what it was baked from. plan.json comes after all that a build would measure or draw
    anew, because that must be the source's.

    Args:
        config: the source's, with the annotation of `labels`.
    Raises:
        InputError: the place is the source itself, holds something else, or cannot be written.
    """
    store = Store(url)
    if store.url == source.url:
        raise InputError("out", url, "is the root itself; choose a new place")
    plan = _plan_record(source, config, labels)
    if store.exists(PLAN):
        _refuse_difference(Root(url), plan)
    else:
        store.check_writable()
        _copy_beginnings(source, labels, store)
        content = json.dumps(plan, indent=1, ensure_ascii=False).encode()
        if not store.create(PLAN, content):
            return open_baked(source, config, labels, url)  # another process was first
    for number, extension in enumerate(source.extensions, start=1):  # more than at an earlier bake
        values = {**extension.model_dump(), "plan": plan["digest"]}
        write_extension(store, number, Extension(**values))
    return Root(url)


def _plan_record(source: Root, config: BuildConfig, labels: LabelSet | None) -> Record:
    written = read_plan(source.store.get(PLAN))  # without what extensions added
    plan = BuildPlan(config, tuple(written["class_names"]))
    encoders = labels.plan["encoders"] if labels else written["models"]["annotation"]
    return written | {
        "digest": plan.digest,
        "config": config.model_dump(mode="json"),
        "models": written["models"] | {"annotation": encoders},
        "baked_from": {"plan": written["digest"], "labels": labels.digest if labels else None},
    }


def _refuse_difference(there: Root, plan: Record) -> None:
    found = there.plan.get("baked_from")
    if there.plan["digest"] != plan["digest"] or found != plan["baked_from"]:
        remedy = "holds another dataset, or another baked one; choose a new place"
        raise InputError("out", there.url, remedy)


def _copy_beginnings(source: Root, labels: LabelSet | None, store: Store) -> None:
    """What a build measures or draws before its first shard."""
    prototypes = PROTOTYPES if labels is None else prototypes_name(labels)
    for name, kept_as in ((prototypes, PROTOTYPES), (PAIRS, PAIRS), (FIDELITY, FIDELITY)):
        if source.store.exists(name):
            # Without a plan beside it, what may be there is a killed bake's.
            store.put(kept_as, source.store.get(name))
