"""Approximations on tiny genuine pipelines, loaded as a user's would be."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderTiny
from torch import Tensor

from data.errors import InputError
from data.settings import load_settings
from pipeline.conditioning import Conditioning, concatenate
from pipeline.config import GeneratorConfig
from pipeline.generators import load_generator
from pipeline.generators.approximate.shallow import captured, shallow_pass
from pipeline.generators.latent_diffusion import LatentDiffusion
from pipeline.rows import Rows, count_rows

pytestmark = pytest.mark.process  # for its length

ALPHAS = torch.tensor([[0.0, 0.1, 0.4, 0.5, 1.0], [0.0, 0.1, 0.5, 0.6, 1.0]])
SERIES, IMAGES = ALPHAS.shape
GUIDANCE = 3.0


@pytest.fixture(scope="module")
def make(tiny_sd: Path, tiny_sdxl: Path) -> Callable[..., LatentDiffusion]:
    """make(family, **approximate): a generator of four DDIM steps."""
    folders = {"stable_diffusion": tiny_sd, "sdxl": tiny_sdxl}

    def build(family: str = "stable_diffusion", **approximate: object) -> LatentDiffusion:
        values = {
            "family": family,
            "model": str(folders[family]),
            "steps": 4,
            "guidance_scale": GUIDANCE,
            "scheduler": "ddim",
            "approximate": approximate,
        }
        return load_generator(load_settings(GeneratorConfig, values), device="cpu")

    return build


def batch(generator: LatentDiffusion) -> tuple[Tensor, Conditioning]:
    """Two series of five, each from one noise."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(SERIES, *generator.latent_shape, generator=rng)
    first, second = (generator.encode([name]) for name in ("dog", "crane"))
    weights = ALPHAS.flatten()

    def line(a: Tensor, b: Tensor) -> Tensor:
        return torch.lerp(b, a, weights.view(-1, *[1] * (a.dim() - 1)))

    pooled = None if first.pooled is None else line(first.pooled, second.pooled)
    condition = Conditioning(line(first.tokens, second.tokens), pooled)
    return noise.repeat_interleave(IMAGES, dim=0), condition


def sampled(generator: LatentDiffusion) -> Tensor:
    return generator.sample(*batch(generator), ALPHAS)


def both(generator: LatentDiffusion, latents: Tensor, condition: Conditioning) -> tuple:
    """All rows without the condition, then all with it."""
    empty = generator.denoiser.unconditional.expand(len(latents))
    return latents.repeat(2, 1, 1, 1), concatenate([empty, condition])


def guided(output: Tensor) -> Tensor:
    without, given = output.chunk(2)
    return without + GUIDANCE * (given - without)


def counted(generator: LatentDiffusion) -> Rows:
    """Rows that one sampling really sends through the network, for one series."""
    network, rows = generator.denoiser.network, {"all": 0, "full": 0}
    for name, module in (("all", network.conv_in), ("full", network.mid_block)):
        module.register_forward_hook(
            lambda _, inputs, __, name=name: rows.update({name: rows[name] + len(inputs[0])})
        )
    sampled(generator)
    return Rows(rows["full"] // SERIES, (rows["all"] - rows["full"]) // SERIES)


@torch.inference_mode()
def test_without_options_it_is_the_plain_loop_bit_for_bit(make):
    generator = make()
    noise, condition = batch(generator)
    latents, scheduler = noise, generator.scheduler
    scheduler.set_timesteps(4)
    for timestep in scheduler.timesteps:
        rows, told = both(generator, latents, condition)
        output = generator.denoiser.network(
            rows, timestep, encoder_hidden_states=told.tokens, return_dict=False
        )[0]
        latents = scheduler.step(guided(output), timestep, latents, return_dict=False)[0]
    assert torch.equal(generator.sample(noise, condition), latents)
    assert torch.equal(sampled(make(guidance_interval=[0, 1], cache_steps=1)), latents)
    assert torch.equal(sampled(make(cache_steps=1, steps=4, scheduler="ddim")), latents)


@pytest.mark.parametrize("family", ["stable_diffusion", "sdxl"])
@pytest.mark.parametrize(
    ("approximate", "expected"),
    [
        ({}, Rows(40, 0)),
        ({"steps": 2}, Rows(20, 0)),
        ({"scheduler": "unipc", "steps": 3}, Rows(30, 0)),
        ({"scheduler": "heun", "steps": 2}, Rows(30, 0)),
        ({"scheduler": "pndm", "steps": 2}, Rows(30, 0)),
        ({"guidance_interval": [0.25, 0.75]}, Rows(30, 0)),
        ({"cache_steps": 2}, Rows(20, 20)),
        ({"cache_steps": 2, "guidance_interval": [0, 0.25]}, Rows(15, 10)),
        ({"cache_anchors": 2}, Rows(16, 24)),
        ({"cache_anchors": 3, "guidance_interval": [0.5, 1]}, Rows(18, 12)),
        ({"cache_anchors": 3, "cache_steps": 4}, Rows(6, 34)),
    ],
)
def test_rows_are_as_counted(make, family, approximate, expected):
    generator = make(family, **approximate)
    assert count_rows(generator.config, IMAGES) == expected
    assert counted(generator) == expected


@pytest.mark.parametrize("family", ["stable_diffusion", "sdxl"])
def test_the_first_step_of_a_cache_over_time_is_exact(make, family):
    exact, fast = (sampled(make(family, steps=1, cache_steps=n)) for n in (1, 3))
    assert torch.equal(exact, fast)
    exact, fast = (sampled(make(family, cache_steps=n)) for n in (1, 3))
    assert not torch.equal(exact, fast)


@pytest.mark.parametrize("until", [0.5, 1])
@torch.inference_mode()
def test_the_second_step_reads_the_features_of_the_first(make, until):
    generator = make(steps=2, cache_steps=2, guidance_interval=[0, until])
    noise, condition = batch(generator)
    got = generator.sample(noise, condition)
    network, scheduler = generator.denoiser.network, generator.scheduler
    scheduler.set_timesteps(2)
    first, second = scheduler.timesteps
    rows, told = both(generator, noise, condition)
    with captured(network) as found:
        output = network(rows, first, encoder_hidden_states=told.tokens, return_dict=False)[0]
    latents = scheduler.step(guided(output), first, noise, return_dict=False)[0]
    (deep,) = found
    if until == 1:
        rows, told = both(generator, latents, condition)
        given = {"encoder_hidden_states": told.tokens}
        output = guided(shallow_pass(network, deep, rows, second, **given)[0])
    else:  # the later half has the condition
        given = {"encoder_hidden_states": condition.tokens}
        output = shallow_pass(network, deep[len(latents) :], latents, second, **given)[0]
    expected = scheduler.step(output, second, latents, return_dict=False)[0]
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["stable_diffusion", "sdxl"])
def test_anchors_themselves_are_exact_in_one_step(make, family):
    exact, fast = make(family, steps=1), make(family, steps=1, cache_anchors=3)
    exact, fast = (sampled(g).unflatten(0, (SERIES, IMAGES)) for g in (exact, fast))
    at = [0, 2, 4]
    torch.testing.assert_close(fast[:, at], exact[:, at], atol=1e-5, rtol=1e-5)
    between = [1, 3]
    assert not torch.allclose(fast[:, between], exact[:, between], atol=1e-5)
    # Features interpolated by alpha are better than those of the near anchor on the left.
    off, near = (
        (part - exact[:, between]).square().mean() for part in (fast[:, between], exact[:, [0, 2]])
    )
    assert off < near / 4


