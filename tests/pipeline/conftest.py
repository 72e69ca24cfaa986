"""Tiny genuine pipelines of every family: random weights, saved as a user's model would be."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    CMStochasticIterativeScheduler,
    ConsistencyModelPipeline,
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DiTPipeline,
    DiTTransformer2DModel,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UNet2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from semix.data.real import RealDataConfig, class_names
from semix.pipeline.standins.fitting import seeded
from semix.pipeline.standins.text import build_tokenizer, captions_of
from tests.pipeline.qwen import qwen_tokenizer

# Any names work; every word of these is one token. `real: {name: digits}` has the digits.
NAMES = ("dog", "crane", "great_white_shark", *class_names(RealDataConfig(name="digits")))
TEMPLATES = ("a photo of a {class}", "a picture of a {class}", "{class} bird")
SIZE = 8  # side of the latents; images are twice as large
WIDTH = 16  # of the networks and the text encoders
# The noise schedule that Stable Diffusion was trained with, SDXL too.
BETAS: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
TRAILING: dict[str, Any] = BETAS | {"timestep_spacing": "trailing"}


@pytest.fixture
def clip(hasty_standins: Any, tmp_path: Path) -> Path:
    """A copy of a small CLIP that a test may spoil."""
    return Path(shutil.copytree(hasty_standins.clip, tmp_path / "clip"))


@pytest.fixture(scope="session")
def tiny_names() -> tuple[str, ...]:
    """Class names whose words are single tokens, and which the DiT has as labels."""
    return NAMES


@pytest.fixture(scope="session")
def tiny_sd_epsilon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Stable Diffusion 1.x: predicts the noise, PNDM, guidance."""
    scheduler = PNDMScheduler(**BETAS, skip_prk_steps=True)
    return _save(_stable_diffusion(scheduler), tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Stable Diffusion 2.x: predicts the velocity, DDIM, guidance."""
    scheduler = DDIMScheduler(
        **BETAS, clip_sample=False, set_alpha_to_one=False, prediction_type="v_prediction"
    )
    return _save(_stable_diffusion(scheduler), tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_sd_four_levels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Levels as Stable Diffusion's: attention in three of four and in the middle, so that its
    blocks see four shapes."""
    unet = _unet(
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        block_out_channels=(WIDTH // 2, WIDTH, 2 * WIDTH, 2 * WIDTH),
        cross_attention_dim=WIDTH,
    )
    return _save(
        _stable_diffusion(DDIMScheduler(**BETAS, clip_sample=False), unet=unet), tmp_path_factory
    )


@pytest.fixture(scope="session")
def tiny_sd_turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As SD-Turbo: Euler with trailing steps."""
    return _save(_stable_diffusion(EulerDiscreteScheduler(**TRAILING)), tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As SDXL: two text encoders, pooled embedding, Euler."""
    return _save(_sdxl(EulerDiscreteScheduler(**BETAS)), tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_sdxl_turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As SDXL-Turbo: its own scheduler, ancestral Euler, draws noise at each step."""
    return _save(_sdxl(EulerAncestralDiscreteScheduler(**TRAILING)), tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_dit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As DiT-XL/2 256: 1000 labels and an empty one, learned variance, DDIM."""
    with seeded(0):
        transformer = DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=WIDTH // 2,
            in_channels=4,
            out_channels=8,  # the noise and its variance
            num_layers=2,
            sample_size=SIZE,
            patch_size=2,
            num_embeds_ada_norm=1000,  # DiTPipeline takes 1000 as the empty label
        )
        vae = _vae()
    words = [name.replace("_", " ") for name in NAMES]
    labels = {i: f"{words[i]}, {words[i]} two" if i < len(words) else f"n{i}" for i in range(1000)}
    scheduler = DDIMScheduler(clip_sample=False, beta_schedule="linear")
    pipeline = DiTPipeline(transformer, vae, scheduler, id2label=labels)
    pipeline.register_to_config(id2label=labels)  # published models carry it in model_index.json
    return _save(pipeline, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_consistency(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As openai/diffusers-cd_imagenet64_l2: labels, pixels, a consistency model."""
    pipeline = ConsistencyModelPipeline(_pixel_unet(), CMStochasticIterativeScheduler())
    return _save(pipeline, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_edm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pixels under EDM's preconditioning, in the folder of a DDPMPipeline."""
    return _save(DDPMPipeline(_pixel_unet(), EDMEulerScheduler()), tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_pixel_ddim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pixels, noise prediction, DDIM."""
    pipeline = DDIMPipeline(_pixel_unet(), DDIMScheduler(clip_sample=False))
    return _save(pipeline, tmp_path_factory)


@pytest.fixture(scope="session")
def unlabelled_pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of pixels without labels."""
    unet = _pixel_unet(num_class_embeds=None)
    return _save(DDIMPipeline(unet, DDIMScheduler()), tmp_path_factory)


def _pixel_unet(**settings: Any) -> UNet2DModel:
    with seeded(0):
        return UNet2DModel(
            sample_size=16,
            block_out_channels=(WIDTH, WIDTH),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=8,
            num_class_embeds=settings.pop("num_class_embeds", 10),
            **settings,
        )


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Stable Diffusion 3.5: two CLIP encoders and T5, flow, guidance in two rows."""
    first, second, third = _tokenizer(), _tokenizer(), _t5_tokenizer()
    with seeded(0):
        transformer = SD3Transformer2DModel(
            sample_size=SIZE,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=WIDTH // 2,
            num_attention_heads=2,
            joint_attention_dim=2 * WIDTH,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=2 * WIDTH,
            out_channels=4,
            pos_embed_max_size=SIZE,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
        )
        pipeline = StableDiffusion3Pipeline(
            transformer=_amplify_conditioning(transformer),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_flow_vae(),
            text_encoder=_text_encoder(CLIPTextModelWithProjection, first),
            tokenizer=first,
            text_encoder_2=_text_encoder(CLIPTextModelWithProjection, second),
            tokenizer_2=second,
            text_encoder_3=_t5(third),
            tokenizer_3=third,
        )
    return _save(pipeline, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As FLUX.1-dev: packed latents, pooled CLIP and T5, a shift by size, embedded guidance."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return _save(_flux(scheduler, guidance_embeds=True), tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_flux_schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As FLUX.1-schnell: no guidance, no shift."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    return _save(_flux(scheduler, guidance_embeds=False), tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_flux2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As FLUX.2 klein base: Qwen3's tokens, latents in squares of four, a batch norm in the VAE."""
    tokenizer = qwen_tokenizer(_captions())
    with seeded(0):
        transformer = Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=WIDTH,
            num_attention_heads=2,
            joint_attention_dim=3 * WIDTH,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        )
        vae = AutoencoderKLFlux2(**SMALL_VAE)
        vae.bn.running_mean.normal_(), vae.bn.running_var.uniform_(0.5, 2)
        pipeline = Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=vae,
            text_encoder=_qwen(Qwen3ForCausalLM, tokenizer, layers=28),
            tokenizer=tokenizer,
            transformer=_amplify_conditioning(transformer),
        )
    return _save(pipeline, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_z_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Z-Image: Qwen3's tokens at the prompt's own length, an image as a film of one frame."""
    tokenizer = qwen_tokenizer(_captions())
    with seeded(0):
        transformer = ZImageTransformer2DModel(
            in_channels=4,
            dim=2 * WIDTH,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[128, 16, 16],
        )
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            token.data.normal_()
        pipeline = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_flow_vae(),
            text_encoder=_qwen(Qwen3Model, tokenizer, layers=2),
            tokenizer=tokenizer,
            transformer=_amplify_conditioning(transformer),
        )
    return _save(pipeline, tmp_path_factory)


def _qwen(kind: Any, tokenizer: Qwen2Tokenizer, *, layers: int) -> Any:
    encoder = kind(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )
    torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=1.0)  # words that differ
    return encoder


def _flux(scheduler: Any, *, guidance_embeds: bool) -> FluxPipeline:
    first, second = _tokenizer(), _t5_tokenizer()
    with seeded(0):
        transformer = FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=WIDTH,
            num_attention_heads=2,
            joint_attention_dim=2 * WIDTH,
            pooled_projection_dim=WIDTH,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 4, 8),
        )
        return FluxPipeline(
            scheduler=scheduler,
            vae=_flow_vae(),
            text_encoder=_text_encoder(CLIPTextModel, first),
            tokenizer=first,
            text_encoder_2=_t5(second),
            tokenizer_2=second,
            transformer=_amplify_conditioning(transformer),
        )


def _captions() -> list[str]:
    return [text for texts in captions_of(NAMES, TEMPLATES) for text in texts]


def _t5_tokenizer() -> T5Tokenizer:
    words = {word for text in _captions() for word in text.split()}
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=[*special, *[(f"▁{word}", -1.0) for word in sorted(words)]])


def _t5(tokenizer: T5Tokenizer) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer), d_model=2 * WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2
        )
    )


LAYERS = ("add_v_proj", "context_embedder", "text_embedder", "cap_embedder.1", "stream_modulation")


def _amplify_conditioning(transformer: Any) -> Any:
    """Amplify the layers of the conditioning, which an untrained network would hardly follow."""
    for name, weight in transformer.named_parameters():
        if any(layer in name for layer in LAYERS):
            weight.data *= 6
    return transformer


def _flow_vae() -> AutoencoderKL:
    return _vae(
        scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False
    )


def _save(pipeline: Any, factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp(type(pipeline).__name__)
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _stable_diffusion(scheduler: Any, unet: Any = None) -> StableDiffusionPipeline:
    tokenizer = _tokenizer()
    with seeded(0):
        return StableDiffusionPipeline(
            vae=_vae(),
            text_encoder=_text_encoder(CLIPTextModel, tokenizer),
            tokenizer=tokenizer,
            unet=unet or _unet(cross_attention_dim=WIDTH),
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )


def _sdxl(scheduler: Any) -> StableDiffusionXLPipeline:
    first, second = _tokenizer(), _tokenizer()
    second.pad_token = "!"  # SDXL's second encoder pads with another token than its first
    with seeded(0):
        return StableDiffusionXLPipeline(
            vae=_vae(),
            text_encoder=_text_encoder(CLIPTextModel, first),
            text_encoder_2=_text_encoder(CLIPTextModelWithProjection, second),
            tokenizer=first,
            tokenizer_2=second,
            unet=_unet(
                cross_attention_dim=2 * WIDTH,
                transformer_layers_per_block=(1, 2),
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=6 * 8 + WIDTH,
            ),
            scheduler=scheduler,
            add_watermarker=False,
        )


def _tokenizer() -> CLIPTokenizer:
    return build_tokenizer(NAMES, captions_of(NAMES, TEMPLATES))


def _text_encoder(kind: Callable[[CLIPTextConfig], Any], tokenizer: CLIPTokenizer) -> Any:
    encoder = kind(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            projection_dim=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=1.0)  # words that differ
    return encoder


def _unet(**settings: Any) -> UNet2DConditionModel:
    two_levels: dict[str, Any] = {
        "sample_size": SIZE,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (WIDTH, 2 * WIDTH),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 2,  # the number of heads, whatever diffusers calls it
    }
    unet = UNet2DConditionModel(**two_levels | settings)
    # An untrained network would hardly follow its conditioning.
    for name, weight in unet.named_parameters():
        if "attn2.to_v" in name:
            weight.data *= 6
    return unet


def _vae(**settings: Any) -> AutoencoderKL:
    return AutoencoderKL(**SMALL_VAE | {"scaling_factor": 0.18215} | settings)


SMALL_VAE = {
    "sample_size": 2 * SIZE,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (WIDTH, WIDTH),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
}
