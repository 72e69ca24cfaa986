"""Estimates against what real builds run, count and store."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pipeline.build import generate_shard, load_models
from pipeline.config import BuildConfig
from pipeline.costs.estimate import estimate, hours, image_bytes
from pipeline.costs.flops import flops
from pipeline.costs.work import all_computed_groups, network_calls, series_work
from pipeline.plan import BuildPlan
from pipeline.prototypes import ensure_prototypes
from pipeline.root import create_root, plan_of
from pipeline.work import finish

# 5 series of 4 images in shards of 3 and 2, in batches of 2: 4 + 2 series are computed.
SMALL = ("mixing.pairs.kind=sampled", "mixing.pairs.count=5")
SMALL += ("shards.groups_per_shard=3", "shards.groups_per_batch=2")
COMPUTED = 6


@pytest.fixture
def small(make_config, hasty_standins):
    """small(*overrides): a BuildConfig of five series."""
    return lambda *overrides: make_config(hasty_standins, *SMALL, *overrides)


def built(config: BuildConfig, folder: str) -> tuple[list[dict], list[int], list[int]]:
    """Make all shards: commit records, FLOP of each, rows through the whole U-Net in each."""
    root = create_root(config, folder)
    ensure_prototypes(root, device="cpu")
    plan = plan_of(root)
    models = load_models(root, plan, device="cpu")
    records, counted, rows = [], [], []
    with rows_of(models.generator.denoiser.network, rows), attention_in_the_open():
        for shard in range(plan.num_shards):
            rows.append(0)
            spec = plan.shard(shard)
            work, record = flops(
                lambda s=spec: finish(generate_shard(s, plan, models=models, root=root))
            )
            counted.append(work)
            records.append(record)
    return records, counted, rows


@contextmanager
def rows_of(network: torch.nn.Module, rows: list[int]) -> Iterator[None]:
    def count(module, args, kwargs):
        rows[-1] += len(args[0])

    handle = network.register_forward_pre_hook(count, with_kwargs=True)
    yield
    handle.remove()


@contextmanager
def attention_in_the_open() -> Iterator[None]:
    """No count sees into CLIP's fused kernel."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


