"""CLIP features beside a shard's images, and the class prototypes to compare them with."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from data.errors import InputError
from data.root import PROTOTYPES, Root
from data.store import Store
from data.tensors import read_tensors

if TYPE_CHECKING:  # torch costs seconds
    from torch import Tensor


def of_unit_length(annotation: Mapping[str, Any]) -> bool:
    """Whether these annotation settings compare features and prototypes of length 1."""
    return bool(annotation.get("normalize", False))


def read_features(
    store: Store, file: Mapping[str, Any], *, groups: int, unit: bool = False
) -> "Tensor":
    """The features of a shard, float32 [G, A, D], in the order of its groups.

    Args:
        file: the `features` of a shard's record.
        groups: how many the shard holds.
        unit: scale each to length 1.
    Raises:
        ValueError: the file is not there, damaged, or of another number of groups; named.
    """
    features = _tensor(store, file["name"], "features")
    if features.ndim != 3 or len(features) != groups:
        found = "x".join(map(str, features.shape))
        raise ValueError(f"{file['name']}: holds {found} values, wanted {groups} groups")
    features = features.float()
    return features / features.norm(dim=-1, keepdim=True) if unit else features


def read_vectors(root: Root, name: str = PROTOTYPES, *, unit: bool = False) -> "Tensor":
    """Class prototypes, float32 [K, D].

    Args:
        unit: those of features of length 1.
    Raises:
        InputError: they are not there.
        ValueError: they are damaged.
    """
    if not root.store.exists(name):
        raise InputError("url", root.url, f"holds no {name}; run `semix resume`")
    return _tensor(root.store, name, "unit" if unit else "prototypes").float()


def _tensor(store: Store, name: str, key: str) -> "Tensor":
    try:
        content = store.get(name)
    except FileNotFoundError:
        raise ValueError(f"{name}: is not there") from None
    tensors, _ = read_tensors(content, where=name)
    if key not in tensors:
        raise ValueError(f"{name}: holds no tensor {key!r}")
    return tensors[key]
