"""Methods that mix real images while training."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.batches import TrainingBatch, pin
from semix.calib.config.method import (
    CutMixConfig,
    MITConfig,
    MixupConfig,
    PLPConfig,
    RankMixupConfig,
    RegMixupConfig,
)
from semix.calib.losses.base import RealLoss, soft_cross_entropy
from semix.calib.methods.base import BatchOutcome, Forward, Method, Plain
from semix.calib.models.base import ImageClassifier
from semix.data.errors import InputError


def draw_weight(alpha: float) -> float:
    """lambda ~ Beta(alpha, alpha), from torch's global generator on the CPU."""
    return float(torch.distributions.Beta(alpha, alpha).sample())


def draw_partners(targets: Tensor) -> Tensor:
    """A random order of the batch [B], drawn on the CPU so that every device has the same."""
    partners = pin(torch.randperm(len(targets)), targets.device)
    return partners.to(targets.device, non_blocking=True)


def blend(values: Tensor, partners: Tensor, weight: float) -> Tensor:
    """weight x_i + (1 - weight) x_partner(i), float32, of images or labels [B, ...]."""
    values = values.float()
    return weight * values + (1 - weight) * values[partners]


def blended_labels(targets: Tensor, partners: Tensor, weight: float, num_classes: int) -> Tensor:
    """Soft labels [B, K] of a blend; one-hot where both images are of one class."""
    return blend(functional.one_hot(targets, num_classes), partners, weight)


def soft_outcome(network: Forward, images: Tensor, labels: Tensor) -> BatchOutcome:
    """Cross-entropy of images [B, S, S, 3] against soft labels [B, K]."""
    logits, _ = network(images)
    return BatchOutcome(soft_cross_entropy(logits, labels), logits, labels.argmax(1))


class Mixup(Method):
    """Soft cross-entropy of lambda x_i + (1 - lambda) x_j, lambda ~ Beta(alpha, alpha).

    One lambda per batch. Each image is paired with the one before it, as in torchvision; the batch
    is already shuffled. With `heavier` it is max(lambda, 1 - lambda), so that x_i has the larger
    weight, as MIT's code does.

    Source: Zhang et al. 2018 (mixup: Beyond Empirical Risk Minimization).
    """

    losses = ("ce",)

    def __init__(self, num_classes: int, settings: MixupConfig) -> None:
        super().__init__()
        with torch.device("cpu"):  # the distribution checks its values, also of a meta model
            mixup = heavier_mixup() if settings.heavier else plain_mixup()
            self.mix = mixup(alpha=settings.alpha, num_classes=num_classes)

    def forward(self, network: Forward, batch: TrainingBatch, loss: RealLoss) -> BatchOutcome:
        images, labels = self.mix(batch.images.float(), batch.targets)
        return soft_outcome(network, images, labels)


def plain_mixup() -> Any:
    from torchvision.transforms import v2  # two seconds, for this method alone

    return v2.MixUp


def heavier_mixup() -> Any:
    """Mixup that never gives an image a weight below one half."""

    class HeavierMixUp(plain_mixup()):  # type: ignore[misc]
        def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
            weight = super().make_params(flat_inputs)["lam"]
            return {"lam": max(weight, 1 - weight)}

    return HeavierMixUp


class CutMix(Method):
    """Soft cross-entropy, where labels are mixed by the areas of the two images.

    One box per batch, of area 1 - lambda with lambda ~ Beta(alpha, alpha), cut off at the edges.
    Each image is paired with the one before it, as in torchvision.

    Source: Yun et al. 2019, section 3.1.
    """

    losses = ("ce",)

    def __init__(self, num_classes: int, settings: CutMixConfig) -> None:
        super().__init__()
        with torch.device("cpu"):  # the distribution checks its values, also of a meta model
            from torchvision.transforms import v2  # more than a second, for this method alone

            self.mix = v2.CutMix(alpha=settings.alpha, num_classes=num_classes)

    def forward(self, network: Forward, batch: TrainingBatch, loss: RealLoss) -> BatchOutcome:
        channels_first = batch.images.permute(0, 3, 1, 2)
        images, labels = self.mix(channels_first, batch.targets)
        return soft_outcome(network, images.permute(0, 2, 3, 1), labels)


MIN_FRACTION = 1e-3  # smallest fraction of draws that are far enough apart


