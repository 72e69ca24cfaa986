"""G13: Stable Diffusion 3.5 and FLUX.1 at 1024 px: speed, fraction of GEMM rate, peak memory."""

from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sampling import images_per_second
from benchmarks.measure import Result
from semix.data.settings import load_settings
from semix.pipeline.config import BuildConfig
from semix.pipeline.memory import memory_needed

BATCH = 8
# The published settings. xDiT reports 0.233 images a second for FLUX.1-dev, 28 steps, 1024 px, on
# one H100 with torch.compile.
MODELS: dict[str, dict[str, Any]] = {
    "sd35-medium": {"steps": 28, "guidance_scale": 4.5},
    "flux-dev": {"steps": 28, "guidance_scale": 3.5, "prompt_length": 512},
}
SMALL = {
    "small-sd3": {"steps": 2, "prompt_length": 16},
    "small-flux": {"steps": 2, "prompt_length": 16, "image_size": 32},
}
XDIT = 0.233


def g13_flow(bench: Bench) -> Result:
    result = Result("G13", f"flow models, batches of {BATCH}, decoded; blocks compiled")
    cpu = bench.device == "cpu"
    for size, settings in (SMALL if cpu else MODELS).items():
        mode = "none" if cpu else "regional"
        generator = bench.generator(size=size, compile=mode, **settings)
        if not cpu:
            torch.cuda.reset_peak_memory_stats()
        rate = images_per_second(bench, generator, BATCH, repeats=1)
        config = bench.config(size=size, **settings)
        tflops = rate * bench.image_tflop(config)
        fraction = bench.gemm_fraction(tflops)
        figures = {"images_per_second": rate, "tflops": tflops, "share": fraction}
        figures["counted_GB"] = _counted_bytes(config) / 1e9
        if not cpu:
            figures["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
            ratio = figures["counted_GB"] / figures["peak_GB"]
            result.at_least(f"{size}: memory as counted over the peak", ratio, 0.8)
            result.at_least(f"{size}: share of the device's GEMM rate", figures["share"], 0.4)
        if size == "flux-dev":
            result.at_least("flux-dev: images a second over xDiT's", rate / XDIT, 1.0)
        result.figures[size] = figures
        del generator
        if not cpu:
            torch.cuda.empty_cache()
    return result


def _counted_bytes(config: Any) -> int:
    """Bytes of network, VAE and batch, without a CLIP tower."""
    values = {
        "real": {"name": "digits"},
        "generator": config.model_dump(),
        "mixing": {"groups_per_pair": 1, "alphas": BATCH},
        "annotation": {"model": "ViT-B-32-quickgelu", "pretrained": "openai"},
        "shards": {"groups_per_batch": 1},
    }
    needed = memory_needed(load_settings(BuildConfig, values))
    return needed.making - needed.clip
