"""What a plan needs of the real data, measured once: class prototypes, and similar pairs."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from data.fingerprint import hashed_seed
from data.leases import Renewing, claim, release
from data.real import RealDataConfig
from data.repair import refuse_other_prototypes
from data.root import PROTOTYPES, Root
from data.store import Store
from pipeline.config import AnnotationConfig
from pipeline.root import PAIRS, plan_of

if TYPE_CHECKING:  # torch costs seconds, and most of what opens a root does without
    from torch import Tensor

CHUNKS = "prototypes"  # folder of features whose measurement is under way
LEASE = "prototypes"  # of whoever measures
FIRST_LOOK_S, LONGEST_LOOK_S = 0.25, 5.0  # between looks at a store that many workers ask


def ensure_prototypes(
    root: Root, *, device: str = "auto", beat: Callable[[], None] = lambda: None
) -> None:
    """Measure what the plan needs of the real data, once: class prototypes, and similar pairs.

    Args:
        beat: called whenever work went on, for whoever watches.
    Raises:
        InputError: a class without images, or two that CLIP cannot tell apart; committed shards
            were labelled with others.
        FloatingPointError: a feature of a real image is not a number.
    """
    if not root.store.exists(PROTOTYPES):
        config = plan_of(root).config
        content = measure(
            config.annotation,
            config.real,
            device=device,
            identity=root.plan["models"]["annotation"],
            store=root.store,
            beat=beat,
        )
        refuse_other_prototypes(root, hashlib.sha256(content).hexdigest())
        root.store.create(PROTOTYPES, content)
        remove_chunks(root.store)
    ensure_pairs(root)


def prepare(root: Root, *, device: str = "auto", beat: Callable[[], None] = lambda: None) -> None:
    """`ensure_prototypes` among many workers: one measures, the others wait, or take over from it.

    Args:
        beat: called whenever work went on, and at each look, for whoever watches.
    Raises:
        InputError, FloatingPointError: as of `ensure_prototypes`.
    """
    pause = FIRST_LOOK_S
    while not is_prepared(root):
        if claim(root.store, LEASE):
            _measure_alone(root, device, Renewing(root.store, beat))
        else:
            beat()
            time.sleep(pause)
            pause = min(1.2 * pause, LONGEST_LOOK_S)


def _measure_alone(root: Root, device: str, beat: Renewing) -> None:
    try:
        with beat.holding(LEASE):
            ensure_prototypes(root, device=device, beat=beat)
    finally:
        with suppress(OSError):  # whoever wants it sees that nobody renews it
            release(root.store, LEASE)


def is_prepared(root: Root) -> bool:
    """Whether all is there that `ensure_prototypes` makes."""
    if not root.store.exists(PROTOTYPES):
        return False
    similar = plan_of(root).config.mixing.pairs.kind == "similar"
    return not similar or root.store.exists(PAIRS)


def measure(
    config: AnnotationConfig,
    real: RealDataConfig,
    *,
    device: str,
    identity: Mapping[str, Any],
    store: Store,
    known: bytes | None = None,
    beat: Callable[[], None] = lambda: None,
) -> bytes:
    """The prototypes that `config` needs, as the bytes of a safetensors file; see `unpack`.

    What was measured before is taken: from `known`, else from the cache folder of this machine.
    Else the training images pass through CLIP once, and their features wait in `store` below
    `prototypes/`, so that a killed measurement goes on where it was.

    The caller writes the file, and then calls `remove_chunks`.

    Args:
        device: auto, cpu, cuda or cuda:N.
        identity: `pipeline.provenance.annotation_identity(config)`.
        known: prototypes measured for another annotation of the same real data, a root's say;
            for an encoder that they hold, neither images nor CLIP are touched.
    Raises:
        InputError: a class without images, or two that CLIP cannot tell apart.
        FloatingPointError: a feature of a real image is not a number.
    """
    from pipeline.annotation.prototype_file import PrototypeFile, refuse_coinciding, say_scale
    from pipeline.annotation.survey import Survey

    before = PrototypeFile.unpack(known) if known is not None else None
    survey = Survey(real, device, store, before, beat)
    found = survey.file(config, identity)
    refuse_coinciding(found, config)
    say_scale(found, config)
    return found.pack(config)


def remove_chunks(store: Store) -> None:
    """Remove the features that waited for a measurement; another process may do the same."""
    for name in store.list(CHUNKS):
        with suppress(FileNotFoundError):
            store.delete(name)


def unpack(content: bytes) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """Tensors and facts of a prototypes file.

    Returns:
        Tensors, float32: `prototypes` [K, D], the mean of each class's features; `unit` [K, D],
        the mean of its unit features at length 1; `second` and `second_unit` of a second encoder.
        Facts, as text: `encoder`, its identity as JSON; `weight_variance`, `unit_weight_variance`,
        `scale` and `label_of_average_real_image`; with `second_` before them those of the second
        encoder; `real`, the digest of the images, and `class_names` as JSON.
    Raises:
        ValueError: another file, or a damaged one.
    """
    from pipeline.annotation.sealed import open_sealed

    return open_sealed(content)


def ensure_pairs(root: Root) -> None:
    """Draw the pairs of a plan that mixes similar classes, once, into pairs.json."""
    plan = plan_of(root)
    wanted = plan.config.mixing.pairs
    if wanted.kind != "similar" or root.store.exists(PAIRS):
        return
    vectors, _ = read_prototypes(root)
    pairs = similar_pairs(
        vectors,
        plan.num_pairs,
        temperature=wanted.temperature,
        seed=hashed_seed(plan.config.mixing.seed, "pairs"),
    )
    root.store.create(PAIRS, json.dumps(pairs).encode())


def similar_pairs(
    prototypes: "Tensor", count: int, *, temperature: float, seed: int
) -> list[tuple[int, int]]:
    """Draw `count` different pairs with odds exp(cosine / temperature), in ascending order.

    Adding Gumbel noise to the log-odds and keeping the largest draws without replacement
    (Efraimidis and Spirakis 2006). Memory is that of one row of pairs and of the result.

    Args:
        prototypes: [K, D]; count: at most K (K - 1) / 2.
    """
    import torch

    unit = torch.nn.functional.normalize(prototypes.double(), dim=1)
    rng = torch.Generator().manual_seed(seed)
    keys, pairs = torch.empty(0, dtype=torch.float64), torch.empty(0, 2, dtype=torch.int64)
    for first in range(len(unit) - 1):
        cosine = unit[first + 1 :] @ unit[first]
        uniform = torch.rand(len(cosine), generator=rng, dtype=torch.float64)
        gumbel = -(-uniform.clamp(min=1e-300).log()).log()
        second = torch.arange(first + 1, len(unit))
        keys = torch.cat([keys, cosine / temperature + gumbel])
        pairs = torch.cat([pairs, torch.stack([torch.full_like(second, first), second], 1)])
        if len(keys) > count:
            keys, best = keys.topk(count)
            pairs = pairs[best]
    return sorted((first, second) for first, second in pairs.tolist())


def read_prototypes(root: Root) -> tuple["Tensor", dict[str, str]]:
    """Prototypes float32 [K, D] as measured, and the facts of `unpack`, `scale` among them.

    Raises:
        ValueError: the file is damaged.
    """
    tensors, facts = unpack(root.store.get(PROTOTYPES))
    return tensors["prototypes"], facts
