"""How cost grows: with images, steps, rows, alphas, and with the number of classes."""

import time

import torch

from benchmarks.measure import Result, Sides, interleaved, line, slope
from benchmarks.models import build_config, open_root
from semix.data.settings import load_settings
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import BuildPlan
from semix.pipeline.shard import make_batch
from semix.pipeline.shard_writer import Stopwatch


def run() -> Result:
    result = Result("slopes", "seconds of CPU over images, steps, rows, alphas, classes")
    for name, slopes in {
        "images": images(),
        "steps": steps(),
        "rows": rows(),
        "alphas": alphas(),
        "classes": classes(),
    }.items():
        result.figures[name] = slopes
    deviation = abs(result.figures["images"]["slope"] - 1)
    result.at_most("slope over images, distance to 1", deviation, 0.03)
    result.at_least("share explained by a line over steps", result.figures["steps"]["r2"], 0.995)
    result.at_least("share explained by a line over rows", result.figures["rows"]["r2"], 0.995)
    result.at_least("share explained by a line over alphas", result.figures["alphas"]["r2"], 0.99)
    result.at_most("slope of a group over classes", result.figures["classes"]["slope"], 0.1)
    return result


def _seconds(sides: Sides) -> list[list[float]]:
    return list(interleaved(sides, repeats=5).values())


def _batches(*overrides: str, count: int = 1):  # type: ignore[no-untyped-def]
    _, plan, models = open_root(build_config("mixing.groups_per_pair=8", *overrides))
    size = plan.config.shards.groups_per_batch

    def make() -> None:
        for batch in range(count):
            groups = [plan.group(batch * size + i) for i in range(size)]
            make_batch(groups, plan, models=models, clock=Stopwatch())

    return make


def images() -> dict:
    counts = [4, 8, 16, 32]
    sides = {str(n): _batches("generator.steps=3", "mixing.alphas=4", count=n) for n in counts}
    return slope([n * 32 for n in counts], _seconds(sides))


def steps() -> dict:
    counts = [5, 10, 20, 40]
    return line(counts, _seconds({str(n): _batches(f"generator.steps={n}") for n in counts}))


def rows() -> dict:
    """One network call at many batch sizes: a + b rows; a is what a call costs by itself."""
    _, _, models = open_root(build_config())
    generator = models.generator
    sides = {}
    counts = [2, 8, 32, 64, 128]
    for count in counts:
        latents = torch.randn(count, *generator.latent_shape)
        condition = models.embeddings[[0]].expand(count)

        def call(latents=latents, condition=condition) -> None:  # type: ignore[no-untyped-def]
            with torch.inference_mode():
                for _ in range(max(1, 256 // len(latents))):
                    generator.predict(latents, torch.tensor(500), condition, 1.0)

        sides[str(count)] = call
    seconds = [
        [s / max(1, 256 // count) for s in row]
        for count, row in zip(counts, _seconds(sides), strict=True)
    ]
    return line(counts, seconds)


def alphas() -> dict:
    counts = [2, 4, 8, 16]
    return line(counts, _seconds({str(n): _batches(f"mixing.alphas={n}") for n in counts}))


def classes() -> dict:
    """The last group of a plan of 10 to 10,000 classes: 49,995,000 pairs, never listed."""
    config = load_settings(BuildConfig, build_config().model_dump())
    counts = [10, 100, 1000, 10_000]
    seconds = []
    for count in counts:
        plan = BuildPlan(config, tuple(map(str, range(count))))
        row = []
        for _ in range(7):
            start = time.process_time()
            for _ in range(2000):
                plan.group(plan.num_groups - 1)
            row.append(time.process_time() - start)
        seconds.append(row)
    return slope(counts, seconds)
