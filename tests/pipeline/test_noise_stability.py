"""The score itself: round trips worked out by hand, and on every family."""

import pytest
import torch
from diffusers import DDIMInverseScheduler, DDIMScheduler
from torch import Tensor

from data.errors import InputError
from pipeline.conditioning import Conditioning
from pipeline.config import GeneratorConfig
from pipeline.generators import load_generator
from pipeline.generators.schedulers import ddim_pair
from pipeline.noise import initial_noise, inversion_stability

SHAPE = (4, 8, 8)
NOTHING = Conditioning(torch.zeros(3, 1, 1))


def schedulers(prediction: str = "epsilon", spacing: str = "trailing"):
    settings = {
        "prediction_type": prediction,
        "timestep_spacing": spacing,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "clip_sample": False,
    }
    return DDIMScheduler(**settings), DDIMInverseScheduler(**settings)


class Network:
    """A small nonlinear function of latents, time and condition, one row at a time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(4, 4, 3, 3, generator=generator) / 6

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning, w: float):
        told = condition.tokens.mean((1, 2))[:, None, None, None] + timestep / 1000
        return (
            torch.tanh(torch.conv2d(latents, self.weight.to(latents), padding=1) + told) + w * 0.1
        )


@pytest.mark.parametrize("steps", [3, 4, 7, 10, 20])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_a_constant_prediction_gives_the_start_back(steps, spacing):
    noise, constant = initial_noise([1, 2, 3], SHAPE), initial_noise([4, 5, 6], SHAPE)
    found = inversion_stability(
        noise,
        NOTHING,
        predict=lambda *_: constant,
        schedulers=schedulers(spacing=spacing),
        steps=steps,
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.ones(3), atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [4, 10, 20])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_so_does_a_constant_noise_told_as_a_velocity(steps, spacing):
    """v = (eps - sqrt(1 - abar) x) / sqrt(abar) at the level of the latents; a constant v itself
    is another eps at each level, so it is not expected to."""
    noise, constant = initial_noise([1, 2, 3], SHAPE), initial_noise([4, 5, 6], SHAPE)
    pair = schedulers("v_prediction", spacing)
    levels = [abar for _, abar, _ in sampling_levels(pair[0], steps)]
    levels += [abar for _, abar, _ in inversion_levels(pair[0], steps)]
    coming = iter(levels)

    def velocity(latents, *_):
        abar = next(coming)
        return (constant - (1 - abar) ** 0.5 * latents) / abar**0.5

    found = inversion_stability(noise, NOTHING, predict=velocity, schedulers=pair, steps=steps)
    torch.testing.assert_close(found, torch.ones(3), atol=1e-6, rtol=0)


def sampling_levels(scheduler, steps):
    """(time step told, abar of the latents, abar after the step), noisiest first."""
    scheduler.set_timesteps(steps)
    jump = 1000 // steps
    abar = {t: float(value) for t, value in enumerate(scheduler.alphas_cumprod)}
    times = scheduler.timesteps.tolist()
    return [(t, abar[t], abar[t - jump] if t >= jump else 1.0) for t in times]


def inversion_levels(scheduler, steps):
    return [(t, after, before) for t, before, after in reversed(sampling_levels(scheduler, steps))]


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_it_is_the_ddim_equations(prediction, spacing):
    noise, network = initial_noise([1, 2, 3], SHAPE), Network()
    condition = Conditioning(torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1))
    pair = schedulers(prediction, spacing)
    x = noise.double()
    for t, here, there in [*sampling_levels(pair[0], 5), *inversion_levels(pair[0], 5)]:
        output = network(x, torch.tensor(t), condition, 0.0)
        epsilon = output
        if prediction == "v_prediction":
            epsilon = here**0.5 * output + (1 - here) ** 0.5 * x
        clean = (x - (1 - here) ** 0.5 * epsilon) / here**0.5
        x = there**0.5 * clean + (1 - there) ** 0.5 * epsilon
    expected = torch.cosine_similarity(noise.double().flatten(1), x.flatten(1)).float()
    assert expected.max() < 0.999
    found = inversion_stability(
        noise, condition, predict=network, schedulers=pair, steps=5, guidance_scale=0.0
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_both_passes_are_guided_alike():
    seen = []

    def predict(latents, timestep, condition, guidance_scale):
        seen.append(guidance_scale)
        return latents

    inversion_stability(
        initial_noise([1, 2, 3], SHAPE),
        NOTHING,
        predict=predict,
        schedulers=schedulers(),
        steps=4,
        guidance_scale=5.5,
    )
    assert seen == [5.5] * 8


def test_its_gradient_is_the_slope():
    noise, network = initial_noise([1, 2, 3], SHAPE), Network()

    def score(values):
        return inversion_stability(
            values, NOTHING, predict=network, schedulers=schedulers(), steps=4
        )

    leaf = noise.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(leaf).sum(), leaf)
    way = gradient / gradient.flatten(1).norm(dim=1)[:, None, None, None]
    reach = 0.05
    slope = (score(noise + reach * way) - score(noise - reach * way)) / (2 * reach)
    torch.testing.assert_close(slope, (gradient * way).flatten(1).sum(1), rtol=0.02, atol=1e-5)


def test_a_constant_target_lets_no_gradient_through_the_network():
    leaf = initial_noise([1, 2, 3], SHAPE).requires_grad_()

    def predict(latents, *_):
        assert not torch.is_grad_enabled()
        return torch.tanh(latents)

    score = inversion_stability(
        leaf, NOTHING, predict=predict, schedulers=schedulers(), steps=4, detach_target=True
    )
    (gradient,) = torch.autograd.grad(score.sum(), leaf)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("tiny_sd", "stable_diffusion"),
        ("tiny_sd_epsilon", "stable_diffusion"),
        ("tiny_sd_turbo", "stable_diffusion"),
        ("tiny_sdxl", "sdxl"),
        ("tiny_dit", "dit"),
    ],
)
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_every_family_inverts(model, family, guidance_scale, request, tiny_names):
    config = GeneratorConfig(
        family=family, model=str(request.getfixturevalue(model)), guidance_scale=2.0
    )
    generator = load_generator(config, device="cpu")
    embeddings = generator.encode(tiny_names[:3])
    noise = initial_noise([1, 2, 3], generator.latent_shape)
    pair = ddim_pair(generator.denoiser.pipeline.scheduler)
    shared = pair[0].config.keys() & pair[1].config.keys() - {"_class_name", "_use_default_values"}
    assert {key: pair[0].config[key] for key in shared} == {
        key: pair[1].config[key] for key in shared
    }

    def score(rows, steps):
        with torch.inference_mode():
            return inversion_stability(
                noise[rows],
                embeddings[rows],
                predict=generator.predict,
                schedulers=pair,
                steps=steps,
                guidance_scale=guidance_scale,
            )

    found = score([0, 1, 2], 5)
    assert found.abs().max() <= 1
    assert len(set(found.tolist())) == 3
    torch.testing.assert_close(score([2], 5), found[2:], atol=1e-4, rtol=0)
    assert not torch.equal(score([0, 1, 2], 6), found)


def test_a_schedule_that_ddim_cannot_follow_is_named():
    from diffusers import FlowMatchEulerDiscreteScheduler

    message = r"noise\.strategy = .*cannot follow the model's FlowMatchEulerDiscreteScheduler"
    with pytest.raises(InputError, match=message):
        ddim_pair(FlowMatchEulerDiscreteScheduler())
