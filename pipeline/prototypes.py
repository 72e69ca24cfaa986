"""What a plan needs of the real data, measured once in a root: prototypes, and similar pairs."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from semix.data.fingerprint import hashed_seed
from semix.data.formats import PAIRS, PROTOTYPES
from semix.data.leases import Renewing, claim, release
from semix.data.root import Root
from semix.data.splits import RealDataConfig
from semix.data.store import Store
from semix.data.tensors import open_sealed
from semix.data.verify import refuse_others
from semix.pipeline.config import AnnotationConfig
from semix.pipeline.provenance import AnnotationIdentity, planned_models
from semix.pipeline.root import config_of, plan_of

if TYPE_CHECKING:  # torch costs seconds, and most of what opens a root does without
    from torch import Tensor

CHUNKS = LEASE = "prototypes"  # folder of features whose measurement is under way; who measures
FIRST_LOOK_S, LONGEST_LOOK_S = 0.25, 5.0  # between looks at a store that many workers ask


def ensure_prototypes(
    root: Root, *, device: str = "auto", heartbeat: Callable[[], None] = lambda: None
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
        config = config_of(root)
        content = measure(
            config.annotation,
            config.real,
            device=device,
            identity=planned_models(root.plan)["annotation"],
            store=root.store,
            heartbeat=heartbeat,
        )
        refuse_others(root, "prototypes", hashlib.sha256(content).hexdigest())
        root.store.create(PROTOTYPES, content)
        remove_chunks(root.store)
    ensure_pairs(root)


def prepare(
    root: Root, *, device: str = "auto", heartbeat: Callable[[], None] = lambda: None
) -> None:
    """`ensure_prototypes` among many workers: one measures, the others wait, or take over from it.

    Args:
        beat: called whenever work went on, and at each look, for whoever watches.
    Raises:
        InputError, FloatingPointError: as of `ensure_prototypes`; also what is there is not what
            committed shards were made with.
    """
    pause = FIRST_LOOK_S
    while not is_prepared(root):
        if claim(root.store, LEASE):
            _measure_alone(root, device, Renewing(root.store, heartbeat))
        else:
            heartbeat()
            time.sleep(pause)
            pause = min(1.2 * pause, LONGEST_LOOK_S)
    for kind, ours in root.made_from().items():
        refuse_others(root, kind, ours)


def _measure_alone(root: Root, device: str, heartbeat: Renewing) -> None:
    try:
        with heartbeat.holding(LEASE):
            ensure_prototypes(root, device=device, heartbeat=heartbeat)
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
    identity: AnnotationIdentity,
    store: Store,
    known: bytes | None = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> bytes:
    """The prototypes that `config` needs, as the bytes of a safetensors file; see `unpack`.

    What was measured before is taken: from `known`, else from the cache folder of this machine.
    Else the training images pass through CLIP once, and their features wait in `store` below
    `prototypes/`, so that a killed measurement goes on where it was.

    The caller writes the file, and then calls `remove_chunks`.

    Args:
        device: auto, cpu, cuda or cuda:N.
        identity: `semix.pipeline.provenance.annotation_identity(config)`.
        known: prototypes measured for another annotation of the same real data, a root's say;
            for an encoder that they hold, neither images nor CLIP are touched.
    Raises:
        InputError: a class without images, or two that CLIP cannot tell apart.
        FloatingPointError: a feature of a real image is not a number.
    """
    from semix.pipeline.prototype_measurement import PrototypeFile, PrototypeMeasurement

    before = PrototypeFile.unpack(known) if known is not None else None
    found = PrototypeMeasurement(real, device, store, f"{CHUNKS}/", before, heartbeat).file(
        config, identity
    )
    found.refuse_coinciding(config)
    found.say_scale(config)
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
    import torch

    arrays, facts = open_sealed(content)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, facts


def ensure_pairs(root: Root) -> None:
    """Draw the pairs of a plan that mixes similar classes, once, into pairs.json."""
    plan = plan_of(root)
    wanted = plan.config.mixing.pairs
    if wanted.kind != "similar" or root.store.exists(PAIRS):
        return
    from semix.pipeline.prototype_measurement import similar_pairs

    vectors, _ = read_prototypes(root)
    pairs = similar_pairs(
        vectors,
        plan.num_pairs,
        temperature=wanted.temperature,
        seed=hashed_seed(plan.config.mixing.seed, "pairs"),
    )
    root.store.create(PAIRS, json.dumps(pairs).encode())


def read_prototypes(root: Root) -> tuple["Tensor", dict[str, str]]:
    """Prototypes float32 [K, D] as measured, and the facts of `unpack`, `scale` among them.

    Raises:
        ValueError: the file is damaged.
    """
    tensors, facts = unpack(root.store.get(PROTOTYPES))
    return tensors["prototypes"], facts


def stored_scale(root: Root) -> float:
    """The sharpening that prototypes of a root gave; 0 where none are there that can be read."""
    try:
        return float(read_prototypes(root)[1]["scale"])
    except (FileNotFoundError, ValueError):
        return 0.0
