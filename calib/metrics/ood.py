"""How well a score tells known images from foreign ones: AUROC and FPR95."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from semix.calib.metrics.one_pass import PART
from torch import Tensor
from torch.distributions import Categorical


@dataclass(frozen=True)
class OodMetrics:
    """Both are fractions in [0, 1]."""

    auroc: float  # chance that a known image scores above a foreign one; ties count half
    fpr95: float  # share of foreign images accepted where 95 % of the known ones are

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def ood_metrics(in_scores: Tensor, out_scores: Tensor) -> OodMetrics:
    """Compare the scores of known (in-distribution) and foreign images.

    Args:
        in_scores, out_scores: [N] and [M] float, higher means more like the known images:
            `max_probability`, the usual one, or `negative_entropy`.
    Raises:
        ValueError: a set is empty, not one-dimensional or holds a value that is not finite.
    """
    known, foreign = _scores("in_scores", in_scores), _scores("out_scores", out_scores)
    return OodMetrics(auroc=_auroc(known, foreign), fpr95=_false_positive_rate(known, foreign))


def max_probability(logits: Tensor) -> Tensor:
    """Largest softmax probability of float [N, K], float64 [N]: Hendrycks and Gimpel 2017."""
    return _by_part(logits, lambda part: part.softmax(1).amax(1))


def negative_entropy(logits: Tensor) -> Tensor:
    """Minus the entropy of softmax, nats, of float [N, K], float64 [N]: highest where surest."""
    return _by_part(logits, lambda part: -Categorical(logits=part).entropy())


def _by_part(logits: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    # In float64: in float32 the surest images would all have the probability 1.
    parts = logits.detach().cpu().split(max(1, PART // logits.shape[1]))
    return torch.cat([score(part.double()) for part in parts])


def _auroc(known: Tensor, foreign: Tensor) -> float:
    ordered = foreign.sort().values
    below = torch.searchsorted(ordered, known)  # foreign scores < this one
    upto = torch.searchsorted(ordered, known, right=True)  # <= this one
    return ((below + upto).double().mean() / (2 * len(foreign))).item()


def _false_positive_rate(known: Tensor, foreign: Tensor) -> float:
    # The highest score that still accepts 95 % of the known images, so always one of theirs.
    threshold = known.sort().values[len(known) * 5 // 100]
    return (foreign >= threshold).double().mean().item()


def _scores(name: str, scores: Tensor) -> Tensor:
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name} have shape {tuple(scores.shape)}: give [N] with N >= 1")
    scores = scores.detach().cpu().double()
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        place = int(bad[0])
        raise ValueError(f"{name}[{place}] = {scores[place].item()}: every score must be finite")
    return scores
