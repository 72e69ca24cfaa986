"""Public configurations of the large models, and model folders made of them without weights."""

import json
from pathlib import Path

from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from transformers import T5Tokenizer

from semix.pipeline.standins.text import build_tokenizer, captions_of
from tests.pipeline.qwen import qwen_tokenizer

VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
# The published configs; what they leave out are the classes' defaults.
SD15 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
SD21 = {
    "sample_size": 64,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
SDXL = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
DIT_XL_2 = {
    "sample_size": 32,
    "num_layers": 28,
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
}
SD3_MEDIUM: dict[str, object] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
SD35_MEDIUM = SD3_MEDIUM | {
    "qk_norm": "rms_norm",
    "dual_attention_layers": list(range(13)),
    "pos_embed_max_size": 384,
}
SD35_LARGE = SD3_MEDIUM | {
    "qk_norm": "rms_norm",
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
}
T5_XXL = {
    "model_type": "t5",
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
FLOW_VAE = {
    "latent_channels": 16,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
KLEIN_4B = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
UNET = "UNet2DConditionModel"


def write(path: Path, **content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def configs_of(folder: Path, pipeline: str, networks: dict[str, tuple[str, dict]]) -> str:
    """A model directory with the configs that a hub repository has, and no weights.

    Args:
        networks: class and config of each network, by its folder.
    """
    flow = "transformer" in networks and pipeline != "DiTPipeline"
    vae = ("AutoencoderKL", VAE | FLOW_VAE if flow else VAE)
    networks = {"vae": vae} | networks
    scheduler = FlowMatchEulerDiscreteScheduler() if flow else DDIMScheduler()
    scheduler.save_pretrained(folder / "scheduler")
    index = {"_class_name": pipeline, "scheduler": ["diffusers", type(scheduler).__name__]}
    for name, (kind, settings) in networks.items():
        library = "transformers" if kind.startswith(("CLIP", "T5", "Qwen3")) else "diffusers"
        index[name] = [library, kind]
        write(folder / name / "config.json", _class_name=kind, **settings)
        if kind.startswith("T5"):
            T5Tokenizer().save_pretrained(folder / name.replace("text_encoder", "tokenizer"))
            index[name.replace("text_encoder", "tokenizer")] = ["transformers", "T5Tokenizer"]
        elif kind.startswith("Qwen3"):
            qwen_tokenizer(["a photo of a cat"]).save_pretrained(folder / "tokenizer")
            index["tokenizer"] = ["transformers", "Qwen2Tokenizer"]
        elif library == "transformers":
            tokenizer = build_tokenizer(("cat",), captions_of(("cat",), ("{class}",)))
            tokenizer.model_max_length = 77
            tokenizer.save_pretrained(folder / name.replace("text_encoder", "tokenizer"))
            index[name.replace("text_encoder", "tokenizer")] = ["transformers", "CLIPTokenizer"]
    write(folder / "model_index.json", **index)
    return str(folder)


def text(width: int, layers: int) -> dict:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "projection_dim": width}
    return {"model_type": "clip_text_model", "num_hidden_layers": layers, **sizes}


CLIP_L = ("CLIPTextModel", text(768, 12))
FLUX = {
    "transformer": ("FluxTransformer2DModel", {}),
    "text_encoder": CLIP_L,
    "text_encoder_2": ("T5EncoderModel", T5_XXL),
}


FLUX_DEV = FLUX | {"transformer": ("FluxTransformer2DModel", {"guidance_embeds": True})}
Z_IMAGE = {
    "transformer": ("ZImageTransformer2DModel", {}),
    "text_encoder": ("Qwen3Model", QWEN3_4B),
}
KLEIN = {
    "transformer": ("Flux2Transformer2DModel", KLEIN_4B),
    "vae": ("AutoencoderKLFlux2", {}),
    "text_encoder": ("Qwen3ForCausalLM", QWEN3_4B),
}


def sd3(transformer: dict) -> dict[str, tuple[str, dict]]:
    return {
        "transformer": ("SD3Transformer2DModel", transformer),
        "text_encoder": ("CLIPTextModelWithProjection", text(768, 12)),
        "text_encoder_2": ("CLIPTextModelWithProjection", text(1280, 32)),
        "text_encoder_3": ("T5EncoderModel", T5_XXL),
    }
