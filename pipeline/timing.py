"""Measure the speed of a device, on a matrix product and on one batch of a build."""

import time
from dataclasses import dataclass

import torch

from semix.data.device import resolve_device, resolve_dtype
from semix.pipeline.annotate import Annotator, Encoders
from semix.pipeline.class_sets import UndrawnPairs
from semix.pipeline.estimate import TERA, computed_groups, cost_or_reason
from semix.pipeline.generators import load_generator
from semix.pipeline.noise.source import random_noise
from semix.pipeline.plan import BuildPlan
from semix.pipeline.prompts import prompt_names
from semix.pipeline.shard import Models, class_embeddings, make_batch
from semix.pipeline.shard_writer import Stopwatch

MATRIX_SIDES = {"cpu": 1024, "cuda": 8192}  # of the square matrices, which fill the device
MIN_SECONDS = 0.5


@dataclass(frozen=True)
class BatchTiming:
    """Time of one batch on one device, after a first batch that warmed up and compiled.

    Attributes:
        images: generated images, without padding.
        seconds: from noise to CLIP features; encoding files and writing run beside the next batch.
        build_seconds: estimated time of the whole build on one such device: generating all batches
            and selecting their noise.
        tflop: of the batch; None where it cannot be counted.
    """

    images: int
    seconds: float
    stages: dict[str, float]
    build_seconds: float
    tflop: float | None


def device_rate(device: str, dtype: str) -> float:
    """Median TFLOP/s of matrix products that take half a second together.

    Args:
        dtype: float32, float16 or bfloat16.
    Raises:
        InputError: the device lacks that precision.
    """
    torch_device = torch.device(device)
    side = MATRIX_SIDES[torch_device.type]
    # Random numbers, since a GPU clocks higher on zeros, where no bits switch.
    precision = resolve_dtype(dtype, device, field="dtype")
    left, right = (torch.randn(side, side, device=torch_device).to(precision) for _ in range(2))
    torch.mm(left, right)
    seconds: list[float] = []
    while sum(seconds) < MIN_SECONDS:
        _synchronise(torch_device)
        start = time.perf_counter()
        torch.mm(left, right)
        _synchronise(torch_device)
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / sorted(seconds)[len(seconds) // 2] / TERA


def time_batch(plan: BuildPlan, *, device: str, noise_ratio: float) -> BatchTiming:
    """Load the models, make one batch twice and time the second run.

    Args:
        noise_ratio: cost of selecting noise, as a multiple of that of generating.
    Raises:
        InputError: a model cannot be loaded or does not suit.
    """
    device = resolve_device(device)
    plan, models = _with_pairs(plan), _models(plan, device)
    batch = plan.config.shards.groups_per_batch
    groups = [plan.group(index) for index in range(min(batch, plan.num_groups))]
    for _ in range(2):  # the first one loads kernels and compiles
        _synchronise(torch.device(device))
        clock = Stopwatch()
        make_batch(groups, plan, models=models, clock=clock)
        seconds = clock.wall  # the features are on the CPU, so the device is done
    batches = computed_groups(plan) / batch
    cost, _ = cost_or_reason(plan.config)
    return BatchTiming(
        images=len(groups) * plan.images_per_group,
        seconds=seconds,
        stages={str(stage): stage_seconds for stage, stage_seconds in clock.seconds.items()},
        build_seconds=batches * seconds * (1 + noise_ratio),
        tflop=cost.tflop(groups=len(groups), computed=batch) if cost else None,
    )


def _models(plan: BuildPlan, device: str) -> Models:
    """Load models as a worker does, without prototypes and noise selection."""
    config = plan.config
    names = prompt_names(config.generator, plan.class_names)
    generator = load_generator(config.generator, device=device, names=names)
    annotator = Annotator(config.annotation, {}, Encoders(config.annotation, device=device))
    embeddings = class_embeddings(generator, plan)
    return Models(generator, annotator, embeddings, random_noise(generator.latent_shape), "")


def _with_pairs(plan: BuildPlan) -> BuildPlan:
    """The plan; if its pairs are not drawn yet, with an arbitrary pair in their place."""
    if isinstance(plan.sets, UndrawnPairs):
        return BuildPlan(plan.config, plan.class_names, similar=[(0, 1)] * plan.num_pairs)
    return plan


def _synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
