"""from_pretrained, the only way models come in: safetensors, a pinned revision, never code."""

from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import nn

from data.device import resolve_dtype
from data.errors import InputError
from pipeline.checks import check_generator
from pipeline.checks.model_paths import check_weights, local_path, pinned
from pipeline.config import GeneratorConfig
from pipeline.generators.lora import add_lora

WEIGHTS = "diffusion_pytorch_model"
PART_FILES = [  # of a hub repository that is one network
    *("config.json", f"{WEIGHTS}.safetensors", f"{WEIGHTS}.safetensors.index.json"),
    f"{WEIGHTS}-*.safetensors",
]
# What diffusers, transformers and the hub's client raise for models they cannot find or read.
UNREADABLE = (OSError, ValueError, RuntimeError, SafetensorError)


def load_pipeline(kind: Any, config: GeneratorConfig, *, device: str, **parts: Any) -> Any:
    """A diffusers pipeline of class `kind` on the device, fine-tuned parts put in.

    Its networks only evaluate, and want no gradients of their weights.

    Args:
        parts: what `from_pretrained` shall take instead of the model's own.
    Raises:
        InputError: it cannot be loaded, or the device lacks its precision; it, or what is added
            to it, is of another format than safetensors or of the hub without a commit.
    """
    check_generator(config)  # once more: a root from elsewhere never passed a build's checks
    dtype = resolve_dtype(config.dtype, device, field="generator.dtype")
    if config.unet is not None:
        parts["unet"] = _tuned_unet(config, dtype)
    folder = _pipeline_folder(kind, config, parts)
    pipeline = _from_pretrained(
        kind, folder, config.model, "generator.model", variant=config.variant, dtype=dtype, **parts
    )
    add_lora(pipeline, config.lora)
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.eval().requires_grad_(False)
    # Convolutions run faster on a GPU with the channels last, and no slower on a CPU.
    for name in ("unet", "vae"):
        if name in pipeline.components:
            pipeline.components[name].to(memory_format=torch.channels_last)
    return pipeline.to(device)


def load_part(kind: Any, model: str, *, field: str, revision: str | None, **settings: Any) -> Any:
    """One network of class `kind`, from a directory or from the pinned commit of a hub id.

    Raises:
        InputError: it cannot be loaded, is no safetensors, or of the hub without a commit.
    """
    place = pinned(model, revision, f"{field}_revision")
    if not isinstance(place, Path):
        try:
            place = Path(snapshot_download(model, revision=revision, allow_patterns=PART_FILES))
        except UNREADABLE as error:
            raise _unloadable(field, model, error) from error
    if place.is_dir():  # else loading names it
        check_weights(place, field)
    return _from_pretrained(kind, place, model, field, **settings)


def native_shape(network: Any) -> tuple[int, int, int]:
    """(channels, height, width) of the latents that a U-Net or transformer was trained on."""
    size = network.config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    return network.config.in_channels, height, width


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _pipeline_folder(kind: Any, config: GeneratorConfig, parts: dict[str, Any]) -> Path:
    """The model's directory; of a hub id the pinned commit's, checked as a local one is."""
    path = local_path(config.model)
    if path is not None:
        return path
    try:
        path = Path(
            kind.download(
                config.model,
                revision=config.revision,
                variant=config.variant,
                use_safetensors=True,
                **parts,
            )
        )
    except UNREADABLE as error:
        raise _unloadable("generator.model", config.model, error) from error
    check_generator(config.model_copy(update={"model": str(path)}))
    return path


def _from_pretrained(kind: Any, folder: Path, model: str, field: str, **settings: Any) -> Any:
    """From a directory alone, so that nothing else is asked of the hub."""
    try:
        return kind.from_pretrained(folder, use_safetensors=True, **settings)
    except UNREADABLE as error:
        raise _unloadable(field, model, error) from error


def _unloadable(field: str, model: str, error: Exception) -> InputError:
    return InputError(field, model, f"cannot be loaded: {first_line(error)}")


def _tuned_unet(config: GeneratorConfig, dtype: torch.dtype) -> UNet2DConditionModel:
    """Raises InputError for one that takes or gives other than the model's own."""
    assert config.unet is not None
    field = "generator.unet"
    unet = load_part(
        UNet2DConditionModel,
        config.unet,
        field=field,
        revision=config.unet_revision,
        dtype=dtype,
    )
    model = local_path(config.model) or config.model
    own = unet.load_config(model, subfolder="unet", revision=config.revision)
    for name in ("in_channels", "out_channels", "cross_attention_dim", "addition_embed_type"):
        if unet.config[name] != own.get(name):
            remedy = f"its {name} is {unet.config[name]}, that of the model's own {own.get(name)}"
            raise InputError(field, config.unet, remedy)
    return unet
