"""Selective prediction: risk and coverage when only the most confident predictions are kept."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RISK, COVERAGE = 0.05, 0.8


@dataclass(frozen=True)
class Selective:
    """Fractions in [0, 1].

    Attributes:
        aurc: mean over k of the fraction of errors among the k most confident.
        augrc: mean height of the curve of (errors among the k most confident) / N against k / N,
            for k = 1 to N, by the trapezoidal rule.
        coverage_at_5_risk: the largest k / N at which at most 5 % of the k are errors; 0 if none.
        risk_at_80_coverage: the fraction of errors among the most confident 80 %.
    """

    aurc: float
    augrc: float
    coverage_at_5_risk: float
    risk_at_80_coverage: float


def selective(confidence: Tensor, correct: Tensor) -> Selective:
    """The measures of selective prediction.

    Samples of equal confidence each count with their mean error, the expectation over their orders.

    Args:
        confidence, correct: [N] float64.

    Source: Geifman, Uziel and El-Yaniv 2019, eq. (4), for AURC; libraries that take the trapezoid
    over k/N and divide by 1 - 1/N differ by at most 1/N. Traub et al. 2024, arXiv 2407.01032, for
    AUGRC, where that trapezoid and that divisor are taken here too.
    """
    mistakes, risk = _mistakes_and_risk(confidence, correct)
    samples = len(risk)
    admissible = (risk <= RISK).nonzero()
    generalised_risk = mistakes / samples
    return Selective(
        aurc=risk.mean().item(),
        augrc=torch.trapezoid(generalised_risk).item() / (samples - 1)
        if samples > 1
        else generalised_risk.item(),
        coverage_at_5_risk=(int(admissible[-1]) + 1) / samples if len(admissible) else 0.0,
        risk_at_80_coverage=risk[math.ceil(samples * COVERAGE) - 1].item(),
    )


def risk_at_coverages(confidence: Tensor, correct: Tensor, coverages: Tensor) -> Tensor:
    """The fraction of errors among the most confident predictions, at each coverage in (0, 1].

    Args:
        confidence, correct: [N] float64; coverages: [C].
    """
    _, risk = _mistakes_and_risk(confidence, correct)
    kept = (coverages * len(risk)).ceil().long().clamp(min=1)
    return risk[kept - 1]


def _mistakes_and_risk(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Errors among the k most confident, and their fraction, for k = 1 to N."""
    order = confidence.argsort(descending=True)
    _, tie, ties = confidence[order].unique_consecutive(return_inverse=True, return_counts=True)
    errors = torch.zeros(len(ties), dtype=torch.float64).index_add_(0, tie, 1 - correct[order])
    mistakes = (errors / ties)[tie].cumsum(0)
    return mistakes, mistakes / torch.arange(1, len(order) + 1, dtype=torch.float64)
