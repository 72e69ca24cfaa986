"""The most stable of several candidate noises."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.conditioning import Conditioning
from pipeline.noise.initial import initial_noise
from pipeline.noise.rungs import Rung
from pipeline.noise.scoring import Scorer, per_point, reduced


@dataclass(frozen=True)
class Choice:
    """The candidates of one choice.

    Attributes:
        seeds: [K].
        scores: [K] over all points, at full steps; None where halving or NaN dropped one.
        per_point: [K][P] of the same.
        best: the candidates that are kept, the most stable first.
    """

    seeds: tuple[int, ...]
    scores: tuple[float | None, ...]
    per_point: tuple[list[float] | None, ...]
    best: tuple[int, ...]


@torch.inference_mode()
def select_noise(
    seeds: Sequence[Sequence[int]],
    conditions: Conditioning,
    *,
    scorer: Scorer,
    shape: Sequence[int],
    rungs: Sequence[Rung],
    names: Sequence[str],
    points: int,
    reduce: str = "mean",
    keep: int = 1,
) -> list[Choice]:
    """Keep the most stable candidates of G choices, scored together.

    Args:
        seeds: [G][K].
        conditions: G x S x P rows: S sets of classes at P points, choice by choice.
        shape: of one noise.
        rungs: how many candidates are scored at how many steps; the first has all K, and the
            last all points.
        names: of the choices, for errors.
        reduce: mean or min over the points.
    Raises:
        FloatingPointError: fewer than `keep` candidates of a choice have a score.
    """
    left = [list(range(len(candidates))) for candidates in seeds]
    for rung in rungs:
        left = [_filled(candidates, rung.candidates) for candidates in left]
        drawn = [
            initial_noise([own[c] for c in candidates], shape)
            for own, candidates in zip(seeds, left, strict=True)
        ]
        told = conditions if rung.point is None else conditions[slice(rung.point, None, points)]
        scored_at = points if rung.point is None else 1
        each = per_point(scorer(torch.stack(drawn), told, steps=rung.steps), scored_at).cpu()
        scores = reduced(each, reduce)  # [G, n]
        found = [_scored(*choice) for choice in zip(left, scores, each, strict=True)]
        left = [_ranked(scored) for scored in found]
        _refuse_too_few(left, seeds, names, keep)
    return [
        _choice(tuple(own), scored, tuple(ranked[:keep]))
        for own, scored, ranked in zip(seeds, found, left, strict=True)
    ]


Scored = dict[int, tuple[float, list[float]]]  # candidate to its score, and that at each point


def _scored(candidates: Sequence[int], scores: Tensor, each: Tensor) -> Scored:
    rows = zip(candidates, scores.tolist(), each.tolist(), strict=True)
    return {candidate: (score, points) for candidate, score, points in rows}


def _ranked(scored: Scored) -> list[int]:
    """Best first, the lower candidate where two are equal; NaN is left out."""
    finite = [candidate for candidate, (score, _) in scored.items() if math.isfinite(score)]
    return sorted(finite, key=lambda candidate: (-scored[candidate][0], candidate))


def _filled(ranked: Sequence[int], count: int) -> list[int]:
    """The first `count`; the last one again where NaN left fewer, so that no batch shrinks."""
    return [ranked[min(position, len(ranked) - 1)] for position in range(count)]


def _refuse_too_few(
    left: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], names: Sequence[str], keep: int
) -> None:
    for candidates, own, name in zip(left, seeds, names, strict=True):
        if len(candidates) < keep:
            raise FloatingPointError(
                f"{name}: {len(candidates)} of {len(own)} candidate noises have a stability, "
                f"{keep} are needed; the network gave NaN, try another dtype"
            )


def _choice(seeds: tuple[int, ...], scored: Scored, best: tuple[int, ...]) -> Choice:
    finite = {c: value for c, value in scored.items() if math.isfinite(value[0])}
    return Choice(
        seeds,
        tuple(finite[c][0] if c in finite else None for c in range(len(seeds))),
        tuple(finite[c][1] if c in finite else None for c in range(len(seeds))),
        best,
    )
