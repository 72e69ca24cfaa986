"""Latents on their way into the VAE, and its precision."""

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionXLPipeline

from data.settings import load_settings
from pipeline.config import GeneratorConfig
from pipeline.generators import load_generator
from pipeline.generators.latents import decoded_at_once, unscaled, upcast
from pipeline.noise import initial_noise


def make_vae(**settings) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(4,), norm_num_groups=2, latent_channels=2, **settings
    ).eval()


def test_latents_are_scaled_and_shifted_back_as_the_config_says():
    latents = torch.tensor([2.0, 6.0]).view(1, 2, 1, 1)
    plain = make_vae(scaling_factor=0.5)
    assert unscaled(latents, plain.config).flatten().tolist() == [4, 12]
    shifted = make_vae(scaling_factor=0.5, shift_factor=1.5)
    assert unscaled(latents, shifted.config).flatten().tolist() == [5.5, 13.5]
    moments = make_vae(scaling_factor=0.5, latents_mean=[1.0, 2.0], latents_std=[3.0, 0.5])
    assert unscaled(latents, moments.config).flatten().tolist() == [13, 8]


@pytest.mark.parametrize(
    ("dtype", "forced", "expected"),
    [
        (torch.float16, True, torch.float32),
        (torch.float16, False, torch.float16),
        (torch.bfloat16, True, torch.bfloat16),
    ],
)
def test_a_vae_that_overflows_in_float16_decodes_in_float32(dtype, forced, expected):
    assert upcast(make_vae(force_upcast=forced).to(dtype)).dtype == expected


def test_moments_of_the_latents_are_used_as_sdxl_uses_them(tiny_sdxl, tmp_path):
    pipeline = DiffusionPipeline.from_pretrained(tiny_sdxl, use_safetensors=True)
    moments = {"latents_mean": [0.5, -1.0, 0.0, 2.0], "latents_std": [2.0, 1.0, 0.5, 3.0]}
    pipeline.vae.register_to_config(**moments)
    pipeline.save_pretrained(tmp_path)
    values = {"model": str(tmp_path), "family": "sdxl", "steps": 2, "guidance_scale": 2.0}
    generator = load_generator(load_settings(GeneratorConfig, values), device="cpu")
    noise = initial_noise([0], generator.latent_shape)
    images = generator.decode(generator.sample(noise, generator.encode(["dog"])))
    pipeline = StableDiffusionXLPipeline.from_pretrained(tmp_path, add_watermarker=False)
    theirs = pipeline(
        "a photo of a dog",
        latents=noise,
        num_inference_steps=2,
        guidance_scale=2.0,
        output_type="pt",
    ).images
    expected = (theirs * 255).round().permute(0, 2, 3, 1)
    assert (images.float() - expected).abs().max() <= 1


@pytest.mark.parametrize(
    ("side", "images"), [(32, 16), (512, 16), (768, 7), (1024, 4), (2048, 1), (4096, 1)]
)
def test_as_many_images_are_decoded_at_once_as_8_gib_hold(side, images):
    assert decoded_at_once(side * side) == images


@pytest.mark.parametrize(("setting", "parts"), [({}, [3, 2]), ({"decode_batch": 4}, [4, 1])])
def test_the_size_of_the_images_alone_says_how_many_are_decoded_at_once(
    tiny_sd, monkeypatch, setting, parts
):
    monkeypatch.setattr("pipeline.generators.latents.DECODING_BYTES", 3 * 16 * 16 * 1920)
    config = load_settings(GeneratorConfig, {"model": str(tiny_sd), **setting})
    generator = load_generator(config, device="cpu")
    seen, decode = [], generator.vae.decode
    monkeypatch.setattr(
        generator.vae, "decode", lambda z, **o: (seen.append(len(z)), decode(z, **o))[1]
    )
    assert generator.decode(initial_noise(range(5), generator.latent_shape)).shape[1:3] == (16, 16)
    assert seen == parts


def test_decoding_in_slices_changes_nothing(tiny_sd):
    values = {"model": str(tiny_sd), "decode_batch": 2}
    slices = load_generator(load_settings(GeneratorConfig, values), device="cpu")
    whole = load_generator(
        load_settings(GeneratorConfig, values | {"decode_batch": 5}), device="cpu"
    )
    latents = initial_noise(range(5), slices.latent_shape)
    difference = slices.decode(latents).int() - whole.decode(latents).int()
    assert difference.abs().max() <= 1
    assert len(slices.decode(latents)) == 5
