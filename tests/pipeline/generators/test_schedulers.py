"""Each sampler on each model's schedule, against `from_config` as diffusers documents it."""

from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
)
from torch import Tensor

from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.schedulers import (
    DETERMINISTIC,
    ddim_pair,
    network_calls,
    network_rows,
    sampler,
)
from semix.pipeline.noise import initial_noise
from tests.pipeline.conftest import BETAS

OWN = {
    "epsilon": PNDMScheduler(**BETAS, skip_prk_steps=True),
    "velocity": DDIMScheduler(
        **BETAS,
        clip_sample=False,
        prediction_type="v_prediction",
        timestep_spacing="leading",
    ),
    "euler": EulerDiscreteScheduler(**BETAS, timestep_spacing="trailing"),
}
each_own = pytest.mark.parametrize("own", OWN)
each_name = pytest.mark.parametrize("name", DETERMINISTIC)


def settings_of(scheduler: Any) -> dict[str, Any]:
    return {key: value for key, value in scheduler.config.items() if not key.startswith("_")}


def walk(scheduler: Any, predict: Any, steps: int = 6) -> Tensor:
    """Sample as the documentation's loop does."""
    scheduler.set_timesteps(steps)
    latents = initial_noise([0], (2, 4, 4)) * scheduler.init_noise_sigma
    for timestep in scheduler.timesteps:
        output = predict(scheduler.scale_model_input(latents, timestep), timestep)
        latents = scheduler.step(output, timestep, latents, return_dict=False)[0]
    return latents


@each_own
@each_name
def test_a_sampler_follows_the_models_schedule(own, name):
    scheduler = OWN[own]
    result = sampler(scheduler, name=name)
    assert type(result).__name__ == DETERMINISTIC[name]
    torch.testing.assert_close(result.betas, scheduler.betas)
    assert result.config.prediction_type == scheduler.config.prediction_type
    if own != "epsilon":  # whose scheduler leaves it to each sampler
        assert result.config.timestep_spacing == scheduler.config.timestep_spacing
    assert result.config.get("steps_offset") == 1


@each_own
@each_name
def test_a_sampler_is_what_diffusers_documents(own, name):
    settings: dict[str, Any] = {"skip_prk_steps": True} if name == "pndm" else {}
    if name == "ddim":
        settings["clip_sample"] = False
    kind = getattr(diffusers, DETERMINISTIC[name])
    documented = kind.from_config(OWN[own].config, **settings)
    result = sampler(OWN[own], name=name)

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        return 0.3 * latents + (timestep / 1000).sin()

    latents = walk(result, predict)
    assert latents.isfinite().all()
    torch.testing.assert_close(latents, walk(documented, predict))
    assert torch.equal(latents, walk(result, predict))  # its state starts afresh, and no noise
    assert latents.std() > 0.1


@each_own
def test_all_samplers_arrive_where_the_model_points(own):
    """A model that always predicts the same image is followed to that image."""
    image = initial_noise([5], (2, 4, 4))
    alphas = OWN[own].alphas_cumprod
    predicts_noise = OWN[own].config.prediction_type == "epsilon"

    for name in DETERMINISTIC:
        scheduler = sampler(OWN[own], name=name, spacing="trailing")

        def predict(scaled: Tensor, timestep: Tensor) -> Tensor:
            signal = alphas[int(timestep)]
            noise = (scaled - signal.sqrt() * image) / (1 - signal).sqrt()
            if predicts_noise:
                return noise
            return signal.sqrt() * noise - (1 - signal).sqrt() * image

        latents = walk(scheduler, predict, steps=20)
        torch.testing.assert_close(latents, image, atol=0.05, rtol=0.05)


def test_without_a_name_the_models_own_sampler_stays():
    for own in OWN.values():
        result = sampler(own, spacing="linspace")
        assert type(result) is type(own)
        assert result is not own
        changed = {"timestep_spacing": "linspace"}
        assert settings_of(result) == settings_of(own) | changed


@pytest.mark.parametrize(
    "own",
    [
        EulerAncestralDiscreteScheduler(),
        LCMScheduler(),
        DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
    ],
)
def test_a_sampler_that_draws_noise_is_refused_until_another_is_named(own):
    name = type(own).__name__
    message = rf"generator\.scheduler = nothing: the model's own {name} may draw noise .* ddim, "
    with pytest.raises(InputError, match=message):
        sampler(own)
    for other in DETERMINISTIC:
        walk(sampler(own, name=other), lambda latents, timestep: 0.1 * latents)
    result = sampler(own, name="dpmpp_2m")
    assert result.config.algorithm_type == "dpmsolver++"


