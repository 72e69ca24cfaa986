"""Heads of second stages: MaC-Cal's masked bottleneck with its sparsity control, TST, VTST."""

import math
from itertools import pairwise
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from semix.calib.config import HeadConfig, MaCCalConfig, TSTConfig


class MaskedBottleneckHead(nn.Module):
    """Maps features [N, D] to logits [N, K] by two masked linear layers with a ReLU between them.

    The trainer calls, in this order:

        head.start_epoch(p, generator)     # draws masks, which keep a weight with probability p
        head(features); loss.backward()
        head.after_backward()              # sets gradients of masked weights to 0
        optimiser.step()
        head.after_step()                  # masks again what momentum and weight decay have changed

    Biases are never masked. In eval mode the head is deterministic and uses no generator.

    `mask_mode: reset` sets masked weights to 0 for good when an epoch starts; `preserve` keeps
    their values for later epochs, whose masks may keep them. `inference` chooses the weights in
    eval mode: those that the last mask keeps (`last`), all, multiplied by p (`expected`), or all,
    not multiplied (`dense`); calibration is then worse than without a head.

    Args:
        in_features: D.
        num_classes: K.

    Source: MaC-Cal (arXiv 2508.09116), eqs. (8)-(11). The paper does not say whether masked weights
    keep their values; "reset" agrees with its ablation.
    """

    mask1: Tensor  # bool [H, D], true where a weight is kept
    mask2: Tensor  # bool [K, H]
    retention: Tensor  # float32 scalar, the p with which the masks were drawn

    def __init__(self, in_features: int, num_classes: int, settings: MaCCalConfig) -> None:
        super().__init__()
        hidden = settings.hidden or max(2 * num_classes, in_features // 4)
        self.mask_mode, self.inference = settings.mask_mode, settings.inference
        self.layer1 = _initialised_layer(in_features, hidden, nonlinearity="relu")
        self.layer2 = _initialised_layer(hidden, num_classes, nonlinearity="linear")
        self.register_buffer("mask1", torch.ones(hidden, in_features, dtype=torch.bool))
        self.register_buffer("mask2", torch.ones(num_classes, hidden, dtype=torch.bool))
        self.register_buffer("retention", torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        hidden_units = functional.linear(
            features, self._weight(self.layer1, self.mask1), self.layer1.bias
        )
        weight = self._weight(self.layer2, self.mask2)
        return functional.linear(functional.relu(hidden_units), weight, self.layer2.bias)

    @torch.no_grad()
    def start_epoch(self, p: float, generator: torch.Generator) -> None:
        """Draw new masks; in reset mode also set the masked weights to 0.

        Args:
            p: probability, in (0, 1], that a weight is kept.
            generator: on the CPU, so that the masks are the same on every device.
        Raises:
            ValueError: p lies outside (0, 1].
        """
        if not 0 < p <= 1:
            raise ValueError(f"p = {p}: the fraction of kept weights must lie in (0, 1]")
        self.retention.fill_(p)
        for _, mask in self._masked_layers():
            mask.copy_(torch.rand(mask.shape, generator=generator) < p)
        self.after_step()

    @torch.no_grad()
    def after_backward(self) -> None:
        """Called between backward and the optimiser's step: masked weights get no gradient."""
        for layer, mask in self._masked_layers():
            if layer.weight.grad is not None:
                layer.weight.grad.mul_(mask)

    @torch.no_grad()
    def after_step(self) -> None:
        """Called after the optimiser's step: in reset mode, sets masked weights to 0 again.

        The step may change them by momentum from an epoch in which they were not masked.
        """
        if self.mask_mode == "reset":
            for layer, mask in self._masked_layers():
                layer.weight.mul_(mask)

    def _masked_layers(self) -> tuple[tuple[nn.Linear, Tensor], tuple[nn.Linear, Tensor]]:
        return (self.layer1, self.mask1), (self.layer2, self.mask2)

    def _weight(self, layer: nn.Linear, mask: Tensor) -> Tensor:
        if self.mask_mode == "reset":
            return layer.weight  # its masked entries are 0
        if self.training or self.inference == "last":
            return layer.weight * mask
        return layer.weight * self.retention if self.inference == "expected" else layer.weight


def _initialised_layer(
    size_in: int, size_out: int, *, nonlinearity: Literal["relu", "linear"]
) -> nn.Linear:
    layer = nn.Linear(size_in, size_out)
    if not layer.weight.is_meta:  # as in `semix.calib.models.convnets.convolution`
        nn.init.kaiming_normal_(layer.weight, nonlinearity=nonlinearity)
    nn.init.zeros_(layer.bias)
    return layer


ACCURACY_GUARD = 0.05  # p must not fall if accuracy is further below that of stage one
CHANCE_MARGIN = 0.1  # fraction of stage one's gain over chance that still counts as chance
CHANCE_EPOCHS = 3  # consecutive epochs at chance after which a head is at chance


class ControllerState(TypedDict):
    """The state of a `SparsityController` for a checkpoint."""

    p: float
    epoch: int
    history: list[dict[str, float]]
    generator: Tensor


class SparsityController:
    """Sets p, the fraction of weights that masks keep, for each epoch of the head's training.

        (12)  p <- clamp(p + clip(gamma Acc - Conf, -delta, +delta), p_min, 1)
        (13)  delta_e = delta_max (delta_min / delta_max)^(e / E)

    If the head is overconfident on the training set, Conf > gamma Acc, then p falls, more weights
    are masked and confidence falls. While accuracy is more than 5 points below that of stage one, p
    does not fall.

    Masks that set weights to 0 for good can remove more than the head learns in an epoch. The
    gradient of each layer is multiplied by the weights of the other one, so a head with few weights
    learns less and less, until its accuracy is at chance. So if accuracy is at chance, or falls
    towards it for several epochs, p rises by delta_max.

    Args:
        settings: `epochs` is E; gamma is the factor by which the target of confidence is below the
            training accuracy, which is optimistic.
        base_accuracy: accuracy of stage one on the training set, in [0, 1].
        chance: accuracy of a random guess, 1 / K.
        seed: of `generator`, with which the head draws its masks.
    Raises:
        ValueError: base_accuracy lies outside [0, 1].

    Source: MaC-Cal (arXiv 2508.09116), eqs. (12), (13), reconstructed from its text; p_start,
    p_min, both deltas, ACCURACY_GUARD and the rise from chance are our additions.
    """

    def __init__(
        self, settings: MaCCalConfig, *, base_accuracy: float, chance: float, seed: int = 0
    ) -> None:
        if not 0 <= base_accuracy <= 1:
            raise ValueError(f"base_accuracy = {base_accuracy}: give a fraction in [0, 1]")
        self.settings, self.base_accuracy, self.chance = settings, base_accuracy, chance
        self.p = settings.p_start
        self.epoch = 0  # number of epochs done
        self.history: list[dict[str, float]] = []
        self.generator = torch.Generator().manual_seed(seed)

    def delta(self, epoch: int) -> float:
        """Largest change of p after this epoch, counted from 0. Eq. (13)."""
        ratio = self.settings.delta_min / self.settings.delta_max
        return self.settings.delta_max * math.pow(ratio, epoch / self.settings.epochs)

    def end_epoch(self, *, accuracy: float, confidence: float) -> float:
        """Record an epoch and return p for the next one. Eq. (12).

        Args:
            accuracy, confidence: means over the epoch's masked training passes, in [0, 1].
        Raises:
            ValueError: a value lies outside [0, 1], or all epochs are done.
        """
        for name, value in (("accuracy", accuracy), ("confidence", confidence)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} = {value}: give a fraction in [0, 1]")
        if self.epoch >= self.settings.epochs:
            raise ValueError(f"epoch = {self.epoch}: all {self.settings.epochs} epochs are done")
        delta = self.delta(self.epoch)
        self.history.append(
            {
                "epoch": self.epoch,
                "p": self.p,  # during this epoch
                "delta": delta,
                "accuracy": accuracy,
                "confidence": confidence,
            }
        )
        change = min(max(self.settings.gamma * accuracy - confidence, -delta), delta)
        if accuracy < self.base_accuracy - ACCURACY_GUARD:
            change = max(change, 0.0)
        if self.at_chance() or self._is_falling_to_chance():
            change = self.settings.delta_max
        self.p = min(max(self.p + change, self.settings.p_min), 1.0)
        self.epoch += 1
        return self.p

    def at_chance(self) -> bool:
        """Whether accuracy was at chance in each of the last epochs, unlike that of stage one."""
        gain = self.base_accuracy - self.chance
        accuracies = self._accuracies(CHANCE_EPOCHS)
        has_gain = len(accuracies) == CHANCE_EPOCHS and gain > ACCURACY_GUARD
        return has_gain and max(accuracies) <= self.chance + CHANCE_MARGIN * gain

    def _is_falling_to_chance(self) -> bool:
        """Whether accuracy fell in each of the last epochs, to below half of stage one's gain."""
        accuracies = self._accuracies(CHANCE_EPOCHS + 1)
        all_fell = all(after < before for before, after in pairwise(accuracies))
        enough_epochs = len(accuracies) == CHANCE_EPOCHS + 1
        return (
            enough_epochs and all_fell and accuracies[-1] < (self.base_accuracy + self.chance) / 2
        )

    def _accuracies(self, count: int) -> list[float]:
        return [record["accuracy"] for record in self.history[-count:]]

    def state_dict(self) -> ControllerState:
        """The state for a checkpoint; the masks are buffers of the head."""
        return {
            "p": self.p,
            "epoch": self.epoch,
            "history": [dict(record) for record in self.history],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: ControllerState) -> None:
        self.p, self.epoch = state["p"], state["epoch"]
        self.history = [dict(record) for record in state["history"]]
        self.generator.set_state(state["generator"])


HIDDEN_FACTOR = 3  # hidden width / latent width, as in the official code


class TSTHead(nn.Module):
    """Maps features [N, D] to logits [N, K]: linear D -> 3Z, ReLU, linear 3Z -> Z, linear Z -> K.

    Args:
        in_features: D.
        num_classes: K.
        settings: `latent` is Z.

    Source: Jordahn and Olmos 2024 (arXiv 2405.01196), two-stage training, and its code.
    """

    def __init__(self, in_features: int, num_classes: int, settings: TSTConfig) -> None:
        super().__init__()
        self.encoder = build_encoder(in_features, settings.latent)
        self.classifier = nn.Linear(settings.latent, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.encoder(features))
        return logits


def build_encoder(in_features: int, latent: int) -> nn.Sequential:
    """A network from features [N, D] to latents [N, Z], with one hidden layer."""
    hidden = HIDDEN_FACTOR * latent
    return nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU(), nn.Linear(hidden, latent))


class VTSTHead(nn.Module):
    """Maps features [N, D] to logits [N, K] of a latent z ~ N(mean, variance) in Z dimensions.

    Two networks D -> 3Z -> Z compute the mean and, with a log sigmoid behind it, the log variance,
    so the variance is below 1. In training mode z is drawn once per image, with torch's global
    generator. In eval mode the logits are the log of the mean class probabilities over `samples`
    draws. These use the same noise, a buffer, for all images, so that a prediction depends on the
    image alone.

    Args:
        in_features: D.
        num_classes: K.
        settings: `latent` is Z; `samples` is the number of draws per prediction.

    Source: Jordahn and Olmos 2024 (arXiv 2405.01196), variational two-stage training.
    """

    noise: Tensor  # [S, 1, Z] float32, standard normal

    def __init__(self, in_features: int, num_classes: int, settings: TSTConfig) -> None:
        super().__init__()
        latent, samples = settings.latent, settings.samples
        self.mean = build_encoder(in_features, latent)
        self.log_variance = build_encoder(in_features, latent)
        self.classifier = nn.Linear(latent, num_classes)
        self.register_buffer("noise", torch.randn(samples, 1, latent))

    def encode(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latent, [N, Z] each."""
        return self.mean(features), functional.logsigmoid(self.log_variance(features))

    def forward(self, features: Tensor) -> Tensor:
        mean, log_variance = self.encode(features)
        if self.training:
            return self.decode(mean, log_variance, torch.randn_like(mean))
        logits = self.decode(mean, log_variance, self.noise)  # [S, N, K]
        return logits.log_softmax(-1).logsumexp(0) - math.log(len(self.noise))

    def decode(self, mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
        """Logits of the latent mean + standard deviation * noise, [..., N, K]."""
        logits: Tensor = self.classifier(mean + (log_variance / 2).exp() * noise)
        return logits


def kl_divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) || N(0, I)) / Z, averaged over the batch: a scalar, at least 0."""
    terms = mean.square() + log_variance.exp() - log_variance - 1  # [N, Z]
    return terms.mean() / 2


def build_head(settings: HeadConfig, in_features: int, num_classes: int) -> nn.Module:
    """Build an untrained head."""
    if isinstance(settings, MaCCalConfig):
        return MaskedBottleneckHead(in_features, num_classes, settings)
    kind = TSTHead if settings.method == "tst" else VTSTHead
    return kind(in_features, num_classes, settings)
