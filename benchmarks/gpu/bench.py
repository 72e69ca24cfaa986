"""What all GPU benchmarks use: models on the device, a clock that waits for it, its peak rate."""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.flow_pipelines import FLUX, SD3, save_flow
from benchmarks.random_models import NAMES, save_pipeline
from semix.data.settings import load_settings
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.estimate import TERA, generator_cost
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.schedulers import network_rows
from semix.pipeline.noise import initial_noise
from semix.pipeline.timing import device_rate


class Bench:
    """One device and one size of model."""

    def __init__(self, device: str, size: str) -> None:
        self.device, self.size = device, size
        self.dtype = "float32" if device == "cpu" else "bfloat16"
        self.folder = Path(tempfile.mkdtemp(prefix="semix-bench-"))

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device != "cpu" else "cpu"

    @cached_property
    def gemm_tflops(self) -> float:
        """Rate of one large matrix product, the unit of `gemm_fraction`."""
        return device_rate(self.device, self.dtype)

    def model(self, size: str | None = None) -> Path:
        """The saved pipeline, made at first use."""
        folder = self.folder / (size or self.size)
        if not folder.is_dir():
            save = save_flow if (size or self.size) in (*SD3, *FLUX) else save_pipeline
            save(folder, size or self.size, device=self.device)
        return folder

    def generator(self, *, size: str | None = None, **settings: Any) -> Any:
        """A generator as a build loads it."""
        return load_generator(self.config(size=size, **settings), device=self.device)

    def config(self, *, size: str | None = None, **settings: Any) -> GeneratorConfig:
        """Settings of a generator: 20 steps with guidance, unless `settings` change them."""
        size = size or self.size
        values = {
            "family": family_of(size),
            "model": str(self.model(size)),
            "dtype": self.dtype,
            "steps": 20,
            **settings,
        }
        return load_settings(GeneratorConfig, values)

    def image_tflop(self, config: GeneratorConfig, *, decoded: bool = True) -> float:
        """TFLOP of one image, counted from the model's config files."""
        cost = generator_cost(config)
        rows = network_rows(config, 1, calls=cost.calls)
        return (rows * cost.row + decoded * cost.decode) / TERA

    def inputs(self, generator: Any, images: int) -> tuple[torch.Tensor, Conditioning]:
        """Noise and conditioning of some images."""
        noise = initial_noise(range(images), generator.latent_shape).to(self.device)
        rows = [index % len(NAMES) for index in range(images)]
        return noise, generator.encode(NAMES)[rows]

    def seconds(self, call: Callable[[], object], *, repeats: int = 3) -> float:
        """Median wall seconds, after one call that warms up."""
        call()
        times = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def gemm_fraction(self, tflops: float) -> float:
        return tflops / self.gemm_tflops


def family_of(size: str) -> str:
    if size in SD3:
        return "sd3"
    if size in FLUX:
        return "flux"
    return "sdxl" if size == "sdxl" else "stable_diffusion"


def check_activations(values: torch.Tensor) -> None:
    """Check that no activations are dead or exploded, which would flatter the rates."""
    assert torch.isfinite(values.float()).all(), "NaN or infinite values"
    assert values.float().flatten(1).std(dim=1).min() > 0, "a constant image"
