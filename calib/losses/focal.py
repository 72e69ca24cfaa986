"""Focal losses: focal, FLSD, dual focal, AdaFocal."""

import numpy as np
import torch
from torch import Tensor

from semix.calib.config.loss import AdaFocalConfig, DualFocalConfig, FLSD53Config, FocalConfig
from semix.calib.losses.base import Feedback, Outputs, PointwiseLoss, log_probability

TINY = torch.finfo(torch.float32).tiny


class Focal(PointwiseLoss):
    """(1 - p_y)^gamma (-log p_y), averaged over the batch; focal_calibration's code sums it.

    Source: Lin et al. 2017, Focal Loss; Mukhoti et al. 2020 for calibration.
    """

    def __init__(self, num_classes: int, settings: FocalConfig) -> None:
        super().__init__()
        self.gamma = settings.gamma

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = log_probability(logits, targets)
        return power(1 - log_p.exp(), self.gamma) * -log_p


class FLSD53(PointwiseLoss):
    """Focal loss of gamma 5 where p_y < 0.2 and gamma 3 elsewhere, averaged over the batch.

    The choice carries no gradient. The official code sums over the batch.

    Source: Mukhoti et al. 2020, Calibrating Deep Neural Networks using Focal Loss, section 5.
    """

    def __init__(self, num_classes: int, settings: FLSD53Config) -> None:
        super().__init__()

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = log_probability(logits, targets)
        p = log_p.exp()
        return power(1 - p, torch.where(p < 0.2, 5.0, 3.0)) * -log_p


def power(base: Tensor, gamma: float | Tensor) -> Tensor:
    """base^gamma for base >= 0; at 0 the gradient is 0, which has no limit for gamma < 1."""
    return base.clamp(min=TINY).pow(gamma)


class DualFocal(PointwiseLoss):
    """(1 - p_y + p_j)^gamma (-log p_y), averaged over the batch; the official code sums it.

    p_j is the largest probability strictly below p_y, 0 where there is none: classes with
    exactly p_y do not count. The gradient flows through p_j as well.

    Source: Tao et al. 2023, Dual Focal Loss for Calibration, and its official code.
    """

    def __init__(self, num_classes: int, settings: DualFocalConfig) -> None:
        super().__init__()
        self.gamma = settings.gamma

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = logits.log_softmax(1)
        p = log_p.exp()
        p_y = p.gather(1, targets[:, None])  # [N, 1]
        p_j = p.where(p < p_y, 0).topk(1).values[:, 0]  # [N]; on ties topk picks the official class
        log_p_y = log_p.gather(1, targets[:, None])[:, 0]
        return power(1 - p_y[:, 0] + p_j, self.gamma) * -log_p_y


class AdaFocal(PointwiseLoss):
    """(1 - p_y)^g (-log p_y), or (1 + p_y)^|g| (-log p_y) where g < 0, averaged over the batch.

    g belongs to the bin that contains p_y. After each epoch the bins are formed anew, of equal
    size by the confidence max_k p_k of the validation images, and each g follows its bin's gap,
    mean confidence less accuracy: g exp(rate gap) where g > 0, else g exp(-rate gap). A |g| below
    `switch` becomes `switch` with the other sign; then g is clamped to [gamma_min, gamma_max].

    As in the official code, which sums over the batch: bins are half open, [l, u) for p_y and
    (l, u] for validation images, so those of the lowest confidence are in no bin; a bin without
    images keeps its g. Training starts with bins of equal width and `gamma` in all.

    Source: Ghosh et al. 2022, AdaFocal, and its official code.
    """

    edges: Tensor  # [bins - 1] float64, between the bins
    gammas: Tensor  # [bins] float64

    def __init__(self, num_classes: int, settings: AdaFocalConfig) -> None:
        super().__init__()
        self.rate, self.switch = settings.rate, settings.switch
        self.gamma_min, self.gamma_max = settings.gamma_min, settings.gamma_max
        bins, gamma = settings.bins, settings.gamma
        edges = torch.arange(1, bins, dtype=torch.float64) * (1 / bins)
        self.register_buffer("edges", edges)
        self.register_buffer("gammas", torch.full((bins,), gamma, dtype=torch.float64))

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = log_probability(logits, targets)
        p = log_p.exp()
        bins = torch.bucketize(p.detach().double(), self.edges, right=True)
        gamma = self.gammas[bins].float()
        return power(1 - gamma.sign() * p, gamma.abs()) * -log_p

    def end_epoch(self, feedback: Feedback) -> None:
        """Form the bins anew and update each gamma.

        Raises:
            ValueError: there are no validation images.
        """
        outputs = feedback.outputs("validation")
        if len(outputs.targets) == 0:
            raise ValueError("validation has 0 images: AdaFocal derives its gammas from them")
        edges, gap = _edges_and_gaps(outputs, len(self.gammas))
        gap = gap.to(self.gammas.device)
        gammas = self.gammas * (self.rate * torch.where(self.gammas > 0, gap, -gap)).exp()
        flipped = torch.where(gammas > 0, -self.switch, self.switch)
        gammas = torch.where(gammas.abs() < self.switch, flipped, gammas)
        self.gammas.copy_(gammas.clamp(self.gamma_min, self.gamma_max))
        self.edges.copy_(edges)

    def pop_diagnostics(self) -> dict[str, float | None]:
        """The smallest and the largest gamma of all bins."""
        return {"gamma_least": self.gammas.min().item(), "gamma_greatest": self.gammas.max().item()}


def _edges_and_gaps(outputs: Outputs, bins: int) -> tuple[Tensor, Tensor]:
    """Edges between bins of equal size, [bins - 1], and confidence less accuracy, [bins]."""
    confidence, predicted = outputs.logits.cpu().float().log_softmax(1).exp().max(1)
    error = confidence.double() - (predicted == outputs.targets.cpu()).double()
    samples = len(error)
    ranks = np.linspace(0, samples, bins + 1)
    ranked = confidence.sort().values.numpy()
    edges = torch.from_numpy(np.interp(ranks, np.arange(samples), ranked))
    # Index 0 is the lowest edge itself, in no bin; edges are rounded like confidences.
    bin_index = torch.bucketize(confidence, edges.float())
    count = torch.bincount(bin_index, minlength=bins + 1)
    gap = torch.bincount(bin_index, error, minlength=bins + 1) / count.clamp(min=1)
    return edges[1:-1], gap[1:]
