"""Enhanced sampling against a plain reading of the authors' formulas, its rows, its refusals."""

from typing import Any

import pytest
import torch
from diffusers import DDIMInverseScheduler

from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.checks import check_generator
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.schedulers import network_rows
from semix.pipeline.noise import initial_noise
from tests.pipeline.generators.test_loading import make_lora

NAMES = ["dog", "crane"]


def settings(model, **values: Any) -> GeneratorConfig:
    return load_settings(
        GeneratorConfig, {"model": str(model), "steps": 5, "guidance_scale": 3.0, **values}
    )


def sampled(config: GeneratorConfig):
    generator = load_generator(config, device="cpu")
    noise = initial_noise([0, 1], generator.latent_shape)
    condition = generator.encode(NAMES)
    return generator, noise, condition, generator.sample(noise, condition)


def ddim(x, output, *, start: float, end: float, predicts: str):
    """A step between noise levels, abar from `start` to `end`: Song et al. 2021, eq. 12."""
    if predicts == "v_prediction":
        clean = start**0.5 * x - (1 - start) ** 0.5 * output
        noise = start**0.5 * output + (1 - start) ** 0.5 * x
    else:
        noise, clean = output, (x - (1 - start) ** 0.5 * output) / start**0.5
    return end**0.5 * clean + (1 - end) ** 0.5 * noise


@pytest.mark.parametrize(
    ("enhance", "back", "enhanced"),
    [
        ({"name": "zigzag"}, 0.0, 4),
        ({"name": "weak_to_strong"}, 1.0, 4),
        ({"name": "weak_to_strong", "weak_guidance": 2.0, "until": 0.5}, 2.0, 3),
    ],
)
@pytest.mark.parametrize("model", ["tiny_sd", "tiny_dit"])
def test_zigzag_is_a_step_its_inverse_and_the_step_again(request, model, enhance, back, enhanced):
    family = "dit" if model == "tiny_dit" else "stable_diffusion"
    config = settings(request.getfixturevalue(model), family=family, enhance=enhance)
    generator, x, condition, latents = sampled(config)
    scheduler, network = generator.scheduler, generator.denoiser
    empty = network.unconditional.expand(2)
    predicts = scheduler.config.prediction_type

    def predicted(x, time, guidance: float):
        without, with_prompt = (network(x, time, rows).float() for rows in (empty, condition))
        return without + guidance * (with_prompt - without)

    scheduler.set_timesteps(5)
    levels = scheduler.alphas_cumprod
    for call, time in enumerate(scheduler.timesteps):
        before = int(time) - 1000 // 5
        end = float(levels[before] if before >= 0 else scheduler.final_alpha_cumprod)
        ends = {"start": float(levels[time]), "end": end, "predicts": predicts}
        x_next = ddim(x, predicted(x, time, 3.0), **ends)
        if call < enhanced:
            output = predicted(x_next, time, back)
            back_ends = {"start": ends["end"], "end": ends["start"], "predicts": predicts}
            x = ddim(x_next, output, **back_ends)
            x_next = ddim(x, predicted(x, time, 3.0), **ends)
        x = x_next
    torch.testing.assert_close(latents, x, rtol=1e-4, atol=1e-4)
    plain = load_generator(config.model_copy(update={"enhance": None}), device="cpu")
    noise = initial_noise([0, 1], plain.latent_shape)
    assert (plain.sample(noise, condition) - latents).abs().max() > 1e-3


def test_the_weaker_model_may_be_one_of_other_low_rank_weights(tiny_sd, tmp_path):
    lora = [{"path": str(make_lora(tiny_sd, tmp_path)), "scale": 0.5}]
    enhance = {"name": "weak_to_strong", "weak_lora": -2.0}
    config = settings(tiny_sd, lora=lora, enhance=enhance)
    generator, x, condition, latents = sampled(config)
    weak_lora = [{**lora[0], "scale": -1.0}]
    weak = load_generator(settings(tiny_sd, lora=weak_lora), device="cpu")
    scheduler = generator.scheduler
    inverse = DDIMInverseScheduler.from_config(scheduler.config, clip_sample=False)
    scheduler.set_timesteps(5)
    inverse.set_timesteps(5)

    def step(x, time):
        output = generator.denoiser.guided(x, time, condition, 3.0)
        return scheduler.step(output, time, x).prev_sample

    for call, time in enumerate(scheduler.timesteps):
        x_next = step(x, time)
        if call < 4:
            output = weak.denoiser.guided(x_next, time, condition, 1.0)
            x_next = step(inverse.step(output, time, x_next).prev_sample, time)
        x = x_next
    torch.testing.assert_close(latents, x, rtol=1e-4, atol=1e-4)


