"""Refuse models that cannot work, before anything heavy is imported or loaded."""

from pathlib import Path

from data.errors import InputError
from data.files import read_json
from pipeline.checks.clip import check_clip
from pipeline.checks.model_paths import check_weights, local_path, lora_file, pinned, refuse_absent
from pipeline.checks.scheduler_rules import refuse_foreign, refuse_stochastic
from pipeline.config import BuildConfig, GeneratorConfig

# The class that model_index.json must name.
PIPELINES = {
    "stable_diffusion": "StableDiffusionPipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "dit": "DiTPipeline",
}
NOT_LOADED = ("safety_checker", "feature_extractor", "image_encoder")


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
    folder = pinned(config.model, config.revision, "generator.revision")
    if isinstance(folder, Path):
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
    """A diffusers directory of the family, all its parts in safetensors, each in its folder."""
    folder = folder.absolute()
    refuse_absent(folder, "generator.model")
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
    left_out = {*NOT_LOADED, *(["unet"] if config.unet is not None else [])}
    for part, found in sorted(parts.items()):
        if part not in left_out and isinstance(found, list) and found[0] is not None:
            _check_pipeline_part(folder, part, found)


def _check_pipeline_part(folder: Path, part: str, found: list[str]) -> None:
    """Networks of transformers other than CLIP's can name further models, which it would fetch."""
    library, kind = found
    if library == "transformers" and not kind.startswith("CLIP"):
        raise InputError("generator.model", folder, f"its {part} is a {kind}; semix takes CLIP's")
    if not (folder / part).is_dir():
        raise InputError("generator.model", folder, f"has no folder {part}; fetch it again")
    check_weights(folder / part, "generator.model")


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
            raise InputError("generator.unet", folder.absolute(), remedy)
    for lora in config.lora:
        lora_file(lora)
    tiny = config.approximate.tiny_decoder
    if tiny is not None:
        field = "generator.approximate.tiny_decoder"
        _check_part(tiny, config.approximate.tiny_decoder_revision, field, f"{field}_revision")


def _check_part(model: str, revision: str | None, field: str, revision_field: str) -> None:
    """A local directory must exist and hold safetensors; a hub id must come with a commit."""
    path = pinned(model, revision, revision_field)
    if not isinstance(path, Path):
        return
    refuse_absent(path, field)
    check_weights(path, field)
