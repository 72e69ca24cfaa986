"""Estimates: FLOP against published numbers and loaded models, the rest against real builds."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from open_clip import create_model

from semix.data.errors import InputError
from semix.data.formats import PROTOTYPES
from semix.data.images import ENCODINGS
from semix.pipeline.clip import ClipEncoder
from semix.pipeline.config import AnnotationConfig, BuildConfig, GeneratorConfig
from semix.pipeline.estimate import (
    clip_cost,
    computed_groups,
    estimate,
    flops,
    generator_cost,
    hours,
    series_cost,
)
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.schedulers import network_calls, network_rows
from semix.pipeline.model_paths import NotLocal
from semix.pipeline.plan import BuildPlan
from semix.pipeline.shard import generate_shard, load_models
from semix.pipeline.timing import device_rate, time_batch
from tests.pipeline.published import (
    DIT_XL_2,
    FLUX,
    KLEIN,
    SD3_MEDIUM,
    SD15,
    SD21,
    SDXL,
    UNET,
    Z_IMAGE,
    configs_of,
    sd3,
    text,
)
from tests.pipeline.roots import begun, made, plan_of

GIGA = 1e9
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# 5 series of 4 images in shards of 3 and 2, in batches of 2: 4 + 2 series are computed.
SMALL = ("mixing.pairs.kind=sampled", "mixing.pairs.count=5")
SMALL += ("shards.groups_per_shard=3", "shards.groups_per_batch=2")
COMPUTED = 6


@pytest.mark.process  # for its length
@pytest.mark.parametrize(
    ("family", "pipeline", "networks", "row", "decode"),
    [
        # The U-Net of SD 1.5 without its attention products is the 338.76 GMAC that DeepCache
        # and T-GATE print; that of SDXL without them is 5.98 TFLOP in diffusers' benchmark.
        (
            "stable_diffusion",
            "StableDiffusionPipeline",
            {"unet": (UNET, SD15), "text_encoder": ("CLIPTextModel", text(768, 12))},
            803.3,
            2_515,
        ),
        (
            "stable_diffusion",
            "StableDiffusionPipeline",
            {"unet": (UNET, SD21), "text_encoder": ("CLIPTextModel", text(1024, 23))},
            804.3,
            2_515,
        ),
        (
            "sdxl",
            "StableDiffusionXLPipeline",
            {
                "unet": (UNET, SDXL),
                "text_encoder": ("CLIPTextModel", text(768, 12)),
                "text_encoder_2": ("CLIPTextModelWithProjection", text(1280, 32)),
            },
            6_761,
            10_470,
        ),
        # 118.6 GMAC in table 4 of Peebles and Xie 2023.
        ("dit", "DiTPipeline", {"transformer": ("DiTTransformer2DModel", DIT_XL_2)}, 237.2, 622),
        # With 77 tokens of CLIP and 256 of T5; FLUX.1-schnell with 256 of T5.
        ("sd3", "StableDiffusion3Pipeline", sd3(SD3_MEDIUM), 8_904, 10_473),
        ("flux", "FluxPipeline", FLUX, 69_467, 10_473),
        # 3.9 and 6.2 billion weights, applied to some 4,600 and 4,100 tokens.
        ("flux2", "Flux2KleinPipeline", KLEIN, 32_533, 10_475),
        ("z_image", "ZImagePipeline", Z_IMAGE, 55_121, 10_473),
    ],
)
def test_published_networks(tmp_path, family, pipeline, networks, row, decode):
    model = configs_of(tmp_path, pipeline, networks)
    result = generator_cost(GeneratorConfig(family=family, model=model, guidance_scale=0))
    assert result.row / GIGA == pytest.approx(row, rel=2e-3)
    assert result.decode / GIGA == pytest.approx(decode, rel=1e-3)
    assert result.image_size == {"dit": 256, "stable_diffusion": 512}.get(family, 1024)


@pytest.mark.parametrize(
    ("name", "published"), [("ViT-B-32-quickgelu", 8.82), ("ViT-L-14", 162.0), ("ViT-H-14", 334.6)]
)
def test_published_clip_towers(name, published):
    work, width = clip_cost(AnnotationConfig(model=name, pretrained="openai"))
    assert work / GIGA == pytest.approx(published, rel=1e-3)
    assert width == {"B": 512, "L": 768, "H": 1024}[name[4]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "fixture"),
    [
        ("stable_diffusion", "tiny_sd_epsilon"),
        ("sdxl", "tiny_sdxl"),
        ("dit", "tiny_dit"),
    ],
)
def test_the_loaded_model_computes_as_much(family, fixture, dtype, request, tiny_names):
    model = str(request.getfixturevalue(fixture))
    config = GeneratorConfig(family=family, model=model, dtype=dtype, compile="regional")
    generator = load_generator(config.model_copy(update={"compile": "none"}), device="cpu")
    condition = generator.encode(tiny_names[:1])
    latents = torch.randn(1, *generator.latent_shape)
    inputs = latents.to(generator.dtype)
    flop, _ = flops(lambda: generator.denoiser(inputs, torch.tensor(500), condition))
    result = generator_cost(config)
    assert result.row == flop
    assert result.decode == flops(lambda: generator.decode(latents))[0]


def test_the_loaded_clip_computes_as_much(hasty_config):
    config = hasty_config.annotation
    encoder = ClipEncoder(config, device="cpu")
    pixels = torch.randint(0, 256, (1, 32, 32, 3), dtype=torch.uint8)
    with unfused_attention():
        assert clip_cost(config)[0] == flops(lambda: encoder.encode(pixels))[0]


def test_a_whole_text_and_image_model_gives_the_same():
    """The tower alone is built; open_clip's own factory builds all of it."""
    model = create_model("RN50", load_weights=False).eval()
    size = model.visual.image_size
    flop, _ = flops(lambda: model.encode_image(torch.randn(1, 3, size, size)))
    assert clip_cost(AnnotationConfig(model="RN50", pretrained="openai"))[0] == flop


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_sampling_computes_as_much_as_its_rows(tiny_sd_epsilon, tiny_names, guidance_scale):
    """With the model's own PNDM, guided in half of its calls."""
    settings = {"steps": 5, "guidance_scale": guidance_scale, "guidance_interval": (0, 0.5)}
    config = GeneratorConfig(model=str(tiny_sd_epsilon), **settings)
    generator = load_generator(config, device="cpu")
    noise = torch.randn(1, *generator.latent_shape)
    condition = generator.encode(tiny_names[:1])
    flop, _ = flops(lambda: generator.sample(noise, condition))
    assert flop == network_rows(config, 1) * generator_cost(config).row


