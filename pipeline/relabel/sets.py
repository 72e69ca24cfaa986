"""Which label set some settings mean, and where its features come from."""

import json
from collections.abc import Sequence

from data.errors import InputError
from data.label_records import SET_SCHEMA, Record, set_digest
from data.label_sets import LabelSet, create_set, label_sets
from data.root import PROTOTYPES, Root
from data.settings import load_settings
from pipeline.config import AnnotationConfig, BuildConfig
from pipeline.provenance import annotation_identity

# Settings that mean nothing beside another rule or model; they fall back to their defaults.
BELONGS_TO = {"rule": ("scale", "temperature"), "model": ("pretrained", "revision")}
ROOT, IMAGES = "root", "images"  # where features come from, besides another set
# Images in one forward pass. Part of a set's identity: the batch layout moves last bits.
BATCH = 64


def relabelled_config(root: Root, overrides: Sequence[str]) -> BuildConfig:
    """The root's config with another annotation.

    Raises:
        InputError: an override of something else, or one that does not fit.
    """
    for override in overrides:
        if not override.startswith("annotation."):
            remedy = "the images are made; only annotation.* can change"
            raise InputError("--set", override, remedy)
    own = root.plan["config"]
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
    own = load_settings(BuildConfig, root.plan["config"]).annotation
    return config.annotation == own and encoders_of(root, config.annotation) == own_encoders(root)


def plan_set(root: Root, config: BuildConfig) -> LabelSet:
    """The label set of this annotation; its set.json is written where it is new."""
    # One that is there keeps the source of features it was started with.
    return create_set(root, set_record(root, config.annotation))


def set_record(root: Root, annotation: AnnotationConfig) -> Record:
    """What set.json says of a new set."""
    encoders = encoders_of(root, annotation)
    settings = annotation.model_dump(mode="json")
    plan: str = root.plan["digest"]
    return {
        "schema": SET_SCHEMA,
        "digest": set_digest(plan, settings, encoders, BATCH),
        "plan": plan,
        "annotation": settings,
        "encoders": encoders,
        "features": _features_source(root, encoders),
        "batch": BATCH,
    }


def encoders_of(root: Root, annotation: AnnotationConfig) -> Record:
    """Name and file hashes of each CLIP model, as in plan.json.

    Relabelling from stored features needs no CLIP, so its files may be on another machine:
    those that are not here, and are called as the root's own, count as the root's own.
    """
    found: Record = json.loads(json.dumps(annotation_identity(annotation)))
    own = own_encoders(root)
    first, second = _known(_first(found), _first(own)), found.get("second")
    if second is None:
        return first
    return first | {"second": _known(second, own.get("second", {}))}


def own_encoders(root: Root) -> Record:
    """Those that the root's stored features are from."""
    encoders: Record = root.plan["models"]["annotation"]
    return encoders


def annotation_of(labels: LabelSet) -> AnnotationConfig:
    return load_settings(AnnotationConfig, labels.plan["annotation"])


def prototypes_name(labels: LabelSet) -> str:
    return f"{labels.folder}/{PROTOTYPES}"


def _features_source(root: Root, encoders: Record) -> str:
    """The root, if its features serve; else a set that read the images with these encoders."""
    if _covers(own_encoders(root), encoders):
        return ROOT
    for digest in label_sets(root):
        other = LabelSet(root, digest).plan
        if other["features"] == IMAGES and _covers(other["encoders"], encoders):
            return digest
    return IMAGES


def _covers(there: Record, wanted: Record) -> bool:
    """Whether features of `there` are all that labels by `wanted` need."""
    second = wanted.get("second")
    return _first(there) == _first(wanted) and second in (None, there.get("second"))


def _first(encoders: Record) -> Record:
    return {key: value for key, value in encoders.items() if key != "second"}


def _known(found: Record, own: Record) -> Record:
    if found["files"] or {**own, "files": {}} != found:
        return found
    return own
