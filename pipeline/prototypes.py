"""Measure class prototypes of the real data, and draw similar pairs, once per root."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from semix.data.fingerprint import hashed_seed
from semix.data.formats import PAIRS, PROTOTYPES
from semix.data.leases import LeaseHeartbeat, claim, release
from semix.data.root import Root
from semix.data.splits import RealDataConfig
from semix.data.store import Store
from semix.data.tensors import open_sealed
from semix.data.verify import check_same_origin
from semix.pipeline.config import AnnotationConfig
from semix.pipeline.provenance import AnnotationIdentity, planned_models
from semix.pipeline.root import config_of, plan_of

if TYPE_CHECKING:  # torch costs seconds, and most of what opens a root does without
    from torch import Tensor

CHUNKS = LEASE = "prototypes"  # folder of features in progress; lease of the process that measures
FIRST_POLL_S, LONGEST_POLL_S = 0.25, 5.0  # between polls of a store that many workers ask


def ensure_prototypes(
    root: Root, *, device: str = "auto", heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Measure class prototypes, and draw similar pairs, unless the root has them.

    Args:
        heartbeat: called after each step, to show that there is progress.
    Raises:
        InputError: a class without images; two classes whose prototypes coincide; or committed
            shards were labelled with other prototypes.
        FloatingPointError: a feature of a real image is not finite.
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
        check_same_origin(root, "prototypes", hashlib.sha256(content).hexdigest())
        root.store.create(PROTOTYPES, content)
        remove_chunks(root.store)
    ensure_pairs(root)


def prepare(
    root: Root, *, device: str = "auto", heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Call `ensure_prototypes` in one of many workers; the others wait, or take over if it dies.

    Args:
        heartbeat: called after each step, and at each poll.
    Raises:
        InputError, FloatingPointError: as for `ensure_prototypes`; also if committed shards were
            made with other prototypes or pairs.
    """
    pause_s = FIRST_POLL_S
    while not is_prepared(root):
        if claim(root.store, LEASE):
            _measure_under_lease(root, device, LeaseHeartbeat(root.store, heartbeat))
        else:
            heartbeat()
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, LONGEST_POLL_S)
    for kind, digest in root.input_digests().items():
        check_same_origin(root, kind, digest)


def _measure_under_lease(root: Root, device: str, heartbeat: LeaseHeartbeat) -> None:
    try:
        with heartbeat.holding(LEASE):
            ensure_prototypes(root, device=device, heartbeat=heartbeat)
    finally:
        with suppress(OSError):  # a lease that is not renewed expires
            release(root.store, LEASE)


def is_prepared(root: Root) -> bool:
    """Whether the root has the prototypes, and the pairs if its plan mixes similar classes."""
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
    """Measure the prototypes that `config` needs; return a safetensors file, see `unpack`.

    Earlier measurements are reused, from `known` or from the cache folder of this machine.
    Otherwise CLIP encodes all training images once; their features are stored below `prototypes/`
    in `store`, so that a killed measurement can continue.

    The caller writes the file, and then calls `remove_chunks`.

    Args:
        device: auto, cpu, cuda or cuda:N.
        identity: `semix.pipeline.provenance.annotation_identity(config)`.
        known: the file of another annotation of the same real data; measurements of its encoders
            are reused.
    Raises:
        InputError: a class without images, or two whose prototypes coincide.
        FloatingPointError: a feature of a real image is not finite.
    """
    from semix.pipeline.prototype_measurement import PrototypeFile, PrototypeMeasurement

    known_file = PrototypeFile.unpack(known) if known is not None else None
    file = PrototypeMeasurement(real, device, store, f"{CHUNKS}/", known_file, heartbeat).file(
        config, identity
    )
    file.check_distinct(config)
    file.report_scale(config)
    return file.pack(config)


def remove_chunks(store: Store) -> None:
    """Remove the features of a complete measurement; another process may do the same."""
    for name in store.list(CHUNKS):
        with suppress(FileNotFoundError):
            store.delete(name)


def unpack(content: bytes) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """Tensors and facts of a prototypes file.

    Returns:
        Tensors, float32: `prototypes` [K, D], the mean of each class's features; `unit` [K, D],
        the mean of its unit-length features, itself scaled to length 1; `second` and `second_unit`
        of a second encoder.
        Facts, as text: `encoder`, its identity as JSON; `weight_variance`, `unit_weight_variance`,
        `scale` and `label_of_average_real_image`, prefixed `second_` for the second encoder;
        `real`, the digest of the images, and `class_names` as JSON.
    Raises:
        ValueError: another file, or a damaged one.
    """
    import torch

    arrays, facts = open_sealed(content)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, facts


def ensure_pairs(root: Root) -> None:
    """Draw the pairs of a plan that mixes similar classes into pairs.json, unless it exists."""
    plan = plan_of(root)
    pairs_config = plan.config.mixing.pairs
    if pairs_config.kind != "similar" or root.store.exists(PAIRS):
        return
    from semix.pipeline.prototype_measurement import similar_pairs

    vectors, _ = read_prototypes(root)
    pairs = similar_pairs(
        vectors,
        plan.num_pairs,
        temperature=pairs_config.temperature,
        seed=hashed_seed(plan.config.mixing.seed, "pairs"),
    )
    root.store.create(PAIRS, json.dumps(pairs).encode())


def read_prototypes(root: Root) -> tuple["Tensor", dict[str, str]]:
    """Prototypes float32 [K, D], not normalised, and the facts of `unpack`, with `scale`.

    Raises:
        ValueError: the file is damaged.
    """
    tensors, facts = unpack(root.store.get(PROTOTYPES))
    return tensors["prototypes"], facts


def stored_scale(root: Root) -> float:
    """The sharpening in a root's prototypes; 0 if they are missing or unreadable."""
    try:
        return float(read_prototypes(root)[1]["scale"])
    except (FileNotFoundError, ValueError):
        return 0.0
