"""What a build will take: sizes, denoiser rows, FLOP, bytes; by arithmetic, nothing is made."""

import math
from dataclasses import dataclass, replace

import numpy as np

from data.fingerprint import canonical_json
from pipeline.config import ApproximationConfig, BuildConfig
from pipeline.costs.work import (
    Work,
    all_computed_groups,
    computed_groups,
    noise_rows,
    series_work,
    work_or_reason,
)
from pipeline.noise.cost import noise_cost
from pipeline.plan import BuildPlan

# Bytes of an image by its side: means over CIFAR-10 images (32) and photographs (224, 512) under
# the settings of data.images, Pillow 13. Generated images differ by 10 to 30 %.
IMAGE_BYTES = {
    "webp": {32: 1_664, 224: 77_000, 512: 346_000},
    "png": {32: 2_272, 224: 92_000, 512: 434_000},
    "jpg": {32: 1_284, 224: 31_000, 512: 132_000},
}
BLOCK = 512  # of a tar: a header each member, contents rounded up
TAR_RECORD = 20 * BLOCK  # what a whole tar is rounded up to
SCORES = 300  # bytes that chosen noise adds to the record of a series
COMMIT_RECORD = 1_200  # bytes


@dataclass(frozen=True)
class Estimate:
    """What a whole build will take. The pass over the real images for prototypes is not in it.

    Attributes:
        network_rows: one sample in one call of the denoiser: two an image and step where it is
            guided. With what fills up the last batches, without what chooses noise.
        shallow_rows: those of feature caches, through the outermost part of the network alone.
        noise_rows: spent on choosing noise.
        noise_ratio: the same, in times the rows of generating.
        tflop: of all shards; two FLOP a multiply-add, products of attention included.
        gate_tflop: of the fidelity gate before them, where images are approximate.
        bytes: shards and CLIP features, as stored.
        unknown: why some of these are None.
    """

    groups: int
    images: int
    shards: int
    noise_rows: int
    noise_ratio: float
    network_rows: int | None = None
    shallow_rows: int | None = None
    tflop: float | None = None
    gate_tflop: float | None = None
    bytes: int | None = None
    unknown: str | None = None


def estimate(plan: BuildPlan) -> Estimate:
    """Memory and time do not grow with the plan.

    Raises:
        InputError: the model's scheduler cannot be used.
    """
    sizes = Estimate(
        groups=plan.num_groups,
        images=plan.num_images,
        shards=plan.num_shards,
        noise_rows=noise_rows(plan),
        noise_ratio=noise_cost(plan.config, groups=plan.num_groups).ratio,
    )
    work, unknown = work_or_reason(plan.config)
    if work is None:
        return replace(sizes, unknown=unknown)
    computed = all_computed_groups(plan)
    return replace(
        sizes,
        network_rows=computed * work.rows.full,
        shallow_rows=computed * work.rows.shallow,
        tflop=work.tflop(groups=plan.num_groups, computed=computed, noise_rows=sizes.noise_rows),
        gate_tflop=gate_tflop(plan, work),
        bytes=stored_bytes(plan, work),
    )


def gate_tflop(plan: BuildPlan, fast: Work) -> float:
    """Of the fidelity gate: its series once approximately and twice exactly, from other noise."""
    approximate = plan.config.generator.approximate
    if not approximate.active:
        return 0.0
    off = plan.config.generator.model_copy(update={"approximate": ApproximationConfig()})
    exact = series_work(plan.config.model_copy(update={"generator": off}))
    groups = min(approximate.gate_groups, plan.num_groups)
    computed = computed_groups(groups, plan.config.shards.groups_per_batch)
    return sum(work.tflop(groups=groups, computed=computed) for work in (fast, exact, exact))


def hours(tflop: float, *, rate: float, share: float) -> float:
    """Hours of one device that computes with `share` of `rate` TFLOP/s."""
    return tflop / (rate * share) / 3600


def stored_bytes(plan: BuildPlan, work: Work) -> int:
    """Tars and features of all shards; exact but for the images and the digits of the labels."""
    shards = plan.config.shards
    side = shards.store_size or work.costs.image_size
    series = work.images * _member(image_bytes(shards.image_format, side))
    series += _member(record_bytes(plan.config, len(plan.class_names)))
    full, rest = divmod(plan.num_groups, plan.layout.size)
    tars = full * _tar(plan.layout.size * series) + (_tar(rest * series) if rest else 0)
    features = plan.num_images * work.costs.feature_width * 2  # half precision
    return round(tars) + features + plan.num_shards * COMMIT_RECORD


def image_bytes(image_format: str, side: int) -> float:
    """Expected bytes of an encoded image; a pixel costs less the larger the image is."""
    known = IMAGE_BYTES[image_format]
    sides = np.array(list(known))
    a_pixel = np.array(list(known.values())) / sides**2
    return float(np.interp(math.log(side), np.log(sides), a_pixel)) * side**2


def record_bytes(config: BuildConfig, classes: int) -> int:
    """Bytes of `KEY.json`, from one that is as long as most."""
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
    }
    if names > 2:
        record |= {
            "mixture": [[number] * names] * images,
            "coordinates": [[number] * names] * images,
        }
    scores = 0 if config.noise.strategy == "random" else SCORES
    return len(canonical_json(record)) + scores


def _member(content: float) -> float:
    return BLOCK + content + BLOCK / 2  # on average half a block fills up the last one


def _tar(members: float) -> int:
    return math.ceil((members + 2 * BLOCK) / TAR_RECORD) * TAR_RECORD