class MIT(Method):
    """MIT-L: two blends of each pair, from whose logits those of the two images are recovered.

    The mean of the two images' cross-entropies; two passes per step. The training accuracy is that
    of the first image's recovered logits. `margin` is the smallest distance of the two lambdas, by
    which the recovery divides.

    Raises:
        InputError: lambdas so far apart are hardly ever drawn.

    Source: Wang et al. 2023 (On the Pitfall of Mixup), and its official code.
    """

    losses = ("ce",)

    def __init__(self, num_classes: int, settings: MITConfig) -> None:
        super().__init__()
        alpha, margin = settings.alpha, settings.margin
        self.alpha, self.margin = alpha, max(margin, 1e-6)
        weights = np.random.default_rng(0).beta(alpha, alpha, size=(10_000, 2))
        apart = np.abs(weights - 0.5).sum(1) >= self.margin
        if apart.mean() < MIN_FRACTION:
            message = f"with alpha {alpha:g} lambdas so far apart are hardly ever drawn; lower it"
            raise InputError("method.margin", margin, message)

    def forward(self, network: Forward, batch: TrainingBatch, loss: RealLoss) -> BatchOutcome:
        weights, partners = draw_apart(self.alpha, self.margin), draw_partners(batch.targets)
        mixed = [network(blend(batch.images, partners, weight))[0] for weight in weights]
        first, second = recover(mixed[0], mixed[1], weights)
        value = (loss(first, batch.targets) + loss(second, batch.targets[partners])) / 2
        return BatchOutcome(value, first, batch.targets)


def draw_apart(alpha: float, margin: float) -> tuple[float, float]:
    """lambda_1 >= 1/2 >= lambda_2, at least `margin` apart, from torch's global generator."""
    distribution = torch.distributions.Beta(alpha, alpha)
    while True:
        first, second = distribution.sample((2,)).tolist()
        heavier, lighter = max(first, 1 - first), min(second, 1 - second)
        if heavier - lighter >= margin:
            return heavier, lighter


