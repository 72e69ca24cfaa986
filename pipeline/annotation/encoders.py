"""The CLIP models of an annotation, loaded when the first image comes."""

from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from data.device import resolve_device
from pipeline.config import AnnotationConfig

if TYPE_CHECKING:  # open_clip costs seconds
    from pipeline.clip import ClipEncoder

NAMES = FEATURES, SECOND = "features", "second"  # of tensors, in memory and in files


class Encoders:
    """One or two CLIP models; whoever has features already never loads them.

    Args:
        device: auto, cpu, cuda or cuda:N.
    """

    def __init__(self, config: AnnotationConfig, *, device: str) -> None:
        self.config = config
        self.device = device

    def load(self) -> None:
        """Load them now. Raises InputError for a model that cannot be loaded."""
        _ = self._loaded

    def encode(self, images: Tensor) -> dict[str, Tensor]:
        """uint8 [N, H, W, 3] -> float32 [N, D] on the CPU for each model, by its name."""
        return {name: encoder.encode(images).cpu() for name, encoder in self._loaded.items()}

    @cached_property
    def _loaded(self) -> "dict[str, ClipEncoder]":
        from pipeline.clip import ClipEncoder

        device = resolve_device(self.device)
        return {
            name: ClipEncoder(encoder, device=device, dtype=self.config.dtype, field=field)
            for name, (field, encoder) in zip(NAMES, self.config.encoders, strict=False)
        }
