"""Compiled networks predict what the plain ones do."""

import shutil

import pytest
import torch

from data.errors import InputError
from data.settings import load_settings
from pipeline.config import GeneratorConfig
from pipeline.generators import load_generator
from pipeline.generators.compilation import COMPILER
from pipeline.noise import initial_noise

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason="there is no C++ compiler"
)


def latents_of(model, family: str, compiled: str):
    values = {"model": str(model), "family": family, "steps": 2, "compile": compiled}
    generator = load_generator(load_settings(GeneratorConfig, values), device="cpu")
    noise = initial_noise([0, 1], generator.latent_shape)
    latents = generator.sample(noise, generator.encode(["dog", "crane"]))
    return latents, generator.denoiser.network


@needs_compiler
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
