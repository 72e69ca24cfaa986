"""FeDLaS: labels smoothed by how far features lie from their class."""

import torch
from torch import Tensor, nn

from semix.calib.config.loss import (
    FeDLaSConfig,
    FeDLaSLabelSmoothingConfig,
    FeDLaSMarginSmoothingConfig,
)
from semix.calib.losses.base import RealLoss, batch_statistics, sum_over_processes
from semix.calib.losses.smoothing import (
    blended_cross_entropy,
    excess_over_margin,
    uniform_cross_entropy,
)

EPS = 1e-3  # added to the deviation, as in the official code


class FeDLaS(RealLoss):
    """(1 - a_n) (-log p_ny) + a_n penalty_n with a_n = 2 strength sigmoid(beta psi_n gamma_n).

    gamma is the sample's L1 feature norm as a z-score under running statistics; psi is +1 or -1,
    as the gate chooses from the logits. Features and logits enter without gradient: only the gate
    learns through a. The gate is in the model's optimiser, outside gradient clipping.
    The losses of the family differ in the penalty.

    At beta 4 a nearly switches from 0 to 2 strength; with strength at most 0.5 it stays below 1.
    `momentum` is the weight of the *new* batch in the running statistics: 1 forgets all former
    batches. `variant: paper` swaps the gate's two outputs, with psi = -1 on a tie; `code` has
    psi = 0 on a tie.

    Args:
        strength: a at psi gamma = 0.

    Source: FeDLaS and its official code, losses/fedlas.py; where they differ, `variant`.
    """

    norm_mean: Tensor  # [1] float32
    norm_std: Tensor  # [1] float32
    norm_batches: Tensor  # [1] int64, batches that entered norm_mean and norm_std

    def __init__(self, num_classes: int, settings: FeDLaSConfig, *, strength: float) -> None:
        super().__init__()
        self.strength, self.beta, self.momentum = strength, settings.beta, settings.momentum
        self.norm_start, self.variant = settings.norm_start, settings.variant
        hidden = max(2, num_classes // 2)  # half of two or three classes would be a single unit
        self.gate = nn.Sequential(
            nn.Linear(num_classes, hidden), nn.LeakyReLU(0.01), nn.Linear(hidden, 2)
        )
        self.register_buffer("norm_mean", torch.tensor([20.0]))
        self.register_buffer("norm_std", torch.tensor([100.0]))
        self.register_buffer("norm_batches", torch.zeros(1, dtype=torch.long))
        self.health = FeDLaSDiagnostics()  # this name is in checkpoints, in names of buffers

    def penalty(self, logits: Tensor) -> Tensor:
        """The penalty that a_n weights, [N] from logits [N, K] float32."""
        raise NotImplementedError

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        norms = _norms(logits, features)
        if self.training:
            self._update_statistics(norms)
        psi, signed_score, smoothing = self._modulation(logits, norms)
        if self.training:
            self.health.note(psi, signed_score, smoothing, correct=logits.argmax(1) == targets)
        logits = logits.float()
        return blended_cross_entropy(logits, targets, smoothing, self.penalty(logits)).mean()

    def smoothing_of(self, logits: Tensor, features: Tensor) -> Tensor:
        """The strength a of each sample, [N] float32 in (0, 2 strength), without updating state.

        Args:
            logits, features: [N, K] and [N, D] float.
        Raises:
            ValueError: features are missing or of another shape.
        """
        return self._modulation(logits, _norms(logits, features))[2]

    def pop_diagnostics(self) -> dict[str, float | None]:
        """Measures of the training samples since the last call: see `FeDLaSDiagnostics.pop`."""
        return self.health.pop()

    def _modulation(self, logits: Tensor, norms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """psi, psi gamma and a, each [N] float32."""
        score = (norms - self.norm_mean) / (self.norm_std + EPS)  # gamma
        with torch.autocast(logits.device.type, enabled=False):
            weights = self.gate(logits.detach().float()).softmax(1)  # [N, 2]
        if self.variant == "code":
            difference = weights[:, 1] - weights[:, 0]
            sign = difference.sign()
        else:
            difference = weights[:, 0] - weights[:, 1]
            sign = torch.where(difference > 0, 1.0, -1.0)
        # The value is exactly the sign, the gradient is that of `difference` (straight through).
        psi = sign.detach() + (difference - difference.detach())
        signed_score = psi * score
        return psi, signed_score, 2 * self.strength * torch.sigmoid(self.beta * signed_score)

    @torch.no_grad()
    def _update_statistics(self, norms: Tensor) -> None:
        count, mean, std = batch_statistics(norms)
        usable = count >= 2  # one value has no deviation; a test on the device needs no wait
        weight = torch.full_like(self.norm_mean, self.momentum)
        if self.norm_start == "first_batch":
            weight = torch.where(self.norm_batches == 0, 1.0, weight)
        weight = torch.where(usable, weight, 0.0)
        self.norm_mean.lerp_(mean.float().expand(1), weight)
        self.norm_std.lerp_(std.float().expand(1), weight)
        self.norm_batches += usable


def _norms(logits: Tensor, features: Tensor | None) -> Tensor:
    """L1 norm of each row of features, [N] float32, without gradient."""
    if features is None or features.ndim != 2 or len(features) != len(logits):
        shape = None if features is None else tuple(features.shape)
        raise ValueError(f"features are {shape}: FeDLaS needs [{len(logits)}, D], a row per sample")
    return features.detach().float().abs().sum(1)


class FeDLaSLabelSmoothing(FeDLaS):
    """FeDLaS-LS: the penalty is cross-entropy against the uniform distribution.

    With beta = 0 it is label smoothing.
    """

    def __init__(self, num_classes: int, settings: FeDLaSLabelSmoothingConfig) -> None:
        super().__init__(num_classes, settings, strength=settings.smoothing)

    def penalty(self, logits: Tensor) -> Tensor:
        return uniform_cross_entropy(logits)


class FeDLaSMarginSmoothing(FeDLaS):
    """FeDLaS-MbLS: the penalty is that of MbLS, max(0, max_l z_l - z_k - margin) over classes.

    With beta = 0 it is (1 - weight) cross-entropy + weight penalty, which is not MbLS.

    `variant: code` takes the mean of the penalty over classes, `paper` the sum.
    """

    def __init__(self, num_classes: int, settings: FeDLaSMarginSmoothingConfig) -> None:
        super().__init__(num_classes, settings, strength=settings.weight)
        self.margin = settings.margin

    def penalty(self, logits: Tensor) -> Tensor:
        excess = excess_over_margin(logits, self.margin)
        return excess.mean(1) if self.variant == "code" else excess.sum(1)


DIAGNOSTICS = ("gate_positive", "smoothing_raised", "smoothing")


class FeDLaSDiagnostics(nn.Module):
    """Sums of DIAGNOSTICS, on the device to avoid waits; not saved with the state."""

    sums: Tensor  # [3, 2] float64: DIAGNOSTICS over right and over wrong samples
    count: Tensor  # [2] float64: right and wrong samples

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(3, 2).double(), persistent=False)
        self.register_buffer("count", torch.zeros(2).double(), persistent=False)

    @torch.no_grad()
    def note(
        self, psi: Tensor, signed_score: Tensor, smoothing: Tensor, *, correct: Tensor
    ) -> None:
        """Add a batch.

        Args:
            psi, signed_score, smoothing: psi, psi gamma and a, each [N].
            correct: [N] bool, whether the prediction is right.
        """
        values = torch.stack([psi > 0, signed_score > 0, smoothing]).double()  # [3, N]
        membership = torch.stack([correct, ~correct]).double()  # [2, N]
        self.sums += values @ membership.T
        self.count += membership.sum(1)

    def pop(self) -> dict[str, float | None]:
        """Means over the samples of all processes since the last call; resets the sums.

        Every process must call.

        Returns:
            gate_positive: fraction with psi = +1. smoothing_raised: fraction with psi gamma > 0,
            so with a above the base. smoothing, smoothing_correct, smoothing_wrong: mean a of all
            samples, of right and of wrong predictions. None without such a sample.
        """
        count, sums = (
            sum_over_processes(self.count).tolist(),
            sum_over_processes(self.sums).tolist(),
        )
        self.count.zero_()
        self.sums.zero_()
        rows = zip(DIAGNOSTICS, sums, strict=True)
        diagnostics = {name: _ratio(sum(row), sum(count)) for name, row in rows}
        diagnostics["smoothing_correct"] = _ratio(sums[2][0], count[0])
        diagnostics["smoothing_wrong"] = _ratio(sums[2][1], count[1])
        return diagnostics


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None
