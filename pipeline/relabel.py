"""Make further label sets over existing images.

Finds or creates the label set of given settings, and labels its shards. Features come from the
root, from another set that encoded the images with the same models, or from the images in the tars,
encoded again.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from semix.data.errors import InputError
from semix.data.features import (
    features_content,
    publish_features,
    read_features,
)
from semix.data.fingerprint import fingerprint
from semix.data.formats import (
    PROTOTYPES,
    CommitRecord,
    Failure,
    LabelSetRecord,
    SeriesLabels,
)
from semix.data.label_sets import IMAGES, ROOT, LabelSet, create_set, features_file, label_sets
from semix.data.licences import without_cards
from semix.data.root import Root
from semix.data.settings import load_settings, read_yaml
from semix.data.splits import RealDataConfig
from semix.data.store import Store
from semix.data.tar import GroupSample, read_shard
from semix.data.threads import mapped
from semix.pipeline.config import AnnotationConfig, BuildConfig
from semix.pipeline.plan import BuildPlan, MixGroup, planned_settings
from semix.pipeline.prototypes import measure, remove_chunks
from semix.pipeline.provenance import (
    AnnotationIdentity,
    EncoderIdentity,
    annotation_content,
    annotation_identity,
    encoder_content,
    labelling_encoders,
    unchanged,
)
from semix.pipeline.shard_job import HeartbeatCallback, Publish, failure_of

if TYPE_CHECKING:  # torch costs seconds
    from torch import Tensor

    from semix.pipeline.annotate import Annotator

# Settings that belong to one rule or model: if that changes, they fall back to their defaults.
BELONGS_TO = {"rule": ("scale", "temperature"), "model": ("pretrained", "revision")}
PLAIN_TEXT = re.compile(r"[\w./@:-]+", re.ASCII)
# Images in one forward pass. Part of a set's identity: the batch layout changes the last bits.
BATCH = 64
THREADS = 8  # for labelling from stored features; they mostly wait for the store

Encoder = TypeVar("Encoder", bound=EncoderIdentity)
Features = dict[str, "Tensor"]  # float32 [G, A, D] by encoder


def relabelled_config(root: Root, overrides: Sequence[str]) -> BuildConfig:
    """The root's config with another annotation.

    Raises:
        InputError: an override of something else, or one that does not fit.
    """
    for override in overrides:
        if not override.startswith("annotation."):
            remedy = "the images are made; only annotation.* can change"
            raise InputError("--set", override, remedy)
    config = planned_settings(root.plan)
    new = dict(override.removeprefix("annotation.").partition("=")[::2] for override in overrides)
    reset = {  # keys that fall back to their defaults
        key
        for name, keys in BELONGS_TO.items()
        if name in new and new[name].strip() != config["annotation"][name]
        for key in keys
    }
    annotation = {key: value for key, value in config["annotation"].items() if key not in reset}
    return load_settings(BuildConfig, {**config, "annotation": annotation}, overrides)


def is_own(root: Root, config: BuildConfig) -> bool:
    """Whether this annotation gives the labels that are in the root's shards already."""
    planned, new = (
        load_settings(BuildConfig, planned_settings(root.plan)).annotation,
        config.annotation,
    )
    content = annotation_content(planned, own_encoders(root))
    return annotation_content(new, encoders_of(root, new)) == content


def plan_set(root: Root, config: BuildConfig) -> LabelSet:
    """The label set of this annotation; writes set.json if it is new."""
    # An existing set keeps the source of features that it was started with.
    return create_set(root, set_record(root, config.annotation))


def set_record(root: Root, annotation: AnnotationConfig) -> LabelSetRecord:
    """The set.json of a new set."""
    encoders, plan = encoders_of(root, annotation), root.plan.digest
    return LabelSetRecord(
        # The images' plan, and all that decides their labels, but no paths of models.
        digest=fingerprint([plan, annotation_content(annotation, encoders), BATCH]),
        plan=plan,
        annotation=annotation.model_dump(mode="json"),
        encoders=dict(encoders),
        features=_features_source(root, encoders),
        batch=BATCH,
    )


def encoders_of(root: Root, annotation: AnnotationConfig) -> AnnotationIdentity:
    """Name and file hashes of each CLIP model, as in plan.json.

    Relabelling from stored features needs no CLIP, so its files may be on another machine: a model
    without local files counts as the root's model if it has the same name.
    """
    identity, planned = annotation_identity(annotation), own_encoders(root)
    first = _planned_if_same(_without_second(identity), _without_second(planned))
    if "second" in identity:
        first["second"] = _planned_if_same(identity["second"], planned.get("second"))
    return first


def own_encoders(root: Root) -> AnnotationIdentity:
    """The encoders of the root's stored features."""
    return root.plan.models["annotation"]


def annotation_of(labels: LabelSet) -> AnnotationConfig:
    return load_settings(AnnotationConfig, labels.record.annotation)


