"""Which models and versions a dataset was made with."""

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data.fingerprint import file_digest
from pipeline.checks.model_paths import local_path
from pipeline.config import AnnotationConfig, BuildConfig, EncoderConfig, GeneratorConfig

PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "peft", "numpy", "pillow")
WEIGHTS = {".safetensors", ".json", ".txt", ".bin", ".pt", ".pth"}


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
    fast = config.approximate
    if fast.tiny_decoder is not None:
        additions["tiny_decoder"] = _identity(fast.tiny_decoder, fast.tiny_decoder_revision)
    return additions


def _identity(model: str, revision: str | None) -> dict[str, Any]:
    path = local_path(model)
    return {"model": model, "revision": revision, "files": _hashes(path) if path else {}}


def _hashes(path: Path) -> dict[str, str]:
    if path.is_file():
        return {path.name: file_digest(path)}
    if not path.is_dir():
        return {}
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in WEIGHTS)
    return {p.relative_to(path).as_posix(): file_digest(p) for p in files}
