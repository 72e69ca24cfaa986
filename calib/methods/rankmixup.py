"""RankMixup: an image must be surer of its class than a blend of it."""

from typing import Literal

import torch
from torch import Tensor

from calib.batches import Batch
from calib.losses.base import RealLoss
from calib.methods.base import Forward, Method, Outcome
from calib.methods.mixing import (
    blend,
    blended_labels,
    check_alpha,
    draw_partners,
    draw_weight,
)
from calib.parameters import in_range, one_of

ONE_HOT = 1 - 1e-6  # lambda + (1 - lambda) is not quite 1 in float32
MIXES = {"mrl": 1, "mndcg": 3}


class RankMixup(Method):
    """L(images) + weight R(images, blends), with blends in a pass of their own.

    Args:
        kind: "mrl", a margin between the largest logits, or "mndcg", the order of several
            confidences by their lambda.
        weight: of R.
        alpha: of Beta(alpha, alpha); 2 for CIFAR, 1 for Tiny-ImageNet.
        margin: of "mrl", in logits; 2 for CIFAR, 1 for Tiny-ImageNet.
        mixes: blends of each image, each with a lambda and partners of its own; None takes 1 for
            "mrl" and 3 for "mndcg".
        variant: of "mrl", see `margin_ranking`.
    Raises:
        InputError: a parameter is out of range.

    Source: Noh et al. 2023 (RankMixup), and its official code.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        kind: Literal["mrl", "mndcg"] = "mrl",
        weight: float = 0.1,
        alpha: float = 2.0,
        margin: float = 2.0,
        mixes: int | None = None,
        variant: Literal["code", "paper"] = "code",
    ) -> None:
        super().__init__()
        check_alpha(alpha)
        one_of("method.kind", kind, tuple(MIXES))
        one_of("method.variant", variant, ("code", "paper"))
        in_range("method.weight", weight, low=0, high=1e6, what="must be 0 or more")
        in_range("method.margin", margin, low=0, high=1e6, what="must be 0 or more")
        mixes = MIXES[kind] if mixes is None else mixes
        what = "give a whole number of at least 1"
        in_range("method.mixes", mixes, low=1, what=what, whole=True)
        self.num_classes, self.alpha, self.mixes = num_classes, alpha, mixes
        self.kind, self.weight, self.margin, self.variant = kind, weight, margin, variant

    def forward(self, network: Forward, batch: Batch, loss: RealLoss) -> Outcome:
        logits, features = network(batch.images)
        real = loss(logits, batch.targets, features=features, indices=batch.indices)
        blends, labels = self._blends(batch)
        mixed, _ = network(blends)
        return Outcome(
            real + self.weight * self._rank(logits, mixed, labels), logits, batch.targets
        )

    def _blends(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images [mixes B, S, S, 3] and labels [mixes B, K]."""
        images, labels = [], []
        for _ in range(self.mixes):
            weight, partners = draw_weight(self.alpha), draw_partners(batch.targets)
            images.append(blend(batch.images, partners, weight))
            labels.append(blended_labels(batch.targets, partners, weight, self.num_classes))
        return torch.cat(images), torch.cat(labels)

    def _rank(self, logits: Tensor, mixed: Tensor, labels: Tensor) -> Tensor:
        if self.kind == "mndcg":
            return ndcg_shortfall(logits, mixed, labels)
        repeated = logits.repeat(self.mixes, 1)
        return margin_ranking(repeated, mixed, labels, margin=self.margin, variant=self.variant)


def margin_ranking(
    logits: Tensor, mixed: Tensor, labels: Tensor, *, margin: float, variant: str = "code"
) -> Tensor:
    """Mean of ReLU(max z_mix - max z + margin) where the blend is of two classes, else of 0.

    Args:
        logits, mixed: of images and their blends, [B, K] before softmax.
        labels: of the blends, [B, K].
        variant: "paper" leaves blends of one class out one by one. The official code multiplies
            a row of shares [B] with a column of losses [B, 1] before it averages, so "code" is
            the mean over all B blends times the share of blends that are of two classes.
    """
    excess = mixed.float().amax(1) - logits.float().amax(1) + margin  # [B]
    counts = (labels.amax(1) < ONE_HOT).float()
    if variant == "code":
        return counts.mean() * excess.relu().mean()
    return (counts * excess.relu()).mean()


def ndcg_shortfall(logits: Tensor, mixed: Tensor, labels: Tensor) -> Tensor:
    """Mean of 1 - NDCG of an image's and its M blends' confidences, ranked by largest label.

    The image is first, with label 1. A gain above the ideal one counts as one below it does.

    Args:
        logits: [B, K], before softmax.
        mixed, labels: of the blends, [M B, K], mix by mix.
    """
    label, order = labels.view(-1, *logits.shape).amax(2).sort(dim=0, descending=True, stable=True)
    sure = mixed.float().softmax(1).amax(1).view_as(label).gather(0, order)  # [M, B]
    first = logits.float().softmax(1).amax(1)[None]  # [1, B]
    ranks = torch.arange(len(label) + 1, device=logits.device)
    discount = (ranks + 2).float().log2()[:, None]
    gain = (torch.cat([first, sure]) / discount).sum(0)  # [B]
    ideal = (torch.cat([torch.ones_like(first), label]) / discount).sum(0)
    return (1 - torch.where(gain < ideal, gain / ideal, ideal / gain)).mean()
