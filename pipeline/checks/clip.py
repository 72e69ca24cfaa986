"""Refuse CLIP models that cannot work, before weights are fetched or loaded."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import InputError
from data.files import read_json
from pipeline.checks.model_paths import PICKLES, SAFE, check_commit, refuse_absent
from pipeline.config import AnnotationConfig, EncoderConfig

LOCAL, HUB = "local-dir:", "hf-hub:"
HUB_WEIGHTS = "open_clip_model.safetensors"
# What open_clip takes of a folder, whatever else lies in it.
FIRST = {HUB_WEIGHTS, "open_clip_pytorch_model.safetensors"}
CONVERT = "convert it once, as docs/format.md says under Safety"
SETTINGS = "open_clip_config.json"


def check_clip(config: AnnotationConfig) -> None:
    """The model, and the second one where there is one; see `check_encoder`."""
    for field, encoder in config.encoders:
        check_encoder(encoder, field)


def check_encoder(config: EncoderConfig, field: str) -> None:
    """One model.

    Raises:
        InputError: a local folder that is no open_clip directory; a hub model without a commit;
            a name that open_clip does not know, or without weights; weights of another format
            than safetensors; a tower that would come from elsewhere.
    """
    in_place = config.model.startswith((LOCAL, HUB))
    if in_place and config.pretrained is not None:
        remedy = f"{config.model} brings its own weights; leave it out"
        raise InputError(f"{field}.pretrained", config.pretrained, remedy)
    if config.revision is not None and not config.model.startswith(HUB):
        remedy = f"belongs to hf-hub: models, and {config.model} is none; leave it out"
        raise InputError(f"{field}.revision", config.revision, remedy)
    if config.model.startswith(LOCAL):
        check_folder(Path(config.model.removeprefix(LOCAL)), field)
    elif in_place:
        check_commit(config.model, config.revision, f"{field}.revision")
    else:
        _check_named(config, field)


def check_folder(folder: Path, field: str) -> None:
    """An open_clip directory: of this machine, or that of a commit. Raises InputError."""
    folder = folder.absolute()
    refuse_absent(folder, f"{field}.model")
    if not (folder / SETTINGS).is_file():
        remedy = f"is not an open_clip directory (it has no {SETTINGS})"
        raise InputError(f"{field}.model", folder, remedy)
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if Path(name).suffix in PICKLES]
    if pickles and not FIRST & set(names):
        remedy = f"is no safetensors file, and no other is read; {CONVERT}, to {HUB_WEIGHTS}"
        raise InputError(f"{field}.model", folder / pickles[0], remedy)
    if not any(name.endswith(SAFE) for name in names):
        raise InputError(f"{field}.model", folder, f"holds no weights (no {SAFE} file)")
    settings = read_json(folder / SETTINGS)
    refuse_other_sources(settings.get("model_cfg", settings), folder, field)


def tag_repository(config: EncoderConfig) -> str | None:
    """The hub repository where a tag's weights are `HUB_WEIGHTS`; None for any other tag."""
    from open_clip import get_pretrained_cfg

    tag = get_pretrained_cfg(config.model, config.pretrained)
    repository, _, file = tag.get("hf_hub", "").rpartition("/")
    return repository if repository and not file else None


def _check_named(config: EncoderConfig, field: str) -> None:
    if re.match(r"[.~]|.*/", config.model) or Path(config.model).is_dir():
        remedy = f"write {LOCAL}{config.model} if it is a folder, {HUB}{config.model} if a hub id"
        raise InputError(f"{field}.model", config.model, remedy)
    from open_clip import get_model_config, get_pretrained_cfg, list_models

    if config.model not in list_models():
        remedy = "open_clip has no such model; see open_clip.list_models()"
        raise InputError(f"{field}.model", config.model, remedy)
    if config.pretrained is None:
        # open_clip itself would go on with random weights.
        remedy = "name a weights tag, such as openai, or a safetensors file"
        raise InputError(f"{field}.pretrained", "nothing", remedy)
    remedy = ""
    if get_pretrained_cfg(config.model, config.pretrained):
        if tag_repository(config) is None:
            remedy = f"its weights are no safetensors, and no other are read; {CONVERT}, and name"
            remedy += f" the file, or take another tag; {config.model} has {_tags(config)}"
    elif not Path(config.pretrained).is_file():
        remedy = f"is no file, and no tag of {config.model}; it has {_tags(config)}"
    elif not config.pretrained.endswith(SAFE):
        remedy = f"is no safetensors file, and no other is read; {CONVERT}, or name a tag; "
        remedy += f"{config.model} has {_tags(config)}"
    if remedy:
        raise InputError(f"{field}.pretrained", config.pretrained, remedy)
    refuse_other_sources(get_model_config(config.model), config.model, field)


def _tags(config: EncoderConfig) -> str:
    """Tags of the model whose weights are safetensors."""
    from open_clip import list_pretrained_tags_by_model

    tags = list_pretrained_tags_by_model(config.model)
    fit = [tag for tag in tags if tag_repository(config.model_copy(update={"pretrained": tag}))]
    return ", ".join(fit) or "none"


def refuse_other_sources(settings: Mapping[str, Any], value: object, field: str) -> None:
    """Raises InputError for a tower named by its place on the hub: no commit pins what comes."""
    for tower, key in (("text_cfg", "hf_model_name"), ("vision_cfg", "timm_model_name")):
        name = settings.get(tower, {}).get(key)
        if name and (key == "hf_model_name" or re.search("[:/]", name)):
            remedy = (
                f"its {tower} takes {name} from the hub, of no commit; use a model of one piece"
            )
            raise InputError(f"{field}.model", value, remedy)
