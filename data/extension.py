"""Where the groups of each shard lie, of a plan and of what was added behind it."""

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import Field

from data.errors import InputError
from data.schemas import MOST_RECORD, Digest
from data.store import Store
from data.strict_json import Strict, read_strictly

NAME = re.compile(r"extensions/(\d+)\.json")


@dataclass(frozen=True)
class Stretch:
    """Shards of one size that follow each other, over groups that follow each other.

    Attributes:
        shards: how many; the last of them may be short, and stays so when more are added.
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


class Extension(Strict):
    """`extensions/N.json`: groups that were added behind the last."""

    plan: Digest
    groups_per_pair: int = Field(ge=1)
    first_group: int = Field(ge=0)
    first_shard: int = Field(ge=0)
    groups: int = Field(ge=1)
    shards: int = Field(ge=1)

    @property
    def stretch(self) -> Stretch:
        return Stretch(self.first_group, self.first_shard, self.groups, self.shards)


@dataclass(frozen=True)
class Layout:
    """The groups of every shard and the shard of every group, by arithmetic.

    Attributes:
        size: groups of a whole shard.
    """

    stretches: tuple[Stretch, ...]
    size: int

    @property
    def num_groups(self) -> int:
        return sum(stretch.groups for stretch in self.stretches)

    @property
    def num_shards(self) -> int:
        return sum(stretch.shards for stretch in self.stretches)

    def groups_of(self, shard: int) -> range:
        """The groups in a shard. Raises IndexError."""
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard}: the plan has {self.num_shards}")
        stretch = self._at([s.first_shard for s in self.stretches], shard)
        start = stretch.first_group + (shard - stretch.first_shard) * self.size
        return range(start, min(start + self.size, stretch.last_group + 1))

    def shard_of(self, group: int) -> int:
        """The shard that a group is in. Raises IndexError."""
        if not 0 <= group < self.num_groups:
            raise IndexError(f"group {group}: the plan has {self.num_groups}")
        stretch = self._at([s.first_group for s in self.stretches], group)
        return stretch.first_shard + (group - stretch.first_group) // self.size

    def _at(self, starts: Sequence[int], number: int) -> Stretch:
        return self.stretches[bisect_right(starts, number) - 1]


def layout(groups: int, size: int, extensions: Sequence[Extension] = ()) -> Layout:
    """Of a plan of so many groups, `size` a shard, and what was added to it."""
    base = Stretch(0, 0, groups, -(-groups // size))
    return Layout((base, *(extension.stretch for extension in extensions)), size)


def layout_of(plan: Mapping[str, Any], extensions: Sequence[Extension]) -> Layout:
    """Of plan.json as it was written, and what was added to it.

    Raises:
        InputError: its config does not say how many groups a shard has.
    """
    shards = plan["config"].get("shards")
    size = shards.get("groups_per_shard") if isinstance(shards, dict) else None
    if not isinstance(size, int) or size < 1:
        raise InputError("plan.json: config.shards.groups_per_shard", size, "is not what was built")
    return layout(plan["num_groups"], size, extensions)


def next_extension(plan: str, before: Layout, groups_per_pair: int, pairs: int) -> Extension:
    """The one that raises a root to so many series of each pair."""
    groups = groups_per_pair * pairs - before.num_groups
    return Extension(
        plan=plan,
        groups_per_pair=groups_per_pair,
        first_group=before.num_groups,
        first_shard=before.num_shards,
        groups=groups,
        shards=-(-groups // before.size),
    )


def read_extensions(store: Store, plan: Mapping[str, Any]) -> list[Extension]:
    """What was added to the plan in plan.json, in order.

    Raises:
        InputError: a file is damaged, missing in the row, or does not continue what is before it.
    """
    found = [match for match in map(NAME.fullmatch, store.list("extensions")) if match]
    if not found:
        return []
    read: list[Extension] = []
    for number in range(1, 1 + max(int(match[1]) for match in found)):
        name = extension_name(number)
        try:
            content = store.get(name)
            values = read_strictly(Extension, content, what="extension", most=MOST_RECORD)
            extension = Extension(**values)
            _refuse_gap(extension, plan, layout_of(plan, read))
        except (OSError, ValueError) as error:
            remedy = f"{error}; bring it back, for the shards behind depend on it"
            raise InputError(f"{store.url}/{name}", "damaged", remedy) from None
        read.append(extension)
    return read


def write_extension(store: Store, number: int, extension: Extension) -> bool:
    """Create-only; False if another one has that number already."""
    content = json.dumps(extension.model_dump(), indent=1).encode()
    return store.create(extension_name(number), content)


def extension_name(number: int) -> str:
    return f"extensions/{number}.json"


def _refuse_gap(extension: Extension, plan: Mapping[str, Any], before: Layout) -> None:
    expected = Stretch(
        before.num_groups,
        before.num_shards,
        extension.groups,
        -(-extension.groups // before.size),
    )
    if extension.plan != plan["digest"]:
        raise ValueError("belongs to another plan")
    if extension.stretch != expected:
        wrong = {k: v for k, v in asdict(extension.stretch).items() if v != getattr(expected, k)}
        raise ValueError(f"does not continue what is before it ({', '.join(wrong)})")
