"""A process's batch in parts that pass one after the other, for one update of the weights."""

from collections.abc import Iterator
from dataclasses import dataclass

from calib.batches import Batch
from calib.config.checks import LEAST, check_accumulation
from data.errors import InputError


@dataclass(frozen=True)
class Part:
    """A part of a batch.

    Attributes:
        real, mixed: shares of the whole's real and mixed images, with which the means of the
            parts add up to those of the whole.
    """

    batch: Batch
    real: float
    mixed: float


def micro_batches(batch: Batch, count: int) -> Iterator[Part]:
    """Split a batch into `count` parts with equally many real images.

    Mixed images are shared out as equally as they go.

    Raises:
        InputError: a part would have fewer than two images of a kind, which batch norms need.
    """
    if count == 1:
        yield Part(batch, 1.0, 1.0)
        return
    check_accumulation(len(batch.targets), count)
    real = [tensor.chunk(count) for tensor in (batch.images, batch.targets, batch.indices)]
    if batch.mixed_images is None or batch.mixed_labels is None:
        for images, targets, indices in zip(*real, strict=True):
            yield Part(Batch(images, targets, indices), 1 / count, 0.0)
        return
    total = len(batch.mixed_images)
    if total // count < LEAST:
        remedy = f"the {total} mixed images of a step leave fewer than {LEAST} for each part"
        raise InputError("accumulate", count, f"{remedy}; choose fewer parts")
    mixed = [tensor.tensor_split(count) for tensor in (batch.mixed_images, batch.mixed_labels)]
    for tensors in zip(*real, *mixed, strict=True):
        yield Part(Batch(*tensors), 1 / count, len(tensors[3]) / total)
