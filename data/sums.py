"""Sums over commit records, exact whatever the order."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

MICRO = 10**6
MOST = 1e12  # seconds or TFLOP of one shard; no work takes longer

Record = Mapping[str, Any]


@dataclass
class Sums:
    """What progress adds up; times and work in whole millionths, so that order is nothing.

    Attributes:
        wall, tflop, stages: of the shards, in millionths.
        untold: shards that do not say how many TFLOP they took.
        prototypes: how many shards were labelled with which; "" where they do not say.
    """

    shards: int = 0
    groups: int = 0
    wall: int = 0
    tflop: int = 0
    untold: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    prototypes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def over(cls, entries: Iterable[Record]) -> Self:
        found = cls()
        for entry in entries:
            found.add(entry)
        return found

    @classmethod
    def of_part(cls, part: Record) -> Self:
        """As an index keeps them with one of its parts."""
        kept = part["sums"]
        return cls(
            shards=part["shards"],
            groups=kept["groups"],
            wall=_micro(kept["wall_seconds"]),
            tflop=_micro(kept["tflop"]),
            untold=kept["untold"],
            stages=Counter({stage: _micro(value) for stage, value in kept["seconds"].items()}),
            prototypes=Counter(kept["prototypes"]),
        )

    def add(self, entry: Record) -> None:
        """One more commit record."""
        self.shards += 1
        self.groups += entry["groups"]
        self.wall += _micro(entry.get("wall_seconds", 0.0))
        tflop = entry.get("tflop")
        self.tflop += _micro(tflop or 0.0)
        self.untold += tflop is None
        self.prototypes[entry.get("prototypes", "")] += 1
        for stage, value in entry.get("seconds", {}).items():
            self.stages[stage] += _micro(value)

    def __iadd__(self, other: "Sums") -> Self:
        self.shards += other.shards
        self.groups += other.groups
        self.wall += other.wall
        self.tflop += other.tflop
        self.untold += other.untold
        self.stages.update(other.stages)
        self.prototypes.update(other.prototypes)
        return self

    def kept(self) -> dict[str, Any]:
        """What an index keeps of them."""
        return {
            "groups": self.groups,
            "wall_seconds": self.wall / MICRO,
            "tflop": self.tflop / MICRO,
            "untold": self.untold,
            "seconds": self.seconds(),
            "prototypes": dict(self.prototypes),
        }

    def seconds(self) -> dict[str, float]:
        """By stage."""
        return {stage: value / MICRO for stage, value in self.stages.items()}


def _micro(value: float) -> int:
    return round(min(max(value, -MOST), MOST) * MICRO)
