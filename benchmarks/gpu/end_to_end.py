"""G6, G12: a whole shard against generating alone and against serial stages; equal bytes."""

import io
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from PIL import Image

from benchmarks.encoding import crops
from benchmarks.gpu.bench import Bench, check_activations
from benchmarks.measure import Result
from semix.pipeline.shard import encode_series
from semix.pipeline.shard_writer import Stopwatch, write_series
from tests import handmade

BATCH = 64


def g6_end_to_end(bench: Bench) -> Result:
    result = Result("G6", f"{bench.size}: generate, encode, write; natural images are encoded")
    images = 512 if bench.device != "cpu" else 64
    # Random weights give noise, the worst case for file sizes: photographs are encoded instead.
    photographs = crops(BATCH)
    for steps, guidance, bar in ((20, 7.5, 1.03), (4, 0.0, 1.10)):
        generator = bench.generator(steps=steps, guidance_scale=guidance, compile="regional")
        make = _batches(bench, generator, images)
        alone = _time(bench, lambda: list(make()))  # noqa: B023
        ours = _time(bench, lambda: _overlapped(bench, make(), photographs))  # noqa: B023
        serial = _time(bench, lambda: _serial(bench, make(), photographs))  # noqa: B023
        name = f"{steps} steps"
        result.at_most(f"{name}: whole over generating alone", ours / alone, bar)
        if steps == 20:
            result.at_least("serial with PNG over ours", serial / ours, 1.7)
        result.figures[name] = {"alone_s": alone, "ours_s": ours, "serial_s": serial}
        result.figures[name]["images_per_second"] = images / ours
    return result


def _batches(bench: Bench, generator: Any, images: int) -> Any:
    noise, condition = bench.inputs(generator, BATCH)
    check_activations(generator.decode(generator.sample(noise, condition)))

    def make() -> Any:
        for _ in range(images // BATCH):
            yield generator.decode(generator.sample(noise, condition)).cpu().numpy()

    return make


def _time(bench: Bench, call: Any) -> float:
    bench.wait()
    start = time.perf_counter()
    call()
    bench.wait()
    return time.perf_counter() - start


def _overlapped(bench: Bench, batches: Any, photographs: np.ndarray) -> None:
    series = (
        (
            handmade.series_of(handmade.record(number * BATCH + row, 8)),
            partial(encode_series, photographs[row : row + 8], "webp"),
        )
        for number, _ in enumerate(batches)
        for row in range(0, BATCH, 8)
    )
    with (bench.folder / "ours.tar").open("wb") as file:
        write_series(file, series, extension="webp", clock=Stopwatch())


def _serial(bench: Bench, batches: Any, photographs: np.ndarray) -> None:
    """Generate, save each image as PNG, then read all files again and write a tar."""
    folder = bench.folder / "png"
    folder.mkdir(exist_ok=True)
    files: list[Path] = []
    for number, _ in enumerate(batches):
        for row, image in enumerate(photographs):
            files.append(folder / f"{number}_{row}.png")
            Image.fromarray(image).save(files[-1])
    with wds.ShardWriter(str(bench.folder / "serial-%04d.tar"), maxsize=1e12, verbose=0) as writer:
        for number, path in enumerate(files):
            buffer = io.BytesIO()
            Image.open(path).save(buffer, "PNG")
            writer.write({"__key__": f"{number:08d}", "png": buffer.getvalue()})


def g12_determinism(bench: Bench) -> Result:
    result = Result("G12", f"{bench.size}: the same batch twice; the same images in another batch")
    generator = bench.generator()
    noise, condition = bench.inputs(generator, BATCH)

    def pixels(size: int) -> torch.Tensor:
        batches = [
            generator.decode(generator.sample(noise[i : i + size], condition[i : i + size]))
            for i in range(0, BATCH, size)
        ]
        return torch.cat(batches)

    first = pixels(BATCH)
    result.equal("the same batch twice is the same", bool(torch.equal(first, pixels(BATCH))), True)
    difference = (first.int() - pixels(BATCH // 2).int()).abs()
    result.figures["other batch, largest pixel difference"] = int(difference.max())
    result.figures["other batch, share of pixels that differ"] = float(
        (difference > 0).float().mean()
    )
    return result