def differing_settings(labels: LabelSet) -> dict[str, Any]:
    """Settings of a set's annotation, by name, that differ from those of its root's own labels."""
    planned = load_settings(AnnotationConfig, labels.root.plan.config.get("annotation", {}))
    old, new = planned.model_dump(mode="json"), annotation_of(labels).model_dump(mode="json")
    return {name: value for name, value in new.items() if old[name] != value}


def command_of(labels: LabelSet) -> str:
    """The command that completes a set: `semix relabel ROOT --set annotation.scale=4.0`."""
    words = ["semix", "relabel", labels.root.url]
    for name, value in differing_settings(labels).items():
        words += ["--set", f"annotation.{name}={_yaml(value)}"]
    return shlex.join(words)


def _yaml(value: object) -> str:
    """The value as text for `--set`, without quotes where possible."""
    plain = isinstance(value, str) and PLAIN_TEXT.fullmatch(value) and read_yaml(value) == value
    return str(value) if plain else json.dumps(value)


def ensure_set_prototypes(
    labels: LabelSet, *, device: str = "auto", heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Measure the prototypes of a set, or copy those of the same encoder.

    The root, or the set whose features this one uses, has prototypes of the same encoder: then
    neither CLIP nor the real images are needed.
    """
    store = labels.store
    if store.exists(labels.prototypes):
        return
    source = None if labels.record.features == IMAGES else labels.feature_source
    name = source.prototypes if source else PROTOTYPES
    content = measure(
        annotation_of(labels),
        load_settings(RealDataConfig, labels.root.plan.config["real"]),
        device=device,
        identity=labelling_encoders(labels.record),
        store=store,
        known=store.get(name) if store.exists(name) else None,
        heartbeat=heartbeat,
    )
    store.create(labels.prototypes, content)
    remove_chunks(store)


class RelabelJob:
    """Makes the labels of one label set of a root, whose prototypes are measured already."""

    def __init__(self, labels: LabelSet, plan: BuildPlan) -> None:
        self.labels, self.plan = labels, plan
        self.store = labels.store
        self.annotator: Annotator | None = None

    @property
    def num_shards(self) -> int:
        return self.labels.root.plan.num_shards

    def missing(self) -> Sequence[int]:
        return self.labels.missing()

    def is_done(self, shard: int) -> bool:
        """Also true if the images were removed meanwhile: there is nothing to label."""
        return not self.labels.root.is_committed(shard) or self.labels.is_labelled(shard)

    def failed_attempts(self, missing: Sequence[int]) -> Mapping[int, int]:
        return self.labels.failed_attempts(missing)

    def lease(self, shard: int) -> str:
        return f"labels-{self.labels.digest[:12]}-{shard:07d}"

    def load(self, *, device: str, heartbeat: HeartbeatCallback) -> None:
        from semix.pipeline.annotate import build_annotator

        config = annotation_of(self.labels)
        if self.labels.record.features == IMAGES:
            self._check_same_encoders(config)
        prototypes = self.store.get(self.labels.prototypes)
        self.annotator = build_annotator(config, prototypes, device=device)

    def make(self, shard: int, *, heartbeat: HeartbeatCallback) -> Publish:
        assert self.annotator is not None, "load() comes first"
        record = self.labels.root.record(shard)
        if record is None:
            return lambda: "its images are gone; they are made again first"
        labelled = label_shard(
            record,
            labels=self.labels,
            plan=self.plan,
            annotator=self.annotator,
            heartbeat=heartbeat,
        )

        def publish() -> str:
            labelled.publish()
            return f"{record.groups} groups labelled"

        return publish

    def record_failure(self, failure: Failure) -> None:
        self.labels.record_failure(failure)

    def _check_same_encoders(self, config: AnnotationConfig) -> None:
        local = encoders_of(self.labels.root, config)
        recorded = labelling_encoders(self.labels.record)
        if annotation_content(config, local) != annotation_content(config, recorded):
            remedy = "its files are not those that this label set was started with"
            raise InputError("annotation.model", config.model, remedy)


def label_stored(
    labels: LabelSet,
    shards: Iterable[int],
    *,
    plan: BuildPlan,
    made: Callable[[int], None] = lambda shard: None,
) -> None:
    """Label these shards from stored features, on threads of this process: no CLIP, no pixels.

    A failure is recorded and stops no other shard. No shard is claimed: each takes milliseconds,
    and two processes that make the same labels publish the same bytes.

    Args:
        plan: of the root.
        made: called on this thread with the number of each shard, after it was tried.
    """
    job = RelabelJob(labels, plan)
    job.load(device="cpu", heartbeat=lambda: None)

    def label(shard: int) -> int:
        try:
            job.make(shard, heartbeat=lambda: None)()
        except InputError:
            raise
        except Exception as error:
            job.record_failure(failure_of(shard, error))
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
) -> "LabelledShard":
    """Label the images of one committed shard.

    Raises:
        ValueError: the features or the tar are damaged, or not as recorded.
    """
    groups = [plan.group(index) for index in record.group_numbers]
    features = _features(record, groups, labels=labels, annotator=annotator, heartbeat=heartbeat)
    series = [
        SeriesLabels(group=group.index, **series_labels.label_fields())
        for group, series_labels in zip(groups, annotator.annotate(features, groups), strict=True)
    ]
    return LabelledShard(record, labels, series, features)


@dataclass(frozen=True)
class LabelledShard:
    """The labels of one shard, not yet published."""

    record: CommitRecord
    labels: LabelSet
    series: list[SeriesLabels]
    features: Features

    def publish(self) -> bool:
        """Publish the labels, in one object; return False if the images have labels already."""
        record, labels, file = self.record, self.labels, None
        if labels.record.features == IMAGES:  # new features are stored with this set
            file = publish_features(
                labels.store,
                features_content(self.features),
                shard=record.shard,
                folder=labels.folder,
            )
        return labels.commit(record.shard, images=record.sha256, groups=self.series, features=file)


def encode_images(
    store: Store,
    record: CommitRecord,
    groups: Sequence[MixGroup],
    *,
    annotator: "Annotator",
    batch: int,
    heartbeat: Callable[[], None] = lambda: None,
) -> Features:
    """Encode the images of a shard in batches of one size, with one batch of pixels in memory.

    Args:
        batch: images in one forward pass; the last one is padded, because its size would change
            the last bits.
    Raises:
        ValueError: the tar is damaged, not the recorded one, or holds other series.
    """
    import torch

    features: dict[str, list[Tensor]] = {}
    for pixels in _batches(store, record, groups, batch):
        padded = np.concatenate([pixels, np.repeat(pixels[-1:], batch - len(pixels), axis=0)])
        for key, rows in annotator.encode(torch.from_numpy(padded)).items():
            features.setdefault(key, []).append(rows[: len(pixels)])
        heartbeat()
    shape = (len(groups), len(groups[0].mixture))
    return {key: torch.cat(rows).unflatten(0, shape) for key, rows in features.items()}


def series_of(
    store: Store, record: CommitRecord, groups: Sequence[MixGroup]
) -> Iterator[GroupSample]:
    """Yield the series of a shard; at the end they are verified against its record and the plan.

    Raises:
        ValueError: a damaged tar, other bytes than recorded, or other series; it names the tar.
    """
    for sample, group in zip(read_shard(store, record, hashed=True), groups, strict=True):
        series = sample.record
        if series.classes != list(group.classes) or len(sample.images) != len(group.mixture):
            raise ValueError(f"{record.tar}: group {series.group} is not the one that its plan has")
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
    import torch

    sizes = {"groups": len(groups), "images": len(groups[0].mixture)}
    arrays = read_features(labels.store, features_file(record, labels), **sizes)
    return {name: torch.from_numpy(array).float() for name, array in arrays.items()}


def _batches(
    store: Store, record: CommitRecord, groups: Sequence[MixGroup], size: int
) -> Iterator[np.ndarray]:
    images: list[np.ndarray] = []
    for sample in series_of(store, record, groups):
        try:
            images += list(sample.pixels())
        except ValueError as error:
            raise ValueError(f"{record.tar}: {error}") from None
        while len(images) >= size:
            yield _stack(images[:size], record)
            images = images[size:]
    if images:
        yield _stack(images, record)


def _stack(images: list[np.ndarray], record: CommitRecord) -> np.ndarray:
    if len({image.shape for image in images}) > 1:
        raise ValueError(f"{record.tar}: its images differ in size")
    return np.stack(images)


def _features_source(root: Root, encoders: AnnotationIdentity) -> str:
    """The root, if its features suit; else a set that encoded the images with these encoders."""
    if _covers(own_encoders(root), encoders):
        return ROOT
    for digest in label_sets(root):
        record = LabelSet(root, digest).record
        if record.features == IMAGES and _covers(labelling_encoders(record), encoders):
            return digest
    return IMAGES


def _covers(stored: AnnotationIdentity, needed: AnnotationIdentity) -> bool:
    """Whether features by the encoders `stored` suffice for labels by the encoders `needed`."""
    if encoder_content(stored) != encoder_content(needed):
        return False
    second, stored_second = needed.get("second"), stored.get("second")
    if not second:
        return True
    return stored_second is not None and encoder_content(stored_second) == encoder_content(second)


def _without_second(encoders: AnnotationIdentity) -> AnnotationIdentity:
    """The identity without the second encoder."""
    first = encoders.copy()
    first.pop("second", None)
    return first


def _planned_if_same(encoder: Encoder, planned: Encoder | None) -> Encoder:
    """The root's encoder where this one equals it, or has its name and no local files."""
    if planned is None:
        return encoder
    if not encoder["files"] and without_cards({**planned, "files": {}}) == without_cards(encoder):
        return planned
    result = encoder.copy()
    if unchanged(encoder_content(planned), encoder_content(encoder)):
        result["files"] = planned["files"]  # an older root may have hashed more files
    return result
