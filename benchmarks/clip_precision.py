"""clip: error of mixed images' weights if CLIP runs in bfloat16, on the quickstart's models."""

import tempfile
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.measure import Result
from benchmarks.models import build_config, open_root
from semix.data.store import Store
from semix.pipeline.annotate import build_annotator
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import BuildPlan, MixGroup
from semix.pipeline.prototypes import measure
from semix.pipeline.provenance import annotation_identity
from semix.pipeline.shard import Models, mix_groups


def run() -> Result:
    result = Result("clip", "digits: weights and labels of 1,440 mixed images, bfloat16 CLIP")
    config = build_config("generator.steps=20", "mixing.groups_per_pair=4")
    _, plan, models = open_root(config)
    groups = [plan.group(index) for index in range(plan.num_groups)]
    images = mix_images(groups, plan, models)
    exact, rounded = (label(config, dtype, groups, images) for dtype in ("float32", "bfloat16"))
    for name in ("weights", "labels"):
        approx, reference = rounded[name], exact[name]
        correlations = [spearmanr(*pair).statistic for pair in zip(approx, reference, strict=True)]
        result.figures[name] = {
            "spearman": float(spearmanr(approx.flatten(), reference.flatten()).statistic),
            "least_spearman_of_a_series": float(min(correlations)),
            "largest_difference": float((approx - reference).abs().max()),
            "mean_difference": float((approx - reference).abs().mean()),
            "standard_deviation": float(reference.std()),
        }
    result.at_least("Spearman of the weights", result.figures["weights"]["spearman"], 0.999)
    result.figures["images"] = exact["weights"].numel()
    return result


def mix_images(groups: list[MixGroup], plan: BuildPlan, models: Models) -> Tensor:
    """Images of all series, uint8 [G, A, H, W, 3], as a build makes them."""
    size = plan.config.shards.groups_per_batch
    batches = []
    for start in range(0, len(groups), size):
        batch = groups[start : start + size]
        options: dict[str, Any] = {"embeddings": models.embeddings, "generator": models.generator}
        batches.append(mix_groups(batch, models.noise(batch)[0], batch_groups=size, **options)[0])
    return torch.cat(batches)


def label(
    config: BuildConfig, dtype: str, groups: list[MixGroup], images: Tensor
) -> dict[str, Tensor]:
    """Weights, and probabilities of the first class, [G, A]; CLIP and prototypes in `dtype`."""
    annotation = config.annotation.model_copy(update={"dtype": dtype})
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        identity = annotation_identity(annotation)
        store = Store(folder)
        prototypes = measure(annotation, config.real, device="cpu", identity=identity, store=store)
    annotator = build_annotator(annotation, prototypes, device="cpu")
    features = annotator.encode(images.flatten(0, 1))
    by_series = {name: rows.unflatten(0, images.shape[:2]) for name, rows in features.items()}
    series = annotator.annotate(by_series, groups)
    first_class = [[row[0][1] for row in labels.labels] for labels in series]
    weights = [labels.weights for labels in series]
    return {"weights": torch.tensor(weights), "labels": torch.tensor(first_class)}
