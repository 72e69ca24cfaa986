"""The plan of a build: class sets, mixing weights, series and shards as functions of an index."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice
from typing import Any

import numpy as np

from semix.data.errors import InputError
from semix.data.fingerprint import hashed_seed
from semix.data.formats import MAX_GROUPS, PLAN, Extension, Plan, SeriesByRun, spec_digest
from semix.data.layout import layout
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.pipeline.class_sets import AllSets, ClassSets, CountedPairs, class_sets
from semix.pipeline.config import BuildConfig, MixingConfig
from semix.pipeline.provenance import (
    NON_IDENTITY_SETTINGS,
    ModelIdentities,
    identity,
    model_identities,
)

# Exponent of the dense middle: of 8 alphas, half lie between 0.36 and 0.64.
DENSITY = 1.5


@dataclass(frozen=True)
class MixGroup:
    """One series: its classes and the seed of the one noise that all its images start from.

    Attributes:
        classes: class indices, ascending; two unless a simplex is mixed.
        mixture: the weight of each class in each image, [A][k]; rows sum to 1.
    """

    index: int
    classes: tuple[int, ...]
    seed: int
    mixture: tuple[tuple[float, ...], ...]

    @property
    def first(self) -> int:
        """The class with weight alpha."""
        return self.classes[0]

    @property
    def second(self) -> int:
        """The class with weight 1 - alpha, in a pair."""
        return self.classes[1]

    @property
    def alphas(self) -> list[float]:
        """Weights of the first class, [A]."""
        return [row[0] for row in self.mixture]


@dataclass(frozen=True)
class ShardSpec:
    """The groups `start` to `stop - 1`; `digest` binds them to the plan."""

    index: int
    start: int
    stop: int
    digest: str


class BuildPlan:
    """All groups of a build, each computed from its index; memory does not grow with the plan.

    Groups cycle through the sets of classes, as CSM enumerates its pairs, so group i belongs
    to set i mod P, and so do the groups of each extension, counted from its first. All pairs come
    in lexicographic order with c1 < c2. Where a run determined how many series each pair has, they
    come in rounds: see `CountedPairs`.

    Args:
        names, models: class names, and identities of the models, if they are known already (a
            root records them); else the models' files are hashed when the digest is needed.
        similar: the pairs drawn by similarity, ascending.
        by_run: the series per pair that a run determined. Without them and `similar`, plans that
            need them know their sizes but not their groups, as `semix build --check` needs it.
        extensions: groups added behind the last one. They change no earlier group or shard, so the
            digest stays.
    Raises:
        InputError: named pairs that are not in the data, or more pairs than there are.
    """

    def __init__(
        self,
        config: BuildConfig,
        names: tuple[str, ...] | None = None,
        *,
        models: ModelIdentities | None = None,
        similar: Sequence[tuple[int, int]] | None = None,
        by_run: SeriesByRun | None = None,
        extensions: Sequence[Extension] = (),
    ) -> None:
        self._models = models
        self.class_names = _class_names(config) if names is None else names
        self.similar, self.by_run = similar, by_run
        self.sets = class_sets(config.mixing, self.class_names) if similar is None else similar
        self.num_pairs = len(self.sets)
        groups = self.num_pairs * config.mixing.groups_per_pair
        if groups > MAX_GROUPS:
            remedy = f"with {self.num_pairs:,} pairs these are {groups:,} series; a root has at "
            remedy += f"most {MAX_GROUPS:,}: choose fewer, or start another root with another seed"
            raise InputError("mixing.groups_per_pair", config.mixing.groups_per_pair, remedy)
        # A derived shard size is a part of the plan, like a configured one.
        size = config.shards.size(groups)
        shards = config.shards.model_copy(update={"groups_per_shard": size})
        self.config = config = config.model_copy(update={"shards": shards})
        self.layout = layout(groups, size, extensions)
        # The sets of the plan itself, and of each extension.
        records = [by_run, *(extension.by_run for extension in extensions)]
        self._sets: list[ClassSets] = [
            CountedPairs(record.series) if record is not None else self.sets for record in records
        ]
        self.num_groups, self.num_shards = self.layout.num_groups, self.layout.num_shards
        self.images_per_group = config.mixing.images

    @cached_property
    def models(self) -> ModelIdentities:
        """Names and file hashes of generator and CLIP."""
        return model_identities(self.config) if self._models is None else self._models

    @cached_property
    def digest(self) -> str:
        """Fingerprint of all that decides the bytes; see `semix.pipeline.provenance.identity`."""
        return identity(
            self.config, self.class_names, self.models, similar=self.similar, by_run=self.by_run
        )

    @property
    def num_images(self) -> int:
        return self.num_groups * self.images_per_group

    def group(self, index: int) -> MixGroup:
        if not 0 <= index < self.num_groups:
            raise IndexError(f"group {index}: the plan has {self.num_groups}")
        number, offset = self.layout.position_of(index)
        sets, mixing = self._sets[number], self.config.mixing
        seed = group_seed(mixing.seed, index)
        return MixGroup(index, sets[offset % len(sets)], seed, mixture_points(mixing, index))

    def classes(self) -> np.ndarray:
        """The classes of every group, int32 [num_groups, k], without their seeds and mixtures."""
        return np.concatenate(
            [
                _cycled(sets, segment.groups)
                for sets, segment in zip(self._sets, self.layout.segments, strict=True)
            ]
        )

    def shard(self, index: int) -> ShardSpec:
        groups = self.layout.groups_of(index)
        return ShardSpec(index, groups.start, groups.stop, spec_digest(self.digest, index))


@dataclass(frozen=True)
class Build:
    """A root, and the plan of its series with the settings that hold on this machine.

    Attributes:
        overrides: settings that differ here from plan.json and change no byte of a shard, such as
            where models are stored, as `section.key=value`.
    """

    root: Root
    plan: BuildPlan
    overrides: tuple[str, ...] = ()

    @property
    def config(self) -> BuildConfig:
        return self.plan.config


def open_build(
    url: str, overrides: Sequence[str] = (), *, heartbeat: Callable[[], None] = lambda: None
) -> Build:
    """Open an existing root, with overrides of settings that differ on this machine.

    Raises:
        InputError: no root, an override of a setting that decides its bytes, another version's
            settings, or a plan.json that was changed since.
    """
    check_overrides(overrides)
    return build_of(Root(url, heartbeat=heartbeat), overrides)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises InputError for an override of a setting that decides the bytes of a root."""
    for override in overrides:
        section, _, name = override.partition("=")[0].partition(".")
        if name.split(".")[0] not in NON_IDENTITY_SETTINGS.get(section, ()):
            remedy = "a root keeps the settings it was begun with; only where things lie may change"
            raise InputError(
                "overrides", override, f"{remedy}; leave it out, or choose a new place"
            )


