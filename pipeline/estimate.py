"""Estimate the cost of a build, in network rows, FLOP, bytes and hours, without generating."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from semix.data.fingerprint import canonical_json
from semix.data.images import ENCODINGS
from semix.pipeline.clip import image_tower
from semix.pipeline.config import BuildConfig, EncoderConfig, GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.schedulers import network_rows
from semix.pipeline.model_paths import NotLocal
from semix.pipeline.noise.cost import noise_cost
from semix.pipeline.plan import BuildPlan

TERA = 1e12
BLOCK = 512  # of a tar: one header per member, contents rounded up
TAR_RECORD = 20 * BLOCK  # a whole tar is rounded up to this
SCORES = 300  # bytes that selected noise adds to the record of a series
COMMIT_RECORD = 1_200  # bytes


@dataclass(frozen=True)
class GeneratorCost:
    """Cost of a generator, in FLOP and network calls.

    Attributes:
        row: FLOP of one sample in one call of the denoiser.
        decode: FLOP of decoding one image by the VAE or the tiny decoder.
        calls: calls of the denoiser per sampling, as the scheduler counts: PNDM makes one more than
            its steps, Heun nearly two per step.
        image_size: side of a decoded image, pixels.
    """

    row: int
    decode: int
    calls: int
    image_size: int


@dataclass(frozen=True)
class SeriesCost:
    """Cost of one series.

    Attributes:
        images: number of images.
        rows: denoiser rows; one sample in one call is a row.
        generator: FLOP of a row and of decoding an image.
        clip: FLOP per image of the image tower, or the sum of two CLIP models.
        feature_width: D of a CLIP feature, or the sum over two CLIP models.
    """

    images: int
    rows: int
    generator: GeneratorCost
    clip: int
    feature_width: int

    def tflop(self, *, groups: int, computed: int, noise_rows: float = 0) -> float:
        """TFLOP of a number of groups.

        Args:
            computed: `groups` and the padding of last batches, which is generated and decoded but
                not encoded.
            noise_rows: denoiser rows spent on selecting noise.
        """
        model = self.generator
        generated = computed * (self.rows * model.row + self.images * model.decode)
        return (generated + groups * self.images * self.clip + noise_rows * model.row) / TERA


@dataclass(frozen=True)
class Estimate:
    """Cost of a whole build, without the pass over the real images for prototypes.

    Attributes:
        network_rows: denoiser rows for the images: two per image and step with guidance. Includes
            the padding of last batches, excludes noise selection.
        noise_rows: denoiser rows for noise selection.
        noise_ratio: noise_rows as a multiple of network_rows.
        tflop: of all shards; two FLOP per multiply-add, products of attention included.
        bytes: shards and CLIP features, as stored.
        unknown: the reason why some of these are None.
    """

    groups: int
    images: int
    shards: int
    noise_rows: int
    noise_ratio: float
    network_rows: int | None = None
    tflop: float | None = None
    bytes: int | None = None
    unknown: str | None = None


def estimate(plan: BuildPlan) -> Estimate:
    """Estimate a build; memory and time do not grow with the plan.

    Raises:
        InputError: a model that cannot be used.
    """
    selection = noise_cost(plan.config, groups=plan.num_groups)
    sizes = Estimate(
        groups=plan.num_groups,
        images=plan.num_images,
        shards=plan.num_shards,
        noise_rows=noise_rows(plan),
        noise_ratio=selection.ratio,
    )
    cost, unknown = cost_or_reason(plan.config)
    if cost is None:
        return replace(sizes, unknown=unknown)
    computed = computed_groups(plan)
    return replace(
        sizes,
        noise_ratio=selection.rows / (plan.num_groups * cost.rows),
        network_rows=computed * cost.rows,
        tflop=cost.tflop(groups=plan.num_groups, computed=computed, noise_rows=sizes.noise_rows),
        bytes=stored_bytes(plan, cost),
    )


def cost_or_reason(config: BuildConfig) -> tuple[SeriesCost, None] | tuple[None, str]:
    """The cost of one series, or the reason why it is unknown."""
    try:
        return series_cost(config), None
    except NotLocal as error:
        return None, str(error)
    except RuntimeError as error:  # a network that needs values, which meta tensors lack
        return None, f"a model cannot be counted without weights: {error}"


def series_cost(config: BuildConfig) -> SeriesCost:
    """Count the cost of one series from the models' config files; weights are not needed.

    Raises:
        NotLocal: the models are not on this machine.
        InputError: a model that cannot be used.
    """
    images, generator = config.mixing.images, generator_cost(config.generator)
    towers = [clip_cost(encoder, field) for field, encoder in config.annotation.encoders]
    return SeriesCost(
        images=images,
        rows=network_rows(config.generator, images, calls=generator.calls),
        generator=generator,
        clip=sum(tower_flop for tower_flop, _ in towers),
        feature_width=sum(width for _, width in towers),
    )


def generator_cost(config: GeneratorConfig) -> GeneratorCost:
    """Count what the family's networks compute per image, at their native size.

    Raises:
        NotLocal, InputError: as for `series_cost`.
    """
    generator = load_generator(config.model_copy(update={"compile": "none"}), device="meta")
    latents = torch.empty(1, *generator.latent_shape, device="meta")
    step, condition = torch.tensor(0), generator.denoiser.unconditional
    row, _ = flops(lambda: generator.predict(latents, step, condition, guidance_scale=1.0))
    decode, image = flops(lambda: generator.decode(latents))
    generator.scheduler.set_timesteps(config.steps)
    return GeneratorCost(row, decode, len(generator.scheduler.timesteps), image.shape[1])


def clip_cost(config: EncoderConfig, field: str = "annotation") -> tuple[int, int]:
    """FLOP of the image tower per image, and the width of its feature.

    Raises:
        NotLocal: a hub model that was not fetched before.
    """
    tower: Any = image_tower(config, field)
    size = tower.image_size
    height, width = (size, size) if isinstance(size, int) else size
    tower_flop, feature = flops(lambda: tower(torch.empty(1, 3, height, width, device="meta")))
    return tower_flop, feature.shape[-1]


@torch.no_grad()
def flops(call: Callable[[], Any]) -> tuple[int, Any]:
    """Run `call` on any device and return its FLOP and its result."""
    with FlopCounterMode(display=False) as counter:
        output = call()
    return counter.get_total_flops(), output


def computed_groups(plan: BuildPlan) -> int:
    """Groups of all shards, with the padding of each last batch."""
    full, remainder = divmod(plan.num_groups, plan.layout.size)
    return full * _whole_batches(plan.layout.size, plan) + _whole_batches(remainder, plan)


def noise_rows(plan: BuildPlan) -> int:
    """Denoiser rows of noise selection for all shards, with the padding of last batches."""
    # A short last batch is padded for selection, but not for gradient descent.
    is_padded = plan.config.noise.strategy == "select"
    groups = computed_groups(plan) if is_padded else plan.num_groups
    return noise_cost(plan.config, groups=groups).rows


def hours(tflop: float, *, rate: float, share: float) -> float:
    """Hours of one device that reaches the fraction `share` of `rate` TFLOP/s."""
    return tflop / (rate * share) / 3600


def stored_bytes(plan: BuildPlan, cost: SeriesCost) -> int:
    """Bytes of all shards and features; exact but for the images and the digits of the labels."""
    shards = plan.config.shards
    side = shards.store_size or cost.generator.image_size
    encoding = ENCODINGS[shards.image_format]
    series = cost.images * _member(
        encoding.expected_bytes(side) + shards.mark * encoding.mark_bytes
    )
    series += _member(record_bytes(plan.config, len(plan.class_names)))
    full, remainder = divmod(plan.num_groups, plan.layout.size)
    tars = full * _tar(plan.layout.size * series)
    tars += _tar(remainder * series) if remainder else 0
    features = plan.num_images * cost.feature_width * 2  # half precision
    return round(tars) + features + plan.num_shards * COMMIT_RECORD


def record_bytes(config: BuildConfig, classes: int) -> int:
    """Bytes of a typical `KEY.json`."""
    names, images = config.mixing.classes, config.mixing.images
    number = 0.1234567890123456  # most weights and labels are this long
    label = [[classes - 1, number]] * names
    record = {
        "group": 123_456,
        "classes": [classes - 1] * names,
        "names": ["a class name"] * names,
        "seed": 2**63 - 1,
        "alphas": [number] * images,
        "weights": [number] * images,
        "labels": [label] * images,
        "noise": {"strategy": config.noise.strategy, "stability": None},
        **({"synthetic": True} if config.shards.mark else {}),
    }
    if names > 2:
        record |= {
            "mixture": [[number] * names] * images,
            "coordinates": [[number] * names] * images,
        }
    scores = SCORES if config.noise.strategy in ("select", "optimise") else 0
    return len(canonical_json(record)) + scores


def _member(content: float) -> float:
    return BLOCK + content + BLOCK / 2  # padding of the last block is half a block on average


def _tar(members: float) -> int:
    return math.ceil((members + 2 * BLOCK) / TAR_RECORD) * TAR_RECORD


def _whole_batches(groups: int, plan: BuildPlan) -> int:
    """Groups of one shard with the padding of its last batch."""
    batch = plan.config.shards.groups_per_batch
    return math.ceil(groups / batch) * batch