SD3 = {"family": "sd3", "prompt_length": 20, "image_size": 16}
FLUX = {"family": "flux", "prompt_length": 20, "image_size": 16}


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize(("model", "values"), [("tiny_sd3", SD3), ("tiny_flux", FLUX)])
def test_reflection_is_the_way_ahead_and_back_then_the_step(request, model, values, ahead):
    enhance = {"name": "reflect", "ahead_strength": 2.0, "reflect_steps": ahead, "merge": 0.25}
    config = settings(request.getfixturevalue(model), **values, enhance=enhance)
    generator, x, condition, latents = sampled(config)
    network = generator.denoiser
    null = network.unconditional.expand(2).tokens
    inner = 3.0 if model == "tiny_flux" else 1.0

    def tokens(strength: float, share: float) -> Conditioning:
        mixed = (1 - share) * condition.tokens + share * null
        return Conditioning(condition.tokens + strength * mixed, condition.pooled)

    scheduler = generator.scheduler
    scheduler.set_timesteps(5)
    sigmas, times = scheduler.scheduler.sigmas, scheduler.timesteps
    for call in range(5):
        if call < 4:
            stop, y = min(call + ahead, 4), x
            for i in range(call, stop):
                velocity = network.guided(y, times[i], tokens(2.0, 0.3), inner)
                y = y + (sigmas[i + 1] - sigmas[i]) * velocity
            for i in range(stop, call, -1):
                velocity = network.guided(y, times[i], tokens(-1.0, 0.7), inner)
                y = y + (sigmas[i - 1] - sigmas[i]) * velocity
            x = x + 0.25 * (y - x)
        velocity = network.guided(x, times[call], condition, 3.0)
        x = x + (sigmas[call + 1] - sigmas[call]) * velocity
    torch.testing.assert_close(latents, x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "values", "rows"),
    [
        ("tiny_sd", {"enhance": {"name": "zigzag"}}, 10 + 4 * 3),
        ("tiny_sd", {"enhance": {"name": "zigzag", "until": 0.4}}, 10 + 2 * 3),
        ("tiny_sd", {"enhance": {"name": "weak_to_strong", "weak_guidance": 2}}, 10 + 4 * 4),
        (
            "tiny_sd",
            {"enhance": {"name": "zigzag"}, "guidance_interval": [0, 0.5]},
            8 + 3 * 3 + 1 * 2,
        ),
        ("tiny_sd3", SD3 | {"enhance": {"name": "reflect"}}, 10 + 4 * 2),
        ("tiny_sd3", SD3 | {"enhance": {"name": "reflect", "reflect_steps": 3}}, 10 + 2 * 9),
        ("tiny_flux", FLUX | {"enhance": {"name": "reflect"}}, 5 + 4 * 2),
    ],
)
def test_rows_are_as_counted(request, model, values, rows):
    config = settings(request.getfixturevalue(model), **values)
    generator, sizes = load_generator(config, device="cpu"), []
    entry = getattr(generator.denoiser.network, "conv_in", None) or generator.denoiser.network
    entry.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(args[0] if args else kwargs["hidden_states"])),
        with_kwargs=True,
    )
    noise = initial_noise([0, 1], generator.latent_shape)
    generator.sample(noise, generator.encode(NAMES))
    assert sum(sizes) == network_rows(config, 2) == 2 * rows


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"guidance_scale": 1, "enhance": {"name": "zigzag"}}, "this model takes none"),
        ({"enhance": {"name": "reflect"}}, "reflect` is not of stable_diffusion; take zigzag or"),
        (SD3 | {"enhance": {"name": "zigzag"}}, "zigzag` is not of sd3; take reflect"),
        ({"family": "z_image", "enhance": {"name": "reflect"}}, "does not know family z_image"),
        ({"scheduler": "heun", "enhance": {"name": "zigzag"}}, "not those of heun; set `sched"),
        (
            {"enhance": {"name": "zigzag", "weak_guidance": 0.5}},
            r"give 0 \(no prompt\), 1 \(no guid",
        ),
        ({"enhance": {"name": "golden"}}, "golden"),
        ({"enhance": {"name": "weak_to_strong", "weak_lora": -1}}, "with weights in `lora`"),
    ],
)
def test_settings_that_cannot_be_enhanced_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        settings("some/model", **values)


def test_a_models_own_sampler_that_cannot_invert_is_named(tiny_sd_epsilon):
    config = settings(tiny_sd_epsilon, enhance={"name": "zigzag"})
    with pytest.raises(
        InputError, match=r"enhance\.name = zigzag: inverts DDIM's steps, not the .*PN"
    ):
        check_generator(config)
    check_generator(settings(tiny_sd_epsilon, enhance={"name": "zigzag"}, scheduler="ddim"))
