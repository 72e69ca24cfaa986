"""Further labels for images that are there: which set some settings mean, and labelling its shards.

Features come from the root, from another set that read the images with the same encoders, or from
the images in the tars, encoded anew.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from semix.data.errors import InputError, TooLarge
from semix.data.fingerprint import fingerprint
from semix.data.formats import (
    PROTOTYPES,
    CommitRecord,
    Failure,
    File,
    LabelSetRecord,
    SeriesLabels,
)
from semix.data.images import decode_image
from semix.data.label_sets import IMAGES, ROOT, LabelSet, create_set, label_sets
from semix.data.root import Root
from semix.data.settings import load_settings, read_yaml
from semix.data.splits import RealDataConfig
from semix.data.store import Store
from semix.data.tar import GroupSample, read_shard
from semix.data.tensors import read_tensors
from semix.data.threads import mapped
from semix.pipeline.config import AnnotationConfig, BuildConfig
from semix.pipeline.plan import BuildPlan, MixGroup
from semix.pipeline.prototypes import measure, remove_chunks
from semix.pipeline.provenance import (
    AnnotationIdentity,
    EncoderIdentity,
    annotation_content,
    annotation_identity,
    encoder_content,
    labelling_encoders,
    planned_models,
    unchanged,
)
from semix.pipeline.root import plan_of
from semix.pipeline.shard_job import HeartbeatCallback, Making, failure_of, finish

if TYPE_CHECKING:  # torch costs seconds
    from semix.pipeline.annotate import Annotator
    from torch import Tensor

# Settings that mean nothing beside another rule or model; they fall back to their defaults.
BELONGS_TO = {"rule": ("scale", "temperature"), "model": ("pretrained", "revision")}
PLAIN = re.compile(r"[\w./@:-]+", re.ASCII)
# Images in one forward pass. Part of a set's identity: the batch layout moves last bits.
BATCH = 64
THREADS = 8  # that label from stored features; they wait for the store most of the time

Encoder = TypeVar("Encoder", bound=EncoderIdentity)
Features = dict[str, "Tensor"]  # by encoder, each float32 [G, A, D]


def relabelled_config(root: Root, overrides: Sequence[str]) -> BuildConfig:
    """The root's config with another annotation.

    Raises:
        InputError: an override of something else, or one that does not fit.
    """
    for override in overrides:
        if not override.startswith("annotation."):
            remedy = "the images are made; only annotation.* can change"
            raise InputError("--set", override, remedy)
    own = root.plan.config
    given = dict(override.removeprefix("annotation.").partition("=")[::2] for override in overrides)
    left = {
        key
        for changed, keys in BELONGS_TO.items()
        if changed in given and given[changed].strip() != own["annotation"][changed]
        for key in keys
    }
    kept = {key: value for key, value in own["annotation"].items() if key not in left}
    return load_settings(BuildConfig, {**own, "annotation": kept}, overrides)


def is_own(root: Root, config: BuildConfig) -> bool:
    """Whether these are the labels that the root's images carry already."""
    own, wanted = load_settings(BuildConfig, root.plan.config).annotation, config.annotation
    there = annotation_content(own, own_encoders(root))
    return annotation_content(wanted, encoders_of(root, wanted)) == there


def plan_set(root: Root, config: BuildConfig) -> LabelSet:
    """The label set of this annotation; its set.json is written where it is new."""
    # One that is there keeps the source of features it was started with.
    return create_set(root, set_record(root, config.annotation))


def set_record(root: Root, annotation: AnnotationConfig) -> LabelSetRecord:
    """What set.json says of a new set."""
    encoders, plan = encoders_of(root, annotation), root.plan.digest
    return LabelSetRecord(
        # The images' plan, and all that decides their labels, wherever models lie.
        digest=fingerprint([plan, annotation_content(annotation, encoders), BATCH]),
        plan=plan,
        annotation=annotation.model_dump(mode="json"),
        encoders=dict(encoders),
        features=_features_source(root, encoders),
        batch=BATCH,
    )


