"""Models of a build: there, of the right kind, with headers that can be read."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flows.costs import amount
from flows.doctor.finding import FAILED, OK, UNCHECKED, WARNING, Finding
from flows.doctor.subject import Subject

if TYPE_CHECKING:
    from pipeline.config import EncoderConfig

LOCAL, HUB = "local-dir:", "hf-hub:"


def check(subject: Subject) -> Iterator[Finding]:
    if subject.build is None:
        yield Finding("models", UNCHECKED, "no config of a build was given")
        return
    from pipeline.checks import check_models

    check_models(subject.build)
    for name, (model, path) in places(subject).items():
        yield _judged(name, model, path)


def places(subject: Subject) -> dict[str, tuple[str, Path | None]]:
    """By setting: the model, and its file, folder or copy of the hub's; None if it is not here."""
    from pipeline.model_paths import copy_here

    assert subject.build is not None
    generator, found = subject.build.generator, {}
    found["generator.model"] = (generator.model, copy_here(generator.model, generator.revision))
    if generator.unet is not None:
        found["generator.unet"] = (
            generator.unet,
            copy_here(generator.unet, generator.unet_revision),
        )
    for field, encoder in subject.build.annotation.encoders:
        if encoder.model.startswith((LOCAL, HUB)):
            model = encoder.model.removeprefix(LOCAL).removeprefix(HUB)
            found[f"{field}.model"] = (encoder.model, copy_here(model, encoder.revision))
        else:
            name = f"{encoder.model} {encoder.pretrained}"
            found[f"{field}.pretrained"] = (name, _clip_file(encoder))
    return found


def weights(place: Path) -> dict[Path, int]:
    """Numbers in each safetensors file that would be loaded.

    Raises:
        OSError, SafetensorError: a file that cannot be read.
    """
    from safetensors import safe_open

    counts = {}
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    for path in (file for file in files if file.suffix == ".safetensors"):
        plain = path.with_name(path.name.split(".")[0] + ".safetensors")
        if path != plain and plain.exists():
            continue  # the same in another precision
        with safe_open(path, framework="np") as file:
            shapes = (file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118
            counts[path] = sum(math.prod(shape) for shape in shapes)
    return counts


def _judged(name: str, model: str, place: Path | None) -> Finding:
    if place is None:
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            remedy = "unset HF_HUB_OFFLINE, or fetch it before: hf download"
            return Finding(name, FAILED, f"{model} is not in the hub's cache", remedy)
        remedy = "the first run fetches it; `hf download` does so now"
        return Finding(name, WARNING, f"{model} is not in the hub's cache yet", remedy)
    from safetensors import SafetensorError

    try:
        files = list(weights(place))
    except (OSError, SafetensorError) as error:
        remedy = "fetch or convert this model again; a file of it is damaged"
        return Finding(name, FAILED, f"{place}: {error}", remedy)
    size = sum(path.stat().st_size for path in files)
    return Finding(name, OK, f"{place}: {len(files)} files, {amount(size)}")


def _clip_file(config: "EncoderConfig") -> Path | None:
    """The file that is named, or the weights of a tag in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    from pipeline.checks import HUB_WEIGHTS, tag_repository

    assert config.pretrained is not None  # check_models has refused that
    repository = tag_repository(config)
    if repository is None:
        return Path(config.pretrained)
    found = try_to_load_from_cache(repository, HUB_WEIGHTS)
    return Path(found) if isinstance(found, str) else None
