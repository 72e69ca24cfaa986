"""C13: a step of stage one against a bare loop with the same passes, losses and update."""

import copy
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional

from benchmarks.measure import Result, Sides, interleaved, ratio
from semix.calib.batches import TrainingBatch
from semix.calib.config import TrainConfig
from semix.calib.real_data import open_data
from semix.calib.stage_one import BaseStage
from semix.data.images import encode_image
from semix.data.real import load_real
from semix.data.settings import load_settings
from semix.data.splits import RealDataConfig
from semix.data.tar import GroupSample
from tests import handmade

SIZE, BATCH, STEPS, REPEATS = 32, 32, 8, 9
ALPHAS = [0.0, 0.3, 0.7, 1.0]
REAL = {"name": "digits", "image_size": SIZE, "train_per_class": 4, "validation_per_class": 1}


def run() -> Result:
    result = Result("C13", f"ResNet-8, {BATCH} real and {2 * BATCH} mixed images of {SIZE} px")
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        config = settings(blends(Path(folder)))
        stage = BaseStage(config, open_data(config), seed=0, accelerator=Accelerator())
        batch = next(iter(stage.batches.epoch(torch.Generator().manual_seed(0))))
    bare = bare_step(copy.deepcopy(stage.network), config)
    stage.network.train()
    outputs = [(stage.step(batch), bare(batch)) for _ in range(3)]
    same = all(torch.equal(ours, theirs) for ours, theirs in outputs)
    result.equal("losses and accuracy of three steps are the bare loop's", same, True)
    sides: Sides = {
        "ours": lambda: [stage.step(batch) for _ in range(STEPS)],
        "bare": lambda: [bare(batch) for _ in range(STEPS)],
    }
    seconds = interleaved(sides, repeats=REPEATS)
    speedup = ratio(seconds["ours"], seconds["bare"])
    result.at_most("step over the bare loop", speedup["ratio"], 1.03)
    result.figures |= {
        "step": speedup,
        "milliseconds_a_step": {k: min(v) / STEPS * 1e3 for k, v in seconds.items()},
        "cpu_seconds": seconds,
    }
    return result


def bare_step(
    network: torch.nn.Module, config: TrainConfig
) -> Callable[[TrainingBatch], torch.Tensor]:
    """CSM's step as one would write it: two passes, both losses, clipping, update, metrics."""
    network.train()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    def step(batch: TrainingBatch) -> torch.Tensor:
        logits, _ = network(batch.images)
        real = functional.cross_entropy(logits, batch.targets)
        p = network(batch.mixed_images)[0].softmax(1)
        mixed = (p - batch.mixed_labels).square().sum(1).mean()
        (real + mixed).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 2.0)
        optimiser.step()
        optimiser.zero_grad()
        accuracy = (logits.argmax(1) == batch.targets).float().mean()
        return torch.stack([real.detach(), mixed.detach(), accuracy])

    return step


def settings(url: str) -> TrainConfig:
    values = {
        "name": "csm",
        "real": REAL,
        "mixed": {"url": url},
        "model": {"name": "resnet8"},
        "batch_size": BATCH,
        "optimiser": {"schedule": "constant"},
    }
    return load_settings(TrainConfig, values)


def blends(folder: Path) -> str:
    """URL of a root of plain blends, one series per pair of digits."""
    real = load_real(RealDataConfig(**REAL))
    pictures = [real.train.images(real.train.targets == k)[0].astype(float) for k in range(10)]
    samples = []
    for group, (first, second) in enumerate(itertools.combinations(range(10), 2)):
        series = [a * pictures[first] + (1 - a) * pictures[second] for a in ALPHAS]
        fields: dict[str, Any] = {"classes": [first, second], "alphas": ALPHAS, "weights": ALPHAS}
        labels = [[[first, a], [second, 1 - a]] for a in ALPHAS]
        record = handmade.series_of(handmade.record(group, labels=labels, **fields))
        images = [encode_image(image.round().astype(np.uint8), "webp") for image in series]
        samples.append(GroupSample(record, images, "webp"))
    url: str = handmade.root_of(folder, samples, real.class_names).url
    return url
