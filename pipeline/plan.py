"""BuildPlan: every group and shard as a pure function of the config and an index."""

import hashlib
import math
from dataclasses import dataclass

from data.fingerprint import fingerprint
from data.real import class_names
from data.root import spec_digest
from pipeline.config import BuildConfig


@dataclass(frozen=True)
class MixGroup:
    """One series: two classes and the seed of the one noise that all its images start from."""

    index: int
    first: int  # class index with weight alpha
    second: int  # class index with weight 1 - alpha
    seed: int


@dataclass(frozen=True)
class ShardSpec:
    """The groups `start` to `stop - 1`; `digest` binds them to the plan."""

    index: int
    start: int
    stop: int
    digest: str


class BuildPlan:
    """All groups of a build, computed from their index; memory does not grow with the plan.

    Groups walk the unordered pairs (c1 < c2) in lexicographic order and start again after the
    last, as CSM enumerates them, so group i belongs to pair i mod P.

    Args:
        names: class names, when they are known already (a root carries them).
    """

    def __init__(self, config: BuildConfig, names: tuple[str, ...] | None = None) -> None:
        self.config = config
        self.class_names = class_names(config.real) if names is None else names
        self.num_pairs = math.comb(len(self.class_names), 2)
        self.num_groups = self.num_pairs * config.mixing.groups_per_pair
        self.num_shards = math.ceil(self.num_groups / config.shards.groups_per_shard)
        self.alphas = alpha_grid(config.mixing.alphas)
        self.digest = fingerprint([config.model_dump(mode="json"), list(self.class_names)])

    def group(self, index: int) -> MixGroup:
        if not 0 <= index < self.num_groups:
            raise IndexError(f"group {index}: the plan has {self.num_groups}")
        first, second = pair(index % self.num_pairs, len(self.class_names))
        return MixGroup(index, first, second, group_seed(self.config.mixing.seed, index))

    def shard(self, index: int) -> ShardSpec:
        if not 0 <= index < self.num_shards:
            raise IndexError(f"shard {index}: the plan has {self.num_shards}")
        size = self.config.shards.groups_per_shard
        stop = min((index + 1) * size, self.num_groups)
        return ShardSpec(index, index * size, stop, spec_digest(self.digest, index))


def alpha_grid(alphas: int | tuple[float, ...]) -> tuple[float, ...]:
    """A count becomes 0, 1/(A-1), ..., 1, end points included; weights stay as given."""
    if isinstance(alphas, int):
        return tuple(position / (alphas - 1) for position in range(alphas))
    return alphas


def pair(rank: int, classes: int) -> tuple[int, int]:
    """The pair at `rank` among all c1 < c2 in lexicographic order, without listing them."""
    from_the_end = math.comb(classes, 2) - 1 - rank
    # Counted from the end, the pairs with c1 = classes - 2 - row fill a triangle's rows.
    row = (math.isqrt(8 * from_the_end + 1) - 1) // 2
    column = from_the_end - row * (row + 1) // 2
    return classes - 2 - row, classes - 1 - column


def group_seed(plan_seed: int, group: int) -> int:
    """A seed of its own for each group, whatever the batch, worker or order."""
    digest = hashlib.sha256(f"{plan_seed}/{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch wants a non-negative int64
