"""C12: generating on one thread while others encode and write, and publish the previous shard."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.measure import Result, interleaved, ratio
from benchmarks.models import build_config, open_root, standins
from benchmarks.tiny import save_tiny_pipeline
from semix.data.images import encode_image
from semix.data.leases import claim, release
from semix.data.root import Root
from semix.data.store import Store
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import build_of
from semix.pipeline.shard import GeneratedShard, encode_series, generate_shard, make_batch
from semix.pipeline.shard_job import BuildJob
from semix.pipeline.shard_writer import Stopwatch, write_series
from semix.pipeline.standins import StandIns
from semix.pipeline.worker import Worker
from tests import handmade

BATCHES = 6
SHARDS, LATENCY_S = 8, 0.3  # latency of each request that writes, as in a busy bucket


def run() -> Result:
    result = Result("C12", "a shard of 24 series at 256 px: overlapped against its slowest stage")
    folder = Path(tempfile.mkdtemp(prefix="semix-bench-"))
    save_tiny_pipeline(folder / "diffusion", standins().diffusion, image_size=256)
    models = StandIns(folder / "diffusion", standins().clip, {})
    measure_encoding(result, folder, models)
    measure_publishing(result, models)
    return result


def config_of(models: StandIns, *overrides: str) -> BuildConfig:
    return build_config(
        "generator.steps=1",
        "generator.guidance_scale=0",
        "shards.groups_per_batch=4",
        "mixing.groups_per_pair=1",
        *overrides,
        models=models,
    )


def measure_encoding(result: Result, folder: Path, models: StandIns) -> None:
    """One shard against generating alone, or encoding alone."""
    config = config_of(
        models,
        "shards.image_format=png",  # the slowest lossless format, to make both stages similar
        f"shards.groups_per_shard={4 * BATCHES}",
    )
    root, plan, loaded = open_root(config)
    spec = plan.shard(0)
    batches = [[plan.group(b * 4 + i) for i in range(4)] for b in range(BATCHES)]
    pixels: list[np.ndarray] = []

    def generate() -> None:
        pixels.clear()
        for groups in batches:
            pixels.append(make_batch(groups, plan, models=loaded, clock=Stopwatch()).images)

    def encode() -> None:
        series = (
            (handmade.series_of(handmade.record(index, 8)), partial(encode_series, images, "png"))
            for index, images in enumerate(images for batch in pixels for images in batch)
        )
        with (folder / "alone.tar").open("wb") as file:
            write_series(file, series, extension="png", clock=Stopwatch(), threads=1)

    def overlapped() -> None:
        if root.is_committed(0):
            root.discard(0)
        generate_shard(spec, plan, models=loaded, root=root).publish()

    seconds = interleaved(
        {"generate": generate, "encode": encode, "overlapped": overlapped},
        clock=time.perf_counter,
    )
    slowest = max(("generate", "encode"), key=lambda name: float(np.median(seconds[name])))
    overlap = ratio(seconds["overlapped"], seconds[slowest])
    serial = [a + b for a, b in zip(seconds["generate"], seconds["encode"], strict=True)]
    result.at_most("wall over the slowest stage", overlap["ratio"], 1.1)
    result.figures |= {
        "slowest": slowest,
        "overlap": overlap,
        "serial": ratio(serial, seconds["overlapped"]),
        "wall_seconds": seconds,
    }
    image = encode_image(pixels[0][0, 0], "png")
    result.figures["image_kB"] = len(image) / 1000


def measure_publishing(result: Result, models: StandIns) -> None:
    """A worker's shards into a slow store, against only claiming and making them."""
    root, plan, loaded = open_root(config_of(models, "shards.groups_per_shard=4"))
    job = BuildJob(build_of(root))
    job.models, job.load = loaded, lambda **_: None  # type: ignore[method-assign]

    def make_all(end: Callable[[GeneratedShard], object]) -> None:
        with slow_store(root):
            for shard in range(SHARDS):
                claim(root.store, shard)
                end(generate_shard(plan.shard(shard), plan, models=loaded, root=root))
                release(root.store, shard)

    def worker() -> None:
        with slow_store(root):
            assert Worker(job, 0, 1, device="cpu", only=range(SHARDS)).run() == 0

    seconds = interleaved(
        {
            "making": lambda: make_all(lambda made: made.files.close()),
            "one after another": lambda: make_all(GeneratedShard.publish),
            "worker": worker,
        },
        repeats=3,
        clock=time.perf_counter,
    )
    overlap = ratio(seconds["worker"], seconds["making"])
    result.at_most(f"{SHARDS} shards, {LATENCY_S:g} s a write, over making", overlap["ratio"], 1.15)
    serial = ratio(seconds["one after another"], seconds["making"])
    result.figures["publishing"] = {"worker": overlap, "one after another": serial, "wall": seconds}


@contextmanager
def slow_store(root: Root) -> Iterator[None]:
    """Remove the shards; within the block each write to a store takes `LATENCY_S` longer."""
    shutil.rmtree(Path(root.url) / "shards", ignore_errors=True)

    def slow_down(write: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            time.sleep(LATENCY_S)
            return write(*arguments)

        return run

    writes: dict[str, Any] = {
        name: slow_down(getattr(Store, name)) for name in ("publish", "put", "create")
    }
    with patch.multiple(Store, **writes):
        yield