RECIPES = {
    "heun, unguided": ("generator.scheduler=heun", "generator.guidance_scale=1"),
    "pndm, guided in an interval": (
        "generator.scheduler=pndm",
        "generator.approximate.guidance_interval=[0, 0.5]",
    ),
    "cached anchors, fewer steps": (
        "generator.approximate.cache_anchors=2",
        "generator.approximate.steps=2",
        "generator.approximate.scheduler=dpmpp_2m",
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
    records, counted, rows = built(config, str(tmp_path))
    found = estimate(BuildPlan(config))
    if found.shallow_rows == 0:  # those pass the whole network by
        assert sum(rows) == found.network_rows + found.noise_rows
    # A simplex is mixed and projected by small matrix products, which are no network's.
    share = 1e-4 if recipe == "simplex" else 1e-9
    assert [record["tflop"] * 1e12 for record in records] == pytest.approx(counted, rel=share)
    assert found.tflop * 1e12 == pytest.approx(sum(counted), rel=share)
    assert found.unknown is None


def test_rows_by_hand(small):
    found = estimate(BuildPlan(small()))
    # 3 steps, each with and without the prompt, of 4 images.
    assert found.network_rows == COMPUTED * 4 * 3 * 2
    assert (found.groups, found.images, found.shards) == (5, 20, 2)
    assert (found.noise_rows, found.noise_ratio, found.shallow_rows) == (0, 0, 0)
    interval = small("generator.steps=10", "generator.approximate.guidance_interval=[0.2, 0.5]")
    assert estimate(BuildPlan(interval)).network_rows == COMPUTED * 4 * (10 + 3)


def test_tflop_by_hand(small):
    config = small("noise.strategy=select", "noise.max_cost=9")
    costs, found = series_work(config).costs, estimate(BuildPlan(config))
    generated = found.network_rows * costs.row + COMPUTED * 4 * costs.decode + 20 * costs.clip
    # 8 candidates at 3 alphas, 3 steps there and 3 back, for each series; by whole batches.
    assert found.noise_rows == COMPUTED * 8 * 3 * 6
    assert found.tflop * 1e12 == pytest.approx(generated + found.noise_rows * costs.row)
    assert found.noise_ratio == pytest.approx(8 * 3 * 6 / (4 * 3 * 2))


def test_the_fidelity_gate_comes_on_top(small):
    exact = estimate(BuildPlan(small("shards.groups_per_batch=1")))
    fast = estimate(BuildPlan(small("shards.groups_per_batch=1", "generator.approximate.steps=1")))
    # All five series, as there are fewer than the gate would take.
    assert fast.gate_tflop == pytest.approx(fast.tflop + 2 * exact.tflop)
    assert exact.gate_tflop == 0


@pytest.mark.parametrize(
    ("family", "fixture", "overrides", "calls"),
    [
        ("stable_diffusion", "tiny_sd", (), 7),
        ("stable_diffusion", "tiny_sd_epsilon", (), 8),  # PNDM takes one step twice
        ("stable_diffusion", "tiny_sd_epsilon", ("generator.scheduler=heun",), 13),
        ("sdxl", "tiny_sdxl", ("generator.approximate.steps=4",), 4),
        ("dit", "tiny_dit", ("generator.scheduler=unipc",), 7),
    ],
)
def test_network_calls_of_the_families(request, small, family, fixture, overrides, calls):
    model = request.getfixturevalue(fixture)
    more = (f"generator.family={family}", f"generator.model={model}", "generator.steps=7")
    config = small(*more, *overrides)
    assert network_calls(config.generator) == calls
    # Latents of 8 pixels and a VAE that doubles them.
    assert series_work(config).costs.image_size == 16


@pytest.mark.parametrize("image_format", ["webp", "png", "jpg"])
def test_bytes_of_a_build(small, tmp_path, image_format):
    config = small(f"shards.image_format={image_format}")
    create_and_fill(config, str(tmp_path))
    stored = sum(file.stat().st_size for file in (tmp_path / "shards").rglob("*.*"))
    assert estimate(BuildPlan(config)).bytes == pytest.approx(stored, rel=0.25)


def create_and_fill(config: BuildConfig, folder: str) -> None:
    root = create_root(config, folder)
    ensure_prototypes(root, device="cpu")
    plan = plan_of(root)
    models = load_models(root, plan, device="cpu")
    for shard in range(plan.num_shards):
        finish(generate_shard(plan.shard(shard), plan, models=models, root=root))


def test_bytes_of_an_image():
    assert image_bytes("webp", 512) == pytest.approx(346_000)
    assert image_bytes("webp", 32) == pytest.approx(1_664)
    assert image_bytes("png", 1024) == pytest.approx(4 * 434_000)
    between = image_bytes("jpg", 340)  # nearly midway by the logarithm of the side
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
    found = estimate(BuildPlan(config))
    assert (found.groups, found.images, found.shards) == (5, 20, 2)
    assert (found.tflop, found.network_rows, found.bytes) == (None, None, None)
    assert found.unknown.startswith("generator.model = owner/model: is not on this machine")


def test_millions_of_series_by_arithmetic(small):
    """A million of each of 5 pairs and in the end 2 in a shard of their own."""
    plan = BuildPlan(small("mixing.groups_per_pair=1000003"))
    assert divmod(plan.num_groups, 3) == (1_666_671, 2)
    computed = 4 * 1_666_671 + 2
    assert all_computed_groups(plan) == computed
    one, many = estimate(BuildPlan(small())), estimate(plan)
    assert many.network_rows == computed * one.network_rows // COMPUTED


def test_a_scheduler_that_does_not_suit_is_refused(small, tiny_sdxl_turbo):
    config = small("generator.family=sdxl", f"generator.model={tiny_sdxl_turbo}")
    with pytest.raises(ValueError, match=r"generator\.scheduler = nothing: the model's own Euler"):
        estimate(BuildPlan(config))
