"""BuildPlan: every group and shard as a pure function of the config and an index."""

from collections.abc import Sequence
from dataclasses import dataclass

from data.extension import Extension, layout
from data.fingerprint import fingerprint
from data.real import class_names
from data.root import spec_digest
from pipeline.config import BuildConfig
from pipeline.plan.pairs import ClassSets, Similar, class_sets
from pipeline.plan.points import mixture_points
from pipeline.plan.seeds import hashed_seed


@dataclass(frozen=True)
class MixGroup:
    """One series: its classes and the seed of the one noise that all its images start from.

    Attributes:
        classes: class indices, ascending; two unless a simplex is mixed.
        mixture: the weight of each class in each image, [A][k]; rows sum to 1.
        round: how many series of the same classes come before it.
    """

    index: int
    classes: tuple[int, ...]
    seed: int
    mixture: tuple[tuple[float, ...], ...]
    round: int = 0

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
    """All groups of a build, computed from their index; memory does not grow with the plan.

    Groups walk the sets of classes and start again after the last, as CSM enumerates its pairs,
    so group i belongs to set i mod P. All pairs come in lexicographic order with c1 < c2.

    Args:
        names: class names, when they are known already (a root carries them).
        similar: the pairs drawn by similarity, once the prototypes are measured; without them
            such a plan knows its sizes but not its groups.
        extensions: what was added behind the last group. It changes no group or shard that was
            there, so the digest stays.
    Raises:
        InputError: named pairs that are not in the data, or more pairs than there are.
    """

    def __init__(
        self,
        config: BuildConfig,
        names: tuple[str, ...] | None = None,
        *,
        similar: Sequence[tuple[int, int]] | None = None,
        extensions: Sequence[Extension] = (),
    ) -> None:
        self.class_names = class_names(config.real) if names is None else names
        self.sets: ClassSets = class_sets(config.mixing, self.class_names)
        if similar is not None:
            self.sets = Similar(len(similar), tuple(similar))
        self.num_pairs = len(self.sets)
        groups = self.num_pairs * config.mixing.groups_per_pair
        # The size that follows from the plan is a part of it, as one that is set.
        size = config.shards.size(groups)
        shards = config.shards.model_copy(update={"groups_per_shard": size})
        self.config = config = config.model_copy(update={"shards": shards})
        self.layout = layout(groups, size, extensions)
        self.num_groups, self.num_shards = self.layout.num_groups, self.layout.num_shards
        self.images_per_group = config.mixing.images
        self.digest = fingerprint([config.model_dump(mode="json"), list(self.class_names)])

    @property
    def num_images(self) -> int:
        return self.num_groups * self.images_per_group

    def group(self, index: int) -> MixGroup:
        if not 0 <= index < self.num_groups:
            raise IndexError(f"group {index}: the plan has {self.num_groups}")
        mixing = self.config.mixing
        turn, rank = divmod(index, self.num_pairs)
        return MixGroup(
            index,
            self.sets[rank],
            group_seed(mixing.seed, index),
            mixture_points(mixing, index),
            turn,
        )

    def shard(self, index: int) -> ShardSpec:
        groups = self.layout.groups_of(index)
        return ShardSpec(index, groups.start, groups.stop, spec_digest(self.digest, index))


def group_seed(plan_seed: int, group: int) -> int:
    """A seed of its own for each group, whatever the batch, worker or order."""
    return hashed_seed(plan_seed, group)
