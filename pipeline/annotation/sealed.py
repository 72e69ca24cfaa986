"""Tensors with the hash of their bytes, so that a damaged copy is known for one."""

import hashlib
import json
from collections.abc import Mapping

import torch
from safetensors.torch import save
from torch import Tensor

from data.fingerprint import canonical_json
from data.tensors import read_tensors

Facts = dict[str, str]
SEAL = "semix"  # the one entry of the metadata: safetensors writes several in any order


def seal(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file, the same for the same content."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    note = {"facts": dict(facts), "sha256": _hash(whole, facts)}
    return save(whole, {SEAL: canonical_json(note)})


def open_sealed(content: bytes) -> tuple[dict[str, Tensor], Facts]:
    """Tensors and facts. Raises ValueError for anything but what `seal` gave."""
    tensors, metadata = read_tensors(content, where="tensors")
    try:
        note = json.loads(metadata[SEAL])
        facts, expected = note["facts"], note["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"tensors: not written by semix: {error}") from None
    if expected != _hash(tensors, facts):
        raise ValueError("tensors: damaged: not of the SHA-256 that is noted beside them")
    return tensors, facts


def _hash(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> str:
    digest = hashlib.sha256(canonical_json(facts).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
