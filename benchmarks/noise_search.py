"""C11: successive halving against scoring all candidates in full, on the quickstart's model."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import spearmanr
from semix.data.real import class_names
from semix.pipeline.config import BuildConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.schedulers import inversion_pair
from semix.pipeline.noise import select_noise
from semix.pipeline.noise.cost import Rung, rungs
from semix.pipeline.noise.search import NoiseSelection, Scorer
from semix.pipeline.noise.source import scoring_conditions

from benchmarks.measure import Result, line
from benchmarks.models import build_config

POOL, TOGETHER = 32, 8  # candidates of a pair; choices scored together
COUNTS = (4, 8, 16, 32)
SEED = 7_000_000  # other noises than those on which the schedule was chosen
Job = tuple[tuple[int, ...], list[int]]  # classes and seeds of one choice


def run() -> Result:
    result = Result("C11", "noise for 45 pairs of digits, 3 alphas, T = 10, no guidance")
    search = Search(config_of(POOL))
    pairs = list(itertools.combinations(range(10), 2))
    pools = [
        (pair, [SEED + 1000 * rank + c for c in range(POOL)]) for rank, pair in enumerate(pairs)
    ]
    first, last = rungs(search.config)
    full, _, _ = search(pools, [Rung(POOL, last.steps)])
    look, _, _ = search(pools, [first])
    both = zip(full, look, strict=True)
    rho = [float(spearmanr(a.scores, b.scores).statistic) for a, b in both]
    result.at_least("Spearman between the rungs, mean", sum(rho) / len(rho), 0.8)
    counted: list[tuple[int, float]] = []
    for count in COUNTS:
        jobs = [
            (pair, seeds[at : at + count]) for pair, seeds in pools for at in range(0, POOL, count)
        ][: 45 * POOL // 16]
        whole, whole_rows, whole_s = search(jobs, [Rung(count, last.steps)])
        halved, rows, seconds = search(jobs, rungs(config_of(count)))
        lost = regrets(whole, halved)
        counted += [(whole_rows, whole_s), (rows, seconds)]
        result.at_most(f"rows of {count} candidates over all in full", rows / whole_rows, 0.55)
        result.at_most(f"regret of {count} candidates, in sd", float(lost.mean()), 0.1)
        result.figures[f"{count} candidates"] = {
            "choices": len(jobs),
            "regret_standard_error": float(lost.std() / len(jobs) ** 0.5),
            "same_choice": float((lost == 0).float().mean()),
            "cpu_seconds_over_all_in_full": seconds / whole_s,
        }
    fit = line([rows for rows, _ in counted], [[seconds] for _, seconds in counted])
    result.at_least("share of CPU time explained by a line over rows", fit["r2"], 0.98)
    result.figures |= {"time_over_rows": fit, "spearman_least": min(rho)}
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


def regrets(whole: Sequence[NoiseSelection], halved: Sequence[NoiseSelection]) -> torch.Tensor:
    """Full stability lost, in standard deviations over the candidates of the same choice."""
    lost = []
    for all_, few in zip(whole, halved, strict=True):
        scores = torch.tensor(all_.scores)
        lost.append((scores[all_.best] - scores[few.best]) / scores.std())
    return torch.stack(lost)


class Search:
    """Choices over pools of seeds; the network's rows are counted where it is called."""

    def __init__(self, config: BuildConfig) -> None:
        self.config = config
        self.generator = load_generator(config.generator, device="cpu")
        self.embeddings = self.generator.encode(class_names(config.real))
        self.rows = 0
        pair = inversion_pair(self.generator.denoiser.scheduler)
        self.scorer = Scorer(self.predict, pair, guidance_scale=1.0, max_rows=64)

    def predict(self, latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.rows += len(latents)
        return self.generator.predict(latents, *rest)

    def __call__(
        self, jobs: Sequence[Job], schedule: list[Rung]
    ) -> tuple[list[NoiseSelection], int, float]:
        """The choices, the rows and the CPU seconds."""
        self.rows, start = 0, time.process_time()
        choices: list[NoiseSelection] = []
        for at in range(0, len(jobs), TOGETHER):
            part = jobs[at : at + TOGETHER]
            choices += select_noise(
                [seeds for _, seeds in part],
                scoring_conditions([pair for pair, _ in part], self.config, self.embeddings),
                scorer=self.scorer,
                shape=self.generator.latent_shape,
                rungs=schedule,
            )
        return choices, self.rows, time.process_time() - start
