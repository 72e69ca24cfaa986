"""The groups of each shard, for a plan and its extensions."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from semix.data.errors import InputError, TooLarge
from semix.data.formats import EXTENSIONS, Extension, Plan, SeriesByRun
from semix.data.store import Store

NAME = re.compile(rf"{EXTENSIONS}/(\d{{1,9}})\.json")


@dataclass(frozen=True)
class Segment:
    """Consecutive shards of one size, over consecutive groups.

    Attributes:
        shards: number of shards; the last may be short, and stays so when others are added.
    """

    first_group: int
    first_shard: int
    groups: int
    shards: int

    @property
    def last_group(self) -> int:
        return self.first_group + self.groups - 1

    @property
    def last_shard(self) -> int:
        return self.first_shard + self.shards - 1


@dataclass(frozen=True)
class Layout:
    """The groups of every shard and the shard of every group, by arithmetic.

    Attributes:
        size: groups per full shard.
    """

    segments: tuple[Segment, ...]
    size: int

    @property
    def num_groups(self) -> int:
        return sum(segment.groups for segment in self.segments)

    @property
    def num_shards(self) -> int:
        return sum(segment.shards for segment in self.segments)

    def groups_of(self, shard: int) -> range:
        """The groups in a shard. Raises IndexError."""
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard}: the plan has {self.num_shards}")
        segment = self.segments[bisect_right([s.first_shard for s in self.segments], shard) - 1]
        start = segment.first_group + (shard - segment.first_shard) * self.size
        return range(start, min(start + self.size, segment.last_group + 1))

    def shard_of(self, group: int) -> int:
        """The shard that a group is in. Raises IndexError."""
        if not 0 <= group < self.num_groups:
            raise IndexError(f"group {group}: the plan has {self.num_groups}")
        number, offset = self.position_of(group)
        return self.segments[number].first_shard + offset // self.size

    def position_of(self, group: int) -> tuple[int, int]:
        """The number of the segment that a group is in, and the group's offset there."""
        number = bisect_right([s.first_group for s in self.segments], group) - 1
        return number, group - self.segments[number].first_group


def layout(groups: int, size: int, extensions: Sequence[Extension] = ()) -> Layout:
    """The layout of a plan of `groups` groups, `size` per shard, and of its extensions."""
    base = Segment(0, 0, groups, -(-groups // size))
    return Layout((base, *map(segment_of, extensions)), size)


def layout_of(plan: Plan, extensions: Sequence[Extension]) -> Layout:
    """The layout of plan.json as it was written, and of its extensions."""
    return layout(plan.num_groups, plan.groups_per_shard, extensions)


def segment_of(extension: Extension) -> Segment:
    start = extension.first_group, extension.first_shard
    return Segment(*start, extension.groups, extension.shards)


def next_extension(
    plan: str,
    before: Layout,
    groups: int,
    *,
    groups_per_pair: int,
    by_run: SeriesByRun | None = None,
) -> Extension:
    """The extension that adds this number of series.

    Args:
        groups_per_pair: series of every pair after it, without those that a run determined.
        by_run: the series of each pair, if a run determined them.
    """
    return Extension(
        plan=plan,
        groups_per_pair=groups_per_pair,
        first_group=before.num_groups,
        first_shard=before.num_shards,
        groups=groups,
        shards=-(-groups // before.size),
        by_run=by_run,
    )


def read_extensions(store: Store, plan: Plan) -> list[Extension]:
    """The extensions of the plan in plan.json, in order.

    Raises:
        InputError: a file is damaged or missing, or does not continue the one before it.
    """
    matches = [match for match in map(NAME.fullmatch, store.list(EXTENSIONS)) if match]
    extensions: list[Extension] = []
    for number in range(1, 1 + max((int(match[1]) for match in matches), default=0)):
        location = f"{store.url}/{extension_name(number)}"
        try:
            content = store.get(extension_name(number), max_bytes=Extension.MAX_BYTES)
            extension = Extension.read(content, where=location)
            _check_continues(extension, plan, layout_of(plan, extensions))
        except TooLarge:
            raise
        except (FileNotFoundError, IsADirectoryError, ValueError) as error:
            remedy = f"{error}; restore it from a copy: later shards depend on it"
            raise InputError(location, "damaged", remedy) from None
        extensions.append(extension)
    return extensions


def write_extension(store: Store, number: int, extension: Extension) -> bool:
    """Write an extension, create-only; False if that number is taken."""
    return store.create(extension_name(number), extension.written(indent=1))


def extension_name(number: int) -> str:
    return f"{EXTENSIONS}/{number}.json"


def _check_continues(extension: Extension, plan: Plan, before: Layout) -> None:
    shards = -(-extension.groups // before.size)
    expected = Segment(before.num_groups, before.num_shards, extension.groups, shards)
    if extension.plan != plan.digest:
        raise ValueError("belongs to another plan")
    segment = segment_of(extension)
    if segment != expected:
        differing = {k: v for k, v in asdict(segment).items() if v != getattr(expected, k)}
        raise ValueError(f"does not continue the one before it ({', '.join(differing)})")
    if extension.by_run is not None:
        extension.by_run.check(extension.groups, len(plan.class_names))
