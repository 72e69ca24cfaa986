"""GPU memory: weights against files, live tensors against what torch's allocator was asked for."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.config import BuildConfig, GeneratorConfig
from semix.pipeline.estimate import TERA, generator_cost
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.loading import META, check_weights_fit, load_pipeline, network_bytes
from semix.pipeline.generators.schedulers import network_rows
from semix.pipeline.memory import memory_needed, peak_bytes
from tests.pipeline.published import (
    FLUX_DEV,
    KLEIN,
    SD35_LARGE,
    SD35_MEDIUM,
    Z_IMAGE,
    configs_of,
    sd3,
)

README = Path(__file__).parents[2] / "README.md"
PUBLISHED = {  # family, pipeline, configs, settings
    "SD3.5-medium": ("sd3", "StableDiffusion3Pipeline", sd3(SD35_MEDIUM), {}),
    "SD3.5-large": ("sd3", "StableDiffusion3Pipeline", sd3(SD35_LARGE), {}),
    "FLUX.1-dev": ("flux", "FluxPipeline", FLUX_DEV, {"prompt_length": 512}),
    "FLUX.2-klein-base-4B": ("flux2", "Flux2KleinPipeline", KLEIN, {"prompt_length": 512}),
    "Z-Image": ("z_image", "ZImagePipeline", Z_IMAGE, {}),
}

FAMILIES = {
    "tiny_sd": {"family": "stable_diffusion"},
    "tiny_sdxl": {"family": "sdxl"},
    "tiny_dit": {"family": "dit"},
    "tiny_sd3": {"family": "sd3", "prompt_length": 12},
    "tiny_flux": {"family": "flux", "prompt_length": 12, "image_size": 16},
    "tiny_flux2": {"family": "flux2", "prompt_length": 20, "image_size": 16},
    "tiny_z_image": {"family": "z_image", "image_size": 16},
}


@pytest.fixture
def config_of(request, make_config, hasty_standins):
    """config_of(model, **settings): a BuildConfig that generates with it."""

    def config(model: str, **settings: object) -> BuildConfig:
        path = str(request.getfixturevalue(model))
        generator = {"model": path, **FAMILIES[model], **settings}
        base = make_config(hasty_standins).model_dump()
        return load_settings(BuildConfig, base | {"generator": generator})

    return config


def allocated(call) -> int:
    """Peak of the bytes that the CPU's allocator has given out."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize("model", FAMILIES)
def test_live_tensors_are_those_that_the_allocator_gives_out(config_of, model):
    config = config_of(model, guidance_scale=3.0).generator
    generator = load_generator(config, device="cpu")
    noise = torch.randn(64, *generator.latent_shape)
    condition, step = generator.denoiser.unconditional.expand(64), torch.tensor(500)

    def call() -> None:
        with torch.no_grad():
            generator.predict(noise, step, condition, 3.0)

    # Kernels on the CPU make copies that those on a GPU do without.
    assert 0.7 * allocated(call) < peak_bytes(call) <= 1.05 * allocated(call)


@pytest.mark.parametrize("model", FAMILIES)
def test_what_is_counted_without_weights_is_what_a_loaded_model_takes(config_of, model):
    config = config_of(model, guidance_scale=3.0)
    needed = memory_needed(config)
    loaded = load_pipeline(config.generator, device="cpu")
    sizes = network_bytes(loaded)
    texts = sum(size for name, size in sizes.items() if "text_encoder" in name)
    assert (needed.texts, needed.vae) == (texts, sizes["vae"])
    assert needed.network == max(sizes.get("unet", 0), sizes.get("transformer", 0))
    generator = load_generator(config.generator, device="cpu")
    rows = config.shards.groups_per_batch * config.mixing.images
    noise = torch.randn(rows, *generator.latent_shape)
    condition = generator.denoiser.unconditional.expand(rows)
    measured_peak = peak_bytes(lambda: generator.predict(noise, torch.tensor(0), condition, 3.0))
    assert needed.sampling == pytest.approx(measured_peak, rel=0.1)
    decoded = noise[: generator.decode_batch]
    assert needed.decoding == peak_bytes(lambda: generator.decode(decoded))


