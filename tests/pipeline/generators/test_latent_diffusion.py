"""Sampling as the plain loop does it, its rows; latents into the VAE; compiled networks."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionXLPipeline
from torch._dynamo.utils import counters

from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.conditioning import concatenate
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.latent_diffusion import (
    COMPILER,
    decode_batch_size,
    denormalise,
    upcast,
)
from semix.pipeline.generators.schedulers import network_rows
from semix.pipeline.noise import initial_noise
from tests.emulated_cuda import emulated_cuda
from tests.pipeline.roots import begun, work


def load(model, **settings: Any):
    values = {"model": str(model), "steps": 4, "guidance_scale": 3.0, **settings}
    return load_generator(load_settings(GeneratorConfig, values), device="cpu")


@torch.inference_mode()
def test_sampling_is_the_plain_loop_bit_for_bit(tiny_sd):
    generator = load(tiny_sd, scheduler="ddim")
    noise = initial_noise([0, 1], generator.latent_shape)
    condition = generator.encode(["dog", "crane"])
    embeddings = concatenate([generator.denoiser.unconditional.expand(2), condition]).tokens
    latents, scheduler = noise, generator.scheduler
    scheduler.set_timesteps(4)
    for timestep in scheduler.timesteps:
        unconditional, conditional = generator.denoiser.network(
            latents.repeat(2, 1, 1, 1),
            timestep,
            encoder_hidden_states=embeddings,
            return_dict=False,
        )[0].chunk(2)
        guided = unconditional + 3.0 * (conditional - unconditional)
        latents = scheduler.step(guided, timestep, latents, return_dict=False)[0]
    assert torch.equal(generator.sample(noise, condition), latents)


@torch.inference_mode()
def test_outside_its_interval_guidance_is_off(tiny_sd):
    """The second of two steps takes the conditional prediction alone."""
    generator = load(tiny_sd, scheduler="ddim", steps=2, guidance_interval=[0, 0.5])
    noise = initial_noise([0, 1], generator.latent_shape)
    condition = generator.encode(["dog", "crane"])
    latents, scheduler = noise, generator.scheduler
    scheduler.set_timesteps(2)
    for timestep, scale in zip(scheduler.timesteps, (3.0, 1.0), strict=True):
        output = generator.predict(latents, timestep, condition, scale)
        latents = scheduler.step(output, timestep, latents, return_dict=False)[0]
    assert torch.equal(generator.sample(noise, condition), latents)
    guided = load(tiny_sd, scheduler="ddim", steps=2)
    assert not torch.equal(guided.sample(noise, condition), latents)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, 8),
        ({"guidance_interval": [0.25, 0.75]}, 6),
        ({"guidance_scale": 1.0}, 4),
        ({"scheduler": "heun", "steps": 2}, 6),
        ({"scheduler": "pndm", "steps": 2, "guidance_interval": [0, 0.5]}, 5),
    ],
)
@pytest.mark.parametrize("family", ["stable_diffusion", "sdxl"])
def test_rows_are_as_counted(request, family, settings, rows):
    model = request.getfixturevalue({"stable_diffusion": "tiny_sd", "sdxl": "tiny_sdxl"}[family])
    generator, sizes = load(model, family=family, **settings), []
    generator.denoiser.network.conv_in.register_forward_hook(
        lambda _, inputs, __: sizes.append(len(inputs[0]))
    )
    noise = initial_noise([0, 1], generator.latent_shape)
    generator.sample(noise, generator.encode(["dog", "crane"]))
    assert sum(sizes) == network_rows(generator.config, 2) == 2 * rows


def make_vae(**settings) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(4,), norm_num_groups=2, latent_channels=2, **settings
    ).eval()


def test_latents_are_scaled_and_shifted_back_as_the_config_says():
    latents = torch.tensor([2.0, 6.0]).view(1, 2, 1, 1)
    plain = make_vae(scaling_factor=0.5)
    assert denormalise(latents, plain).flatten().tolist() == [4, 12]
    shifted = make_vae(scaling_factor=0.5, shift_factor=1.5)
    assert denormalise(latents, shifted).flatten().tolist() == [5.5, 13.5]
    moments = make_vae(scaling_factor=0.5, latents_mean=[1.0, 2.0], latents_std=[3.0, 0.5])
    assert denormalise(latents, moments).flatten().tolist() == [13, 8]


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
    generator = load(tmp_path, family="sdxl", steps=2, guidance_scale=2.0)
    noise = initial_noise([0], generator.latent_shape)
    images = generator.decode(generator.sample(noise, generator.encode(["dog"])))
    pipeline = StableDiffusionXLPipeline.from_pretrained(tmp_path, add_watermarker=False)
    reference = pipeline(
        "a photo of a dog",
        latents=noise,
        num_inference_steps=2,
        guidance_scale=2.0,
        output_type="pt",
    ).images
    expected = (reference * 255).round().permute(0, 2, 3, 1)
    assert (images.float() - expected).abs().max() <= 1


@pytest.mark.parametrize(
    ("side", "images"), [(32, 16), (512, 16), (768, 7), (1024, 4), (2048, 1), (4096, 1)]
)
def test_as_many_images_are_decoded_at_once_as_8_gib_hold(side, images):
    assert decode_batch_size(side * side) == images


@pytest.mark.parametrize(("setting", "sizes"), [({}, [3, 2]), ({"decode_batch": 4}, [4, 1])])
def test_the_size_of_the_images_alone_says_how_many_are_decoded_at_once(
    tiny_sd, monkeypatch, setting, sizes
):
    monkeypatch.setattr(
        "semix.pipeline.generators.latent_diffusion.DECODING_BYTES", 3 * 16 * 16 * 1920
    )
    generator = load(tiny_sd, **setting)
    decoded, decode = [], generator.vae.decode
    monkeypatch.setattr(
        generator.vae, "decode", lambda z, **o: (decoded.append(len(z)), decode(z, **o))[1]
    )
    assert generator.decode(initial_noise(range(5), generator.latent_shape)).shape[1:3] == (16, 16)
    assert decoded == sizes


def test_decoding_in_slices_changes_nothing(tiny_sd):
    slices, one_batch = load(tiny_sd, decode_batch=2), load(tiny_sd, decode_batch=5)
    latents = initial_noise(range(5), slices.latent_shape)
    difference = slices.decode(latents).int() - one_batch.decode(latents).int()
    assert difference.abs().max() <= 1
    assert len(slices.decode(latents)) == 5


# Compiled networks predict what the plain ones do.


needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason="there is no C++ compiler"
)


def latents_of(model, family: str, compiled: str):
    generator = load(model, family=family, steps=2, compile=compiled)
    noise = initial_noise([0, 1], generator.latent_shape)
    latents = generator.sample(noise, generator.encode(["dog", "crane"]))
    return latents, generator.denoiser.network


@needs_compiler
@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "family", "mode"),
    [
        ("tiny_sd", "stable_diffusion", "regional"),
        pytest.param("tiny_dit", "dit", "regional", marks=pytest.mark.slow),
        pytest.param("tiny_sd", "stable_diffusion", "full", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_network_predicts_the_same(model, family, mode, request):
    folder = request.getfixturevalue(model)
    torch.compiler.reset()
    compiled, network = latents_of(folder, family, mode)
    plain, _ = latents_of(folder, family, "none")
    torch.testing.assert_close(compiled, plain, atol=1e-3, rtol=1e-3)
    blocks = [m for m in network.modules() if type(m).__name__ == "BasicTransformerBlock"]
    calls = [block._compiled_call_impl for block in blocks]
    assert len(blocks) >= 2
    if mode == "regional":
        assert all(calls)
    else:
        assert network._compiled_call_impl


@pytest.mark.parametrize("mode", ["regional", "full"])
def test_without_a_compiler_it_is_refused(tiny_sd, monkeypatch, mode):
    monkeypatch.setenv("CXX", "/no/compiler")
    message = rf"generator\.compile = {mode}: needs the C\+\+ compiler /no/compiler, "
    with pytest.raises(InputError, match=message):
        latents_of(tiny_sd, "stable_diffusion", mode)


# Images, the first rung and the last one pass the network in batches of three sizes.
SELECT = ("noise.strategy=select", "noise.candidates=4", "noise.halving=true")
OPTIMISE = ("noise.strategy=optimise", *SELECT[1:], "noise.iterations=1")


@pytest.fixture
def traced():
    """Counters of torch.compile without code generation, which takes minutes; Dynamo traces,
    guards and counts as usual."""
    torch.compiler.reset()
    counters.clear()
    torch.compiler.set_default_backend("eager")
    yield counters
    torch.compiler.set_default_backend(None)
    torch.compiler.reset()


FLOW = {
    "tiny_sd3": ("sd3", {"prompt_length": 12}),
    "tiny_flux": ("flux", {"prompt_length": 12, "image_size": 16}),
    "tiny_flux2": ("flux2", {"prompt_length": 20, "image_size": 16}),
    "tiny_z_image": ("z_image", {"image_size": 16, "pad_names": True}),
}


@needs_compiler
@pytest.mark.parametrize("model", FLOW)
def test_the_blocks_of_flow_models_compile_whole(model, request, traced):
    family, settings = FLOW[model]
    latents = []
    for mode in ("none", "regional"):
        values = {"family": family, "steps": 2, "compile": mode, **settings}
        generator = load(request.getfixturevalue(model), **values)
        noise = initial_noise([0, 1], generator.latent_shape)
        latents.append(generator.sample(noise, generator.encode(["dog", "crane"])))
    blocks = [m for m in generator.denoiser.network.modules() if m._compiled_call_impl]
    assert len(blocks) >= 2 and not traced["graph_break"]
    torch.testing.assert_close(*latents, atol=1e-5, rtol=1e-5)


@pytest.fixture
def build(make_config, hasty_standins, tiny_sd_four_levels, tmp_path):
    """build(*overrides): the exit status of a worker that makes one shard."""

    def run(*overrides: str) -> int:
        config = make_config(
            hasty_standins,
            f"generator.model={tiny_sd_four_levels}",
            "mixing.pairs.kind=sampled",
            "mixing.pairs.count=4",
            "noise.steps=2",
            "noise.max_cost=1000",
            *overrides,
        )
        return work(begun(config, tmp_path / "mixed"))

    return run


@needs_compiler
@pytest.mark.process
@pytest.mark.parametrize(
    ("noise", "mode"),
    [
        (SELECT, "regional"),
        pytest.param(OPTIMISE, "regional", marks=pytest.mark.slow),
        pytest.param(OPTIMISE, "full", marks=pytest.mark.slow),
    ],
    ids=["select-regional", "optimise-regional", "optimise-full"],
)
def test_each_layout_of_chosen_noise_gets_its_program(build, traced, noise, mode):
    assert build(*noise, f"generator.compile={mode}") == 0
    assert not traced["recompile_limit"], "a network ran as it was written"


@needs_compiler
@pytest.mark.slow
def test_a_build_whose_noise_is_chosen_is_compiled_to_its_end(build):
    torch.compiler.reset()
    assert build(*SELECT, "generator.compile=regional") == 0


@needs_compiler
@pytest.mark.process
def test_layouts_are_compiled_in_whatever_thread_meets_them(tiny_sd, traced):
    generator = load(tiny_sd, compile="regional")
    condition = generator.encode(["dog"])

    def predict(rows: int) -> bool:
        noise = initial_noise(range(rows), generator.latent_shape)
        output = generator.predict(noise, torch.tensor(9), condition.expand(rows), 1.0)
        return bool(output.isfinite().all())

    with ThreadPoolExecutor(1) as other:
        assert all(other.map(predict, range(1, 6)))
    assert all(map(predict, range(6, 12)))


@needs_compiler
@pytest.mark.parametrize(("mode", "compiled"), [("regional", False), ("full", True)])
def test_all_of_a_model_that_is_compiled_has_its_decoder_in_it(tiny_sd, traced, mode, compiled):
    plain, generator = (load(tiny_sd, compile=m) for m in ("none", mode))
    latents = initial_noise([0, 1], generator.latent_shape)
    assert torch.equal(generator.decode(latents), plain.decode(latents))
    assert (generator.vae.decoder._compiled_call_impl is not None) == compiled
    assert traced["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float16", "tf32"), ("bfloat16", "ieee"), ("float32", "ieee")]
)
def test_a_decoder_that_was_upcast_computes_as_its_weights_were(
    tiny_sd, tmp_path, dtype, expected, precisions
):
    folder = Path(shutil.copytree(tiny_sd, tmp_path / "model"))
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"force_upcast": True}))
    with emulated_cuda():
        config = GeneratorConfig(model=str(folder), dtype=dtype, steps=1, guidance_scale=0)
        generator = load_generator(config, device="cuda")
        precisions.clear()
        pixels = generator.decode(torch.zeros(1, *generator.latent_shape).to("cuda"))
    assert pixels.dtype == torch.uint8
    assert generator.vae.dtype == (torch.float32 if dtype == "float16" else getattr(torch, dtype))
    assert precisions == {expected}
