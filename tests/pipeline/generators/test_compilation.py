"""Compiled networks predict what the plain ones do."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters

from data.errors import InputError
from data.settings import load_settings
from pipeline.config import GeneratorConfig
from pipeline.generators import load_generator
from pipeline.generators.compilation import COMPILER
from pipeline.noise import initial_noise
from pipeline.prototypes import ensure_prototypes
from pipeline.root import create_root
from pipeline.worker import main as worker

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


# Images, the first look and the last pass the network in batches of three sizes.
SELECT = ("noise.strategy=select", "noise.candidates=4", "noise.halving=true")
OPTIMISE = ("noise.strategy=optimise", *SELECT[1:], "noise.iterations=1")


@pytest.fixture
def traced():
    """torch.compile without its code generation, which takes minutes: Dynamo traces, guards and
    counts as ever."""
    torch.compiler.reset()
    counters.clear()
    torch.compiler.set_default_backend("eager")
    yield counters
    torch.compiler.set_default_backend(None)
    torch.compiler.reset()


@pytest.fixture
def build(make_config, hasty_standins, tiny_sd_four_levels, tmp_path):
    """build(*overrides): the exit status of a worker that makes one shard."""

    def made(*overrides: str) -> int:
        config = make_config(
            hasty_standins,
            f"generator.model={tiny_sd_four_levels}",
            "mixing.pairs.kind=sampled",
            "mixing.pairs.count=4",
            "noise.steps=2",
            "noise.max_cost=1000",
            *overrides,
        )
        root = create_root(config, str(tmp_path / "mixed"))
        ensure_prototypes(root, device="cpu")
        return worker([root.url, "--device", "cpu"])

    return made


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
    values = {"model": str(tiny_sd), "compile": "regional"}
    generator = load_generator(load_settings(GeneratorConfig, values), device="cpu")
    condition = generator.encode(["dog"])

    def predict(rows: int) -> bool:
        noise = initial_noise(range(rows), generator.latent_shape)
        found = generator.predict(noise, torch.tensor(9), condition.expand(rows), 1.0)
        return bool(found.isfinite().all())

    with ThreadPoolExecutor(1) as other:
        assert all(other.map(predict, range(1, 6)))
    assert all(map(predict, range(6, 12)))