def test_half_precision_halves_it(config_of):
    full, half = (memory_needed(config_of("tiny_sd3", dtype=d)) for d in ("float32", "bfloat16"))
    assert half.network == full.network / 2
    assert half.texts == pytest.approx(full.texts / 2, rel=0.01)  # all but the integers
    assert half.sampling < 0.8 * full.sampling


def test_a_flow_model_has_its_text_encoders_gone_before_the_transformer_comes(config_of):
    flow, other = memory_needed(config_of("tiny_sd3")), memory_needed(config_of("tiny_sdxl"))
    batch = max(flow.sampling, flow.decoding)
    assert flow.encoding == flow.clip + flow.texts
    assert flow.making == flow.clip + flow.network + flow.vae + batch
    weights = other.clip + other.network + other.vae + other.texts
    assert other.encoding == weights
    assert other.making == weights + max(other.sampling, other.decoding)


def test_offloading_leaves_one_network_at_a_time(config_of):
    config = config_of("tiny_sdxl", offload="model")
    needed, full = memory_needed(config), memory_needed(config_of("tiny_sdxl"))
    assert needed.encoding == needed.clip + needed.texts
    alone = max(needed.network + needed.sampling, needed.vae + needed.decoding)
    assert needed.making == needed.clip + alone < full.making


@pytest.mark.parametrize("model", ["tiny_sdxl", "tiny_dit", "tiny_sd3", "tiny_z_image"])
def test_an_offloaded_model_makes_the_same_images(config_of, model):
    names, images = ["dog", "crane"], []
    for offload in ("none", "model"):
        config = config_of(model, offload=offload, guidance_scale=3.0, steps=2).generator
        generator = load_generator(config, device="cpu", names=names[:1])
        noise = torch.randn(1, *generator.latent_shape, generator=torch.manual_seed(0))
        images.append(generator.decode(generator.sample(noise, generator.encode(names[:1]))))
        hooked = hasattr(generator.denoiser.network, "_hf_hook")
        assert hooked == (offload == "model")
    assert torch.equal(*images)


def test_networks_that_a_gpu_has_no_room_for_are_refused_by_name(tiny_sd3, monkeypatch):
    config = GeneratorConfig(model=str(tiny_sd3), family="sd3", prompt_length=12)
    texts = load_pipeline(config, device=META, transformer=None, vae=None)
    sizes = network_bytes(texts)
    largest = max(sizes, key=sizes.__getitem__)
    room = {"free": sum(sizes.values())}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room["free"], 0))
    check_weights_fit(texts, config, "cuda:0")
    room["free"] -= 1
    with pytest.raises(
        InputError, match=rf"^generator\.model = .*its {largest} alone takes"
    ) as error:
        check_weights_fit(texts, config, "cuda:0")
    assert "generator.offload: model" in str(error.value)
    check_weights_fit(texts, config.model_copy(update={"offload": "model"}), "cuda:0")
    check_weights_fit(texts, config, "cpu")


@pytest.mark.process  # for its length
@pytest.mark.parametrize("name", PUBLISHED)
def test_readme_says_what_published_models_take(hasty_config, name, tmp_path):
    family, pipeline, networks, settings = PUBLISHED[name]
    model = configs_of(tmp_path, pipeline, networks)
    generator = {"family": family, "model": model, "dtype": "bfloat16", "steps": 20, **settings}
    changes = {
        "generator": generator,
        "mixing": {"groups_per_pair": 1, "alphas": 8},
        "annotation": {"model": "ViT-B-32-quickgelu", "pretrained": "openai"},
        "shards": {"groups_per_batch": 1},
    }
    base = {"real": hasty_config.real.model_dump()}
    config = load_settings(BuildConfig, base | changes)
    offloaded = load_settings(BuildConfig, base | changes, ["generator.offload=model"])
    needed, work = memory_needed(config), generator_cost(config.generator)
    cells = [
        f"{network_rows(config.generator, 1)} \N{MULTIPLICATION SIGN} {work.row / TERA:.1f}",
        f"{needed.network / 1e9:.1f} + {needed.texts / 1e9:.1f}",
        f"{needed.making / 1e9:.1f}",
        f"{memory_needed(offloaded).making / 1e9:.1f}",
    ]
    lines = README.read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {name} |"))
    assert [cell.strip() for cell in line.strip("|").split("|")][1:] == cells
