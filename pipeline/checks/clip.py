"""Refuse CLIP models that cannot work, before weights are fetched or loaded."""

import re
from pathlib import Path

from data.errors import InputError
from pipeline.config import AnnotationConfig, EncoderConfig

LOCAL, HUB = "local-dir:", "hf-hub:"
WEIGHTS = {".safetensors", ".bin", ".pth"}  # that open_clip finds in a folder
COMMIT = re.compile("[0-9a-f]{40}")


def check_clip(config: AnnotationConfig) -> None:
    """The model, and the second one where there is one.

    Raises:
        InputError: a local folder that is no open_clip directory; a hub model without a commit;
            a name that open_clip does not know, or without weights.
    """
    for field, encoder in config.encoders:
        _check(encoder, field)


def _check(config: EncoderConfig, field: str) -> None:
    in_place = config.model.startswith((LOCAL, HUB))
    if in_place and config.pretrained is not None:
        remedy = f"{config.model} brings its own weights; leave it out"
        raise InputError(f"{field}.pretrained", config.pretrained, remedy)
    if config.revision is not None and not config.model.startswith(HUB):
        remedy = f"belongs to hf-hub: models, and {config.model} is none; leave it out"
        raise InputError(f"{field}.revision", config.revision, remedy)
    if config.model.startswith(LOCAL):
        _check_folder(Path(config.model.removeprefix(LOCAL)), field)
    elif not in_place:
        _check_named(config, field)
    elif not COMMIT.fullmatch(config.revision or ""):
        remedy = f"pin the commit of {config.model} that you reviewed, 40 hexadecimal digits"
        raise InputError(f"{field}.revision", config.revision or "nothing", remedy)


def _check_folder(folder: Path, field: str) -> None:
    if not (folder / "open_clip_config.json").is_file():
        remedy = "is not an open_clip directory (it has no open_clip_config.json)"
        raise InputError(f"{field}.model", folder, remedy)
    if not any(path.suffix in WEIGHTS for path in folder.iterdir()):
        remedy = "holds no weights (no .safetensors, .bin or .pth file)"
        raise InputError(f"{field}.model", folder, remedy)


def _check_named(config: EncoderConfig, field: str) -> None:
    from open_clip import get_pretrained_cfg, list_models, list_pretrained_tags_by_model

    if config.model not in list_models():
        remedy = "open_clip has no such model; see open_clip.list_models()"
        raise InputError(f"{field}.model", config.model, remedy)
    if config.pretrained is None:
        # open_clip itself would go on with random weights.
        remedy = "name a weights tag, such as openai, or a checkpoint file"
        raise InputError(f"{field}.pretrained", "nothing", remedy)
    known = get_pretrained_cfg(config.model, config.pretrained)
    if not known and not Path(config.pretrained).is_file():
        tags = ", ".join(list_pretrained_tags_by_model(config.model)) or "none"
        remedy = f"is no file, and no tag of {config.model}; it has {tags}"
        raise InputError(f"{field}.pretrained", config.pretrained, remedy)
