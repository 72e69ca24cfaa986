"""How well a score tells known images from foreign ones: AUROC and FPR95."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor


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
        in_scores, out_scores: [N] and [M] float, higher means more like the known images; the
            largest softmax probability is the usual one.
    Raises:
        ValueError: a set is empty, not one-dimensional or holds a value that is not finite.
    """
    known, foreign = _scores("in_scores", in_scores), _scores("out_scores", out_scores)
    return OodMetrics(auroc=_auroc(known, foreign), fpr95=_false_positive_rate(known, foreign))


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
