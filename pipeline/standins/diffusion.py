"""The small latent diffusion model: train its autoencoder and its denoiser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from semix.pipeline.standins.fitting import Batches, TrainingImages, fit, seeded
from semix.pipeline.standins.recipe import Recipe, Report
from semix.pipeline.standins.text import Captions, tokenise


def train_autoencoder(
    images: TrainingImages, recipe: Recipe, report: Report, *, state: Path | None = None
) -> AutoencoderKL:
    """Train on images [N,3,S,S] in [-1, 1]; latents are [N,C,S/f,S/f], f = 2 ** (levels - 1).

    The latents' standardisation is part of the model, so `scaling_factor` 1.0 is exact.
    """
    with seeded(recipe.seed):
        vae = nn.Module.to(build_autoencoder(recipe, images.size), images.device)
    rng = torch.Generator().manual_seed(recipe.seed)
    draw = Batches(len(images.pixels), recipe.autoencoder.batch_size, rng=rng)

    def loss() -> Tensor:
        pixels = images.pixels[next(draw)]
        posterior = vae.encode(pixels).latent_dist
        decoded = vae.decode(posterior.sample(generator=rng)).sample
        kl_divergence = posterior.kl().mean() / posterior.mean[0].numel()
        return F.mse_loss(decoded, pixels) + recipe.kl_weight * kl_divergence

    stage = recipe.autoencoder
    decay = recipe.average_decay
    for step in fit([vae], loss, stage=stage, average_decay=decay, draw=draw, state=state):
        report("autoencoder", step, stage.steps)
    fold_standardisation(vae, *_channel_moments(vae, images.pixels))
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the latents of pixels [N,3,S,S], both [N,C,h,w]."""
    posteriors = [vae.encode(batch).latent_dist for batch in pixels.split(64)]
    return torch.cat([p.mean for p in posteriors]), torch.cat([p.std for p in posteriors])