def build_of(root: Root, overrides: Sequence[str] = ()) -> Build:
    """The build of an open root.

    Raises:
        InputError: another version's settings, or a plan.json that was changed since.
    """
    stored = root.stored_plan
    try:
        config = load_settings(BuildConfig, planned_settings(stored), overrides)
    except InputError as error:
        remedy = f"{error.remedy}; another version of semix wrote this root: use that version"
        raise InputError(f"{root.url}/{PLAN} {error.field}", error.value, remedy) from None
    current = identity(
        config, stored.class_names, stored.models, similar=stored.pairs, by_run=stored.by_run
    )
    if current != stored.digest:
        remedy = "plan.json was changed, or another version of semix wrote it; use that version"
        raise InputError(f"{root.url}/{PLAN} digest", stored.digest[:12], remedy)
    plan = BuildPlan(
        config,
        tuple(stored.class_names),
        models=stored.models,
        similar=stored.pairs,
        by_run=stored.by_run,
        extensions=root.extensions,
    )
    return Build(root, plan, tuple(overrides))


def _cycled(sets: ClassSets, groups: int) -> np.ndarray:
    """The first `groups` sets of a cycle through all of them, int32 [groups, k]."""
    count = min(len(sets), groups)
    if isinstance(sets, AllSets):  # in this order too, and a hundred times as fast
        members = list(islice(combinations(range(sets.classes), sets.size), count))
    else:
        members = [sets[rank] for rank in range(count)]
    return np.array(members, np.int32)[np.arange(groups) % count]


def planned_settings(stored: Plan) -> dict[str, Any]:
    """The settings of a plan, for `load_settings`.

    What an older plan does not mention has its default, except for the mark, which its images lack.
    """
    shards = stored.config.get("shards", {})
    if not isinstance(shards, dict):  # not readable; `load_settings` says so
        return stored.config
    return {**stored.config, "shards": {**shards, "mark": stored.marked}}


def group_seed(plan_seed: int, group: int) -> int:
    """The seed of a group, which does not depend on batch, worker or order."""
    return hashed_seed(plan_seed, group)


def _class_names(config: BuildConfig) -> tuple[str, ...]:
    from semix.data.real import class_names  # a root knows them, and its workers read no images

    return class_names(config.real)


def mixture_points(mixing: MixingConfig, group: int) -> tuple[tuple[float, ...], ...]:
    """Weights of the classes in each image of a group, [A][k]; each row sums to 1.

    For pairs alpha ascends, or keeps the configured order. For more classes, the pure classes come
    first, then points drawn uniformly from the simplex.
    """
    if mixing.classes == 2:
        return tuple((alpha, 1 - alpha) for alpha in _alphas(mixing, group))
    pure = [tuple(float(k == j) for j in range(mixing.classes)) for k in range(mixing.classes)]
    rng = random.Random(hashed_seed(mixing.seed, "points", group))
    inner = [_uniform_point(rng, mixing.classes) for _ in range(mixing.images - mixing.classes)]
    return (*pure, *inner)


def _alphas(mixing: MixingConfig, group: int) -> tuple[float, ...]:
    if not isinstance(mixing.alphas, int):
        return mixing.alphas
    if mixing.grid == "random":
        rng = random.Random(hashed_seed(mixing.seed, "alphas", group))
        return (0.0, *sorted(rng.random() for _ in range(mixing.alphas - 2)), 1.0)
    return alpha_grid(mixing.alphas, dense=mixing.grid == "interior")


def alpha_grid(count: int, *, dense: bool = False) -> tuple[float, ...]:
    """0, 1/(A-1), ..., 1; if `dense`, moved towards 1/2, where images change most."""
    even = tuple(position / (count - 1) for position in range(count))
    if not dense:
        return even
    return tuple(
        (1 + (1 if alpha > 0.5 else -1) * abs(2 * alpha - 1) ** DENSITY) / 2 for alpha in even
    )


def _uniform_point(rng: random.Random, classes: int) -> tuple[float, ...]:
    """A point of the simplex: exponential variates over their sum, which is Dirichlet(1)."""
    variates = [rng.expovariate(1) for _ in range(classes)]
    return tuple(variate / sum(variates) for variate in variates)
