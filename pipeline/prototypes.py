"""Measure class prototypes of the real data once per root, and draw similar pairs from them."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from semix.data.fingerprint import hashed_seed
from semix.data.formats import PROTOTYPES
from semix.data.leases import LeaseHeartbeat, claim, release
from semix.data.root import Root
from semix.data.splits import RealDataConfig
from semix.data.store import Store
from semix.data.tensors import open_sealed
from semix.pipeline.config import AnnotationConfig
from semix.pipeline.plan import Build, BuildPlan
from semix.pipeline.provenance import AnnotationIdentity

if TYPE_CHECKING:  # torch costs seconds, and most of what opens a root does without
    from torch import Tensor

CHUNKS = LEASE = "prototypes"  # folder of features in progress; lease of the process that measures
FIRST_POLL_S, LONGEST_POLL_S = 0.25, 5.0  # between polls of a store that many workers ask


def ensure_prototypes(
    build: Build, *, device: str = "auto", heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Measure class prototypes, unless the root has them.

    Args:
        heartbeat: called after each step, to show that there is progress.
    Raises:
        InputError: a class without images; two classes whose prototypes coincide; or committed
            shards were labelled with other prototypes.
        FloatingPointError: a feature of a real image is not finite.
    """
    root = build.root
    if root.store.exists(PROTOTYPES):
        return
    content = measure(
        build.config.annotation,
        build.config.real,
        device=device,
        identity=root.plan.models["annotation"],
        store=root.store,
        heartbeat=heartbeat,
    )
    root.check_prototypes(content)
    root.store.create(PROTOTYPES, content)
    remove_chunks(root.store)


def prepare(
    build: Build, *, device: str = "auto", heartbeat: Callable[[], None] = lambda: None
) -> bytes:
    """Call `ensure_prototypes` in one of many workers; the others wait, or take over if it dies.

    Args:
        heartbeat: called after each step, and at each poll.
    Returns:
        The prototypes file.
    Raises:
        InputError, FloatingPointError: as for `ensure_prototypes`; also if committed shards were
            made with other prototypes.
    """
    pause_s, store = FIRST_POLL_S, build.root.store
    while not store.exists(PROTOTYPES):
        if claim(store, LEASE):
            _measure_under_lease(build, device, LeaseHeartbeat(store, heartbeat))
        else:
            heartbeat()
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, LONGEST_POLL_S)
    content = store.get(PROTOTYPES)
    build.root.check_prototypes(content)
    return content


def _measure_under_lease(build: Build, device: str, heartbeat: LeaseHeartbeat) -> None:
    try:
        with heartbeat.holding(LEASE):
            ensure_prototypes(build, device=device, heartbeat=heartbeat)
    finally:
        with suppress(OSError):  # a lease that is not renewed expires
            release(build.root.store, LEASE)


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


def drawn_pairs(plan: BuildPlan, prototypes: bytes) -> list[tuple[int, int]]:
    """The pairs of similar classes that a build mixes, ascending.

    Args:
        plan: of as many pairs, which are not drawn yet.
        prototypes: content of the prototypes file.
    """
    from semix.pipeline.prototype_measurement import similar_pairs

    vectors, mixing = unpack(prototypes)[0]["prototypes"], plan.config.mixing
    return similar_pairs(
        vectors,
        plan.num_pairs,
        temperature=mixing.pairs.temperature,
        seed=hashed_seed(mixing.seed, "pairs"),
    )


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
