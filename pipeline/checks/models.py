"""Refuse models that cannot work, before anything heavy is imported or loaded."""

import re
from pathlib import Path

from data.errors import InputError
from data.files import read_json
from pipeline.checks.clip import check_clip
from pipeline.checks.model_paths import local_path, lora_file
from pipeline.checks.scheduler_rules import refuse_foreign, refuse_stochastic
from pipeline.config import BuildConfig, GeneratorConfig

# The class that model_index.json must name.
PIPELINES = {
    "stable_diffusion": "StableDiffusionPipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "dit": "DiTPipeline",
}
NOT_LOADED = ("safety_checker", "feature_extractor", "image_encoder")
COMMIT = re.compile("[0-9a-f]{40}")


def check_models(config: BuildConfig) -> None:
    """Raises InputError for models that are missing, of the wrong kind, or not pinned."""
    check_generator(config.generator, chosen_noise=config.noise.strategy)
    check_clip(config.annotation)


def check_generator(config: GeneratorConfig, *, chosen_noise: str = "random") -> None:
    """The model and what is added to it.

    Args:
        chosen_noise: the noise strategy; any but random inverts the sampling.
    Raises:
        InputError: a local directory that is not there, of another family, without safetensors,
            or with a scheduler that will not do; a hub id without a commit.
    """
    folder = local_path(config.model)
    if folder is None:
        _check_commit(config.model, config.revision, "generator.revision")
    else:
        _check_pipeline(folder, config)
        _check_scheduler(folder, config, chosen_noise)
    _check_additions(config)


def notes(config: BuildConfig) -> list[str]:
    """What a user may not expect of models that can be used, a sentence each."""
    folder = local_path(config.generator.model)
    index = folder / "model_index.json" if folder else None
    if index is None or not index.is_file():
        return []
    checker = (read_json(index).get("safety_checker") or [None])[-1]
    if checker is None:
        return []
    return [
        f"{checker} of {folder} is left out: it would blacken images, and those would still get "
        "the label of a class"
    ]


def _check_pipeline(folder: Path, config: GeneratorConfig) -> None:
    """A diffusers directory of the family, all its parts in safetensors."""
    index = folder / "model_index.json"
    if not index.is_file():
        remedy = "is not a diffusers directory (it has no model_index.json)"
        raise InputError("generator.model", folder, remedy)
    parts = read_json(index)
    kind, wanted = parts.get("_class_name"), PIPELINES[config.family]
    if kind != wanted:
        families = [family for family, name in PIPELINES.items() if name == kind]
        instead = f"; set generator.family to {families[0]}" if families else ""
        remedy = f"holds a {kind}; family {config.family} needs a {wanted}{instead}"
        raise InputError("generator.model", folder, remedy)
    for part in sorted(set(parts) - set(NOT_LOADED)):
        replaced = part == "unet" and config.unet is not None
        if (folder / part).is_dir() and not replaced:
            _check_safetensors(folder / part, "generator.model")


def _check_scheduler(folder: Path, config: GeneratorConfig, chosen_noise: str) -> None:
    path = folder / "scheduler" / "scheduler_config.json"
    if not path.is_file():
        return  # loading names it
    scheduler = read_json(path)
    kind = scheduler.get("_class_name", "")
    if config.scheduler is None:
        refuse_stochastic(kind, scheduler)
    else:
        refuse_foreign(kind, scheduler, field="generator.scheduler", value=config.scheduler)
    if chosen_noise != "random":
        refuse_foreign(kind, scheduler, field="noise.strategy", value=chosen_noise)


def _check_additions(config: GeneratorConfig) -> None:
    if config.unet is not None:
        _check_part(config.unet, config.unet_revision, "generator.unet", "generator.unet_revision")
        folder = local_path(config.unet)
        if folder is not None and not (folder / "config.json").is_file():
            remedy = "is not a U-Net directory (it has no config.json); name the unet folder itself"
            raise InputError("generator.unet", folder, remedy)
    for lora in config.lora:
        if local_path(lora.path) is None:
            _check_commit(lora.path, lora.revision, "generator.lora revision")
        lora_file(lora)
    tiny = config.approximate.tiny_decoder
    if tiny is not None:
        field = "generator.approximate.tiny_decoder"
        _check_part(tiny, config.approximate.tiny_decoder_revision, field, f"{field}_revision")


def _check_part(model: str, revision: str | None, field: str, revision_field: str) -> None:
    """A local directory must exist and hold safetensors; a hub id must come with a commit."""
    path = local_path(model)
    if path is None:
        _check_commit(model, revision, revision_field)
    elif not path.is_dir():
        raise InputError(field, path, "there is no such directory")
    else:
        _check_safetensors(path, field)


def _check_commit(model: str, revision: str | None, field: str) -> None:
    """A branch or a tag may mean another model tomorrow."""
    if revision is None or not COMMIT.fullmatch(revision):
        remedy = f"pin the commit of {model} that you reviewed, 40 hexadecimal digits"
        raise InputError(field, revision or "nothing", remedy)


def _check_safetensors(folder: Path, field: str) -> None:
    """Weights of other formats are never read: they can hold code."""
    suffixes = {path.suffix for path in folder.iterdir()}
    if suffixes & {".bin", ".pt", ".pth", ".ckpt"} and ".safetensors" not in suffixes:
        raise InputError(field, folder, "has no safetensors; convert it")
