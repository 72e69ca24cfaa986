"""Features of a real split, chunk by chunk in a store: a killed measurement goes on there."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.real import ImageSplit
from data.store import Store
from pipeline.annotation.decoding import decoded
from pipeline.annotation.sealed import Facts, open_sealed, seal


@dataclass(frozen=True)
class FeatureChunks:
    """The features of all images of a split, of which one chunk at a time is in memory.

    Attributes:
        encode: uint8 [N, H, W, 3] -> float32 [N, D] on the CPU.
        folder: in the store, for features of this encoder, split and layout alone.
        size: images a file; batch: images encoded at once.
        beat: called after each batch, with how far in the split it reaches.
    """

    split: ImageSplit
    encode: Callable[[Tensor], Tensor]
    store: Store
    folder: str
    size: int
    batch: int
    beat: Callable[[int], None] = field(default=lambda position: None)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Features float32 [n, D] and targets int64 [n], in the order of the split."""
        for start in range(0, len(self.split), self.size):
            stop = min(start + self.size, len(self.split))
            yield self._features(start, stop), torch.from_numpy(self.split.targets[start:stop])

    def _features(self, start: int, stop: int) -> Tensor:
        name = f"{self.folder}/{start // self.size:07d}.safetensors"
        facts = {"images": f"{start} to {stop - 1}"}
        found = self._stored(name, facts)
        if found is None:
            found = self._encoded(start, stop)
            self.store.create(name, seal({"features": found}, facts))
        return found

    def _stored(self, name: str, facts: Facts) -> Tensor | None:
        try:
            tensors, there = open_sealed(self.store.get(name))
            if there == facts:
                return tensors["features"]
        except FileNotFoundError:
            return None
        except ValueError:
            pass  # damaged, but the images are still there
        with suppress(FileNotFoundError):  # another process saw it too
            self.store.delete(name)
        return None

    def _encoded(self, start: int, stop: int) -> Tensor:
        parts, position = [], start
        for images in decoded(self.split, start, stop, batch=self.batch):
            parts.append(self.encode(images))
            position += len(images)
            self.beat(position)
        features = torch.cat(parts)
        bad = ~torch.isfinite(features).all(1)
        if bad.any():
            image = start + int(bad.nonzero()[0])
            target = int(self.split.targets[image])
            raise FloatingPointError(
                f"training image {image}, of class {target}: its CLIP features are not finite"
            )
        return features