@torch.no_grad()
def fold_standardisation(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """Change `vae` so that it encodes to (z - mean) / std instead of z, and decodes accordingly.

    Mean and std are [C]. Exact but for rounding: the two quantisation convolutions are 1 x 1.
    """
    # The last layer of the encoder, and the first of the decoder.
    encoder, decoder = vae.quant_conv, vae.post_quant_conv
    assert isinstance(encoder, nn.Conv2d) and isinstance(decoder, nn.Conv2d)
    assert encoder.bias is not None and decoder.bias is not None
    channels = len(mean)
    encoder.weight[:channels] /= std.view(-1, 1, 1, 1)
    encoder.bias[:channels] = (encoder.bias[:channels] - mean) / std
    encoder.bias[channels:] -= 2 * std.log()  # the second half are log-variances
    decoder.bias += decoder.weight[:, :, 0, 0] @ mean
    decoder.weight *= std.view(1, -1, 1, 1)


def _channel_moments(vae: AutoencoderKL, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of the sampled latents, both [C]."""
    means, deviations = encode(vae, pixels)
    variance = means.var(dim=(0, 2, 3)) + deviations.square().mean(dim=(0, 2, 3))
    return means.mean(dim=(0, 2, 3)), variance.sqrt()


def build_autoencoder(recipe: Recipe, image_size: int) -> AutoencoderKL:
    """Build an untrained autoencoder."""
    levels = len(recipe.autoencoder_widths)
    return AutoencoderKL(
        sample_size=image_size,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=recipe.autoencoder_widths,
        layers_per_block=1,
        latent_channels=recipe.latent_channels,
        norm_num_groups=8,
        mid_block_add_attention=False,  # its cost grows with the fourth power of the image's side
        scaling_factor=1.0,
    )


def train_pipeline(
    images: TrainingImages,
    captions: Captions,
    *,
    vae: AutoencoderKL,
    tokenizer: CLIPTokenizer,
    recipe: Recipe,
    report: Report,
    state: Path | None = None,
) -> StableDiffusionPipeline:
    """Train the text-conditional denoiser of `vae`'s latents.

    Source: v-prediction, Salimans and Ho 2022; guidance by dropped captions, Ho and Salimans 2022.
    """
    latents = encode(vae, images.pixels)
    with seeded(recipe.seed):
        text_encoder = nn.Module.to(_text_encoder(tokenizer, recipe), images.device)
        unet = _unet(recipe, channels=latents[0].shape[1], size=latents[0].shape[-1])
        unet = nn.Module.to(unet, images.device)
    scheduler = _scheduler()
    caption_ids = torch.stack([tokenise(tokenizer, texts) for texts in captions])  # [K,T,L]
    draw = Batches(
        len(images.targets),
        recipe.denoiser.batch_size,
        rng=torch.Generator().manual_seed(recipe.seed),
    )
    loss = _v_loss(
        unet,
        text_encoder,
        scheduler=scheduler,
        latents=latents,
        targets=images.targets,
        caption_ids=caption_ids,
        empty_ids=tokenise(tokenizer, [""]),
        dropped_captions=recipe.dropped_captions,
        draw=draw,
    )
    stage = recipe.denoiser
    modules: list[nn.Module] = [unet, text_encoder]
    decay = recipe.average_decay
    for step in fit(modules, loss, stage=stage, average_decay=decay, draw=draw, state=state):
        report("denoiser", step, stage.steps)
    components: dict[str, Any] = {  # diffusers' annotations allow neither DDIM nor None
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "unet": unet,
        "scheduler": scheduler,
        "safety_checker": None,
        "feature_extractor": None,
    }
    return StableDiffusionPipeline(**components, requires_safety_checker=False)


def _v_loss(
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    *,
    scheduler: DDIMScheduler,
    latents: tuple[Tensor, Tensor],
    targets: Tensor,
    caption_ids: Tensor,
    empty_ids: Tensor,
    dropped_captions: float,
    draw: Batches,
) -> Callable[[], Tensor]:
    """A function that returns the loss of a new batch at each call."""
    means, deviations = latents
    device = means.device
    size, rng = draw.size, draw.rng
    steps = scheduler.config["num_train_timesteps"]

    def noise_like(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=rng).to(device)

    def loss() -> Tensor:
        rows = next(draw)
        clean = means[rows] + deviations[rows] * noise_like(means[rows])
        template = torch.randint(caption_ids.shape[1], (size,), generator=rng)
        ids = caption_ids[targets[rows], template]  # [B,L]
        dropped = torch.rand(size, generator=rng) < dropped_captions
        ids = torch.where(dropped[:, None], empty_ids, ids)
        # one time from each of B equal parts of the range: less variance than B free draws
        times = (torch.arange(size) + torch.rand(size, generator=rng)) * (steps / size)
        times = times.long().clamp(max=steps - 1)
        times = times.to(device)
        noise = noise_like(clean)
        noisy = scheduler.add_noise(clean, noise, times)
        condition = text_encoder(ids.to(device)).last_hidden_state  # [B,L,D]
        velocity = unet(noisy, times, encoder_hidden_states=condition).sample
        return F.mse_loss(velocity, scheduler.get_velocity(clean, noise, times))

    return loss


def _text_encoder(tokenizer: CLIPTokenizer, recipe: Recipe) -> CLIPTextModel:
    model = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.text_width,
            intermediate_size=4 * recipe.text_width,
            projection_dim=recipe.text_width,
            num_hidden_layers=recipe.text_layers,
            num_attention_heads=recipe.text_width // 16,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    # 50 times the usual spread: words that differ from the start allow a short training
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    nn.init.normal_(embedding.weight, std=1.0)
    return model


def _unet(recipe: Recipe, *, channels: int, size: int) -> UNet2DConditionModel:
    # text conditions all levels but the first, where it would cost as much as in all the others
    attending = len(recipe.denoiser_widths) - 1
    return UNet2DConditionModel(
        sample_size=size,
        in_channels=channels,
        out_channels=channels,
        down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * attending),
        up_block_types=(*["CrossAttnUpBlock2D"] * attending, "UpBlock2D"),
        block_out_channels=recipe.denoiser_widths,
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=recipe.text_width,
        attention_head_dim=4,  # the number of heads, despite its name in diffusers
    )


def _scheduler() -> DDIMScheduler:
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="v_prediction",
    )