def recover(first: Tensor, second: Tensor, weights: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Outputs of two images from those of their blends, as if the network were linear.

    Solves w_1 a + (1 - w_1) b = first and w_2 a + (1 - w_2) b = second.

    Args:
        first, second: [N, K].
        weights: w_1 > w_2, of image a in the two blends.
    Returns:
        a and b, float32 [N, K].
    """
    heavier, lighter = weights
    first, second = first.float(), second.float()
    a = ((1 - lighter) * first - (1 - heavier) * second) / (heavier - lighter)
    b = (heavier * second - lighter * first) / (heavier - lighter)
    return a, b


class PLP(Plain):
    """Progressively layer-peeled training: top modules stop early, the stem trains to the end.

    Modules are those of the backbone's `freezing_order`, mostly blocks; the official lists also
    split some blocks in half (11 modules of a ResNet-18, not 10). A frozen module loses its
    gradient between backward and step, so that neither momentum nor weight decay moves it. As in
    the official code, its batch norms stay in training mode: their statistics follow the modules
    below, which still change, and are used with the frozen weights at test time.
    i of L modules are frozen from epoch E (i / L)^gamma on.

    Source: Wang and Zhang 2024 (Calibration Bottleneck), and its official code.
    """

    def __init__(self, num_classes: int, settings: PLPConfig) -> None:
        super().__init__(num_classes, settings)
        self.gamma = settings.gamma
        self.num_frozen = 0  # modules, from the top

    def start_epoch(self, backbone: ImageClassifier, epoch: int, epochs: int) -> None:
        modules = len(backbone.freezing_order())
        starts = [freezing_epoch(i, modules, epochs, self.gamma) for i in range(1, modules)]
        self.num_frozen = sum(epoch >= start for start in starts)

    def after_backward(self, backbone: ImageClassifier) -> None:
        for module in backbone.freezing_order()[: self.num_frozen]:
            for parameter in module.parameters():
                parameter.grad = None


def freezing_epoch(i: int, modules: int, epochs: int, gamma: float) -> int:
    """The first epoch in which i of the modules are frozen; never the very first epoch."""
    exact = epochs * (i / modules) ** gamma
    return max(1, int(exact + 1e-9))  # 7/10 of 350 epochs are 245, not 244.99...


class RegMixup(Method):
    """L(images) + weight CE(blends): both in one pass of 2B images, one lambda per batch.

    alpha is large, so that blends are near one half. `variant: code` averages over all 2B images,
    which halves the sum; `paper` adds.

    Source: Pinto et al. 2022 (RegMixup), and its official code.
    """

    def __init__(self, num_classes: int, settings: RegMixupConfig) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.alpha, self.weight = settings.alpha, settings.weight
        self.scale = 0.5 if settings.variant == "code" else 1.0

    def forward(self, network: Forward, batch: TrainingBatch, loss: RealLoss) -> BatchOutcome:
        count, targets = len(batch.targets), batch.targets
        weight, partners = draw_weight(self.alpha), draw_partners(targets)
        blends = blend(batch.images, partners, weight)
        labels = blended_labels(targets, partners, weight, self.num_classes)
        logits, features = network(torch.cat([batch.images.float(), blends]))
        clean, mixed = logits[:count], logits[count:]
        real = loss(clean, targets, features=features[:count], indices=batch.indices)
        value = self.scale * (real + self.weight * soft_cross_entropy(mixed, labels))
        return BatchOutcome(value, clean, targets)


ONE_HOT = 1 - 1e-6  # lambda + (1 - lambda) is not quite 1 in float32
DEFAULT_MIXES = {"mrl": 1, "mndcg": 3}


class RankMixup(Method):
    """L(images) + weight R(images, blends), with blends in a separate pass.

    R is a margin between the largest logits (`kind: mrl`), or the order of several confidences by
    their lambda (`mndcg`). Each blend has its own lambda and partners.

    Source: Noh et al. 2023 (RankMixup), and its official code.
    """

    def __init__(self, num_classes: int, settings: RankMixupConfig) -> None:
        super().__init__()
        self.num_classes, self.alpha = num_classes, settings.alpha
        self.mixes = settings.mixes or DEFAULT_MIXES[settings.kind]
        self.kind, self.variant = settings.kind, settings.variant
        self.weight, self.margin = settings.weight, settings.margin

    def forward(self, network: Forward, batch: TrainingBatch, loss: RealLoss) -> BatchOutcome:
        logits, features = network(batch.images)
        real = loss(logits, batch.targets, features=features, indices=batch.indices)
        blends, labels = self._blends(batch)
        mixed, _ = network(blends)
        return BatchOutcome(
            real + self.weight * self._rank(logits, mixed, labels), logits, batch.targets
        )

    def _blends(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
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
    """Mean of ReLU(max z_mix - max z + margin) over blends of two classes; others add 0.

    Args:
        logits, mixed: of images and their blends, [B, K] before softmax.
        labels: of the blends, [B, K].
        variant: "paper" leaves out each blend of one class. The official code multiplies
            a row [B] of 1 or 0 per blend with a column of losses [B, 1] before it averages, so
            "code" is the mean over all B blends times the fraction of blends of two classes.
    """
    excess = mixed.float().amax(1) - logits.float().amax(1) + margin  # [B]
    of_two_classes = (labels.amax(1) < ONE_HOT).float()
    if variant == "code":
        return of_two_classes.mean() * excess.relu().mean()
    return (of_two_classes * excess.relu()).mean()


def ndcg_shortfall(logits: Tensor, mixed: Tensor, labels: Tensor) -> Tensor:
    """Mean of 1 - NDCG of an image's and its M blends' confidences, ranked by largest label.

    The image is first, with label 1. A gain above the ideal counts like one below it.

    Args:
        logits: [B, K], before softmax.
        mixed, labels: of the blends, [M B, K], mix by mix.
    """
    label, order = labels.view(-1, *logits.shape).amax(2).sort(dim=0, descending=True, stable=True)
    confidence = mixed.float().softmax(1).amax(1).view_as(label).gather(0, order)  # [M, B]
    first = logits.float().softmax(1).amax(1)[None]  # [1, B]
    ranks = torch.arange(len(label) + 1, device=logits.device)
    discount = (ranks + 2).float().log2()[:, None]
    gain = (torch.cat([first, confidence]) / discount).sum(0)  # [B]
    ideal = (torch.cat([torch.ones_like(first), label]) / discount).sum(0)
    return (1 - torch.where(gain < ideal, gain / ideal, ideal / gain)).mean()
