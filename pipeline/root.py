"""Start a mixed dataset's root, open one that is there, or extend it: plan.json."""

import json
from typing import Any

from data.errors import InputError
from data.extension import next_extension, write_extension
from data.real import load_real
from data.root import PLAN, SCHEMA, Root
from data.schemas import read_pairs
from data.settings import load_settings
from data.store import Store
from pipeline.checks import check_models
from pipeline.checks.prompts import check_prompts
from pipeline.config import BuildConfig
from pipeline.noise.cost import refuse_cost
from pipeline.plan import BuildPlan
from pipeline.provenance import library_versions, model_identities

MIXED = "mixed dataset"  # in messages
PAIRS = "pairs.json"
GROUPS_PER_PAIR = "mixing.groups_per_pair"
SHARD_SIZE = "shards.groups_per_shard"
MOST_GROUPS = 10**8  # keys in a shard have eight digits


def create_root(config: BuildConfig, url: str) -> Root:
    """Write plan.json if the place is new; check everything that is cheap to check.

    Raises:
        InputError: bad models, classes or place, or a root that holds another plan.
    """
    store = Store(url)
    if store.exists(PLAN):
        root = Root(url)
        _refuse_difference(root, config)
        return root
    plan = checked_plan(config, store)
    store.check_writable()
    content = json.dumps(_plan_record(plan), indent=1, ensure_ascii=False).encode()
    if not store.create(PLAN, content):
        return create_root(config, url)  # another process was first
    return Root(url)


def checked_plan(config: BuildConfig, store: Store) -> BuildPlan:
    """The plan of a config for a place, after all checks that need no weights.

    Raises:
        InputError: a place that holds something else, models, pairs, the cost of choosing noise,
            real data, names or prompts.
    """
    store.refuse_strangers(MIXED, own=PLAN)
    check_models(config)
    plan = BuildPlan(config)
    refuse_cost(plan)
    load_real(config.real)
    check_prompts(config.generator, plan.class_names)
    return plan


def plan_of(root: Root) -> BuildPlan:
    """The BuildPlan of a root, from its plan.json alone."""
    try:
        config = load_settings(BuildConfig, root.plan["config"])
    except InputError as error:
        remedy = f"{error.remedy}; another version of semix wrote this root: use that version"
        raise InputError(f"{root.url}/{PLAN} {error.field}", error.value, remedy) from None
    names = tuple(root.plan["class_names"])
    similar = read_pairs(root.store.get(PAIRS)) if root.store.exists(PAIRS) else None
    plan = BuildPlan(
        config,
        names,
        similar=similar,
        extensions=root.extensions,
    )
    if plan.digest != root.plan["digest"]:
        remedy = "plan.json was changed, or another version of semix wrote it; use that version"
        raise InputError(f"{root.url}/{PLAN} digest", root.plan["digest"][:12], remedy)
    return plan


def extend_root(root: Root, groups_per_pair: int) -> Root:
    """Raise the series of each pair to `groups_per_pair`; returns the root as it is then.

    Groups walk the pairs and start again after the last, so more rounds come behind all that
    is there. plan.json stays as it is; `extensions/N.json` says what was added.

    Raises:
        InputError: not more than there is, too many for a root, or another extension came first.
    """
    plan = plan_of(root)
    before = plan.num_groups // plan.num_pairs
    if groups_per_pair <= before:
        remedy = f"{root.url} has {before} already; extending only adds, so give more"
        raise InputError(GROUPS_PER_PAIR, groups_per_pair, remedy)
    if groups_per_pair * plan.num_pairs > MOST_GROUPS:
        remedy = f"a root has at most {MOST_GROUPS:,} series; start another with another seed"
        raise InputError(GROUPS_PER_PAIR, groups_per_pair, remedy)
    extension = next_extension(plan.digest, plan.layout, groups_per_pair, plan.num_pairs)
    number = len(root.extensions) + 1
    if not write_extension(root.store, number, extension):
        now = Root(root.url).extensions[-1].groups_per_pair
        remedy = f"someone else extended {root.url} to {now} meanwhile; look at it and try again"
        raise InputError(GROUPS_PER_PAIR, groups_per_pair, remedy)
    return Root(root.url)


def _plan_record(plan: BuildPlan) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "digest": plan.digest,
        "class_names": plan.class_names,
        "num_groups": plan.num_groups,
        "num_shards": plan.num_shards,
        "images_per_group": plan.images_per_group,
        "config": plan.config.model_dump(mode="json"),
        "models": model_identities(plan.config),
        "versions": library_versions(),
    }


def _refuse_difference(root: Root, config: BuildConfig) -> None:
    there, here = _flat(root.plan["config"]), _flat(config.model_dump(mode="json"))
    if here[SHARD_SIZE] is None:  # not set, so that of the root is as good as any
        here[SHARD_SIZE] = there.get(SHARD_SIZE)
    different = [key for key in sorted(there | here) if there.get(key) != here.get(key)]
    if different == [GROUPS_PER_PAIR]:
        _refuse_more_series(root, here[GROUPS_PER_PAIR])
    if different:
        changes = ", ".join(f"{key} is {there.get(key)!r} there" for key in different)
        remedy = f"holds another plan ({changes}); choose a new place or restore these settings"
        raise InputError("out", root.url, remedy)
    if root.plan["class_names"] != list(BuildPlan(config).class_names):
        raise InputError("out", root.url, "was planned with other class names; choose a new place")
    if not root.missing():
        return
    check_models(config)
    models = model_identities(config)
    for part in ("generator", "annotation"):
        if root.plan["models"][part] != json.loads(json.dumps(models[part])):
            remedy = "its files changed since the plan was made; restore them or choose a new place"
            raise InputError(f"{part}.model", models[part]["model"], remedy)


def _refuse_more_series(root: Root, wanted: int) -> None:
    made = root.extensions[-1].groups_per_pair if root.extensions else None
    planned = root.plan["config"]["mixing"]["groups_per_pair"]
    if wanted > (made or planned):
        remedy = f"{root.url} has {made or planned}; add series behind them with `semix extend`"
        raise InputError(GROUPS_PER_PAIR, wanted, remedy)
    if wanted == made:
        remedy = f"was extended from {planned} to that; go on with `semix resume {root.url}`"
        raise InputError(GROUPS_PER_PAIR, wanted, remedy)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [_flat(item, f"{prefix}.{key}".strip(".")) for key, item in value.items()]
    return {key: item for part in parts for key, item in part.items()}
