"""ShardConfig: how series are batched and stored."""

from typing import Literal

from pydantic import Field

from data.settings import Settings


class ShardConfig(Settings):
    """How groups are batched and stored."""

    groups_per_shard: int = Field(
        64, ge=1, description="groups in one tar; aim at 1 to 5 minutes of work, a kill loses one"
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
