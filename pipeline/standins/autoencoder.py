"""A small AutoencoderKL whose latents have mean 0 and deviation 1 over the training images."""

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from pipeline.standins.progress import Report
from pipeline.standins.recipe import Recipe
from pipeline.standins.training import TrainingImages, batches, fit, seeded


def train_autoencoder(images: TrainingImages, recipe: Recipe, report: Report) -> AutoencoderKL:
    """Train on images [N,3,S,S] in [-1, 1]; latents are [N,C,S/f,S/f], f = 2 ** (levels - 1).

    The latents' standardisation is part of the model, so `scaling_factor` 1.0 is exact.
    """
    with seeded(recipe.seed):
        vae = _build(recipe, images.size)
    rng = torch.Generator().manual_seed(recipe.seed)
    draw = batches(len(images.pixels), recipe.autoencoder.batch_size, rng=rng)

    def loss() -> Tensor:
        pixels = images.pixels[next(draw)]
        posterior = vae.encode(pixels).latent_dist
        decoded = vae.decode(posterior.sample(generator=rng)).sample
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        return F.mse_loss(decoded, pixels) + recipe.kl_weight * divergence

    stage = recipe.autoencoder
    for step in fit([vae], loss, stage=stage, average_decay=recipe.average_decay):
        report("autoencoder", step, stage.steps)
    fold_standardisation(vae, *_channel_moments(vae, images.pixels))
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the latents of pixels [N,3,S,S], both [N,C,h,w]."""
    posteriors = [vae.encode(part).latent_dist for part in pixels.split(64)]
    return torch.cat([p.mean for p in posteriors]), torch.cat([p.std for p in posteriors])


@torch.no_grad()
def fold_standardisation(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """Make `vae` encode to (z - mean) / std where it encoded to z, and decode that as it did z.

    Both [C]. Exact but for rounding: the two quantisation convolutions are 1 x 1.
    """
    into, out_of = vae.quant_conv, vae.post_quant_conv
    assert isinstance(into, nn.Conv2d) and isinstance(out_of, nn.Conv2d)
    assert into.bias is not None and out_of.bias is not None
    channels = len(mean)
    into.weight[:channels] /= std.view(-1, 1, 1, 1)
    into.bias[:channels] = (into.bias[:channels] - mean) / std
    into.bias[channels:] -= 2 * std.log()  # the second half are log-variances
    out_of.bias += out_of.weight[:, :, 0, 0] @ mean
    out_of.weight *= std.view(1, -1, 1, 1)


def _channel_moments(vae: AutoencoderKL, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of the sampled latents, both [C]."""
    means, deviations = encode(vae, pixels)
    variance = means.var(dim=(0, 2, 3)) + deviations.square().mean(dim=(0, 2, 3))
    return means.mean(dim=(0, 2, 3)), variance.sqrt()


def _build(recipe: Recipe, image_size: int) -> AutoencoderKL:
    levels = len(recipe.autoencoder_widths)
    return AutoencoderKL(
        sample_size=image_size,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=recipe.autoencoder_widths,
        layers_per_block=1,
        latent_channels=recipe.latent_channels,
        norm_num_groups=8,
        mid_block_add_attention=False,  # would grow with the fourth power of the image's side
        scaling_factor=1.0,
    )
