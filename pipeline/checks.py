"""Check models, schedulers and prompts before anything heavy is imported or loaded."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semix.data.errors import InputError
from semix.data.files import read_json
from semix.data.licences import licence_notes
from semix.pipeline.config import (
    FLOW_FAMILIES,
    PIPELINES,
    PIXEL_PIPELINES,
    AnnotationConfig,
    BuildConfig,
    EncoderConfig,
    GeneratorConfig,
    hard_label_notes,
)
from semix.pipeline.generators.schedulers import (
    DETERMINISTIC,
    check_deterministic,
    check_flow_scheduler,
    check_schedule,
    own_scheduler,
)
from semix.pipeline.model_paths import (
    CLIP_SETTINGS,
    CLIP_WEIGHTS,
    NOT_LOADED,
    PICKLES,
    SAFE,
    check_commit,
    check_quantisation,
    check_variant,
    check_weights,
    local_path,
    lora_file,
    path_or_pinned_id,
    require_folder,
    weight_files,
)
from semix.pipeline.prompts import checked_prompts, configure_tokenizer, prompt_names
from semix.pipeline.provenance import model_cards

TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
# Class-name prefixes of the text encoders that load from their folder alone, without further
# downloads; their own tokenizers have the same prefixes.
TEXT_ENCODERS = ("CLIP", "T5", "Qwen3")
# transformers' tokenizer class for any model; the model's tokenizer.json defines it.
GENERIC_TOKENIZER = "TokenizersBackend"
# Accepted tokenizer classes whose names begin with none of TEXT_ENCODERS.
OTHER_TOKENIZERS = ("Qwen2Tokenizer", GENERIC_TOKENIZER)
LOCAL, HUB = "local-dir:", "hf-hub:"  # prefixes of CLIP models
HUB_WEIGHTS = CLIP_WEIGHTS[0]
CONVERT = "convert it once, as docs/format.md says under Safety"


def check_models(config: BuildConfig) -> None:
    """Raises InputError for models that are missing, of the wrong kind, or not pinned."""
    check_generator(config.generator, noise_strategy=config.noise.strategy)
    if (network := config.noise.network) is not None and not Path(network).expanduser().is_file():
        remedy = "there is no such file; docs/noise.md says how to convert a published network"
        raise InputError("noise.network", network, remedy)
    check_clip(config.annotation)


def notes(config: BuildConfig) -> list[str]:
    """Sentences on valid settings that may surprise a user."""
    annotation = config.annotation
    has_scale = annotation.rule == "projection" and annotation.scale != "auto"
    label_notes = hard_label_notes(float(annotation.scale)) if has_scale else []
    return [*_safety_checker_note(config), *label_notes, *licence_notes(model_cards(config))]


def _safety_checker_note(config: BuildConfig) -> list[str]:
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


def check_prompts(config: GeneratorConfig, class_names: Sequence[str]) -> None:
    """Check the names of all classes and, if the model is local, their prompts.

    Prompts are checked with the model's tokenizers.

    Raises:
        InputError: `generator.names` renames an unknown class; a prompt that the model would
            truncate; class names whose prompts cannot be padded to equal token length.
    """
    names = prompt_names(config, class_names)
    folder = local_path(config.model)
    index = read_json(folder / "model_index.json") if folder is not None else {}
    kinds = {component: index[component][1] or "" for component in TOKENIZERS if component in index}
    # A hub id, or a class-conditional model (DiT), which takes class numbers and no prompts.
    if folder is None or not any(kinds.values()):
        return
    # transformers takes seconds to import; a wrong path is reported before that
    from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer, TokenizersBackend

    classes: dict[str, Any] = {
        "T5": T5Tokenizer,
        "Qwen2": Qwen2Tokenizer,
        "CLIP": CLIPTokenizer,
    }
    classes[GENERIC_TOKENIZER] = TokenizersBackend
    tokenizers = [
        configure_tokenizer(tokenizer_class.from_pretrained(folder / component), config, component)
        for component, kind in kinds.items()
        for prefix, tokenizer_class in classes.items()
        if kind.startswith(prefix)
    ]
    checked_prompts(config, names, tokenizers)


def check_generator(config: GeneratorConfig, *, noise_strategy: str = "random") -> None:
    """Check the generator, the networks that replace its own, and its LoRAs.

    Args:
        noise_strategy: `select` and `optimise` run the sampler backwards (inversion), so the
            scheduler must support that.
    Raises:
        InputError: a local directory that is missing, of another family, without safetensors, or
            with an unsuitable scheduler; a hub id without a commit.
    """
    folder = path_or_pinned_id(config.model, config.revision, "generator.revision")
    if isinstance(folder, Path):
        _check_pipeline(folder.absolute(), config)
        unet_config = folder / "unet" / "config.json"
        if unet_config.is_file() and config.unet is None:
            check_latent_size(read_json(unet_config), "generator.model", folder)
        _check_guidance(folder, config)
        _check_scheduler(folder, config, noise_strategy)
    _check_replacements_and_lora(config)


def _check_pipeline(folder: Path, config: GeneratorConfig) -> None:
    """Check that a folder is a diffusers directory of the family, with safetensors only."""
    require_folder(folder, "generator.model")
    index = folder / "model_index.json"
    if not index.is_file():
        remedy = "is not a diffusers directory (it has no model_index.json)"
        raise InputError("generator.model", folder, remedy)
    components = read_json(index)
    kind, expected = components.get("_class_name"), PIPELINES[config.family]
    known = PIXEL_PIPELINES if config.family == "pixel" else (expected,)
    if kind not in known:
        families = [family for family, name in PIPELINES.items() if name == kind]
        instead = f"; set generator.family to {families[0]}" if families else ""
        remedy = f"holds a {kind}; family {config.family} needs a {' or '.join(known)}{instead}"
        raise InputError("generator.model", folder, remedy)
    left_out = {*NOT_LOADED, *(["unet"] if config.unet is not None else [])}
    loaded = {
        component: entry
        for component, entry in sorted(components.items())
        if component not in left_out and isinstance(entry, list) and entry[0] is not None
    }
    for component, entry in loaded.items():
        _check_component(folder, component, entry, config.variant)
    variants = {variant for component in loaded for variant in weight_files(folder / component)}
    if config.variant is not None and variants and config.variant not in variants:
        remedy = f"no weights of {folder} are of this variant; leave it out"
        raise InputError("generator.variant", config.variant, remedy)


def _check_component(folder: Path, component: str, entry: list[str], variant: str | None) -> None:
    """Check one component.

    Of transformers only known classes are accepted, because others could download further models.
    """
    library, kind = entry  # of model_index.json
    if library == "transformers" and not kind.startswith((*TEXT_ENCODERS, *OTHER_TOKENIZERS)):
        remedy = f"its {component} is a {kind}; semix takes CLIP's, T5's and Qwen3's"
        raise InputError("generator.model", folder, remedy)
    if not (folder / component).is_dir():
        raise InputError("generator.model", folder, f"has no folder {component}; fetch it again")
    check_weights(folder / component, "generator.model")
    check_quantisation(folder / component, "generator.model")
    check_variant(folder / component, variant)


def _check_guidance(folder: Path, config: GeneratorConfig) -> None:
    """Raises InputError for guidance with a model that was distilled to work without it."""
    if config.guidance_scale <= 1:
        return
    if config.family == "flux":
        network = read_json(folder / "transformer" / "config.json")
        takes_guidance, name = network.get("guidance_embeds"), "FLUX (schnell)"
    elif config.family == "flux2":
        index = read_json(folder / "model_index.json")
        takes_guidance, name = not index.get("is_distilled"), "FLUX.2 klein (distilled)"
    else:
        return
    if not takes_guidance:
        remedy = f"this {name} takes no guidance; set it to 0"
        raise InputError("generator.guidance_scale", config.guidance_scale, remedy)


def _check_scheduler(folder: Path, config: GeneratorConfig, noise_strategy: str) -> None:
    settings = own_scheduler(folder)
    if settings is None:
        return  # loading raises the error
    kind = settings.get("_class_name", "")
    if config.family in FLOW_FAMILIES:
        check_flow_scheduler(kind, settings, config)
        return
    if config.scheduler is None:
        check_deterministic(kind, settings, steps=config.steps)
        if config.enhance is not None and kind != DETERMINISTIC["ddim"]:
            remedy = f"inverts DDIM's steps, not the model's own {kind}; set generator.scheduler: "
            raise InputError("generator.enhance.name", config.enhance.name, f"{remedy}ddim")
    else:
        check_schedule(kind, settings, field="generator.scheduler", value=config.scheduler)
    if noise_strategy in ("select", "optimise"):
        check_schedule(kind, settings, field="noise.strategy", value=noise_strategy)


def check_latent_size(settings: Mapping[str, Any], field: str, model: Path | str) -> None:
    """Raises InputError for a U-Net whose config lacks the size of its latents."""
    if settings.get("sample_size") is None:
        remedy = "the config of its U-Net has no sample_size; add sample_size: the side of its "
        remedy += "training images divided by 8 (64 for 512 pixels)"
        raise InputError(field, model, remedy)


def _check_replacements_and_lora(config: GeneratorConfig) -> None:
    if config.unet is not None:
        _check_network(config.unet, config.unet_revision, "generator.unet")
        folder = local_path(config.unet)
        if folder is not None and not (folder / "config.json").is_file():
            remedy = "is not a U-Net directory (it has no config.json); name the unet folder itself"
            raise InputError("generator.unet", folder.absolute(), remedy)
        if folder is not None:
            check_variant(folder, config.variant)
            check_latent_size(read_json(folder / "config.json"), "generator.unet", folder)
    for lora in config.lora:
        lora_file(lora)
    if config.tiny_decoder is not None:
        _check_network(config.tiny_decoder, config.tiny_decoder_revision, "generator.tiny_decoder")


def _check_network(model: str, revision: str | None, field: str) -> None:
    """Check that a local directory exists and holds safetensors, or that a hub id has a commit."""
    path = path_or_pinned_id(model, revision, f"{field}_revision")
    if isinstance(path, Path):
        require_folder(path, field)
        check_weights(path, field)
        check_quantisation(path, field)


def check_clip(config: AnnotationConfig) -> None:
    """Check the one or two CLIP models; see `check_encoder`."""
    for field, encoder in config.encoders:
        check_encoder(encoder, field)


def check_encoder(config: EncoderConfig, field: str) -> None:
    """Check one CLIP model.

    Raises:
        InputError: a local folder that is no open_clip directory; a hub model without a commit;
            a name that open_clip does not know, or without weights; weights of another format
            than safetensors; a tower that would be downloaded from elsewhere.
    """
    has_own_weights = config.model.startswith((LOCAL, HUB))
    if has_own_weights and config.pretrained is not None:
        remedy = f"{config.model} brings its own weights; leave it out"
        raise InputError(f"{field}.pretrained", config.pretrained, remedy)
    if config.revision is not None and not config.model.startswith(HUB):
        remedy = f"belongs to hf-hub: models, and {config.model} is none; leave it out"
        raise InputError(f"{field}.revision", config.revision, remedy)
    if config.model.startswith(LOCAL):
        check_folder(Path(config.model.removeprefix(LOCAL)), field)
    elif has_own_weights:
        check_commit(config.model, config.revision, f"{field}.revision")
    else:
        _check_named_model(config, field)


def check_folder(folder: Path, field: str) -> None:
    """Raises InputError unless the folder is a usable open_clip directory."""
    folder = folder.absolute()
    require_folder(folder, f"{field}.model")
    if not (folder / CLIP_SETTINGS).is_file():
        remedy = f"is not an open_clip directory (it has no {CLIP_SETTINGS})"
        raise InputError(f"{field}.model", folder, remedy)
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if Path(name).suffix in PICKLES]
    if pickles and not {*CLIP_WEIGHTS} & set(names):
        remedy = f"is no safetensors file, and no other is read; {CONVERT}, to {HUB_WEIGHTS}"
        raise InputError(f"{field}.model", folder / pickles[0], remedy)
    if not any(name.endswith(SAFE) for name in names):
        raise InputError(f"{field}.model", folder, f"holds no weights (no {SAFE} file)")
    settings = read_json(folder / CLIP_SETTINGS)
    check_tower_sources(settings.get("model_cfg", settings), folder, field)


def tag_repository(config: EncoderConfig) -> str | None:
    """The hub repository of the tag's weights, if they are stored there as `HUB_WEIGHTS`.

    That file is safetensors; None for any other tag.
    """
    from open_clip import get_pretrained_cfg

    tag = get_pretrained_cfg(config.model, config.pretrained)
    repository, _, file = tag.get("hf_hub", "").rpartition("/")
    return repository if repository and not file else None


def _check_named_model(config: EncoderConfig, field: str) -> None:
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
    check_tower_sources(get_model_config(config.model), config.model, field)


def _tags(config: EncoderConfig) -> str:
    """Comma-separated list of the model's tags that have safetensors weights."""
    from open_clip import list_pretrained_tags_by_model

    tags = list_pretrained_tags_by_model(config.model)
    usable = [tag for tag in tags if tag_repository(config.model_copy(update={"pretrained": tag}))]
    return ", ".join(usable) or "none"


def check_tower_sources(settings: Mapping[str, Any], value: object, field: str) -> None:
    """Raises InputError for a tower that is downloaded from the hub, without a pinned commit."""
    for tower, key in (("text_cfg", "hf_model_name"), ("vision_cfg", "timm_model_name")):
        name = settings.get(tower, {}).get(key)
        if name and (key == "hf_model_name" or re.search("[:/]", name)):
            remedy = (
                f"its {tower} downloads {name} from the hub without a pinned commit; use a model "
            )
            remedy += "whose weights include both towers"
            raise InputError(f"{field}.model", value, remedy)
