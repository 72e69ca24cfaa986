"""from_pretrained, the only way models come in: safetensors, a pinned revision, never code."""

from typing import Any

import torch
from diffusers import UNet2DConditionModel
from safetensors import SafetensorError
from torch import nn

from data.errors import InputError
from pipeline.checks.model_paths import local_path
from pipeline.config import GeneratorConfig
from pipeline.generators.lora import add_lora

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_pipeline(kind: Any, config: GeneratorConfig, *, device: str, **parts: Any) -> Any:
    """A diffusers pipeline of class `kind` on the device, fine-tuned parts put in.

    Its networks only evaluate, and want no gradients of their weights.

    Args:
        parts: what `from_pretrained` shall take instead of the model's own.
    Raises:
        InputError: it cannot be loaded, or the device lacks its precision.
    """
    dtype = resolve_dtype(config.dtype, device)
    if config.unet is not None:
        parts["unet"] = _tuned_unet(config, dtype)
    pipeline = load_part(
        kind,
        config.model,
        field="generator.model",
        revision=config.revision,
        variant=config.variant,
        dtype=dtype,
        **parts,
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


def load_part(kind: Any, model: str, *, field: str, **settings: Any) -> Any:
    """`kind.from_pretrained` with errors that name the field."""
    try:
        return kind.from_pretrained(local_path(model) or model, use_safetensors=True, **settings)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(field, model, f"cannot be loaded: {first_line(error)}") from error


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """Raises InputError where the device computes in that precision badly or not at all."""
    if name == "float16" and device == "cpu":
        raise InputError("generator.dtype", name, "needs a GPU; use float32 or bfloat16 on a CPU")
    if name == "bfloat16" and device.startswith("cuda"):
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise InputError("generator.dtype", name, "this GPU lacks it; use float16")
    return DTYPES[name]


def native_shape(network: Any) -> tuple[int, int, int]:
    """(channels, height, width) of the latents that a U-Net or transformer was trained on."""
    size = network.config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    return network.config.in_channels, height, width


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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
