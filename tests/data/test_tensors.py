"""Sealed tensors: the same bytes for the same content, and nothing else is opened."""

import json

import numpy as np
import pytest
from safetensors.numpy import load, save

from semix.data.tensors import SEAL, open_sealed, read_arrays, seal
from tests.data.whole_roots import FACTS, prototypes

VECTORS = np.eye(3, 4, dtype=np.float32)


def test_what_is_sealed_comes_back_and_is_the_same_bytes():
    """`prototypes` makes the file by hand; its hash covers facts, names, types, shapes, bytes."""
    content = seal({"prototypes": VECTORS}, FACTS)
    assert content == prototypes() == seal({"prototypes": VECTORS}, dict(reversed(FACTS.items())))
    several = {"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.zeros((0, 2))}
    tensors, facts = open_sealed(seal(several, FACTS))
    assert (facts, tensors.keys()) == (FACTS, several.keys())
    for name, tensor in several.items():
        np.testing.assert_array_equal(tensors[name], tensor, strict=True)


def test_a_strided_array_is_sealed_as_it_reads():
    tensors, _ = open_sealed(seal({"a": VECTORS.T}, {}))
    np.testing.assert_array_equal(tensors["a"], VECTORS.T)


def test_what_was_changed_or_sealed_by_nobody_is_refused():
    content = seal({"prototypes": VECTORS}, FACTS)
    note = json.loads(read_arrays(content, where="x")[1][SEAL])
    unsealed = {"prototypes": VECTORS}
    changed_facts = note | {"facts": FACTS | {"scale": "11.0"}}
    for changed, message in [
        (content[:-1] + bytes([content[-1] ^ 1]), "damaged: does not have the SHA-256"),
        (save(load(content), {SEAL: json.dumps(changed_facts)}), "damaged: does not have"),
        (save(unsealed | {"more": VECTORS}, {SEAL: json.dumps(note)}), "damaged: does not have"),
        (save(unsealed), "not written by semix"),
        (save(unsealed, {SEAL: "{"}), "EOF"),
        (save(unsealed, {SEAL: json.dumps(note | {"more": 1})}), "more: Extra inputs"),
        (content[:-1], "not a complete safetensors file"),
    ]:
        with pytest.raises(ValueError, match=f"^here: .*{message}"):
            open_sealed(changed, where="here")