def test_models_that_are_not_here_are_not_counted(tmp_path):
    message = r"^generator\.model = owner/model: is not on this machine; its cost is known once"
    with pytest.raises(NotLocal, match=message):
        generator_cost(GeneratorConfig(model="owner/model", revision="0" * 40))
    with pytest.raises(InputError, match=r"^generator\.model = .+/gone: there is no such folder"):
        generator_cost(GeneratorConfig(model=str(tmp_path / "gone")))
    with pytest.raises(NotLocal, match=r"^annotation\.model = owner/clip: is not on this machine"):
        clip_cost(AnnotationConfig(model="hf-hub:owner/clip", revision="0" * 40))


def test_a_hub_model_is_counted_once_all_of_it_was_fetched(tiny_sd, tmp_path, monkeypatch):
    """All config files are needed; weights are not looked for."""
    copy = tmp_path / "models--owner--model" / "snapshots" / COMMIT
    shutil.copytree(tiny_sd, copy, ignore=shutil.ignore_patterns("*.safetensors", "unet"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = GeneratorConfig(model="owner/model", revision=COMMIT)
    with pytest.raises(NotLocal, match=r"^generator\.model = owner/model: .*no folder unet; fetch"):
        generator_cost(config)
    (copy / "unet").mkdir()
    with pytest.raises(NotLocal, match=r"^generator\.model = owner/model: cannot be loaded"):
        generator_cost(config)
    shutil.copy(tiny_sd / "unet" / "config.json", copy / "unet")
    assert generator_cost(config) == generator_cost(GeneratorConfig(model=str(tiny_sd)))


@pytest.fixture
def small(make_config, hasty_standins):
    """small(*overrides): a BuildConfig of five series."""
    return lambda *overrides: make_config(hasty_standins, *SMALL, *overrides)


def build_and_count(config: BuildConfig, folder: Path) -> tuple[list[int], list[int]]:
    """Make all shards; returns the FLOP and U-Net rows of each."""
    root = begun(config, folder)
    plan = plan_of(root)
    models = load_models(plan, root.store.get(PROTOTYPES), device="cpu")
    flop, rows = [], []
    with rows_of(models.generator.denoiser.network, rows), unfused_attention():
        for shard in range(plan.num_shards):
            rows.append(0)
            spec = plan.shard(shard)
            shard_flop, _ = flops(
                lambda s=spec: generate_shard(s, plan, models=models, root=root).publish()
            )
            flop.append(shard_flop)
    return flop, rows


@contextmanager
def rows_of(network: torch.nn.Module, rows: list[int]) -> Iterator[None]:
    def count(module, args, kwargs):
        rows[-1] += len(args[0])

    handle = network.register_forward_pre_hook(count, with_kwargs=True)
    yield
    handle.remove()


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Without CLIP's fused kernel, into which no FLOP counter sees."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


RECIPES = {
    "heun, unguided": ("generator.scheduler=heun", "generator.guidance_scale=1"),
    "pndm, guided in an interval": (
        "generator.scheduler=pndm",
        "generator.guidance_interval=[0, 0.5]",
    ),
    "simplex": (
        "mixing.classes=3",
        "mixing.alphas=5",
        "mixing.grid=random",
        "annotation.rule=simplex",
    ),
    "chosen noise": (
        "noise.max_cost=10",
        "noise.strategy=select",
        "noise.halving=true",
        "noise.alphas=[0.5]",
        "noise.guidance_scale=2",
    ),
}


@pytest.mark.process  # for its length
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_and_flop_are_those_that_a_build_runs(small, tmp_path, recipe):
    config = small(*RECIPES[recipe])
    flop, rows = build_and_count(config, tmp_path)
    result = estimate(BuildPlan(config))
    assert sum(rows) == result.network_rows + result.noise_rows
    # A simplex is mixed and projected by small matrix products, which no network runs.
    tolerance = 1e-4 if recipe == "simplex" else 1e-9
    assert result.tflop * 1e12 == pytest.approx(sum(flop), rel=tolerance)
    assert result.unknown is None


def test_rows_by_hand(small):
    result = estimate(BuildPlan(small()))
    # 3 steps, each with and without the prompt, of 4 images.
    assert result.network_rows == COMPUTED * 4 * 3 * 2
    assert (result.groups, result.images, result.shards) == (5, 20, 2)
    assert (result.noise_rows, result.noise_ratio) == (0, 0)
    interval = small("generator.steps=10", "generator.guidance_interval=[0.2, 0.5]")
    assert estimate(BuildPlan(interval)).network_rows == COMPUTED * 4 * (10 + 3)


def test_tflop_by_hand(small):
    config = small("noise.strategy=select", "noise.max_cost=9")
    work, result = series_cost(config), estimate(BuildPlan(config))
    row, decode = work.generator.row, work.generator.decode
    generated = result.network_rows * row + COMPUTED * 4 * decode + 20 * work.clip
    # 8 candidates at 3 alphas, 3 steps there and 3 back, for each series; by whole batches.
    assert result.noise_rows == COMPUTED * 8 * 3 * 6
    assert result.tflop * 1e12 == pytest.approx(generated + result.noise_rows * row)
    assert result.noise_ratio == pytest.approx(8 * 3 * 6 / (4 * 3 * 2))


def test_the_price_of_chosen_noise_is_told_by_the_samplers_own_calls(small, tiny_sd_epsilon):
    """PNDM, which the model brings, makes four calls in three steps."""
    noise = ("noise.strategy=select", "noise.max_cost=9", "shards.groups_per_batch=1")
    result = estimate(BuildPlan(small(f"generator.model={tiny_sd_epsilon}", *noise)))
    assert result.network_rows == 5 * 4 * 4 * 2
    assert result.noise_rows == 5 * 8 * 3 * 6
    assert result.noise_ratio == result.noise_rows / result.network_rows


@pytest.mark.parametrize(
    ("family", "fixture", "overrides", "calls"),
    [
        ("stable_diffusion", "tiny_sd", (), 7),
        ("stable_diffusion", "tiny_sd_epsilon", (), 8),  # PNDM takes one step twice
        ("stable_diffusion", "tiny_sd_epsilon", ("generator.scheduler=heun",), 13),
        ("sdxl", "tiny_sdxl", ("generator.steps=4",), 4),
        ("dit", "tiny_dit", ("generator.scheduler=unipc",), 7),
        ("sd3", "tiny_sd3", (), 7),
        ("flux", "tiny_flux", ("generator.image_size=16",), 7),
    ],
)
def test_network_calls_of_the_families(request, small, family, fixture, overrides, calls):
    model = request.getfixturevalue(fixture)
    more = (f"generator.family={family}", f"generator.model={model}", "generator.steps=7")
    config = small(*more, *overrides)
    result = generator_cost(config.generator)
    assert result.calls == network_calls(config.generator) == calls
    assert result.image_size == 16  # latents of 8 pixels and a VAE that doubles them


@pytest.mark.parametrize("image_format", ["webp", "png", "jpg"])
def test_bytes_of_a_build(small, tmp_path, image_format):
    # A tar is a multiple of 10 KiB, which of five series is a fifth of it.
    more = ("mixing.pairs={kind: sampled, count: 20}", "shards.groups_per_shard=10")
    config = small(f"shards.image_format={image_format}", *more)
    made(config, tmp_path)
    stored = sum(file.stat().st_size for file in (tmp_path / "shards").rglob("*.*"))
    assert estimate(BuildPlan(config)).bytes == pytest.approx(stored, rel=0.2)


def test_bytes_of_an_image():
    assert ENCODINGS["webp"].expected_bytes(512) == pytest.approx(346_000)
    assert ENCODINGS["webp"].expected_bytes(32) == pytest.approx(1_664)
    assert ENCODINGS["png"].expected_bytes(1024) == pytest.approx(4 * 434_000)
    between = ENCODINGS["jpg"].expected_bytes(340)  # nearly midway by the logarithm of the side
    assert between / 340**2 == pytest.approx((31_000 / 224**2 + 132_000 / 512**2) / 2, rel=0.01)


def test_smaller_images_take_less(small):
    large, little = (
        estimate(BuildPlan(small(f"shards.store_size={size}"))).bytes for size in (224, 64)
    )
    assert little < large / 5


def test_hours():
    assert hours(790 * 0.45 * 7200, rate=790, share=0.45) == pytest.approx(2)


def test_a_model_that_was_never_fetched(small):
    config = small("generator.model=owner/model", f"generator.revision={'a' * 40}")
    result = estimate(BuildPlan(config))
    assert (result.groups, result.images, result.shards) == (5, 20, 2)
    assert (result.tflop, result.network_rows, result.bytes) == (None, None, None)
    assert result.unknown.startswith("generator.model = owner/model: is not on this machine")


def test_millions_of_series_by_arithmetic(small):
    """A million series per pair, of 5 pairs; the last 2 are in a shard of their own."""
    plan = BuildPlan(small("mixing.groups_per_pair=1000003"))
    assert divmod(plan.num_groups, 3) == (1_666_671, 2)
    computed = 4 * 1_666_671 + 2
    assert computed_groups(plan) == computed
    one, many = estimate(BuildPlan(small())), estimate(plan)
    assert many.network_rows == computed * one.network_rows // COMPUTED


def test_a_scheduler_that_does_not_suit_is_refused(small, tiny_sdxl_turbo):
    config = small("generator.family=sdxl", f"generator.model={tiny_sdxl_turbo}")
    with pytest.raises(InputError, match=r"generator\.scheduler = nothing: the model's own Euler"):
        estimate(BuildPlan(config))


# How fast this device is.


def test_a_batch_that_fills_up_is_counted_as_it_runs(make_config, hasty_standins):
    """3 series in batches of 4: all four are generated, three are labelled."""
    config = make_config(
        hasty_standins, "mixing.pairs.kind=sampled", "mixing.pairs.count=3", "generator.steps=1"
    )
    result = time_batch(BuildPlan(config), device="cpu", noise_ratio=0.5)
    assert result.images == 3 * 4
    work = series_cost(config)
    generated = 4 * (4 * 2 * work.generator.row + 4 * work.generator.decode)
    assert result.tflop == pytest.approx((generated + 3 * 4 * work.clip) / 1e12)
    assert result.build_seconds == pytest.approx(1.5 * result.seconds)  # one batch is all of it
    assert set(result.stages) == {"noise", "generate", "annotate"}
    assert sum(result.stages.values()) <= result.seconds


def test_similar_pairs_need_not_be_known(make_config, hasty_standins):
    config = make_config(
        hasty_standins, "mixing.pairs.kind=similar", "mixing.pairs.count=20", "generator.steps=1"
    )
    result = time_batch(BuildPlan(config), device="cpu", noise_ratio=0)
    # 20 series in shards of 6: 8 + 8 + 8 + 4 are computed, in batches of 4.
    assert result.build_seconds == pytest.approx(7 * result.seconds)


def test_the_rate_of_this_device():
    assert 0 < device_rate("cpu", "float32") < 1000


def test_no_rate_in_a_precision_that_the_device_lacks():
    with pytest.raises(InputError, match=r"^dtype = float16: needs a GPU"):
        device_rate("cpu", "float16")
