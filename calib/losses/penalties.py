"""Cross-entropy with a penalty: confidence, pairs, ranks, kernels, class means."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.config.loss import (
    CorrectnessRankingConfig,
    CrossEntropyConfig,
    EntropyConfidencePenaltyConfig,
    FocalConfig,
    MDCAConfig,
    MMCEConfig,
    PairwiseConstraintsConfig,
    WeightedMMCEConfig,
)
from semix.calib.losses.base import (
    BatchLoss,
    CrossEntropy,
    Feedback,
    PointwiseLoss,
    RealLoss,
    gather_rows,
    log_probability,
)
from semix.calib.losses.focal import Focal
from semix.calib.losses.smoothing import uniform_cross_entropy
from semix.data.errors import InputError


class EntropyConfidencePenalty(PointwiseLoss):
    """-log p_y - weight H(p), averaged over the batch, where H(p) averages -p_k log p_k over k.

    With `smoothing`, -log p_y becomes the cross-entropy of label smoothing. `variant: code` takes
    the mean of the entropy over classes, as the code of MbLS and its descendants does, so the
    weight is K times weaker than in `paper`, which sums.

    Source: Pereyra et al. 2017, Regularizing Neural Networks by Penalizing Confident Output
    Distributions, section 3; with label smoothing, Roschewitz et al. 2025 (arXiv 2507.07780), where
    both together have the best uncalibrated probabilities under shift.
    """

    def __init__(self, num_classes: int, settings: EntropyConfidencePenaltyConfig) -> None:
        super().__init__()
        is_sum = settings.variant == "paper"
        self.weight = settings.weight if is_sum else settings.weight / num_classes
        self.smoothing = settings.smoothing

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = logits.log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1)
        loss = -log_probability(logits, targets)
        if self.smoothing:
            loss = (1 - self.smoothing) * loss + self.smoothing * uniform_cross_entropy(logits)
        return loss - self.weight * entropy


class MDCA(BatchLoss):
    """Base loss + weight mean_k |mean_n p_nk - mean_n 1[y_n = k]|, n over all processes' samples.

    The weight is 1 in the official scripts, 10 by default in their program. The base is a mean over
    the batch.

    Source: Hebbalaguppe et al. 2022, A Stitch in Time Saves Nine, and its official code.
    """

    def __init__(self, num_classes: int, settings: MDCAConfig) -> None:
        super().__init__()
        self.base: BatchLoss = CrossEntropy(num_classes, CrossEntropyConfig())
        if settings.base == "focal":
            self.base = Focal(num_classes, FocalConfig(gamma=settings.gamma))
        self.weight = settings.weight

    def of_batch(self, logits: Tensor, targets: Tensor) -> Tensor:
        gaps = logits.softmax(1) - functional.one_hot(targets, logits.shape[1])  # [N, K]
        means = gather_rows(gaps.mean(0, keepdim=True), training=self.training)  # [P, K]
        return self.base(logits, targets) + self.weight * means.mean(0).abs().mean()


class PairwiseConstraints(PointwiseLoss):
    """-log p_y + binary_weight D + exclusion_weight E, averaged over the batch.

    D = the mean over k != y of -log sigmoid(z_y - z_k), true class against each other class.
    E = the mean over pairs j != k of the other K - 1 classes of -log sigmoid(z_j - z_k) / 2, which
    is smallest where these logits are equal. With K = 2 there is no such pair and E is 0.
    Needs memory for N (K - 1)^2 numbers.

    `variant: code` also sums over j = k, which adds log 2 / (2 (K - 2)) to E and nothing to the
    gradient; `paper` does not.

    Source: Cheng and Vasconcelos 2022, Calibrating Deep Neural Networks by Pairwise Constraints;
        the codes of CALS and BalCAL.
    """

    def __init__(self, num_classes: int, settings: PairwiseConstraintsConfig) -> None:
        super().__init__()
        self.binary_weight = settings.binary_weight
        self.exclusion_weight = settings.exclusion_weight
        self.variant = settings.variant

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        other_logits = _other_logits(logits, targets)  # [N, K - 1]
        binary = functional.softplus(other_logits - logits.gather(1, targets[:, None])).mean(1)
        return (
            -log_probability(logits, targets)
            + self.binary_weight * binary
            + self.exclusion_weight * self._exclusion(other_logits)
        )

    def _exclusion(self, other_logits: Tensor) -> Tensor:
        count = other_logits.shape[1]
        if count < 2:
            return torch.zeros_like(other_logits[:, 0])
        # -log sigmoid(-d) = softplus(d); the pairs j = k add log 2 each.
        total = (
            functional.softplus(other_logits[:, None] - other_logits[:, :, None]).sum((1, 2)) / 2
        )
        if self.variant == "paper":
            total = total - count * math.log(2) / 2
        return total / (count * (count - 1))


def _other_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """The logits of all classes but the true one, [N, K - 1], in order."""
    columns = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, columns + (columns >= targets[:, None]))


class CorrectnessRanking(RealLoss):
    """-log p_y, averaged, + weight mean_i max(0, |s_i - s_j| - t (c_i - c_j)).

    j is the next sample of the batch (the first after the last); c is the confidence and s the
    fraction of a sample's right predictions in training so far; t = sign(s_i - s_j), and pairs with
    t = 0 add 0. A batch enters the history after its loss. Batch and history cover all processes.

    The confidence is max_k p_k (`softmax`), sum_k p_k log p_k / log K in [-1, 0] (`entropy`), or
    the largest p_k less the second (`margin`). `variant: code` has
    s = (r - min r) / max(1, E - min r), r the number of right predictions of a sample, the minimum
    over all samples and E the epochs completed; the official code takes max(1, E) - min r and
    divides by 0 where all samples were always right. `paper` has s = r / (times seen).

    Raises:
        InputError: `num_samples`, the range of `indices`, is not given.
        ValueError: indices are missing, or a training batch of one sample, which has no pair.

    Source: Moon et al. 2020, Confidence-Aware Learning, and its official code.
    """

    right: Tensor  # [num_samples] int64, right predictions of each training sample
    seen: Tensor  # [num_samples] int64, times it was in a batch
    epochs: Tensor  # [1] int64, epochs completed

    def __init__(self, num_classes: int, settings: CorrectnessRankingConfig) -> None:
        super().__init__()
        num_samples = settings.num_samples
        if num_samples is None:
            remedy = "give the number of training images, at least 1"
            raise InputError("loss.num_samples", num_samples, remedy)
        self.weight, self.confidence = settings.weight, settings.confidence
        self.variant = settings.variant
        self.register_buffer("right", torch.zeros(num_samples, dtype=torch.long))
        self.register_buffer("seen", torch.zeros(num_samples, dtype=torch.long))
        self.register_buffer("epochs", torch.zeros(1, dtype=torch.long))

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        if indices is None or indices.shape != targets.shape:
            shape = None if indices is None else tuple(indices.shape)
            raise ValueError(f"indices are {shape}: CRL needs [{len(targets)}], one per sample")
        logits = logits.float()
        confidence = gather_rows(self._confidence(logits), training=self.training)
        rows = torch.stack([indices, logits.argmax(1) == targets], dim=1)
        indices, right = gather_rows(rows, training=self.training).unbind(1)
        if self.training and len(indices) < 2:
            raise ValueError("logits have 1 row: CRL compares pairs of samples; give 2")
        ranking = self._ranking(confidence, self._correct_fraction(indices))
        if self.training:
            self.right.index_add_(0, indices, right)
            self.seen.index_add_(0, indices, torch.ones_like(right))
        return functional.cross_entropy(logits, targets) + self.weight * ranking

    def end_epoch(self, feedback: Feedback) -> None:
        self.epochs += 1

    def _confidence(self, logits: Tensor) -> Tensor:
        """c, [N]."""
        if self.confidence == "entropy":
            log_p = logits.log_softmax(1)
            return (log_p.exp() * log_p).sum(1) / math.log(logits.shape[1])
        largest = logits.softmax(1).topk(2, dim=1).values
        return largest[:, 0] - largest[:, 1] if self.confidence == "margin" else largest[:, 0]

    def _correct_fraction(self, indices: Tensor) -> Tensor:
        """s of these samples, [N] float32."""
        if self.variant == "paper":
            return self.right[indices] / self.seen[indices].clamp(min=1)
        minimum = self.right.min()
        return (self.right[indices] - minimum) / (self.epochs - minimum).clamp(min=1)

    @staticmethod
    def _ranking(confidence: Tensor, fraction: Tensor) -> Tensor:
        fraction_lead = fraction - fraction.roll(-1)
        confidence_lead = confidence - confidence.roll(-1)
        return (fraction_lead.abs() - fraction_lead.sign() * confidence_lead).relu().mean()


EPS = 1e-10  # under the root, as in the official code: its gradient stays finite at 0
EPS_PAIRS = 1e-5  # added to numbers of pairs, as in the official code


class MMCE(BatchLoss):
    """-log p_y, averaged, + weight M, M = sum_ij (a_i - c_i)(a_j - c_j) k(c_i, c_j) / B^2.

    c is the confidence max_k p_k, a is 1 where the prediction is right, and
    k(c, d) = exp(-|c - d| / bandwidth). The B samples are those of all processes.

    `variant: code` adds M; `paper` its square root, which is the measure itself.

    Source: Kumar et al. 2018, Trainable Calibration Measures; the codes of MbLS and CALS.
    """

    def __init__(self, num_classes: int, settings: MMCEConfig) -> None:
        super().__init__()
        self.weight, self.bandwidth = settings.weight, settings.bandwidth
        self.variant = settings.variant

    def of_batch(self, logits: Tensor, targets: Tensor) -> Tensor:
        confidence, right = _confidence(logits, targets, training=self.training)
        gap = right - confidence  # [B]
        error = (gap[:, None] * gap * _kernel(confidence, self.bandwidth)).mean()
        if self.variant == "paper":
            error = _square_root(error)
        return functional.cross_entropy(logits, targets) + self.weight * error


class WeightedMMCE(BatchLoss):
    """-log p_y, averaged, + weight sqrt(M + 1e-10), right and wrong samples weighted separately.

    With m right and n wrong samples, M = R / m^2 + W / n^2 - 2 X / (m n): R sums
    (1 - c_i)(1 - c_j) k(c_i, c_j) over pairs of right samples, W c_i c_j k over pairs of wrong
    ones, X (1 - c_i) c_j k over right i and wrong j; c and k as in `MMCE`. The penalty is 0
    where all samples are right, or all wrong. The samples are those of all processes.

    `variant: paper` is M above. `code` divides R, W and X, already means, by these numbers of pairs
    once more, as all official codes do, so the penalty is very small.

    Raises:
        ValueError: a training batch of one sample, which has no pair to compare.

    Source: Kumar et al. 2018; the code of focal_calibration.
    """

    def __init__(self, num_classes: int, settings: WeightedMMCEConfig) -> None:
        super().__init__()
        self.weight, self.bandwidth = settings.weight, settings.bandwidth
        self.variant = settings.variant

    def of_batch(self, logits: Tensor, targets: Tensor) -> Tensor:
        confidence, right = _confidence(logits, targets, training=self.training)
        if self.training and len(right) < 2:
            text = "logits have 1 row: weighted MMCE compares right with wrong samples; give 2"
            raise ValueError(text)
        penalty = self._penalty(confidence, right)
        return functional.cross_entropy(logits, targets) + self.weight * penalty

    def _penalty(self, confidence: Tensor, right: Tensor) -> Tensor:
        kernel = _kernel(confidence, self.bandwidth)
        wrong = 1 - right
        among_right, among_wrong = right * (1 - confidence), wrong * confidence

        def mean_over_pairs(first: Tensor, second: Tensor, pairs: Tensor) -> Tensor:
            mean = (first[:, None] * second * kernel).sum() / pairs.clamp(min=1)
            return mean if self.variant == "paper" else mean / (pairs + EPS_PAIRS)

        m, n = right.sum(), wrong.sum()
        error = (
            mean_over_pairs(among_right, among_right, m * m)
            + mean_over_pairs(among_wrong, among_wrong, n * n)
            - 2 * mean_over_pairs(among_right, among_wrong, m * n)
        )
        return torch.where((m > 0) & (n > 0), _square_root(error), 0.0)


def _confidence(logits: Tensor, targets: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
    """c and a of all processes' samples, each [B] float32; c with its gradient."""
    confidence, predicted = logits.softmax(1).max(1)
    right = (predicted == targets).float()
    rows = gather_rows(torch.stack([confidence, right], dim=1), training=training)
    return rows[:, 0], rows[:, 1].detach()


def _kernel(confidence: Tensor, bandwidth: float) -> Tensor:
    """k of all pairs, [B, B]."""
    return (-(confidence[:, None] - confidence).abs() / bandwidth).exp()


def _square_root(error: Tensor) -> Tensor:
    """sqrt(M + 1e-10); M is not negative but for rounding."""
    return (error.clamp(min=0) + EPS).sqrt()