def encoders_of(root: Root, annotation: AnnotationConfig) -> AnnotationIdentity:
    """Name and file hashes of each CLIP model, as in plan.json.

    Relabelling from stored features needs no CLIP, so its files may be on another machine:
    those that are not here, and are called as the root's own, count as the root's own.
    """
    found, own = annotation_identity(annotation), own_encoders(root)
    first = _known(_first(found), _first(own))
    if "second" in found:
        first["second"] = _known(found["second"], own.get("second"))
    return first


def own_encoders(root: Root) -> AnnotationIdentity:
    """Those that the root's stored features are from."""
    return planned_models(root.plan)["annotation"]


def annotation_of(labels: LabelSet) -> AnnotationConfig:
    return load_settings(AnnotationConfig, labels.record.annotation)


def differing_settings(labels: LabelSet) -> dict[str, Any]:
    """Settings of a set's annotation that are not those of its root's own labels, by name."""
    own = load_settings(AnnotationConfig, labels.root.plan.config.get("annotation", {}))
    there, here = own.model_dump(mode="json"), annotation_of(labels).model_dump(mode="json")
    return {name: value for name, value in here.items() if there[name] != value}


def command_of(labels: LabelSet) -> str:
    """The command that completes a set: `semix relabel ROOT --set annotation.scale=4.0`."""
    words = ["semix", "relabel", labels.root.url]
    for name, value in differing_settings(labels).items():
        words += ["--set", f"annotation.{name}={_yaml(value)}"]
    return shlex.join(words)


def _yaml(value: object) -> str:
    """A text that `--set` reads as this value: plain where it can be."""
    plain = isinstance(value, str) and PLAIN.fullmatch(value) and read_yaml(value) == value
    return str(value) if plain else json.dumps(value)


