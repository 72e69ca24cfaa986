"""How well a score separates in-distribution from out-of-distribution images: AUROC, FPR95."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical

from semix.calib.metrics.one_pass import CHUNK_VALUES


@dataclass(frozen=True)
class OodMetrics:
    """Both are fractions in [0, 1]."""

    auroc: float  # chance that an in-distribution image scores above an OOD one; ties count half
    fpr95: float  # fraction of OOD images accepted at 95 % acceptance of in-distribution images

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def ood_metrics(in_scores: Tensor, out_scores: Tensor) -> OodMetrics:
    """Compare the scores of in-distribution and out-of-distribution images.

    Args:
        in_scores, out_scores: [N] and [M] float, higher means more in-distribution:
            `max_probability`, the usual one, or `negative_entropy`.
    Raises:
        ValueError: scores are empty, not one-dimensional or not finite.
    """
    in_scores, out_scores = (
        _checked_scores("in_scores", in_scores),
        _checked_scores("out_scores", out_scores),
    )
    fpr95 = _false_positive_rate(in_scores, out_scores)
    return OodMetrics(auroc=_auroc(in_scores, out_scores), fpr95=fpr95)


def max_probability(logits: Tensor) -> Tensor:
    """Largest softmax probability, float64 [N], from logits [N, K].

    Source: Hendrycks and Gimpel 2017.
    """
    return _by_chunk(logits, lambda chunk: chunk.softmax(1).amax(1))


def negative_entropy(logits: Tensor) -> Tensor:
    """Minus the entropy of softmax in nats, float64 [N], from logits [N, K]; 0: most confident."""
    return _by_chunk(logits, lambda chunk: -Categorical(logits=chunk).entropy())


def _by_chunk(logits: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    chunks = logits.detach().cpu().split(max(1, CHUNK_VALUES // logits.shape[1]))
    # float64, because in float32 the probabilities of all very confident images round to 1 and tie.
    return torch.cat([score(chunk.double()) for chunk in chunks])


def _auroc(in_scores: Tensor, out_scores: Tensor) -> float:
    ordered = out_scores.sort().values
    below = torch.searchsorted(ordered, in_scores)  # OOD scores < each score
    at_most = torch.searchsorted(ordered, in_scores, right=True)  # OOD scores <= each score
    return ((below + at_most).double().mean() / (2 * len(out_scores))).item()


def _false_positive_rate(in_scores: Tensor, out_scores: Tensor) -> float:
    # The highest threshold that at least 95 % of the in-distribution images reach; it is the score
    # of one of them.
    threshold = in_scores.sort().values[len(in_scores) * 5 // 100]
    return (out_scores >= threshold).double().mean().item()


def _checked_scores(name: str, scores: Tensor) -> Tensor:
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name} have shape {tuple(scores.shape)}: give [N] with N >= 1")
    scores = scores.detach().cpu().double()
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        index = int(bad[0])
        raise ValueError(f"{name}[{index}] = {scores[index].item()}: every score must be finite")
    return scores
