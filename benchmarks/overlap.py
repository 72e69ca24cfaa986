"""C12: generating on one thread while the other core encodes and writes."""

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import Result, interleaved, ratio
from benchmarks.models import build_config, opened, standins
from benchmarks.tiny import save_tiny_pipeline
from data.images import encode_image
from pipeline.batch import encode_series, make_batch
from pipeline.build import generate_shard
from pipeline.shard_writer import ShardWriter
from pipeline.standins import StandIns
from pipeline.stopwatch import Stopwatch

BATCHES = 6


def run() -> Result:
    result = Result("C12", "a shard of 24 series at 256 px: overlapped against its slowest stage")
    folder = Path(tempfile.mkdtemp(prefix="semix-bench-"))
    save_tiny_pipeline(folder / "diffusion", standins().diffusion, image_size=256)
    models = StandIns(folder / "diffusion", standins().clip, {})
    config = build_config(
        "generator.steps=1",
        "generator.guidance_scale=0",
        "shards.image_format=png",  # the dearest lossless one: the stages are to be of a size
        "shards.groups_per_batch=4",
        f"shards.groups_per_shard={4 * BATCHES}",
        "mixing.groups_per_pair=1",
        models=models,
    )
    root, plan, loaded = opened(config)
    spec = plan.shard(0)
    batches = [[plan.group(b * 4 + i) for i in range(4)] for b in range(BATCHES)]
    kept: list[np.ndarray] = []

    def generate() -> None:
        kept.clear()
        for groups in batches:
            kept.append(make_batch(groups, plan, models=loaded, clock=Stopwatch()).images)

    def encode() -> None:
        with (
            (folder / "alone.tar").open("wb") as file,
            ShardWriter(file, extension="png", clock=Stopwatch(), threads=1) as writer,
        ):
            for index, series in enumerate(image for batch in kept for image in batch):
                record = {"group": index, "alphas": [0.0] * 8}
                writer.add(record, lambda series=series: encode_series(series, "png"))

    def overlapped() -> None:
        if root.is_committed(0):
            root.discard(0)
        generate_shard(spec, plan, models=loaded, root=root)

    seconds = interleaved(
        {"generate": generate, "encode": encode, "overlapped": overlapped},
        clock=time.perf_counter,
    )
    slowest = max(("generate", "encode"), key=lambda name: float(np.median(seconds[name])))
    found = ratio(seconds["overlapped"], seconds[slowest])
    serial = [a + b for a, b in zip(seconds["generate"], seconds["encode"], strict=True)]
    result.at_most("wall over the slowest stage", found["ratio"], 1.1)
    result.figures |= {
        "slowest": slowest,
        "overlap": found,
        "serial": ratio(serial, seconds["overlapped"]),
        "wall_seconds": seconds,
    }
    first = encode_image(kept[0][0, 0], "png")
    result.figures["image_kB"] = len(first) / 1000
    return result