def ensure_set_prototypes(
    labels: LabelSet, *, device: str = "auto", heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Measure what the set needs of the real training split, or take it from where it is known.

    Prototypes of the root, or of the set whose features serve this one, are of the same encoder:
    then neither CLIP nor the real images are touched.
    """
    store = labels.store
    if store.exists(labels.prototypes):
        return
    other = None if labels.record.features == IMAGES else labels.keeper
    beside = other.prototypes if other else PROTOTYPES
    content = measure(
        annotation_of(labels),
        load_settings(RealDataConfig, labels.root.plan.config["real"]),
        device=device,
        identity=labelling_encoders(labels.record),
        store=store,
        known=store.get(beside) if store.exists(beside) else None,
        heartbeat=heartbeat,
    )
    store.create(labels.prototypes, content)
    remove_chunks(store)


class RelabelJob:
    """One label set of a root as work for a worker; its prototypes are measured already."""

    def __init__(self, labels: LabelSet) -> None:
        self.labels = labels
        self.store = labels.store
        self.annotator: Annotator | None = None

    @cached_property
    def plan(self) -> BuildPlan:
        return plan_of(self.labels.root)

    @property
    def num_shards(self) -> int:
        return self.labels.root.plan.num_shards

    def missing(self) -> Sequence[int]:
        return self.labels.missing()

    def is_done(self, shard: int) -> bool:
        """Also true where the images are gone since our look: there is nothing to label."""
        record = self.labels.root.record(shard)
        return record is None or self.labels.is_committed(shard, record.sha256)

    def failed_attempts(self, missing: Sequence[int]) -> Mapping[int, int]:
        return self.labels.failed_attempts(missing)

    def lease(self, shard: int) -> str:
        return f"labels-{self.labels.digest[:12]}-{shard:07d}"

    def load(self, *, device: str, heartbeat: HeartbeatCallback) -> None:
        from semix.pipeline.annotate import build_annotator

        config = annotation_of(self.labels)
        if self.labels.record.features == IMAGES:
            self._refuse_other_encoders(config)
        prototypes = self.store.get(self.labels.prototypes)
        self.annotator = build_annotator(config, prototypes, device=device)

    def make(self, shard: int, *, heartbeat: HeartbeatCallback) -> Making[str]:
        assert self.annotator is not None, "load() comes first"
        record = self.labels.root.record(shard)
        if record is None:
            return "its images are gone; they are made again first"
        yield from label_shard(
            record,
            labels=self.labels,
            plan=self.plan,
            annotator=self.annotator,
            heartbeat=heartbeat,
        )
        return f"{record.groups} groups labelled"

    def record_failure(self, failure: Failure) -> None:
        self.labels.record_failure(failure)

    def _refuse_other_encoders(self, config: AnnotationConfig) -> None:
        here = encoders_of(self.labels.root, config)
        there = labelling_encoders(self.labels.record)
        if annotation_content(config, here) != annotation_content(config, there):
            remedy = "its files are not those that this label set was started with"
            raise InputError("annotation.model", config.model, remedy)


def label_stored(
    labels: LabelSet, shards: Iterable[int], *, made: Callable[[int], None] = lambda shard: None
) -> None:
    """Label these shards from stored features, on threads of this process: no CLIP, no pixels.

    One that fails is recorded and stops no other. Nothing is claimed: a shard takes milliseconds,
    and two that make the same labels publish the same bytes.

    Args:
        made: called here, with the number of each shard that was tried.
    """
    work = RelabelJob(labels)
    work.load(device="cpu", heartbeat=lambda: None)

    def label(shard: int) -> int:
        try:
            finish(work.make(shard, heartbeat=lambda: None))
        except InputError:
            raise
        except Exception as error:
            work.record_failure(failure_of(shard, error))
        return shard

    for shard in mapped(label, shards, threads=THREADS):
        made(shard)


def label_shard(
    record: CommitRecord,
    *,
    labels: LabelSet,
    plan: BuildPlan,
    annotator: "Annotator",
    heartbeat: Callable[[], None] = lambda: None,
) -> Making[bool]:
    """Label the images of one committed shard in one object; False if they are labelled already.

    Pauses once they are labelled and only the labels are left to publish.

    Raises:
        ValueError: its features or its tar are damaged, or other ones than recorded.
    """
    groups = [plan.group(index) for index in record.group_numbers]
    features = _features(record, groups, labels=labels, annotator=annotator, heartbeat=heartbeat)
    found = [
        SeriesLabels(group=group.index, **part.parts())
        for group, part in zip(groups, annotator.annotate(features, groups), strict=True)
    ]
    yield
    file = None
    if labels.record.features == IMAGES:  # they are new: this set keeps them
        file = store_features(labels.store, features, stem=labels.stem(record.shard))
    return labels.commit(record.shard, images=record.sha256, groups=found, features=file)


def features_file(record: CommitRecord, labels: LabelSet | None) -> File:
    """The features that labels of a shard are made from, where they are stored.

    Raises:
        ValueError: the set that keeps them has none of the shard as it is now.
    """
    keeper = labels.keeper if labels else None
    if keeper is None:
        return record.features
    head = keeper.head(record.shard)
    if head is None or head.images != record.sha256 or head.features is None:
        raise ValueError(
            f"labels/{keeper.digest[:12]} has no features of shard {record.shard} as it is now; "
            "complete that set first"
        )
    return head.features


def read_stored(store: Store, file: File, groups: Sequence[MixGroup]) -> Features:
    """Stored features of a shard.

    Raises:
        ValueError: the file is not there, not as recorded, or of other series.
    """
    try:
        content = store.get(file.name, most=file.most)
    except FileNotFoundError:
        raise ValueError(f"{file.name}: the shard's features are not there") from None
    except TooLarge as error:
        raise ValueError(str(error)) from None  # a fault of this shard, like other damage
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise ValueError(f"{file.name}: does not have the recorded SHA-256")
    found, _ = read_tensors(content, where=file.name)
    wanted = (len(groups), len(groups[0].mixture))
    for key, tensor in found.items():
        if tensor.ndim != 3 or tensor.shape[:2] != wanted:
            shape = f"{key} is of shape {list(tensor.shape)}, not {[*wanted]}, D"
            raise ValueError(f"{file.name}: {shape}")
    return {key: tensor.float() for key, tensor in found.items()}


def store_features(store: Store, features: Features, *, stem: str) -> File:
    """Keep features as fp16 under a name that carries their hash."""
    from safetensors.torch import save

    content = save({key: tensor.half().contiguous() for key, tensor in features.items()})
    digest = hashlib.sha256(content).hexdigest()
    name = f"{stem}-{digest[:8]}.features.safetensors"
    store.create(name, content)  # what is there by this name has the same content
    return File(name=name, sha256=digest, bytes=len(content))


def encode_images(
    store: Store,
    record: CommitRecord,
    groups: Sequence[MixGroup],
    *,
    annotator: "Annotator",
    batch: int,
    heartbeat: Callable[[], None] = lambda: None,
) -> Features:
    """Encode the images of a shard in batches of one size; one batch of pixels is in memory.

    Args:
        batch: images in one forward pass; the last one is padded, because its size would move
            the last bits.
    Raises:
        ValueError: the tar is damaged, not the recorded one, or holds other series.
    """
    import torch

    parts: dict[str, list[Tensor]] = {}
    for pixels in _batches(store, record, groups, batch):
        padded = np.concatenate([pixels, np.repeat(pixels[-1:], batch - len(pixels), axis=0)])
        for key, rows in annotator.encode(torch.from_numpy(padded)).items():
            parts.setdefault(key, []).append(rows[: len(pixels)])
        heartbeat()
    shape = (len(groups), len(groups[0].mixture))
    return {key: torch.cat(rows).unflatten(0, shape) for key, rows in parts.items()}


def series_of(
    store: Store, record: CommitRecord, groups: Sequence[MixGroup]
) -> Iterator[GroupSample]:
    """The series of a shard, sure to be those that its record and the plan name once it ends.

    Raises:
        ValueError: a damaged tar, other bytes than recorded, or other series; names the tar.
    """
    for sample, group in zip(read_shard(store, record, hashed=True), groups, strict=True):
        found = sample.record
        if found.classes != list(group.classes) or len(sample.images) != len(group.mixture):
            raise ValueError(f"{record.tar}: group {found.group} is none of its plan here")
        yield sample


def _features(
    record: CommitRecord,
    groups: list[MixGroup],
    *,
    labels: LabelSet,
    annotator: "Annotator",
    heartbeat: Callable[[], None],
) -> Features:
    if labels.record.features == IMAGES:
        batch = labels.record.batch
        return encode_images(
            labels.store, record, groups, annotator=annotator, batch=batch, heartbeat=heartbeat
        )
    return read_stored(labels.store, features_file(record, labels), groups)


def _batches(
    store: Store, record: CommitRecord, groups: Sequence[MixGroup], size: int
) -> Iterator[np.ndarray]:
    waiting: list[np.ndarray] = []
    for sample in series_of(store, record, groups):
        waiting += _decoded(sample, record)
        while len(waiting) >= size:
            yield _stacked(waiting[:size], record)
            waiting = waiting[size:]
    if waiting:
        yield _stacked(waiting, record)


def _decoded(sample: GroupSample, record: CommitRecord) -> list[np.ndarray]:
    try:
        return [decode_image(image) for image in sample.images]
    except ValueError as error:
        raise ValueError(f"{record.tar}: group {sample.record.group}: {error}") from None


def _stacked(images: list[np.ndarray], record: CommitRecord) -> np.ndarray:
    if len({image.shape for image in images}) > 1:
        raise ValueError(f"{record.tar}: its images differ in size")
    return np.stack(images)


def _features_source(root: Root, encoders: AnnotationIdentity) -> str:
    """The root, if its features serve; else a set that read the images with these encoders."""
    if _covers(own_encoders(root), encoders):
        return ROOT
    for digest in label_sets(root):
        other = LabelSet(root, digest).record
        if other.features == IMAGES and _covers(labelling_encoders(other), encoders):
            return digest
    return IMAGES


def _covers(there: AnnotationIdentity, wanted: AnnotationIdentity) -> bool:
    """Whether features of `there` are all that labels by `wanted` need."""
    if encoder_content(there) != encoder_content(wanted):
        return False
    second, own = wanted.get("second"), there.get("second")
    return not second or (own is not None and encoder_content(own) == encoder_content(second))


def _first(encoders: AnnotationIdentity) -> AnnotationIdentity:
    """Without the second one."""
    first = encoders.copy()
    first.pop("second", None)
    return first


def _known(found: Encoder, own: Encoder | None) -> Encoder:
    """The root's own where it is that, or the files of one that is called so are not here."""
    if own is None:
        return found
    if not found["files"] and {**own, "files": {}} == found:
        return own
    here = found.copy()
    if unchanged(encoder_content(own), encoder_content(found)):
        here["files"] = own["files"]  # perhaps of an older root, which hashed more
    return here
