"""Refuse models that cannot work, before anything heavy is imported or loaded."""

from pathlib import Path

from data.errors import InputError
from data.files import read_json
from pipeline.config import AnnotationConfig, BuildConfig, GeneratorConfig

LOCAL_CLIP = "local-dir:"


def check_models(config: BuildConfig) -> None:
    """Raises InputError for a model directory that is missing or of the wrong kind."""
    check_generator(config.generator)
    check_clip(config.annotation)


def check_generator(config: GeneratorConfig) -> None:
    """A local path must be a diffusers directory of the family; hub ids pass."""
    folder = Path(config.model)
    if not (folder.is_absolute() or config.model.startswith((".", "~")) or folder.exists()):
        return
    index = folder / "model_index.json"
    if not index.is_file():
        remedy = "is not a diffusers directory (it has no model_index.json)"
        raise InputError("generator.model", folder, remedy)
    kind = read_json(index).get("_class_name")
    if kind != "StableDiffusionPipeline":
        remedy = f"holds a {kind}; family stable_diffusion needs a StableDiffusionPipeline"
        raise InputError("generator.model", folder, remedy)


def check_clip(config: AnnotationConfig) -> None:
    """A local folder must be an open_clip directory; a name must be known and have weights."""
    if config.model.startswith(LOCAL_CLIP):
        folder = Path(config.model.removeprefix(LOCAL_CLIP))
        if not (folder / "open_clip_config.json").is_file():
            remedy = "is not an open_clip directory (it has no open_clip_config.json)"
            raise InputError("annotation.model", folder, remedy)
    elif not config.model.startswith("hf-hub:"):
        from open_clip import list_models

        if config.model not in list_models():
            remedy = "open_clip has no such model; see open_clip.list_models()"
            raise InputError("annotation.model", config.model, remedy)
        if config.pretrained is None:
            # open_clip itself would go on with random weights.
            remedy = "name a weights tag, such as openai, or a checkpoint file"
            raise InputError("annotation.pretrained", "nothing", remedy)
