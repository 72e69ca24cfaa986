"""CLIP features of a shard's images: one safetensors file, from which labels can be made again."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save

from semix.data.errors import TooLarge
from semix.data.formats import File, features_name
from semix.data.store import Store
from semix.data.tensors import read_arrays

if TYPE_CHECKING:  # torch costs seconds
    from torch import Tensor

FEATURES, SECOND = "features", "second"  # names of the tensors of both encoders


def read_features(store: Store, file: File, *, groups: int, images: int) -> dict[str, np.ndarray]:
    """Read the features of a shard.

    Args:
        groups: number of series in the shard; images: of each series.
    Returns:
        float16 [groups, images, D] by encoder; the first one is called "features".
    Raises:
        ValueError: the file is missing, not as recorded, or of other series; it names the file.
    """
    content = stored_features(store, file)
    arrays, _ = read_arrays(content, where=file.name)
    if FEATURES not in arrays:
        raise ValueError(f"{file.name}: has no tensor {FEATURES!r}")
    for name, array in sorted(arrays.items()):
        problem = ""
        if array.ndim != 3 or array.shape[:2] != (groups, images):
            problem = f"has shape {list(array.shape)}, not [{groups}, {images}, width]"
        elif array.dtype != np.float16:
            problem = f"is {array.dtype}, not float16"
        if problem:
            raise ValueError(f"{file.name}: {name} {problem}")
    return arrays


def stored_features(store: Store, file: File) -> bytes:
    """The content of a features file.

    Raises:
        ValueError: the file is missing, or not as recorded.
    """
    try:
        content = store.get(file.name, max_bytes=file.max_bytes)
    except FileNotFoundError:
        raise ValueError(f"{file.name}: the shard's features are not there") from None
    except TooLarge as error:
        raise ValueError(str(error)) from None  # a fault of this shard, like other damage
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise ValueError(f"{file.name}: does not have the recorded SHA-256")
    return content


def features_content(features: "Mapping[str, Tensor]") -> bytes:
    """The content of a features file: float16, of [G, A, D] by encoder."""
    return save({name: rows.half().contiguous().numpy() for name, rows in features.items()})


def publish_features(store: Store, content: bytes, *, shard: int, folder: str) -> File:
    """Publish a features file under a name that carries its hash.

    Args:
        folder: `shards`, or that of a label set.
    """
    digest = hashlib.sha256(content).hexdigest()
    name = features_name(shard, digest, folder)
    store.put(name, content)
    return File(name=name, sha256=digest, bytes=len(content))
