"""G10: the second stage on cached features and on new views, against the network in the loop."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from benchmarks.gpu.bench import Bench, check_activations
from benchmarks.head import train_images, train_in_loop
from benchmarks.measure import Result
from semix.calib.config import TrainConfig
from semix.calib.network import Network
from semix.calib.stage_two import HeadStage
from semix.calib.training_data import TrainingData
from semix.data.device import float32_precision
from semix.data.settings import load_settings
from semix.data.splits import ImageSplit, RealDataset

CLASSES, SIZE = 10, 32
SIZES = {False: ("resnet50", 50_000, 40), True: ("resnet8", 256, 3)}  # images, epochs; on CPU
CHANGES = {"cached": {"shift": 0}, "new views": {"shift": 4, "flip": True}}
BARS = {"cached": (25.0, 20.0), "new views": (3.0, 60.0)}  # ratio and seconds
LOOP_EPOCHS = 2  # timed epochs of the loop, after one that warms up


@float32_precision("tf32")
def g10_head_stage(bench: Bench) -> Result:
    """Seconds of the whole stage, ours in bf16; of the loop per epoch, in float32 with TF32."""
    tiny = bench.device == "cpu"
    model, count, epochs = SIZES[tiny]
    result = Result("G10", f"MaC-Cal's head on {model}, {count} images, {epochs} epochs")
    data = TrainingData(noise(count), None, SIZE)
    for name, changes in CHANGES.items():
        config = settings(model, epochs, changes, precision="no" if tiny else "bf16")
        network = frozen_network(config, data, bench.device)
        ours = time_call(bench, lambda: our_stage(bench, config, data, network))  # noqa: B023
        epoch = loop_epoch(bench, config, data, network)
        ratio, limit = BARS[name]
        result.at_least(f"{name}: ratio to the network in the loop", epoch * epochs / ours, ratio)
        if not tiny:
            result.at_most(f"{name}: seconds", ours, limit)
        result.figures[name] = {"seconds": ours, "loop_seconds_an_epoch": epoch}
    return result


def our_stage(bench: Bench, config: TrainConfig, data: TrainingData, network: Network) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # it holds one precision at a time
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=bench.device == "cpu")
    stage = HeadStage(config, data, network=network, seed=0, accelerator=accelerator)
    for epoch in range(stage.epochs):
        stage.train_epoch(epoch)
    check_activations(stage.views.features_of_epoch(0))


def loop_epoch(bench: Bench, config: TrainConfig, data: TrainingData, network: Network) -> float:
    """Seconds of one epoch with the network in the loop."""

    def run(epochs: int) -> Callable[[], object]:
        options: dict[str, Any] = {"base_accuracy": 1.0, "device": bench.device}
        return lambda: train_in_loop(config, data, network, epochs=epochs, **options)

    one_epoch = time_call(bench, run(1))  # warms up
    one_epoch = min(one_epoch, time_call(bench, run(1)))
    return (time_call(bench, run(1 + LOOP_EPOCHS)) - one_epoch) / LOOP_EPOCHS


def time_call(bench: Bench, call: Callable[[], object]) -> float:
    """Wall seconds of a call, until the device has finished."""
    bench.wait()
    start = time.perf_counter()
    call()
    bench.wait()
    return time.perf_counter() - start


def settings(model: str, epochs: int, changes: dict[str, Any], *, precision: str) -> TrainConfig:
    values = {
        "name": "head",
        "real": {"name": "imagefolder", "path": "made"},  # a folder that is never opened
        "model": {"name": model},
        "augment": changes,
        "mixed_precision": precision,
        "head": {"epochs": epochs},
    }
    return load_settings(TrainConfig, values)


def frozen_network(config: TrainConfig, data: TrainingData, device: str) -> Network:
    """Random weights, and batch norms with statistics of images, so that no activation explodes."""
    torch.manual_seed(0)
    network = Network(config, CLASSES)
    network.normalise.fit(data.train_histogram)
    network = network.to(device).to(memory_format=torch.channels_last).train()
    with torch.no_grad():
        for images in train_images(data)[:5120].split(256):
            network(images.to(device))
    return network.eval().requires_grad_(False)


def noise(count: int) -> RealDataset:
    """Random pixels: the time does not depend on the content of the images."""
    rng = np.random.default_rng(0)

    def split(size: int) -> ImageSplit:
        @cache
        def pixels() -> np.ndarray:
            return rng.integers(256, size=(size, SIZE, SIZE, 3), dtype=np.uint8)

        return ImageSplit(
            np.arange(size) % CLASSES,
            load=lambda rows: pixels()[rows],
            content=lambda _: "noise",
        )

    names = tuple(f"class {number}" for number in range(CLASSES))
    return RealDataset(names, split(count), split(CLASSES), split(CLASSES))
