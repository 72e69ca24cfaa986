"""Pixel models: held to diffusers' own calls; mixtures of labels; what they refuse."""

import itertools
from typing import Any

import pytest
import torch
from diffusers import ConsistencyModelPipeline, DDIMPipeline, EDMEulerScheduler, UNet2DModel

from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.checks import check_generator
from semix.pipeline.conditioning import mix
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.noise import initial_noise

NAMES = {"dog": "3", "crane": "7"}


def settings(model, **values: Any) -> GeneratorConfig:
    fixed = {"family": "pixel", "model": str(model), "names": NAMES, "guidance_scale": 1.0}
    return load_settings(GeneratorConfig, fixed | {"steps": 1} | values)


def load(model, **values: Any):
    return load_generator(settings(model, **values), device="cpu")


@torch.inference_mode()
def test_one_step_is_the_call_of_a_consistency_model(tiny_consistency):
    generator = load(tiny_consistency)
    noise = initial_noise([0, 1], generator.latent_shape)
    images = generator.decode(generator.sample(noise, generator.encode(["3", "7"])))
    pipeline = ConsistencyModelPipeline.from_pretrained(tiny_consistency, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(2, [3, 7], num_inference_steps=1, latents=noise, output_type="pt").images
    actual = generator.sample(noise, generator.encode(["3", "7"])) / 2 + 0.5
    torch.testing.assert_close(actual.clamp(0, 1), expected, atol=1e-5, rtol=0)
    assert torch.equal(images, (expected * 255).round().to(torch.uint8).permute(0, 2, 3, 1))


@torch.inference_mode()
def test_edm_is_the_plain_euler_loop(tiny_edm):
    generator = load(tiny_edm, steps=6)
    noise = initial_noise([0, 1], generator.latent_shape)
    network = UNet2DModel.from_pretrained(tiny_edm, subfolder="unet").eval()
    scheduler = EDMEulerScheduler()
    scheduler.set_timesteps(6)
    sigmas, labels = scheduler.sigmas, torch.tensor([3, 7])
    x = noise * scheduler.init_noise_sigma
    for sigma, following in itertools.pairwise(sigmas):
        total = sigma**2 + 0.25
        output = network(x / total.sqrt(), sigma.log() / 4, class_labels=labels).sample
        clean = 0.25 / total * x + sigma * 0.5 / total.sqrt() * output
        x = x + (following - sigma) * (x - clean) / sigma
    actual = generator.sample(noise, generator.encode(["3", "7"]))
    torch.testing.assert_close(actual, x, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_ddim_is_the_plain_loop(tiny_pixel_ddim):
    generator = load(tiny_pixel_ddim, steps=5)
    noise = initial_noise([0, 1], generator.latent_shape)
    pipeline = DDIMPipeline.from_pretrained(tiny_pixel_ddim, use_safetensors=True)
    pipeline.scheduler.set_timesteps(5)
    x = noise
    for timestep in pipeline.scheduler.timesteps:
        output = pipeline.unet(x, timestep, class_labels=torch.tensor([3, 7])).sample
        x = pipeline.scheduler.step(output, timestep, x).prev_sample
    actual = generator.sample(noise, generator.encode(["3", "7"]))
    torch.testing.assert_close(actual, x, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_mixed_labels_mix_the_embeddings(tiny_consistency):
    generator = load(tiny_consistency)
    rows = generator.encode(["3", "7"])
    mixture = torch.tensor([[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]])
    mixed = mix(rows, [0, 1], mixture)
    table = generator.denoiser.network.class_embedding.table.weight
    embedded = generator.denoiser.network.class_embedding(mixed.tokens)
    torch.testing.assert_close(embedded[1], 0.25 * table[3] + 0.75 * table[7])
    noise = initial_noise([0, 0, 0], generator.latent_shape)
    images = generator.sample(noise, mixed)
    ends = generator.sample(noise[:2], rows)
    torch.testing.assert_close(images[[0, 2]], ends)
    assert not torch.allclose(images[1], ends.mean(0), atol=1e-4)


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (
            "tiny_consistency",
            {"steps": 2},
            r"generator\.steps = 2: a consistency model draws",
        ),
        (
            "tiny_sd",
            {},
            r"holds a StableDiffusionPipeline; family pixel needs a Consist",
        ),
    ],
)
def test_models_that_do_not_fit_are_named(request, model, values, message):
    with pytest.raises(InputError, match=message):
        check_generator(settings(request.getfixturevalue(model), **values))


def test_noise_is_not_selected_where_there_is_no_exact_inversion(tiny_edm, tiny_pixel_ddim):
    with pytest.raises(InputError, match=r"noise\.strategy = select: cannot follow the model"):
        check_generator(settings(tiny_edm, steps=4), noise_strategy="select")
    check_generator(settings(tiny_pixel_ddim, steps=4), noise_strategy="select")


def test_settings_of_other_families_are_refused():
    with pytest.raises(InputError, match="no empty label; set `guidance_scale: 1`"):
        settings("some/model", guidance_scale=2.0)
    with pytest.raises(InputError, match="no VAE to replace; leave `tiny_decoder` out"):
        settings("some/model", tiny_decoder="some/decoder")


def test_a_model_without_labels_is_refused(tmp_path, unlabelled_pixels):
    with pytest.raises(InputError, match=r"its U-Net has no labels \(num_class_embeds\)"):
        load(unlabelled_pixels)
