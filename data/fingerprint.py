"""Digests and seeds from content: the same for the same settings and files on every machine."""

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semix.data.errors import InputError
from semix.data.files import open_regular

if TYPE_CHECKING:  # torch costs seconds
    import torch


def canonical_json(value: Any) -> str:
    """The canonical JSON text of a value: sorted keys, no spaces, no NaN.

    Raises:
        InputError: a nested value has no stable form (a set, a callable, NaN, an object).
    """
    _check_stable(value, "settings")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def fingerprint(value: Any) -> str:
    """SHA-256 of the canonical JSON, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


# Both functions hash a seed and its purpose, never a rank or an order, so that the seeds of two
# epochs are unrelated. They must not change: images and weights depend on their results.
def derived_seed(*parts: int | str) -> int:
    """A seed for training, evaluation and corruptions."""
    return int(fingerprint(list(parts))[:15], 16)  # torch takes up to 64 bits


def hashed_seed(*parts: object) -> int:
    """A seed for making images, as `hashed_seed(plan_seed, group)`; a non-negative int64."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch wants a non-negative int64


def generator_for(*parts: int | str) -> "torch.Generator":
    """A CPU generator for one purpose; generators of different `parts` are independent."""
    import torch

    return torch.Generator().manual_seed(derived_seed(*parts))


def file_digest(path: Path) -> str:
    """SHA-256 of a regular file. Raises NoRegularFile for a pipe or a device."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_stable(value: Any, path: str) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float) and math.isfinite(value):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_stable(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InputError(f"{path} key", repr(key), "keys must be text to have an identity")
            _check_stable(item, f"{path}.{key}")
    else:
        raise InputError(path, repr(value), "has no stable form; use text, numbers, lists, maps")
