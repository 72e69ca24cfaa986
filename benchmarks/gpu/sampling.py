"""G1, G2, G3, G8, G11: sampling against one prompt per call, batch sizes, compile, fast paths."""

import time
from typing import Any

import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

from benchmarks.gpu.bench import Bench, check_activations
from benchmarks.measure import Result, line
from semix.pipeline.estimate import TERA, generator_cost


def images_per_second(bench: Bench, generator: Any, images: int, *, repeats: int = 3) -> float:
    noise, condition = bench.inputs(generator, images)
    decoded: list[torch.Tensor] = []

    def make() -> None:
        decoded[:] = [generator.decode(generator.sample(noise, condition))]

    seconds = bench.seconds(make, repeats=repeats)
    check_activations(decoded[0])
    return images / seconds


def peer_rate(bench: Bench, kind: Any, model: Any, *, size: int, images: int) -> float:
    """diffusers' own pipeline, `size` prompts per call, eager, SDPA, same precision."""
    extra = {"safety_checker": None, "requires_safety_checker": False}
    peer = kind.from_pretrained(
        model,
        use_safetensors=True,
        dtype=getattr(torch, bench.dtype),
        **(extra if kind is StableDiffusionPipeline else {}),
    ).to(bench.device)
    peer.set_progress_bar_config(disable=True)

    def call() -> None:
        for _ in range(images // size):
            peer(["a photo of a cat"] * size, num_inference_steps=20, output_type="pt")

    return images / bench.seconds(call, repeats=3)


def g1_sampler(bench: Bench) -> Result:
    result = Result("G1", f"{bench.size}, 20 steps, guidance 7.5: images a second")
    batch = 64
    eager = images_per_second(bench, bench.generator(), batch)
    regional = images_per_second(bench, bench.generator(compile="regional"), batch)
    ours = max(eager, regional)
    single = peer_rate(bench, StableDiffusionPipeline, bench.model(), size=1, images=8)
    eight = peer_rate(bench, StableDiffusionPipeline, bench.model(), size=8, images=16)
    image_tflop = bench.image_tflop(bench.config())
    tflops = ours * image_tflop
    result.at_least("ratio to one prompt a call", ours / single, 4.0)
    result.at_least("share of the device's GEMM rate", bench.gemm_fraction(tflops), 0.35)
    result.figures |= {
        "eager": eager,
        "regional": regional,
        "one prompt a call": single,
        "eight prompts a call": eight,
        "ratio to eight": ours / eight,
        "tflops": tflops,
        "gemm_tflops": bench.gemm_tflops,
        "limit": bench.gemm_tflops / image_tflop,
    }
    return result


def g2_batch_curve(bench: Bench) -> Result:
    result = Result("G2", f"{bench.size}: seconds of one network call over its rows")
    row = generator_cost(bench.config()).row / TERA
    for mode, counts in (
        ("none", [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        ("regional", [8, 32, 128]),  # each batch size is compiled separately
    ):
        generator = bench.generator(compile=mode, guidance_scale=1.0)
        seconds = []
        for count in counts:
            torch._dynamo.reset()
            noise, condition = bench.inputs(generator, count)
            step = torch.tensor(500)
            with torch.inference_mode():
                call = lambda: generator.predict(noise, step, condition, 1.0)  # noqa: B023, E731
                seconds.append([bench.seconds(call, repeats=5)])
        fit = line(counts, seconds)
        fit["tflops at 128 rows"] = 128 * row / seconds[counts.index(128)][0]
        result.figures[mode] = fit
        result.at_least(f"share explained by a line, compile {mode}", fit["r2"], 0.995)
    return result


def g3_compile(bench: Bench) -> Result:
    result = Result("G3", f"{bench.size}: compile modes at 128 rows")
    rates = {}
    for mode in ("none", "regional", "full"):
        generator = bench.generator(compile=mode)
        noise, condition = bench.inputs(generator, 64)
        start = time.perf_counter()
        generator.sample(noise, condition)
        bench.wait()
        first = time.perf_counter() - start
        seconds = bench.seconds(lambda: generator.sample(noise, condition))  # noqa: B023
        rates[mode] = {"first_s": first, "seconds": seconds}
    best = min(rates["regional"]["seconds"], rates["full"]["seconds"])
    result.at_least("compiled over eager", rates["none"]["seconds"] / best, 1.12)
    for mode in ("regional", "full"):
        rates[mode]["compile_s"] = rates[mode]["first_s"] - rates[mode]["seconds"]
    result.at_most("seconds to compile, regional", rates["regional"]["compile_s"], 120)
    result.figures |= rates
    return result


def g8_fast_paths(bench: Bench) -> Result:
    result = Result("G8", f"{bench.size}: faster recipes against the exact one, timing only")
    exact = _sampling_seconds(bench, {})
    exact_tflop = bench.image_tflop(bench.config(), decoded=False)
    settings: dict[str, Any]
    for name, settings in (
        ("guidance off in 40 % of the steps", {"guidance_interval": [0.0, 0.6]}),
        ("half the steps, UniPC", {"scheduler": "unipc", "steps": 10}),
    ):
        expected = exact_tflop / bench.image_tflop(bench.config(**settings), decoded=False)
        ratio = exact / _sampling_seconds(bench, settings)
        result.at_least(name, ratio, 0.9 * expected)
        result.figures[f"{name}, by FLOP"] = expected
    result.figures["exact_seconds"] = exact
    return result


def _sampling_seconds(bench: Bench, settings: dict[str, Any]) -> float:
    generator = bench.generator(**settings)
    noise, condition = bench.inputs(generator, 64)
    return bench.seconds(lambda: generator.sample(noise, condition))


def g11_sdxl(bench: Bench) -> Result:
    result = Result("G11", "SDXL at 1024 px, 20 steps, guidance, batches of 8")
    if bench.device == "cpu":
        result.figures["skipped"] = "SDXL at 1024 px needs a GPU"
        return result
    ours = images_per_second(bench, bench.generator(size="sdxl", decode_batch=2), 8, repeats=1)
    model = bench.model("sdxl")
    single = peer_rate(bench, StableDiffusionXLPipeline, model, size=1, images=2)
    tflops = ours * bench.image_tflop(bench.config(size="sdxl"))
    result.at_least("images a second", ours, 1.0)
    result.figures |= {"one prompt a call": single, "ratio": ours / single, "tflops": tflops}
    return result
