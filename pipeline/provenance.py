"""Which models and versions a dataset was made with."""

import platform
from importlib.metadata import version
from pathlib import Path

from data.fingerprint import file_digest
from pipeline.config import BuildConfig

PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "numpy", "pillow")
WEIGHTS = {".safetensors", ".json", ".txt", ".bin", ".pt"}


def model_identities(config: BuildConfig) -> dict[str, dict]:
    """Generator and annotator: name, revision, and file hashes where they are local."""
    clip = config.annotation
    weights = Path(clip.pretrained) if clip.pretrained else None
    return {
        "generator": {
            "model": config.generator.model,
            "revision": config.generator.revision,
            "files": _hashes(Path(config.generator.model)),
        },
        "annotation": {
            "model": clip.model,
            "pretrained": clip.pretrained,
            "files": _hashes(Path(clip.model.removeprefix("local-dir:")))
            | (_hashes(weights) if weights else {}),
        },
    }


def library_versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def _hashes(path: Path) -> dict[str, str]:
    if path.is_file():
        return {path.name: file_digest(path)}
    if not path.is_dir():
        return {}
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in WEIGHTS)
    return {p.relative_to(path).as_posix(): file_digest(p) for p in files}
