"""What a dataset was made with: models and versions, and the identity that follows from them."""

import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data.fingerprint import file_digest, fingerprint
from pipeline.config import AnnotationConfig, BuildConfig, EncoderConfig, GeneratorConfig
from pipeline.model_paths import local_path

PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "peft", "numpy", "pillow")
# Where something lies, and how much may be spent or lost: no byte follows from these settings.
FREE: dict[str, Any] = {
    "real": {"path"},
    "generator": {"model": True, "unet": True, "tiny_decoder": True, "lora": {"__all__": {"path"}}},
    "annotation": {"model", "pretrained", "second"},
    "noise": {"max_cost"},
    "shards": {"max_left_out"},
}
WEIGHTS = {".safetensors", ".json", ".txt", ".bin", ".pt", ".pth"}


def identity(config: BuildConfig, class_names: Sequence[str], models: Mapping[str, Any]) -> str:
    """Of what decides a dataset's bytes.

    Settings that differ from their defaults, so that a new one makes no old root another; class
    names; and what models hold, wherever they lie.

    Args:
        models: as `model_identities` gives them.
    """
    return fingerprint([deciding(config), contents(models), list(class_names)])


def deciding(config: BuildConfig) -> dict[str, Any]:
    """The settings that decide bytes, where they differ from their defaults."""
    parts = config.model_dump(mode="json", exclude_defaults=True, exclude=FREE)
    return {name: settings for name, settings in parts.items() if settings}


def contents(models: Mapping[str, Any]) -> dict[str, Any]:
    """What of the models' identities decides bytes."""
    own = {key: value for key, value in models["generator"].items() if key in _NAMED}
    added = {key: value for key, value in models["generator"].items() if key not in _NAMED}
    generator: dict[str, Any] = {"own": _content(own)}
    for key, value in added.items():
        found = [_content(part) for part in (value if isinstance(value, list) else [value])]
        generator[key] = found
    annotation = dict(models["annotation"])
    second = annotation.pop("second", None)
    encoders = [encoder_content(part) for part in (annotation, second) if part]
    return {"generator": generator, "annotation": encoders}


def annotation_content(annotation: AnnotationConfig, encoders: Mapping[str, Any]) -> list[Any]:
    """What decides the labels of images: settings as in `deciding`, and the CLIP models."""
    free = FREE["annotation"]
    settings = annotation.model_dump(mode="json", exclude_defaults=True, exclude=free)
    parts = ({k: v for k, v in encoders.items() if k != "second"}, encoders.get("second"))
    return [settings, *(encoder_content(part) for part in parts if part)]


def model_identities(config: BuildConfig) -> dict[str, dict]:
    """Generator and annotator: name, revision, and file hashes where they are local.

    What is added to the generator, or replaces a part of it, is told beside its own files.
    """
    generator = config.generator
    return {
        "generator": _identity(generator.model, generator.revision) | _additions(generator),
        "annotation": annotation_identity(config.annotation),
    }


def annotation_identity(config: AnnotationConfig) -> dict[str, Any]:
    """The CLIP model of an annotation; its second one, where it has one, under `second`."""
    identity = encoder_identity(config.first, config.dtype)
    if config.second is not None:
        identity["second"] = encoder_identity(config.second, config.dtype)
    return identity


def encoder_identity(config: EncoderConfig, dtype: str) -> dict[str, Any]:
    """Name, precision, and file hashes of what is local; a hub id by its commit."""
    weights = Path(config.pretrained) if config.pretrained else None
    revision = {} if config.revision is None else {"revision": config.revision}
    return {
        "model": config.model,
        "pretrained": config.pretrained,
        "dtype": dtype,
        "files": _hashes(Path(config.model.removeprefix("local-dir:")))
        | (_hashes(weights) if weights else {}),
        **revision,
    }


def encoder_content(identity: Mapping[str, Any]) -> dict[str, Any]:
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


def _additions(config: GeneratorConfig) -> dict[str, Any]:
    additions: dict[str, Any] = {}
    if config.unet is not None:
        additions["unet"] = _identity(config.unet, config.unet_revision)
    if config.lora:
        additions["lora"] = [_identity(lora.path, lora.revision) for lora in config.lora]
    if config.tiny_decoder is not None:
        additions["tiny_decoder"] = _identity(config.tiny_decoder, config.tiny_decoder_revision)
    return additions


def _identity(model: str, revision: str | None) -> dict[str, Any]:
    path = local_path(model)
    return {"model": model, "revision": revision, "files": _hashes(path) if path else {}}


def _hashes(path: Path) -> dict[str, str]:
    if path.is_file():
        return {path.name: _digest(path)}
    if not path.is_dir():
        return {}
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in WEIGHTS)
    return {p.relative_to(path).as_posix(): _digest(p) for p in files}


def _digest(path: Path) -> str:
    """Read once by a process, for models have gigabytes, unless the file was written since."""
    state = path.stat()
    return _digest_of(path, state.st_ino, state.st_size, state.st_mtime_ns)


@cache
def _digest_of(path: Path, *state: int) -> str:
    return file_digest(path)


_NAMED = ("model", "revision", "files")


def _content(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Files where there are any, wherever they lie; else the name and commit on the hub."""
    if identity["files"]:
        return {"files": identity["files"]}
    return {"model": identity["model"], "revision": identity["revision"]}