@pytest.mark.parametrize("own", [FlowMatchEulerDiscreteScheduler(), EDMEulerScheduler()])
def test_a_schedule_without_betas_is_refused(own):
    name = type(own).__name__
    with pytest.raises(InputError, match=rf"generator\.scheduler = ddim: cannot follow .* {name}"):
        sampler(own, name="ddim")
    with pytest.raises(InputError, match=rf"noise\.strategy = inversion: cannot follow .* {name}"):
        ddim_pair(own)


def test_a_sampler_that_does_not_know_the_betas_is_refused():
    own = DDIMScheduler(**BETAS, rescale_betas_zero_snr=True, prediction_type="v_prediction")
    for name in ("heun", "pndm"):
        with pytest.raises(InputError, match=f"scheduler = {name}: does not know this model's"):
            sampler(own, name=name)
    torch.testing.assert_close(sampler(own, name="euler").betas, own.betas)
    with pytest.raises(InputError, match="pndm: cannot sample a model that predicts images"):
        sampler(DDIMScheduler(**BETAS, prediction_type="sample"), name="pndm")


@each_own
def test_ddim_and_its_inverse_share_steps_and_betas(own):
    forward, inverse = ddim_pair(OWN[own])
    forward.set_timesteps(8)
    inverse.set_timesteps(8)
    assert forward.timesteps.tolist() == inverse.timesteps.tolist()[::-1]
    torch.testing.assert_close(forward.betas, inverse.betas)
    for scheduler in (forward, inverse):
        assert scheduler.config.prediction_type == OWN[own].config.prediction_type
        assert not scheduler.config.clip_sample


@pytest.mark.parametrize("model", ["tiny_sd", "tiny_sd_epsilon", "tiny_sdxl_turbo", "tiny_dit"])
def test_every_sampler_makes_images_of_every_model(model, request):
    folder = request.getfixturevalue(model)
    family = {"tiny_dit": "dit", "tiny_sdxl_turbo": "sdxl"}.get(model, "stable_diffusion")
    images = []
    for name in DETERMINISTIC:
        values = {"model": str(folder), "family": family, "steps": 4, "scheduler": name}
        generator = load_generator(load_settings(GeneratorConfig, values), device="cpu")
        condition = generator.encode(["dog", "crane"])
        noise = initial_noise([0, 1], generator.latent_shape)
        latents = generator.sample(noise, condition)
        assert latents.isfinite().all()
        assert torch.equal(latents, generator.sample(noise, condition))
        images.append(generator.decode(latents))
        assert images[-1].float().std() > 1
    # Euler equals DDIM; the other samplers differ.
    assert len({image.numpy().tobytes() for image in images}) >= len(DETERMINISTIC) - 1


@each_name
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_calls_are_told_without_the_sampler_as_it_counts_them(name, steps, tmp_path):
    """By name or from the files of the model's own scheduler; without files one call per step."""
    result = sampler(OWN["epsilon"], name=name)
    result.set_timesteps(steps)
    config = GeneratorConfig(model="no/where", steps=steps, scheduler=name)
    assert network_calls(config) == len(result.timesteps)
    result.save_pretrained(tmp_path / "scheduler")
    assert network_calls(GeneratorConfig(model=str(tmp_path), steps=steps)) == len(result.timesteps)
    assert network_calls(GeneratorConfig(model="no/where", steps=steps)) == steps


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, 2 * 20),
        ({"guidance_scale": 1.0}, 20),
        ({"guidance_interval": (0, 0.6)}, 12 + 20),
        ({"guidance_interval": (0.5, 1)}, 10 + 20),
        ({"guidance_interval": (0.3, 0.74), "steps": 4}, 1 + 4),  # at 0, 1/4, 1/2, 3/4
        ({"scheduler": "heun", "steps": 5}, 2 * 9),
        ({"scheduler": "pndm", "steps": 5}, 2 * 6),
    ],
)
def test_rows_of_a_series_by_hand(settings, rows):
    assert network_rows(GeneratorConfig(model="no/where", **settings), 8) == 8 * rows


def test_rows_of_a_sampler_that_counted_itself():
    assert network_rows(GeneratorConfig(model="no/where"), 4, calls=3) == 4 * 2 * 3
