"""Images of an index: read from their shards on access, or decoded once into memory."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from semix.data.errors import InputError
from semix.data.images import decode_image, scaled
from semix.data.shard_files import ShardFiles
from semix.data.threads import mapped

Index = int | Tensor
IMAGES_PER_TASK = 256  # images that a thread decodes per task
# Of smaller images most of the time goes into Python, where threads only wait for one another: 2
# threads take 1.5 times as long as one at 32 x 32, and 0.7 of its time at 64 x 64.
MIN_PIXELS_FOR_THREADS = 48 * 48


@dataclass(frozen=True)
class StoredImages:
    """uint8 [G, A, H, W, 3], read from the shards; only indexed as `images[series, position]`.

    Attributes:
        shards: int64 [G], index of the shard of each series in the pinned index.
        spans: int64 [G, A, 2], offset and size of each image in its shard.
        numbers: int64 [G], the group numbers, for messages.
        stored_size: (H, W, 3) of an image in its shard.
        side: pixels to which images are scaled when they are decoded; None leaves them as stored.
        threads: threads that decode; small images, and a worker process of a DataLoader, have one.
    """

    files: ShardFiles
    shards: np.ndarray
    spans: np.ndarray
    numbers: np.ndarray
    stored_size: tuple[int, ...]
    side: int | None
    threads: int

    @property
    def size(self) -> tuple[int, ...]:
        """(H, W, 3) of an image after scaling."""
        return self.stored_size if self.side is None else (self.side, self.side, 3)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.spans.shape[:2], *self.size))

    @property
    def nbytes(self) -> int:
        """Bytes of all images once they are decoded."""
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: tuple[Index, Index]) -> Tensor:
        """uint8 [..., H, W, 3]; series and position are integers, or int64 and broadcast."""
        group, position = (torch.as_tensor(value) for value in index)
        groups, positions = torch.broadcast_tensors(group, position)
        images = self._decode_all(groups.flatten().numpy(), positions.flatten().numpy())
        return images.view(*groups.shape, *self.size)

    def in_memory(self) -> Tensor:
        """All images, decoded."""
        groups, positions = np.divmod(np.arange(self.spans[..., 0].size), self.spans.shape[1])
        return self._decode_all(groups, positions).view(self.shape)

    def decode(self, group: int, position: int) -> np.ndarray:
        """One image, uint8 [H, W, 3].

        Raises:
            ValueError: not an image, or of another size; names shard, group and position.
        """
        shard = int(self.shards[group])
        try:
            try:
                return self._decode_file(shard, group, position)
            except ValueError:
                if not self.files.fetch_again(shard):
                    raise
                return self._decode_file(shard, group, position)
        except ValueError as error:
            which = f"group {self.numbers[group]}, image {position}"
            tar = self.files.shards[shard].tar
            raise ValueError(f"{tar}: {which}: {error}; run `semix verify --full`") from None

    def _decode_file(self, shard: int, group: int, position: int) -> np.ndarray:
        offset, size = self.spans[group, position].tolist()
        max_pixels = self.stored_size[0] * self.stored_size[1]
        image = decode_image(self.files.read(shard, offset, size), max_pixels=max_pixels)
        if image.shape != self.stored_size:
            actual = "x".join(map(str, image.shape[:2]))
            raise ValueError(
                f"{actual} pixels, others have {self.stored_size[0]}x{self.stored_size[1]}"
            )
        return image if self.side is None else scaled(image, self.side)

    def _decode_all(self, groups: np.ndarray, positions: np.ndarray) -> Tensor:
        """The images at these indices, uint8 [N, H, W, 3]."""
        images = np.empty((len(groups), *self.size), dtype=np.uint8)
        height, width = self.stored_size[:2]
        alone = get_worker_info() or height * width < MIN_PIXELS_FOR_THREADS
        threads = 1 if alone else self.threads
        step = min(IMAGES_PER_TASK, max(1, len(groups) // (4 * threads)))

        def fill(start: int) -> None:
            for row in range(start, min(start + step, len(groups))):
                images[row] = self.decode(int(groups[row]), int(positions[row]))

        starts = range(0, len(groups), step)
        for _ in mapped(fill, starts, threads=threads) if threads > 1 else map(fill, starts):
            pass
        return torch.from_numpy(images)


def images_at(images: Tensor | StoredImages, group: Tensor, position: Tensor) -> Tensor:
    """Images at these indices, uint8 [..., H, W, 3].

    Args:
        images: uint8 [G, A, H, W, 3].
        group, position: int64 that broadcast together, within range.
    """
    if isinstance(images, StoredImages):
        return images[group, position]
    # index_select along one dimension copies whole rows; indexing two dimensions takes twice as
    # long, ten times for images of 32 pixels. Negative indices count from the end.
    rows = group % len(images) * images.shape[1] + position % images.shape[1]
    selected = images.flatten(0, 1).index_select(0, rows.flatten())
    return selected.view(*rows.shape, *images.shape[2:])


def open_images(
    files: ShardFiles,
    shards: np.ndarray,
    spans: np.ndarray,
    *,
    numbers: np.ndarray,
    side: int | None,
    threads: int,
) -> StoredImages:
    """The images of these series, opened; all must have the size of the first image.

    Raises:
        InputError: `side` is given, and the first image is not square.
        ValueError: the first image cannot be decoded.
    """
    offset, size = spans[0, 0].tolist()
    tar = files.shards[int(shards[0])].tar
    try:
        first = decode_image(files.read(int(shards[0]), offset, size))
    except ValueError as error:
        which = f"group {numbers[0]}, image 0"
        raise ValueError(f"{tar}: {which}: {error}; run `semix verify --full`") from None
    if side is not None and first.shape[0] != first.shape[1]:
        actual = f"{first.shape[1]} x {first.shape[0]} pixels"
        raise InputError("side", side, f"is for square images; these have {actual}")
    scaled_side = None if side == first.shape[0] else side
    return StoredImages(files, shards, spans, numbers, first.shape, scaled_side, threads)
