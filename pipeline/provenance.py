"""Which models and versions a dataset was made with."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data.fingerprint import file_digest
from pipeline.checks.model_paths import local_path
from pipeline.config import BuildConfig, GeneratorConfig

PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "peft", "numpy", "pillow")
WEIGHTS = {".safetensors", ".json", ".txt", ".bin", ".pt"}


def model_identities(config: BuildConfig) -> dict[str, dict]:
    """Generator and annotator: name, revision, and file hashes where they are local.

    What is added to the generator, or replaces a part of it, is told beside its own files.
    """
    clip = config.annotation
    weights = Path(clip.pretrained) if clip.pretrained else None
    generator = config.generator
    return {
        "generator": _identity(generator.model, generator.revision) | _additions(generator),
        "annotation": {
            "model": clip.model,
            "pretrained": clip.pretrained,
            "files": _hashes(Path(clip.model.removeprefix("local-dir:")))
            | (_hashes(weights) if weights else {}),
        },
    }


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
