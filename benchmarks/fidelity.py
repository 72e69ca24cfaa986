"""What faster recipes do to images, labels, and a classifier trained on them, at equal count.

    python -m benchmarks.fidelity [NAME ...] [--set generator.tiny_decoder=DIR] [--seeds 5]

Runs on the stand-ins, or with real weights on `--config CONFIG`; `--set` adds one recipe of your
own. Each makes some series fast, exactly, and exactly from other noises, which says how far fast
images may be from exact ones (`benchmarks.criteria`). Then it builds the mixed dataset, trains the
quickstart's CSM on it, and compares accuracy and ECE with the exact recipe's over the same seeds.
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
from semix.data.files import read_json
from semix.data.fingerprint import hashed_seed
from semix.data.settings import load_settings
from semix.flows.build import build
from semix.flows.run_server import prefect_server
from semix.flows.train import train
from semix.pipeline.annotate import FEATURES
from semix.pipeline.config import BuildConfig
from semix.pipeline.generators.latent_diffusion import LatentDiffusion
from semix.pipeline.noise.source import random_noise
from semix.pipeline.plan import BuildPlan, MixGroup
from semix.pipeline.prototypes import ensure_prototypes
from semix.pipeline.root import create_root, plan_of
from semix.pipeline.shard import Models, load_models, make_batch
from semix.pipeline.shard_writer import Stopwatch
from torch import Tensor

from benchmarks.criteria import feature_criterion, weight_criteria
from benchmarks.measure import Result, write
from benchmarks.models import build_config

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
    parser.add_argument("--set", action="append", default=[], help="a setting of your own recipe")
    parser.add_argument("--config", type=Path, help="a BuildConfig; the stand-ins by default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--series", type=int, default=200, help="that are compared, at most")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each; 0: none")
    parser.add_argument("--groups-per-pair", type=int, default=3)
    options = parser.parse_args()
    if unknown := set(options.names) - set(FAST):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    wanted = {name: FAST[name] for name in options.names or ([] if options.set else FAST)}
    wanted |= {OWN: tuple(options.set)} if options.set else {}

    result = Result("fidelity", "faster recipes: images, weights, and a classifier trained on each")
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        result.figures |= compared(wanted, options, Path(folder))
        if options.seeds:
            with prefect_server():
                trained(result, wanted, options, Path(folder))
    config = {"seeds": options.seeds, "groups_per_pair": options.groups_per_pair}
    print(write([result], kind="fidelity", device=options.device, config=config))


def configured(options: argparse.Namespace, *changes: str) -> BuildConfig:
    changes = (f"mixing.groups_per_pair={options.groups_per_pair}", *changes)
    if options.config is not None:
        return load_settings(BuildConfig, options.config, changes)
    return build_config("generator.steps=20", "annotation.scale=2.3", *changes)


@dataclass(frozen=True)
class Sampled:
    """G series of A images made in one way.

    Attributes:
        features: [G A, D]; weights: [G, A, k] along alpha, k = 1 for pairs.
        seconds: of generating, the median batch: the first of a recipe may compile.
    """

    features: Tensor
    weights: Tensor
    seconds: float


def compared(
    wanted: dict[str, tuple[str, ...]], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """The criteria of each recipe.

    Noise is each group's own, whatever a build would choose: the sampler is judged. Labels are
    measured on the images as they are, so what counts is the distribution of images and weights.
    """
    root = create_root(configured(options), str(folder / "compared"))
    ensure_prototypes(root, device=options.device)
    plan = plan_of(root)
    models = load_models(root, plan, device=options.device)
    models = replace(models, noise=random_noise(models.generator.latent_shape))
    seed = plan.config.mixing.seed
    rng = random.Random(hashed_seed(seed, "fidelity"))
    chosen = sorted(rng.sample(range(plan.num_groups), min(options.series, plan.num_groups)))
    groups = [plan.group(index) for index in chosen]
    others = [replace(g, seed=hashed_seed(seed, "fidelity", g.index)) for g in groups]
    exact, other = sampled(groups, plan, models), sampled(others, plan, models)
    found = {}
    for name, changes in wanted.items():
        generator = configured(options, *changes).generator
        denoiser, device = models.generator.denoiser, str(models.generator.device)
        fast = replace(models, generator=LatentDiffusion(denoiser, generator, device=device))
        found[name] = judged(exact, sampled(groups, plan, fast), other, seed=seed)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    return found


def sampled(groups: Sequence[MixGroup], plan: BuildPlan, models: Models) -> Sampled:
    features, weights, seconds = [], [], []
    size = plan.config.shards.groups_per_batch
    for start in range(0, len(groups), size):
        clock = Stopwatch()
        batch = make_batch(list(groups[start : start + size]), plan, models=models, clock=clock)
        features.append(batch.features[FEATURES].flatten(0, 1))
        seconds.append(clock.seconds["generate"])
        for group, labels in zip(batch.groups, batch.labels(models.annotator), strict=True):
            # Of two coordinates the second says nothing new.
            kept = labels.coordinates or [[weight] for weight in labels.weights]
            weights.append(torch.tensor(kept)[torch.tensor(group.alphas).argsort(stable=True)])
    return Sampled(torch.cat(features), torch.stack(weights), statistics.median(seconds))


def judged(exact: Sampled, fast: Sampled, other: Sampled, *, seed: int) -> dict[str, Any]:
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


def trained(
    result: Result, wanted: dict[str, tuple[str, ...]], options: argparse.Namespace, folder: Path
) -> None:
    """Build, train, evaluate each recipe, and the gaps to the exact one."""
    recipes = {EXACT: (), OTHER: ("mixing.seed=1",), **wanted}
    for place, (name, changes) in enumerate(recipes.items()):
        config = configured(options, *changes)
        found = classifier(config, folder / str(place), seeds=options.seeds)
        result.figures[name] = result.figures.get(name, {}) | found
        print(f"{name}: {json.dumps(found)}", flush=True)
    exact = result.figures[EXACT]
    for name in wanted:
        for measure in ("accuracy", "ece"):
            gap = abs(result.figures[name][measure]["mean"] - exact[measure]["mean"])
            spread = exact[measure]["sd"]
            result.at_most(f"{name}: {measure} gap over the seeds' sd", gap / spread, 1.0)


def classifier(config: BuildConfig, place: Path, *, seeds: int) -> dict[str, Any]:
    root = build(config, str(place / "mixed"))
    overrides = [f"mixed.url={root.url}", f"seeds={list(range(seeds))}", "name=CSM"]
    run = train(TRAINING, place / "run", overrides=overrides)
    rows = read_json(run / "evaluation.json")["rows"]
    progress = root.progress()
    found: dict[str, Any] = {"images_per_second": progress.images_done / progress.seconds}
    for key in ("accuracy", "ece", "nll"):
        values = [row["plain"][key] for row in rows]
        found[key] = {"mean": statistics.mean(values), "sd": statistics.stdev(values)}
    return found


if __name__ == "__main__":
    main()
