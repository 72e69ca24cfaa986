"""C11: successive halving against scoring all candidates in full, on the quickstart's model."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import spearmanr

from benchmarks.measure import Result, line
from benchmarks.models import build_config
from semix.data.real import class_names
from semix.pipeline.config import BuildConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.schedulers import inversion_pair
from semix.pipeline.noise import select_noise
from semix.pipeline.noise.cost import Rung, rungs
from semix.pipeline.noise.search import NoiseSelection, Scorer
from semix.pipeline.noise.source import scoring_conditions

POOL, CHOICES_PER_CALL = 32, 8  # candidates per pair; choices that are scored together
COUNTS = (4, 8, 16, 32)
SEED = 7_000_000  # not the noises with which the schedule was tuned
Job = tuple[tuple[int, ...], list[int]]  # classes and candidate seeds of one choice


def run() -> Result:
    result = Result("C11", "noise for 45 pairs of digits, 3 alphas, T = 10, no guidance")
    search = Search(config_of(POOL))
    pairs = list(itertools.combinations(range(10), 2))
    pools = [
        (pair, [SEED + 1000 * rank + c for c in range(POOL)]) for rank, pair in enumerate(pairs)
    ]
    first, last = rungs(search.config)
    full, _, _ = search(pools, [Rung(POOL, last.steps)])
    rough, _, _ = search(pools, [first])
    both = zip(full, rough, strict=True)
    correlations = [float(spearmanr(a.scores, b.scores).statistic) for a, b in both]
    result.at_least("Spearman between the rungs, mean", sum(correlations) / len(correlations), 0.8)
    costs: list[tuple[int, float]] = []
    for count in COUNTS:
        jobs = [
            (pair, seeds[i : i + count]) for pair, seeds in pools for i in range(0, POOL, count)
        ][: 45 * POOL // 16]
        full_choices, full_rows, full_s = search(jobs, [Rung(count, last.steps)])
        halved, rows, seconds = search(jobs, rungs(config_of(count)))
        losses = regrets(full_choices, halved)
        costs += [(full_rows, full_s), (rows, seconds)]
        result.at_most(f"rows of {count} candidates over all in full", rows / full_rows, 0.55)
        result.at_most(f"regret of {count} candidates, in sd", float(losses.mean()), 0.1)
        result.figures[f"{count} candidates"] = {
            "choices": len(jobs),
            "regret_standard_error": float(losses.std() / len(jobs) ** 0.5),
            "same_choice": float((losses == 0).float().mean()),
            "cpu_seconds_over_all_in_full": seconds / full_s,
        }
    fit = line([rows for rows, _ in costs], [[seconds] for _, seconds in costs])
    result.at_least("share of CPU time explained by a line over rows", fit["r2"], 0.98)
    result.figures |= {"time_over_rows": fit, "spearman_least": min(correlations)}
    scores = torch.tensor([choice.scores for choice in full])
    result.figures["stability"] = {
        "mean": float(scores.mean()),
        "sd over candidates": float(scores.std(1).mean()),
        "mean of the best of 8": float(scores[:, :8].amax(1).mean()),
    }
    return result


def config_of(candidates: int) -> BuildConfig:
    noise = f"noise={{strategy: select, candidates: {candidates}, halving: true, max_cost: 100}}"
    return build_config(noise, "generator.steps=20")


def regrets(
    full_choices: Sequence[NoiseSelection], halved: Sequence[NoiseSelection]
) -> torch.Tensor:
    """Full stability lost, in standard deviations over the candidates of the same choice."""
    losses = []
    for reference, halved_choice in zip(full_choices, halved, strict=True):
        scores = torch.tensor(reference.scores)
        losses.append((scores[reference.best] - scores[halved_choice.best]) / scores.std())
    return torch.stack(losses)


class Search:
    """Choices over pools of seeds; the network's rows are counted where it is called."""

    def __init__(self, config: BuildConfig) -> None:
        self.config = config
        self.generator = load_generator(config.generator, device="cpu")
        self.embeddings = self.generator.encode(class_names(config.real))
        self.rows = 0
        pair = inversion_pair(self.generator.denoiser.scheduler)
        self.scorer = Scorer(self.predict, pair, guidance_scale=1.0, max_rows=64)

    def predict(self, latents: torch.Tensor, *arguments: Any) -> torch.Tensor:
        self.rows += len(latents)
        return self.generator.predict(latents, *arguments)

    def __call__(
        self, jobs: Sequence[Job], schedule: list[Rung]
    ) -> tuple[list[NoiseSelection], int, float]:
        """Returns the choices, the rows of the network and the CPU seconds."""
        self.rows, started = 0, time.process_time()
        choices: list[NoiseSelection] = []
        for start in range(0, len(jobs), CHOICES_PER_CALL):
            batch = jobs[start : start + CHOICES_PER_CALL]
            choices += select_noise(
                [seeds for _, seeds in batch],
                scoring_conditions([pair for pair, _ in batch], self.config, self.embeddings),
                scorer=self.scorer,
                shape=self.generator.latent_shape,
                rungs=schedule,
            )
        return choices, self.rows, time.process_time() - started
