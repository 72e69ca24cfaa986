"""One thing that is wrong with a root."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["shard", "record", "prototypes", "index", "labels", "orphan"]


@dataclass(frozen=True)
class Problem:
    """What is wrong, and with which shard.

    Attributes:
        shard: None where it is about the whole root.
        kind: an orphan is a file that nothing refers to: no damage, only bytes.
        files: those to remove before what they held can be made again.
    """

    shard: int | None
    text: str
    kind: Kind = "shard"
    files: tuple[str, ...] = ()

    @property
    def damage(self) -> bool:
        return self.kind != "orphan"

    def __str__(self) -> str:
        return self.text if self.shard is None else f"shard {self.shard}: {self.text}"
