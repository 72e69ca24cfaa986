"""Stable Diffusion 3.5 and FLUX.1 with random weights: the published sizes, and small ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from benchmarks.random_models import NAMES, text_encoder, tokenizer_of
from semix.pipeline.standins.text import captions_of

LARGE_VAE = {
    "sample_size": 1024,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SMALL_VAE = {
    "sample_size": 32,
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (16, 16, 16),
    "norm_num_groups": 8,
    "latent_channels": 4,
    "shift_factor": 0.0,
}
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "layers": 12, "heads": 12}
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "layers": 32, "heads": 20}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2}
SMALL_LENGTH = 16  # tokens, as many as the quickstart's model reads
# T5-XXL is as wide but has 24 layers; texts are encoded once, outside what is timed.
T5_WIDE = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 1, "num_heads": 64}
T5_SMALL: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
SD3: dict[str, dict[str, Any]] = {
    "sd35-medium": {
        "sample_size": 128,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 24,
        "num_attention_heads": 24,
        "attention_head_dim": 64,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 384,
        "qk_norm": "rms_norm",
        "dual_attention_layers": tuple(range(13)),
    },
    # As many blocks, so narrow that a row costs as much as with the U-Net of the quickstart.
    "small-sd3": {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 24,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "joint_attention_dim": 64,
        "caption_projection_dim": 24,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 8,
        "qk_norm": "rms_norm",
    },
}
FLUX: dict[str, dict[str, Any]] = {
    "flux-dev": {"guidance_embeds": True},  # the defaults of FluxTransformer2DModel
    "small-flux": {
        "in_channels": 16,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 12,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 4, 4),
    },
}


def save_flow(
    folder: Path,
    size: str,
    *,
    device: str,
    names: Sequence[str] = NAMES,
    vae: AutoencoderKL | None = None,
) -> Path:
    """Build on the device, in bfloat16 on a GPU; save as safetensors.

    Args:
        size: a key of SD3 or FLUX.
        names: of classes that the tokenizers know.
        vae: replaces a VAE with random weights.
    """
    torch.manual_seed(0)
    small = size.startswith("small")
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    words = {word for texts in captions_of(names, ("a photo of a {class}",)) for word in texts}
    t5_tokenizer = _t5_tokenizer(" ".join(words).split())
    t5_config = T5Config(vocab_size=len(t5_tokenizer), **(T5_SMALL if small else T5_WIDE))
    with torch.device(device):
        # As Any: the wrapped methods of these classes lose their types.
        decoder: Any = vae or AutoencoderKL(**(SMALL_VAE if small else LARGE_VAE))
        t5: Any = T5EncoderModel(t5_config)
        first, second = (SMALL, SMALL) if small else (CLIP_L, CLIP_G)
        clip = CLIPTextModelWithProjection if size in SD3 else CLIPTextModel
        components: dict[str, Any] = {
            "vae": decoder.to(dtype),
            "text_encoder": text_encoder(clip, first, names).to(dtype),
        }
        if size in SD3:
            network: Any = SD3Transformer2DModel(**SD3[size])
            components |= {
                "transformer": network.to(dtype),
                "text_encoder_2": text_encoder(clip, second, names).to(dtype),
                "text_encoder_3": t5.to(dtype),
            }
        else:
            network = FluxTransformer2DModel(**FLUX[size])
            components |= {"transformer": network.to(dtype), "text_encoder_2": t5.to(dtype)}
    length = SMALL_LENGTH if small else 77
    components["tokenizer"] = tokenizer_of(names, length)
    if size in SD3:
        components |= {"tokenizer_2": tokenizer_of(names, length), "tokenizer_3": t5_tokenizer}
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        pipeline: Any = StableDiffusion3Pipeline(scheduler=scheduler, **components)
    else:
        components["tokenizer_2"] = t5_tokenizer
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
        pipeline = FluxPipeline(scheduler=scheduler, **components)
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _t5_tokenizer(words: Sequence[str]) -> T5Tokenizer:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    vocabulary = [(f"\u2581{word}", -1.0) for word in sorted(set(words))]
    return T5Tokenizer(vocab=[*special, *vocabulary])
