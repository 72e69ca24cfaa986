"""Times one warm batch of a build without making anything."""

from dataclasses import dataclass

import torch

from data.device import resolve_device
from pipeline.annotate import Annotator, Encoders
from pipeline.batch import make_batch
from pipeline.costs.gemm import synchronise
from pipeline.costs.work import all_computed_groups, work_or_reason
from pipeline.generators import load_generator
from pipeline.models import Models, class_embeddings
from pipeline.noise.source import random_noise
from pipeline.plan import BuildPlan, Similar
from pipeline.stopwatch import Stopwatch


@dataclass(frozen=True)
class Rehearsal:
    """One batch on one device, after another that warmed it up and compiled.

    Attributes:
        images: made, without those that fill up the batch.
        seconds: from noise to CLIP features; encoding and writing go on beside the next batch.
        build_seconds: of all batches, and of choosing noise at the same price a row.
        tflop: of the batch; None where that cannot be counted.
    """

    images: int
    seconds: float
    stages: dict[str, float]
    build_seconds: float
    tflop: float | None


def rehearse(plan: BuildPlan, *, device: str, noise_ratio: float) -> Rehearsal:
    """Load the models and time the second of two batches.

    Args:
        noise_ratio: cost of choosing noise, in times that of generating.
    Raises:
        InputError: a model cannot be loaded or does not suit.
    """
    device = resolve_device(device)
    plan, models = _with_pairs(plan), _models(plan, device)
    batch = plan.config.shards.groups_per_batch
    groups = [plan.group(index) for index in range(min(batch, plan.num_groups))]
    for _ in range(2):  # the first one loads kernels and compiles
        synchronise(torch.device(device))
        clock = Stopwatch()
        make_batch(groups, plan, models=models, clock=clock)
        seconds = clock.wall  # the features are on the CPU, so the device is done
    batches = all_computed_groups(plan) / batch
    work = models.work
    return Rehearsal(
        images=len(groups) * plan.images_per_group,
        seconds=seconds,
        stages=dict(clock.seconds),
        build_seconds=batches * seconds * (1 + noise_ratio),
        tflop=work.tflop(groups=len(groups), computed=batch) if work else None,
    )


def _models(plan: BuildPlan, device: str) -> Models:
    """As a worker loads them, but for prototypes and chosen noise, which no batch waits for."""
    config = plan.config
    generator = load_generator(config.generator, device=device)
    annotator = Annotator(config.annotation, {}, Encoders(config.annotation, device=device))
    embeddings = class_embeddings(generator, plan)
    noise, (work, _) = random_noise(generator.latent_shape), work_or_reason(config)
    return Models(generator, annotator, embeddings, noise, work)


def _with_pairs(plan: BuildPlan) -> BuildPlan:
    """Any pair does where similar ones would have to be measured first."""
    if isinstance(plan.sets, Similar) and plan.sets.sets is None:
        return BuildPlan(plan.config, plan.class_names, similar=[(0, 1)] * plan.num_pairs)
    return plan
