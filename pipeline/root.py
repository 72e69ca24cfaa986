"""Start, open or extend the root of a mixed dataset; reads and writes plan.json."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from semix.data.errors import InputError
from semix.data.formats import (
    AUDITS,
    DISCARDED,
    EXTENSIONS,
    FAILED,
    INDICES,
    MAX_GROUPS,
    PLAN,
    PROTOTYPES,
    SETS,
    SHARDS,
    Extension,
    Plan,
    SeriesByRun,
)
from semix.data.imagefolder import check_outside_images
from semix.data.layout import next_extension, write_extension
from semix.data.leases import claim, lease_name, living, release
from semix.data.real import load_real
from semix.data.records import numbered_folders
from semix.data.root import Root
from semix.data.settings import flat, in_words, load_settings, whole_section
from semix.data.store import Store
from semix.pipeline.checks import check_models, check_prompts
from semix.pipeline.class_sets import UndrawnPairs
from semix.pipeline.config import BuildConfig
from semix.pipeline.noise.cost import check_noise_cost
from semix.pipeline.plan import Build, BuildPlan, build_of, open_build, planned_settings
from semix.pipeline.prototypes import CHUNKS, drawn_pairs, measure, remove_chunks
from semix.pipeline.provenance import (
    NON_IDENTITY_SETTINGS,
    contents,
    identity_settings,
    library_versions,
    model_identities,
    unchanged,
)

MIXED = "mixed dataset"  # in messages
GROUPS_PER_PAIR = "mixing.groups_per_pair"
SHARD_SIZE = "shards.groups_per_shard"
MARK = "shards.mark"
PLAN_LEASE = "plan"  # held by a run that follows the plan, or that replaces it
REPLACED = re.compile(rf"{DISCARDED}/plan\.(\d+)\.json")
REPLACING_S = 1.0  # time that a process takes at most to replace a plan

log = logging.getLogger("semix.build")


# The series per pair by the run that a config names, for these class names.
SeriesSharing = Callable[[BuildConfig, Sequence[str]], SeriesByRun]


def create_build(
    config: BuildConfig,
    url: str,
    *,
    device: str = "auto",
    share_by_run: SeriesSharing | None = None,
) -> Build:
    """Start the root of a build, or open it to continue.

    Writes plan.json if there is none, after all checks that are cheap; if the plan mixes similar
    classes, also after prototypes were measured. A different plan is replaced if nothing was made
    from it and no run follows it.

    Args:
        device: on which prototypes are measured.
        share_by_run: called if a run determines the series per pair.
    Raises:
        InputError: bad models, classes or URL, or a root that holds another plan.
        FloatingPointError: a feature of a real image is not finite.
    """
    store = Store(url)
    build = _build_once_settled(config, store)
    if build is not None:
        return build
    plan = checked_plan(config, store)
    store.check_writable()
    prototypes = None
    if config.mixing.pairs.kind == "confused":
        assert share_by_run is not None, "`confused` needs a run's classifiers"
        by_run = share_by_run(config, plan.class_names)
        plan = BuildPlan(config, plan.class_names, models=plan.models, by_run=by_run)
    elif isinstance(plan.sets, UndrawnPairs):
        prototypes = measure(
            config.annotation,
            config.real,
            device=device,
            identity=plan.models["annotation"],
            store=store,
        )
        similar = drawn_pairs(plan, prototypes)
        plan = BuildPlan(config, plan.class_names, models=plan.models, similar=similar)
    content = _plan_record(plan).written()
    is_first = (
        _replace_plan(config, store, content) if store.exists(PLAN) else store.create(PLAN, content)
    )
    if not is_first:  # another process was
        return create_build(config, url, device=device, share_by_run=share_by_run)
    if prototypes is not None:
        store.create(PROTOTYPES, prototypes)
        remove_chunks(store)
    return open_build(url)


def build_to_continue(config: BuildConfig, url: str) -> Build | None:
    """The build that a config would continue; None if it would start a new one.

    Raises:
        InputError: the root holds another plan.
    """
    if not Store(url).exists(PLAN):
        return None
    root = Root(url)
    try:
        _refuse_difference(root, config)
    except InputError as difference:
        if not _is_unused(root):
            raise
        log.info("%s: nothing was made by the plan there; it is replaced (%s)", url, difference)
        return None
    return build_of(root, _overrides_of(root, config))


@contextmanager
def running_on(root: Root) -> Iterator[None]:
    """Mark the root as in use during the block, so that no other build replaces its plan.

    Raises:
        InputError: its plan was replaced a moment ago.
    """
    if not claim(root.store, PLAN_LEASE):
        time.sleep(REPLACING_S)  # the holder may be about to replace the plan
    try:
        if Root(root.url).stored_plan.digest != root.stored_plan.digest:
            remedy = "another build replaced its plan a moment ago; choose a new place"
            raise InputError("out", root.url, remedy)
        yield
    finally:
        with suppress(OSError):  # a lease that is not renewed expires
            release(root.store, PLAN_LEASE)


def _build_once_settled(config: BuildConfig, store: Store) -> Build | None:
    """`build_to_continue`, after waiting for a process that replaces the plan."""
    try:
        return build_to_continue(config, store.url)
    except InputError:
        if lease_name(PLAN_LEASE) not in living(store, others=True):
            raise
        time.sleep(REPLACING_S)
        return build_to_continue(config, store.url)


def _is_unused(root: Root) -> bool:
    """Whether nothing was made from the plan, and no other process uses the root."""
    store = root.store
    history = (name for kind in (EXTENSIONS, INDICES, AUDITS, SETS) for name in store.list(kind))
    records = (
        store.scan(f"{kind}/{number:04d}", suffix=".json")[0]
        for kind in (SHARDS, DISCARDED)
        for number in numbered_folders(store, kind)
    )
    if root.stored_plan.baked_from or any(records) or any(history):
        return False
    return not living(store, others=True)


def _replace_plan(config: BuildConfig, store: Store, content: bytes) -> bool:
    """Replace a plan from which nothing was made; return False if another process may do so.

    Of several processes that would replace the plan, the one that creates the note on the old plan,
    with the next number, goes on.
    """
    numbers = (REPLACED.fullmatch(name) for name in store.scan(DISCARDED, suffix=".json")[0])
    number = 1 + max((int(match[1]) for match in numbers if match), default=0)
    if not claim(store, PLAN_LEASE) or build_to_continue(config, store.url) is not None:
        return False
    reason = "nothing was made by this plan; another build began here"
    note = json.dumps({"why": reason, "record": store.get(PLAN).decode()}).encode()
    if not store.create(f"{DISCARDED}/plan.{number}.json", note):
        remedy = "another build began here at this moment; look at it, or choose a new place"
        raise InputError("out", store.url, remedy)
    files = (name for folder in (FAILED, SHARDS, CHUNKS) for name in store.list(folder))
    for name in (*files, PROTOTYPES):  # what workers of the old plan left
        store.delete(name)
    store.put(PLAN, content)
    return True


def checked_plan(config: BuildConfig, store: Store) -> BuildPlan:
    """The plan of a config for a store, after all checks that need no weights.

    Raises:
        InputError: a store that holds something else or lies among the real images; bad models,
            pairs, cost of noise selection, real data, names or prompts.
    """
    if store.local:
        check_outside_images(config.real.folder, store.url)
    store.require_empty_or_own(MIXED, own=PLAN, leftover=CHUNKS)
    check_models(config)
    plan = BuildPlan(config)
    check_noise_cost(plan)
    load_real(config.real)
    check_prompts(config.generator, plan.class_names)
    return plan


def extend_root(root: Root, groups_per_pair: int) -> Root:
    """Raise the series per pair to `groups_per_pair`; return the extended root.

    Groups cycle through the pairs, so further rounds come behind all existing groups. plan.json
    stays as it is; `extensions/N.json` records what was added.

    Raises:
        InputError: not more than before, too many for a root, or another extension came first.
    """
    plan = build_of(root).plan
    current_count = root.plan.groups_per_pair
    if plan.by_run is not None:
        remedy = f"a run determined the series per pair of {root.url}; extend it by a run as well"
        raise InputError(GROUPS_PER_PAIR, groups_per_pair, remedy)
    if groups_per_pair <= current_count:
        remedy = f"{root.url} has {current_count} already; extending only adds, so give more"
        raise InputError(GROUPS_PER_PAIR, groups_per_pair, remedy)
    groups = (groups_per_pair - current_count) * plan.num_pairs
    _check_room(root, groups, GROUPS_PER_PAIR, groups_per_pair)
    extension = next_extension(plan.digest, plan.layout, groups, groups_per_pair=groups_per_pair)
    return _add_extension(root, extension, GROUPS_PER_PAIR, groups_per_pair)


def extend_root_by_run(root: Root, series: int, share: Callable[[], SeriesByRun]) -> Root:
    """Add this number of series, distributed over pairs by a run; return the extended root.

    Args:
        share: called after the cheap checks.
    Raises:
        InputError: the root does not mix pairs, too many series, or another extension came first.
    """
    plan = build_of(root).plan
    if (classes := plan.config.mixing.classes) != 2:
        remedy = f"{root.url} mixes {classes} classes a series; only pairs can follow a run"
        raise InputError("series", series, remedy)
    _check_room(root, series, "series", series)
    current_count = root.plan.groups_per_pair
    extension = next_extension(
        plan.digest, plan.layout, series, groups_per_pair=current_count, by_run=share()
    )
    return _add_extension(root, extension, "series", series)


def _check_room(root: Root, groups: int, field: str, value: int) -> None:
    if root.plan.num_groups + groups > MAX_GROUPS:
        remedy = f"a root has at most {MAX_GROUPS:,} series; start another with another seed"
        raise InputError(field, value, remedy)


def _add_extension(root: Root, extension: Extension, field: str, value: int) -> Root:
    number = len(root.extensions) + 1
    if not write_extension(root.store, number, extension):
        series = Root(root.url).plan.num_groups
        remedy = f"someone else extended {root.url} to {series} series meanwhile; look at it and "
        raise InputError(field, value, f"{remedy}try again")
    return Root(root.url)


def _plan_record(plan: BuildPlan) -> Plan:
    config = plan.config
    return Plan(
        schema=Plan.SCHEMA,
        digest=plan.digest,
        class_names=list(plan.class_names),
        num_groups=plan.num_groups,
        num_shards=plan.num_shards,
        groups_per_pair=config.mixing.groups_per_pair,
        groups_per_shard=plan.layout.size,
        images_per_group=plan.images_per_group,
        classes_per_group=config.mixing.classes,
        normalize=config.annotation.normalize,
        pairs=None if plan.similar is None else list(plan.similar),
        by_run=plan.by_run,
        config=config.model_dump(mode="json"),
        models=plan.models,
        versions=library_versions(),
    )


def _refuse_difference(root: Root, config: BuildConfig) -> None:
    """Raises InputError unless this config and the root's plan decide the same bytes."""
    planned = load_settings(BuildConfig, planned_settings(root.plan))
    old, new = flat(identity_settings(planned)), flat(identity_settings(config))
    if SHARD_SIZE not in new:  # not set, so the root's value is kept
        old.pop(SHARD_SIZE, None)
    if "mark" not in config.shards.model_fields_set:
        old.pop(MARK, None), new.pop(MARK, None)
    different = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    if different == [GROUPS_PER_PAIR]:
        _check_series_count(root, config.mixing.groups_per_pair)
    if different:
        written = flat(root.plan.config)
        names = dict.fromkeys(whole_section(key, written, new) for key in different)
        changes = ", ".join(f"{name} is {in_words(written, name)} there" for name in names)
        remedy = f"holds another plan ({changes}); choose a new place or restore these settings"
        raise InputError("out", root.url, remedy)
    if root.plan.class_names != list(BuildPlan(config).class_names):
        raise InputError("out", root.url, "was planned with other class names; choose a new place")
    moved = any(o.startswith(("generator.", "annotation.")) for o in _overrides_of(root, config))
    if not moved and not root.missing():
        return  # its models may be gone by now
    check_models(config)
    models = model_identities(config)
    current, planned_contents = contents(models), contents(root.plan.models)
    for section, model in (
        ("generator", config.generator.model),
        ("annotation", config.annotation.model),
    ):
        if not unchanged(planned_contents[section], current[section]):
            remedy = "its files changed since the plan was made; restore them or choose a new place"
            raise InputError(f"{section}.model", model, remedy)


def _check_series_count(root: Root, groups_per_pair: int) -> None:
    extended = root.extensions[-1].groups_per_pair if root.extensions else None
    planned = root.stored_plan.groups_per_pair
    if groups_per_pair > (extended or planned):
        remedy = f"{root.url} has {extended or planned}; add series behind them with `semix extend`"
        raise InputError(GROUPS_PER_PAIR, groups_per_pair, remedy)
    if groups_per_pair == extended:
        remedy = f"was extended from {planned} to that; go on with `semix resume {root.url}`"
        raise InputError(GROUPS_PER_PAIR, groups_per_pair, remedy)


def _overrides_of(root: Root, config: BuildConfig) -> list[str]:
    """Overrides for the config's settings that differ from plan.json and decide no byte."""
    planned, new = root.stored_plan.config, config.model_dump(mode="json")
    names = [(section, name) for section, keys in NON_IDENTITY_SETTINGS.items() for name in keys]
    # What is not stored is off, as `real.download`.
    values = [(section, name, new[section].get(name, False)) for section, name in names]
    return [
        f"{section}.{name}={json.dumps(value)}"
        for section, name, value in values
        if planned[section].get(name, False) != value
    ]