@pytest.mark.parametrize("cache_steps", [1, 2])
def test_anchors_change_nothing_where_all_alphas_are_told_the_same(make, cache_steps):
    """Features that are equal stay what they are when they are interpolated."""
    exact = make(cache_steps=cache_steps)
    noise, condition = batch(exact)
    same = condition[torch.zeros(len(condition), dtype=torch.int64)]
    expected = exact.sample(noise, same, ALPHAS)
    fast = make(cache_steps=cache_steps, cache_anchors=2)
    torch.testing.assert_close(fast.sample(noise, same, ALPHAS), expected, atol=1e-4, rtol=1e-4)


def test_anchors_need_the_alphas(make):
    generator = make(cache_anchors=2)
    with pytest.raises(ValueError, match="cache_anchors: sample needs the alphas"):
        generator.sample(*batch(generator))


@pytest.fixture(scope="module")
def tiny_decoder(tmp_path_factory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("taesd"), levels=2)


def save_decoder(folder: Path, *, levels: int) -> Path:
    torch.manual_seed(0)
    settings = {f"{part}_block_out_channels": (8,) * levels for part in ("encoder", "decoder")} | {
        f"num_{part}_blocks": (1,) * levels for part in ("encoder", "decoder")
    }
    AutoencoderTiny(**settings, scaling_factor=0.5).save_pretrained(folder)
    return folder


@torch.inference_mode()
def test_the_tiny_decoder_scales_latents_by_its_own_config(make, tiny_decoder):
    generator = make(tiny_decoder=str(tiny_decoder))
    latents = torch.randn(3, *generator.latent_shape, generator=torch.Generator().manual_seed(0))
    decoder = AutoencoderTiny.from_pretrained(tiny_decoder)
    pixels = decoder.decode(latents / 0.5).sample
    expected = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1)
    assert torch.equal(generator.decode(latents), expected)
    assert generator.decode(latents).shape == make().decode(latents).shape
    assert not torch.equal(generator.decode(latents), make().decode(latents))


def test_a_decoder_of_another_size_is_refused(make, tmp_path):
    folder = save_decoder(tmp_path, levels=3)
    message = "decodes 4 channels to images 4 times as wide; the model has 4 channels .* 2 times"
    with pytest.raises(InputError, match=rf"approximate\.tiny_decoder = .*{message}"):
        make(tiny_decoder=str(folder))
    with pytest.raises(
        InputError, match=r"approximate\.tiny_decoder = /no: there is no such folder"
    ):
        make(tiny_decoder="/no")


@pytest.mark.parametrize("cache", ["cache_steps", "cache_anchors"])
def test_caches_are_refused_where_they_cannot_work(cache):
    for values, message in [
        ({"family": "dit"}, f"`approximate.{cache}` caches the features of a U-Net; family dit"),
        ({"compile": "full"}, f"`approximate.{cache}` runs parts of the network; use `compile"),
    ]:
        with pytest.raises(InputError, match=message):
            load_settings(GeneratorConfig, {"model": "m", "approximate": {cache: 2}} | values)
