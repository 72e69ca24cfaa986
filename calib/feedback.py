"""What a classifier says of whole splits after an epoch, for those who steer by it."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Outputs:
    """Of all images of a split as they are, in eval mode; the same in every process."""

    logits: Tensor  # [N, K] float32
    features: Tensor  # [N, D]
    targets: Tensor  # [N] int64


class Feedback(Protocol):
    """Runs the network when asked, at most once an epoch and split."""

    def outputs(self, split: Literal["train", "validation"]) -> Outputs: ...
