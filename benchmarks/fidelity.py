"""Effect of faster recipes on images, labels, and a classifier trained on as many images.

    python -m benchmarks.fidelity [NAME ...] [--set generator.tiny_decoder=DIR] [--seeds 5]

It runs on the quickstart's small models, or on the models of `--config CONFIG`; `--set` adds one
recipe. Some series are made by the fast recipe, by the exact one, and by the exact one from other
noise; the difference of the last two limits that of fast images (`benchmarks.criteria`). Then each
recipe builds a mixed dataset, on which the quickstart's CSM is trained; accuracy and ECE are
compared with those of the exact recipe over the same seeds.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

from benchmarks.criteria import feature_criterion, weight_criteria
from benchmarks.measure import Result, write
from benchmarks.models import build_config
from semix.data.features import FEATURES
from semix.data.files import read_json
from semix.data.fingerprint import hashed_seed
from semix.data.settings import load_settings
from semix.flows.build import build
from semix.flows.run_server import prefect_server
from semix.flows.train import train
from semix.pipeline.config import BuildConfig
from semix.pipeline.generators.latent_diffusion import LatentDiffusion
from semix.pipeline.noise.source import random_noise
from semix.pipeline.plan import BuildPlan, MixGroup
from semix.pipeline.prototypes import prepare
from semix.pipeline.root import create_build
from semix.pipeline.shard import Models, load_models, make_batch
from semix.pipeline.shard_writer import Stopwatch

EXACT, OTHER, OWN = "exact", "exact, other noises", "as set"
FAST: dict[str, tuple[str, ...]] = {
    "unipc 10 steps": ("generator.scheduler=unipc", "generator.steps=10"),
    "dpmpp_2m 10 steps": ("generator.scheduler=dpmpp_2m", "generator.steps=10"),
    "guidance in the first 60 %": ("generator.guidance_interval=[0, 0.6]",),
}
TRAINING = Path(__file__).parents[1] / "configs" / "quickstart" / "csm-chosen-noise.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FAST)}; all by default")
    parser.add_argument("--set", action="append", default=[], help="a setting of one more recipe")
    parser.add_argument("--config", type=Path, help="a BuildConfig; default: the quickstart's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--series", type=int, default=200, help="number of series to compare")
    parser.add_argument("--seeds", type=int, default=5, help="training runs per recipe; 0: none")
    parser.add_argument("--groups-per-pair", type=int, default=3)
    options = parser.parse_args()
    if unknown := set(options.names) - set(FAST):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    recipes = {name: FAST[name] for name in options.names or ([] if options.set else FAST)}
    recipes |= {OWN: tuple(options.set)} if options.set else {}

    result = Result("fidelity", "faster recipes: images, weights, and a classifier trained on each")
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        result.figures |= compare(recipes, options, Path(folder))
        if options.seeds:
            with prefect_server():
                train_classifiers(result, recipes, options, Path(folder))
    config = {"seeds": options.seeds, "groups_per_pair": options.groups_per_pair}
    print(write([result], kind="fidelity", device=options.device, config=config))


def config_of(options: argparse.Namespace, *changes: str) -> BuildConfig:
    changes = (f"mixing.groups_per_pair={options.groups_per_pair}", *changes)
    if options.config is not None:
        return load_settings(BuildConfig, options.config, changes)
    return build_config("generator.steps=20", "annotation.scale=2.3", *changes)


@dataclass(frozen=True)
class Sample:
    """G series of A images made in one way.

    Attributes:
        features: [G A, D]; weights: [G, A, k] along alpha, k = 1 for pairs.
        seconds: median per generated batch, as the first batch of a recipe may compile.
    """

    features: Tensor
    weights: Tensor
    seconds: float


def compare(
    recipes: dict[str, tuple[str, ...]], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """The criteria of each recipe.

    Noise is that of each group's seed, without selection, as it is the sampler that is compared.
    Labels are measured on the images, so the distributions of images and weights are compared.
    """
    build = create_build(config_of(options), str(folder / "compared"))
    plan = build.plan
    models = load_models(plan, prepare(build, device=options.device), device=options.device)
    models = replace(models, noise=random_noise(models.generator.latent_shape))
    seed = plan.config.mixing.seed
    rng = random.Random(hashed_seed(seed, "fidelity"))
    indices = sorted(rng.sample(range(plan.num_groups), min(options.series, plan.num_groups)))
    groups = [plan.group(index) for index in indices]
    other_groups = [replace(g, seed=hashed_seed(seed, "fidelity", g.index)) for g in groups]
    exact = generate_sample(groups, plan, models)
    other = generate_sample(other_groups, plan, models)
    criteria = {}
    for name, changes in recipes.items():
        generator = config_of(options, *changes).generator
        denoiser, device = models.generator.denoiser, str(models.generator.device)
        fast = replace(models, generator=LatentDiffusion(denoiser, generator, device=device))
        criteria[name] = judge(exact, generate_sample(groups, plan, fast), other, seed=seed)
        print(f"{name}: {json.dumps(criteria[name])}", flush=True)
    return criteria


def generate_sample(groups: Sequence[MixGroup], plan: BuildPlan, models: Models) -> Sample:
    features, weights, seconds = [], [], []
    size = plan.config.shards.groups_per_batch
    for start in range(0, len(groups), size):
        clock = Stopwatch()
        batch = make_batch(list(groups[start : start + size]), plan, models=models, clock=clock)
        features.append(batch.features[FEATURES].flatten(0, 1))
        seconds.append(clock.seconds["generate"])
        for group, labels in zip(batch.groups, batch.labels(models.annotator), strict=True):
            # The second of two coordinates follows from the first.
            projected = labels.coordinates or [[weight] for weight in labels.weights]
            weights.append(torch.tensor(projected)[torch.tensor(group.alphas).argsort(stable=True)])
    return Sample(torch.cat(features), torch.stack(weights), statistics.median(seconds))


def judge(exact: Sample, fast: Sample, other: Sample, *, seed: int) -> dict[str, Any]:
    criteria = [
        *weight_criteria(exact.weights, fast.weights, other.weights, seed=seed),
        feature_criterion(exact.features, fast.features, other.features),
    ]
    change = (fast.weights - exact.weights).abs().flatten().double()
    return {
        "passed": all(criterion["passed"] for criterion in criteria),
        "criteria": criteria,
        "weight_change_median": float(change.median()),
        "series": len(exact.weights),
        "speedup": exact.seconds / fast.seconds,
    }


def train_classifiers(
    result: Result, fast: dict[str, tuple[str, ...]], options: argparse.Namespace, folder: Path
) -> None:
    """Build, train and evaluate each recipe; add the gaps to the exact one."""
    recipes = {EXACT: (), OTHER: ("mixing.seed=1",), **fast}
    for number, (name, changes) in enumerate(recipes.items()):
        config = config_of(options, *changes)
        scores = classifier(config, folder / str(number), seeds=options.seeds)
        result.figures[name] = result.figures.get(name, {}) | scores
        print(f"{name}: {json.dumps(scores)}", flush=True)
    exact = result.figures[EXACT]
    for name in fast:
        for measure in ("accuracy", "ece"):
            gap = abs(result.figures[name][measure]["mean"] - exact[measure]["mean"])
            spread = exact[measure]["sd"]
            result.at_most(f"{name}: {measure} gap over the seeds' sd", gap / spread, 1.0)


def classifier(config: BuildConfig, out: Path, *, seeds: int) -> dict[str, Any]:
    root = build(config, str(out / "mixed"))
    overrides = [f"mixed.url={root.url}", f"seeds={list(range(seeds))}", "name=CSM"]
    run = train(TRAINING, out / "run", overrides=overrides)
    rows = read_json(run / "evaluation.json")["rows"]
    rate = root.progress().images_done / root.totals().seconds
    figures: dict[str, Any] = {"images_per_second": rate}
    for key in ("accuracy", "ece", "nll"):
        values = [row["kinds"]["plain"][key] for row in rows]
        figures[key] = {"mean": statistics.mean(values), "sd": statistics.stdev(values)}
    return figures


if __name__ == "__main__":
    main()
