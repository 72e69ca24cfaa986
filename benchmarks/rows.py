"""C2: exact counts of network calls and their rows; nothing is timed."""

from collections import Counter
from typing import Any

from torch import nn

from benchmarks.measure import Result
from benchmarks.models import build_config, open_root
from semix.pipeline.shard import class_embeddings, make_batch
from semix.pipeline.shard_writer import Stopwatch

GROUPS, ALPHAS, STEPS, CLASSES = 8, 8, 10, 10


def run() -> Result:
    result = Result("C2", f"{GROUPS} series of {ALPHAS} alphas, {STEPS} steps, guidance")
    _, plan, models = open_root(build_config("generator.decode_batch=64"))
    denoiser = models.generator.denoiser
    counts: Counter[str] = Counter()
    watch(denoiser.network, counts, "unet")
    watch(models.generator.vae.decoder, counts, "vae")
    watch(denoiser.pipeline.text_encoder, counts, "text")
    make_batch([plan.group(i) for i in range(GROUPS)], plan, models=models, clock=Stopwatch())
    result.equal("U-Net rows a series", counts["unet rows"] / GROUPS, float(2 * STEPS * ALPHAS))
    result.equal("U-Net calls", counts["unet calls"], STEPS)
    result.equal("VAE calls", counts["vae calls"], 1)
    result.equal("VAE rows", counts["vae rows"], GROUPS * ALPHAS)
    result.equal("text encoder calls while generating", counts["text calls"], 0)
    class_embeddings(models.generator, plan)
    # The empty prompt is encoded when the model is loaded.
    result.equal("text encoder calls for all classes", counts["text calls"], CLASSES)
    result.figures["naive rows a series"] = 2 * STEPS * ALPHAS
    return result


def watch(module: nn.Module, counts: Counter[str], name: str) -> None:
    """Count calls and rows of a module from now on."""

    def count(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        batch = args[0] if args else next(iter(kwargs.values()))
        counts[f"{name} calls"] += 1
        counts[f"{name} rows"] += len(batch)

    module.register_forward_pre_hook(count, with_kwargs=True)
