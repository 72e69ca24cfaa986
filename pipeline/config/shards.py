"""ShardConfig: how series are batched and stored."""

from typing import Literal

from pydantic import Field

from data.settings import Settings

MOST_OF_A_SMALL_PLAN = 16  # shards: enough to see progress, and to lose little by a kill
MOST_DERIVED = 64  # groups in a shard of a large plan


class ShardConfig(Settings):
    """How groups are batched and stored."""

    groups_per_shard: int | None = Field(
        None,
        ge=1,
        description="groups in one tar; aim at 1 to 5 minutes of work, a kill loses one; none "
        "gives 8 to 16 shards of whole batches, more from a thousand groups on",
    )
    groups_per_batch: int = Field(
        8, ge=1, description="groups in one forward pass; part of the identity, it moves last bits"
    )
    image_format: Literal["webp", "png", "jpg"] = Field(
        "webp", description="webp and png are lossless; jpg moves labels"
    )
    store_size: int | None = Field(
        None, ge=8, description="side of the stored images, pixels; none keeps the model's"
    )

    def size(self, groups: int) -> int:
        """Groups of a shard in a plan of so many groups: as set, or what follows from them."""
        if self.groups_per_shard is not None:
            return self.groups_per_shard
        batch = self.groups_per_batch  # the last one of a shard is filled up: whole ones waste none
        batches = min(-(-groups // (MOST_OF_A_SMALL_PLAN * batch)), MOST_DERIVED // batch)
        return max(1, batches) * batch
