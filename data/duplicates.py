"""Images that two splits share, pixel for pixel."""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

Place = tuple[str, int]  # split, and index in it


def shared_images(splits: Mapping[str, Iterable[np.ndarray]]) -> list[tuple[Place, Place]]:
    """Where images of later splits are, and where the same one is in an earlier split.

    A digest of 16 bytes is kept for each image, so a split may come in parts.

    Args:
        splits: parts of each split by its name, uint8 [n, S, S, 3], in their order.
    """
    found: list[tuple[Place, Place]] = []
    seen: dict[bytes, Place] = {}
    for split, parts in splits.items():
        own: dict[bytes, Place] = {}
        images = (image for part in parts for image in part)
        for index, image in enumerate(images):
            digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
            if digest in seen:
                found.append(((split, index), seen[digest]))
            own.setdefault(digest, (split, index))
        seen = own | seen
    return found
