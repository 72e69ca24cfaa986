"""Some groups at once: noise, images as stored, CLIP features."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.images import LOSSY, decode_image, encode_image
from pipeline.annotate import Annotator
from pipeline.mixing import mix_groups
from pipeline.models import Models
from pipeline.pixels import resized
from pipeline.plan import BuildPlan, MixGroup
from pipeline.stopwatch import Stopwatch


@dataclass(frozen=True)
class Batch:
    """Some groups, generated and labelled.

    Attributes:
        images: as stored, uint8 [G, A, H, W, 3] on the CPU.
        encoded: their bytes where the format is lossy, since CLIP must see what is stored.
        features: [G, A, D] on the CPU, by the name of their encoder.
        noise: the `noise` part of each record.
    """

    groups: list[MixGroup]
    images: np.ndarray
    encoded: list[list[bytes]] | None
    features: dict[str, Tensor]
    noise: list[dict[str, Any]]

    def annotation(self, row: int, annotator: Annotator) -> dict[str, Any]:
        """The labels of one group, as its record has them."""
        group = self.groups[row]
        features = {name: values[row] for name, values in self.features.items()}
        return annotator.annotate(features, classes=group.classes, mixture=group.mixture)

    def encoding(self, row: int, extension: str) -> Callable[[], list[bytes]]:
        """The work that is left for an encoding thread: the files of one series."""
        if self.encoded is not None:
            return partial(list, self.encoded[row])
        return partial(encode_series, self.images[row], extension)


@torch.inference_mode()
def make_batch(
    groups: list[MixGroup], plan: BuildPlan, *, models: Models, clock: Stopwatch
) -> Batch:
    """Generate some groups and encode them with CLIP, where they are: on the device."""
    settings = plan.config.shards
    with clock.stage("noise"):
        noise, notes = models.noise(groups)
    with clock.stage("generate"):
        images = mix_groups(
            groups,
            noise,
            embeddings=models.embeddings,
            generator=models.generator,
            batch_groups=settings.groups_per_batch,
            interpolation=plan.config.mixing.interpolation,
        )
        images = resized(images, settings.store_size)
        stored = images.cpu().numpy()
    encoded = None
    if settings.image_format in LOSSY:
        with clock.stage("encode"):
            encoded = [encode_series(series, settings.image_format) for series in stored]
        images = torch.from_numpy(
            np.stack([[decode_image(image) for image in series] for series in encoded])
        )
    with clock.stage("annotate"):
        found = models.annotator.encode(images.flatten(0, 1))
        features = {name: rows.unflatten(0, images.shape[:2]) for name, rows in found.items()}
        refuse_unstorable(features, groups)
    return Batch(groups, stored, encoded, features, notes)


def refuse_unstorable(features: dict[str, Tensor], groups: list[MixGroup]) -> None:
    """Raises FloatingPointError, with the group's number, for what float16 cannot hold."""
    for name, rows in features.items():
        bad = ~torch.isfinite(rows.half()).all(-1)  # [G, A]
        if bad.any():
            row, image = (int(position) for position in bad.nonzero()[0])
            raise FloatingPointError(
                f"group {groups[row].index}: the CLIP {name} of image {image} are not finite, or "
                "too large for float16"
            )


def encode_series(series: np.ndarray, extension: str) -> list[bytes]:
    """uint8 [A, H, W, 3] to the bytes of A files."""
    return [encode_image(image, extension) for image in series]
