"""What a dataset was made with: models and versions, and the identity that follows from them."""

import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from semix.data.fingerprint import fingerprint
from semix.data.formats import LabelSetRecord, Plan
from semix.data.machine import remembered_digest
from semix.data.model_identity import (
    AnnotationIdentity,
    EncoderIdentity,
    GeneratorIdentity,
    ModelIdentities,
    ModelIdentity,
)
from semix.pipeline.config import (
    AnnotationConfig,
    BuildConfig,
    EncoderConfig,
    GeneratorConfig,
    LoraConfig,
)
from semix.pipeline.model_paths import NOT_LOADED, local_path, lora_file, read_names, still_read

PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "peft", "numpy", "pillow")
# Where something lies, and how much may be spent or lost: no byte follows from these settings.
NON_IDENTITY_SETTINGS: dict[str, Any] = {
    "real": {"path"},
    "generator": {"model": True, "unet": True, "tiny_decoder": True, "lora": {"__all__": {"path"}}},
    "annotation": {"model", "pretrained", "second"},
    "noise": {"max_cost"},
    "shards": {"max_left_out"},
}
SINCE = {".model", ".jinja"}  # are hashed; older roots say nothing of such files


def planned_models(plan: Plan) -> ModelIdentities:
    """What a root was begun with."""
    return plan.models


def labelling_encoders(record: LabelSetRecord) -> AnnotationIdentity:
    """What a label set is made with."""
    return cast(AnnotationIdentity, record.encoders)


def identity(config: BuildConfig, class_names: Sequence[str], models: ModelIdentities) -> str:
    """Of what decides a dataset's bytes.

    Settings that differ from their defaults, so that a new one makes no old root another; class
    names; and what models hold, wherever they lie.

    Args:
        models: as `model_identities` gives them.
    """
    return fingerprint([identity_settings(config), contents(models), list(class_names)])


def identity_settings(config: BuildConfig) -> dict[str, object]:
    """The settings that decide bytes, where they differ from their defaults."""
    parts = config.model_dump(mode="json", exclude_defaults=True, exclude=NON_IDENTITY_SETTINGS)
    return {name: settings for name, settings in parts.items() if settings}


def contents(models: ModelIdentities) -> dict[str, object]:
    """What of the models' identities decides bytes."""
    own = models["generator"]
    added = {
        "unet": [own["unet"]] if "unet" in own else [],
        "lora": own.get("lora", []),
        "tiny_decoder": [own["tiny_decoder"]] if "tiny_decoder" in own else [],
    }
    parts = {name: [_content(part) for part in found] for name, found in added.items() if found}
    generator = {"own": _content(own), **parts}
    return {"generator": generator, "annotation": _encoder_contents(models["annotation"])}


def annotation_content(annotation: AnnotationConfig, encoders: AnnotationIdentity) -> list[object]:
    """What decides the labels of images: settings as in `identity_settings`, and the CLIP models."""
    free = NON_IDENTITY_SETTINGS["annotation"]
    settings = annotation.model_dump(mode="json", exclude_defaults=True, exclude=free)
    return [settings, *_encoder_contents(encoders)]


def model_identities(config: BuildConfig) -> ModelIdentities:
    """Generator and annotator: name, revision, and file hashes where they are local.

    What is added to the generator, or replaces a part of it, is told beside its own files.
    """
    return {
        "generator": generator_identity(config.generator),
        "annotation": annotation_identity(config.annotation),
    }


def generator_identity(config: GeneratorConfig) -> GeneratorIdentity:
    left_out = {*NOT_LOADED, *(["unet"] if config.unet is not None else [])}
    read = {"variant": config.variant, "left_out": left_out}
    found: GeneratorIdentity = {**_identity(config.model, config.revision, **read)}
    if config.unet is not None:
        found["unet"] = _identity(config.unet, config.unet_revision)
    if config.lora:
        found["lora"] = [_lora_identity(lora) for lora in config.lora]
    if config.tiny_decoder is not None:
        found["tiny_decoder"] = _identity(config.tiny_decoder, config.tiny_decoder_revision)
    return found


def annotation_identity(config: AnnotationConfig) -> AnnotationIdentity:
    found: AnnotationIdentity = {**encoder_identity(config.first, config.dtype)}
    if config.second is not None:
        found["second"] = encoder_identity(config.second, config.dtype)
    return found


def encoder_identity(config: EncoderConfig, dtype: str) -> EncoderIdentity:
    """With the hashes of all that is local, weights beside a folder too."""
    files = file_hashes(Path(config.model.removeprefix("local-dir:")))
    if config.pretrained:
        files |= file_hashes(Path(config.pretrained))
    found: EncoderIdentity = {
        "model": config.model,
        "pretrained": config.pretrained,
        "dtype": dtype,
        "files": files,
    }
    if config.revision is not None:
        found["revision"] = config.revision
    return found


def encoder_content(identity: EncoderIdentity) -> dict[str, object]:
    """What of an encoder's identity decides its features: files where they are local, not paths."""
    files = identity["files"]
    in_folder = identity["model"].startswith("local-dir:")
    local_weights = identity["pretrained"] and Path(identity["pretrained"]).name in files
    return {
        "model": None if in_folder else identity["model"],
        "pretrained": None if in_folder or local_weights else identity["pretrained"],
        "revision": identity.get("revision"),
        "dtype": identity["dtype"],
        "files": files,
    }


@cache  # packages' files are read for it, as long as a small shard takes
def library_versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def _encoder_contents(identity: AnnotationIdentity) -> list[dict[str, object]]:
    second = identity.get("second")
    return [encoder_content(part) for part in (identity, second) if part]


def unchanged(then: Any, now: Any) -> bool:
    """Whether contents of models are those that a root was begun with.

    Args:
        then: perhaps of an older root, for which all files of a folder were hashed.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        return then.keys() == now.keys() and all(
            _same_files(then[key], now[key]) if key == "files" else unchanged(then[key], now[key])
            for key in then
        )
    if isinstance(then, list) and isinstance(now, list):
        return len(then) == len(now) and all(map(unchanged, then, now))
    return bool(then == now)


def _same_files(then: dict[str, str], now: dict[str, str]) -> bool:
    known = {name: now[name] for name in now if name in then or Path(name).suffix not in SINCE}
    return bool(then) == bool(now) and still_read(then, now) == known


def _identity(model: str, revision: str | None, **read: Any) -> ModelIdentity:
    path = local_path(model)
    files = file_hashes(path, **read) if path else {}
    return {"model": model, "revision": revision, "files": files}


def _lora_identity(lora: LoraConfig) -> ModelIdentity:
    path = local_path(lora.path)
    files = file_hashes(Path(*lora_file(lora))) if path else {}
    return {"model": lora.path, "revision": lora.revision, "files": files}


def file_hashes(path: Path, **read: Any) -> dict[str, str]:
    """SHA-256 of a file, or of those in a folder that decide what a model computes, by name.

    Args:
        read: as `semix.pipeline.model_paths.read_names` takes it.
    """
    if path.is_file():
        return {path.name: remembered_digest(path)}
    if not path.is_dir():
        return {}
    return {name: remembered_digest(path / name) for name in read_names(path, **read)}


def _content(identity: ModelIdentity) -> dict[str, object]:
    """Files where there are any, wherever they lie; else the name and commit on the hub."""
    if identity["files"]:
        return {"files": identity["files"]}
    return {"model": identity["model"], "revision": identity["revision"]}
