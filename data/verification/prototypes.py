"""The class prototypes that labels come from: readable, unchanged, of the plan's encoder."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from data.fingerprint import canonical_json
from data.strict_json import read_object
from data.tensors import MOST_HEADER, read_arrays
from data.verification.problem import Problem

if TYPE_CHECKING:
    from data.root import Root

PROTOTYPES = "prototypes.safetensors"
SEAL = "semix"  # the entry of the metadata that holds facts and the hash of all values
Record = dict[str, Any]


def prototypes_problems(root: "Root", named: Counter[str]) -> Iterator[Problem]:
    """Whether they can be read, and are those that the shards were labelled with.

    Args:
        named: how many shards name which, by SHA-256; empty where they name none.
    """
    try:
        content = root.store.get(PROTOTYPES)
    except FileNotFoundError:
        if named:
            yield Problem(None, f"{PROTOTYPES} is missing", "prototypes")
        return
    if reason := unusable(content, root.plan):
        yield Problem(None, f"{PROTOTYPES} {reason}", "prototypes", (PROTOTYPES,))
        return
    ours = hashlib.sha256(content).hexdigest()
    if count := named.total() - named[""] - named[ours]:
        text = f"{PROTOTYPES} is not what {count} shards were labelled with"
        yield Problem(None, text, "prototypes")


def unusable(content: bytes, plan: Record) -> str | None:
    """Why a prototypes file cannot serve this plan; None if it can."""
    try:
        tensors, facts = _opened(content)
        encoder = read_object(facts["encoder"].encode(), what="encoder", most=MOST_HEADER)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read: {error}"
    vectors, classes = tensors.get("prototypes"), len(plan["class_names"])
    if vectors is None or vectors.ndim != 2 or len(vectors) != classes:
        shape = None if vectors is None else list(vectors.shape)
        return f"has prototypes of shape {shape}, not [{classes}, width]"
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        return "holds values that are no finite numbers"
    if encoder != plan.get("models", {}).get("annotation", encoder):
        return "was measured with another encoder than the plan's"
    return None


def _opened(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    tensors, metadata = read_arrays(content, where=PROTOTYPES)
    note = read_object(metadata[SEAL].encode(), what=SEAL, most=MOST_HEADER)
    digest = hashlib.sha256(canonical_json(note["facts"]).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} torch.{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    if digest.hexdigest() != note["sha256"]:
        raise ValueError("it does not have the SHA-256 that it names")
    return tensors, note["facts"]
