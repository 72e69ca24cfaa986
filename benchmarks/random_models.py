"""Pipelines of the true architectures with random weights, saved as a user's would be.

Random weights serve to measure time; their images mean nothing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import open_clip
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import save_model
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from semix.pipeline.standins.text import build_tokenizer, captions_of

NAMES = ("cat", "dog", "fox", "owl")
# "tiny" has all networks in small, to try the benchmarks where there is no GPU.
SIZES: dict[str, dict[str, Any]] = {
    "sd15": {
        "unet": {"sample_size": 64, "cross_attention_dim": 768},
        "vae": {"sample_size": 512, "block_out_channels": (128, 256, 512, 512)},
        "text": {"hidden_size": 768, "intermediate_size": 3072, "layers": 12, "heads": 12},
    },
    "sdxl": {
        "unet": {
            "sample_size": 128,
            "cross_attention_dim": 2048,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        "vae": {"sample_size": 1024, "block_out_channels": (128, 256, 512, 512)},
        "text": {"hidden_size": 768, "intermediate_size": 3072, "layers": 12, "heads": 12},
        "text_2": {"hidden_size": 1280, "intermediate_size": 5120, "layers": 32, "heads": 20},
    },
    "tiny": {
        "unet": {
            "sample_size": 8,
            "cross_attention_dim": 32,
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "layers_per_block": 1,
            "norm_num_groups": 8,
        },
        "vae": {"sample_size": 64, "block_out_channels": (16, 16, 16, 16), "norm_num_groups": 8},
        "text": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2},
    },
}


def save_pipeline(folder: Path, size: str, *, device: str) -> Path:
    """Build on the device, where initialising is fast, in bfloat16; save as safetensors."""
    settings = SIZES[size]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    with torch.device(device):
        components: dict[str, Any] = {
            "unet": UNet2DConditionModel(in_channels=4, out_channels=4, **settings["unet"]),
            "vae": _vae(settings["vae"]),
            "text_encoder": text_encoder(CLIPTextModel, settings["text"]),
        }
        if "text_2" in settings:
            components["text_encoder_2"] = text_encoder(
                CLIPTextModelWithProjection, settings["text_2"]
            )
    components = {name: network.to(dtype) for name, network in components.items()}
    components["tokenizer"] = tokenizer_of()
    components["scheduler"] = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    if "text_2" in settings:
        pipeline: Any = StableDiffusionXLPipeline(**components, tokenizer_2=tokenizer_of())
    else:
        pipeline = StableDiffusionPipeline(
            **components, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def save_clip(folder: Path, name: str) -> None:
    """An open_clip architecture, which loads as `local-dir:FOLDER`."""
    torch.manual_seed(0)
    model = open_clip.create_model(name)
    folder.mkdir(parents=True)
    save_model(model, str(folder / "open_clip_model.safetensors"))
    config = {
        "model_cfg": open_clip.get_model_config(name),
        "preprocess_cfg": {key: model.visual.preprocess_cfg[key] for key in ("mean", "std")},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(config))


def _vae(settings: dict[str, Any]) -> AutoencoderKL:
    levels = len(settings["block_out_channels"])
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=2,
        latent_channels=4,
        **settings,
    )


def text_encoder(kind: Any, settings: dict[str, int], names: Sequence[str] = NAMES) -> Any:
    """A text model of class `kind` with random weights."""
    tokenizer = tokenizer_of(names)
    return kind(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings["hidden_size"],
            intermediate_size=settings["intermediate_size"],
            num_hidden_layers=settings["layers"],
            num_attention_heads=settings["heads"],
            projection_dim=settings["hidden_size"],
            max_position_embeddings=77,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def tokenizer_of(names: Sequence[str] = NAMES, length: int = 77) -> CLIPTokenizer:
    """A tokenizer for at most `length` tokens; CLIP's takes 77."""
    tokenizer = build_tokenizer(names, captions_of(names, ("a photo of a {class}",)))
    tokenizer.model_max_length = length
    return tokenizer
