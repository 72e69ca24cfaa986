"""What a plan needs of the real data, measured once: class prototypes, and similar pairs."""

import json
import math
from typing import TYPE_CHECKING

from data.real import load_real
from data.root import Root
from pipeline.plan.seeds import hashed_seed
from pipeline.root import PAIRS, plan_of

if TYPE_CHECKING:  # torch costs seconds, and most of what opens a root does without
    from torch import Tensor

PROTOTYPES = "prototypes.safetensors"


def ensure_prototypes(root: Root, *, device: str = "auto") -> None:
    """Measure what the plan needs of the real data, once: class prototypes, and similar pairs."""
    if not root.store.exists(PROTOTYPES):
        _measure(root, device)
    ensure_pairs(root)


def _measure(root: Root, device: str) -> None:
    from safetensors.torch import save

    from pipeline.annotate import measure_prototypes
    from pipeline.clip import ClipEncoder
    from pipeline.device import resolve_device

    plan = plan_of(root)
    encoder = ClipEncoder(plan.config.annotation, device=resolve_device(device))
    train = load_real(plan.config.real).train
    measured = measure_prototypes(train, encoder, len(plan.class_names))
    scale = measured.scale(plan.config.annotation.scale)
    # A real image at its own prototype has weight 1; this is the label it would get.
    implied = 1 / (1 + math.exp(-scale / 2))
    metadata = {
        "encoder": json.dumps(root.plan["models"]["annotation"], sort_keys=True),
        "real": train.digest,
        "weight_variance": repr(measured.weight_variance),
        "scale": repr(scale),
        "label_of_average_real_image": repr(implied),
    }
    root.store.create(PROTOTYPES, save({"prototypes": measured.vectors}, metadata))


def ensure_pairs(root: Root) -> None:
    """Draw the pairs of a plan that mixes similar classes, once, into pairs.json."""
    plan = plan_of(root)
    wanted = plan.config.mixing.pairs
    if wanted.kind != "similar" or root.store.exists(PAIRS):
        return
    from pipeline.plan.similar import similar_pairs

    vectors, _ = read_prototypes(root)
    pairs = similar_pairs(
        vectors,
        plan.num_pairs,
        temperature=wanted.temperature,
        seed=hashed_seed(plan.config.mixing.seed, "pairs"),
    )
    root.store.create(PAIRS, json.dumps(pairs).encode())


def read_prototypes(root: Root) -> tuple["Tensor", dict[str, str]]:
    """Prototypes float32 [K, D] and their metadata, `scale` among it."""
    from safetensors.torch import load

    content = root.store.get(PROTOTYPES)
    length = int.from_bytes(content[:8], "little")
    return load(content)["prototypes"], json.loads(content[8 : 8 + length])["__metadata__"]
