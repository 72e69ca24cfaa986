"""Second-stage heads: MaC-Cal's masked bottleneck with its sparsity control, TST, VTST."""

import math
from itertools import pairwise
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from semix.calib.config import HeadConfig, MaCCalConfig
from semix.calib.parameters import in_range, one_of
from semix.data.errors import InputError

MASK_MODES = ("reset", "preserve")
INFERENCE = ("last", "expected", "dense")


class MaskedBottleneckHead(nn.Module):
    """Features [N, D] to logits [N, K] through a hidden layer with ReLU; its weights are masked.

    The trainer calls, in this order:

        head.start_epoch(p, generator)     # draw masks: a weight is kept with probability p
        head(features); loss.backward()
        head.after_backward()              # gradients of masked weights become 0
        optimiser.step()
        head.after_step()                  # momentum and weight decay moved them: mask again

    Biases are never masked. In eval mode the head is deterministic and uses no generator.

    Args:
        in_features: D.
        num_classes: K.
        hidden: width of the hidden layer; None is max(2K, D/4).
        mask_mode: "reset" sets masked weights to 0 permanently when an epoch starts; "preserve"
            keeps their values for the epochs that unmask them.
        inference: the weights in eval mode. "last": under the last mask. "expected": all,
            times p. "dense": all, unscaled, which makes calibration worse than no head.
        allow_unscaled: permit "dense".
    Raises:
        InputError: a size below 1, an unknown mode, or an inference that does not fit the mode.

    Source: MaC-Cal (arXiv 2508.09116), eqs. (8)-(11). The paper does not say what becomes of
    masked weights; "reset" is the reading that agrees with its ablation.
    """

    mask1: Tensor  # bool [H, D], True where the weight is kept
    mask2: Tensor  # bool [K, H]
    retention: Tensor  # float32 scalar, the p of the masks

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        hidden: int | None = None,
        mask_mode: Literal["reset", "preserve"] = "reset",
        inference: Literal["last", "expected", "dense"] = "last",
        allow_unscaled: bool = False,
    ) -> None:
        super().__init__()
        if hidden is None:
            hidden = max(2 * num_classes, in_features // 4)
        what = "give a whole number of at least 1"
        in_range("head.hidden", hidden, low=1, what=what, whole=True)
        _check_modes(mask_mode, inference, allow_unscaled=allow_unscaled)
        self.mask_mode, self.inference = mask_mode, inference
        self.layer1 = _layer(in_features, hidden, nonlinearity="relu")
        self.layer2 = _layer(hidden, num_classes, nonlinearity="linear")
        self.register_buffer("mask1", torch.ones(hidden, in_features, dtype=torch.bool))
        self.register_buffer("mask2", torch.ones(num_classes, hidden, dtype=torch.bool))
        self.register_buffer("retention", torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        inner = functional.linear(features, self._weight(self.layer1, self.mask1), self.layer1.bias)
        weight = self._weight(self.layer2, self.mask2)
        return functional.linear(functional.relu(inner), weight, self.layer2.bias)

    @torch.no_grad()
    def start_epoch(self, p: float, generator: torch.Generator) -> None:
        """Draw both masks anew, and in reset mode set the masked weights to 0.

        Args:
            p: probability, in (0, 1], that a weight is kept.
            generator: on the CPU, so that the masks are the same on every device.
        Raises:
            ValueError: p lies outside (0, 1].
        """
        if not 0 < p <= 1:
            raise ValueError(f"p = {p}: the share of kept weights must lie in (0, 1]")
        self.retention.fill_(p)
        for _, mask in self._masked_layers():
            mask.copy_(torch.rand(mask.shape, generator=generator) < p)
        self.after_step()

    @torch.no_grad()
    def after_backward(self) -> None:
        """Call between backward and the optimiser's step: masked weights get no gradient."""
        for layer, mask in self._masked_layers():
            if layer.weight.grad is not None:
                layer.weight.grad.mul_(mask)

    @torch.no_grad()
    def after_step(self) -> None:
        """Call after the optimiser's step: in reset mode masked weights are 0 again.

        Without it, momentum left from an epoch in which they were kept would move them.
        """
        if self.mask_mode == "reset":
            for layer, mask in self._masked_layers():
                layer.weight.mul_(mask)

    def _masked_layers(self) -> tuple[tuple[nn.Linear, Tensor], tuple[nn.Linear, Tensor]]:
        return (self.layer1, self.mask1), (self.layer2, self.mask2)

    def _weight(self, layer: nn.Linear, mask: Tensor) -> Tensor:
        if self.mask_mode == "reset":
            return layer.weight  # masked in place
        if self.training or self.inference == "last":
            return layer.weight * mask
        return layer.weight * self.retention if self.inference == "expected" else layer.weight


def _layer(size_in: int, size_out: int, *, nonlinearity: Literal["relu", "linear"]) -> nn.Linear:
    layer = nn.Linear(size_in, size_out)
    nn.init.kaiming_normal_(layer.weight, nonlinearity=nonlinearity)
    nn.init.zeros_(layer.bias)
    return layer


def _check_modes(mask_mode: str, inference: str, *, allow_unscaled: bool) -> None:
    one_of("head.mask_mode", mask_mode, MASK_MODES)
    one_of("head.inference", inference, INFERENCE)
    if mask_mode == "reset" and inference != "last":
        remedy = "reset weights are already sparse; use last, or mask_mode preserve"
        raise InputError("head.inference", inference, remedy)
    if inference == "dense" and not allow_unscaled:
        remedy = (
            "weights trained under a mask and used without it are worse calibrated than no head;"
            " use last or expected, or set head.allow_unscaled for a comparison"
        )
        raise InputError("head.inference", inference, remedy)


ACCURACY_GUARD = 0.05  # the largest loss of accuracy against stage one at which p may still fall
CHANCE_MARGIN = 0.1  # up to this fraction of stage one's gain over chance counts as chance
CHANCE_EPOCHS = 3  # consecutive epochs after which a head counts as lost, not as unlucky


class ControllerState(TypedDict):
    """The state of a `SparsityController` that changes with the epochs."""

    p: float
    epoch: int
    history: list[dict[str, float]]
    generator: Tensor


class SparsityController:
    """Sets the share p of kept weights for each epoch of the head's training.

        (12)  p <- clamp(p + clip(gamma Acc - Conf, -delta, +delta), p_min, 1)
        (13)  delta_e = delta_max (delta_min / delta_max)^(e / E)

    If the head is overconfident on the training set, Conf > gamma Acc, then p falls, more weights
    are masked and confidence falls. p never falls while accuracy is 5 points below stage one's.

    Masks that set weights to 0 permanently can remove more than an epoch learns: the gradient of
    each layer is a product with the other layer, so a head with few weights learns less and less
    and ends at chance. If accuracy is at chance, or keeps falling towards it, p rises by delta_max.

    Args:
        epochs: E, of the head's training.
        base_accuracy: of the stage-one model on the training set, in [0, 1].
        chance: accuracy of a guess, 1 / K.
        p_start: p of the first epoch, in [p_min, 1].
        p_min: in (0, 1]; an unguarded p can fall until nothing is learnt.
        gamma: share of the training accuracy, which is optimistic, to aim confidence at, in
            (0, 1]; choose among 0.7, 0.8, 0.9 and 0.95 on validation data.
        delta_max, delta_min: largest change of p after the first epoch, and at the end.
        seed: of `generator`, from which the head's masks are drawn.
    Raises:
        InputError: a value out of range.

    Source: MaC-Cal (arXiv 2508.09116), eqs. (12), (13), as reconstructed from its text; p_start,
    p_min, both deltas, the guard and the rise from chance are ours.
    """

    def __init__(
        self,
        *,
        epochs: int,
        base_accuracy: float,
        chance: float,
        p_start: float = 0.5,
        p_min: float = 0.1,
        gamma: float = 0.9,
        delta_max: float = 0.1,
        delta_min: float = 0.001,
        seed: int = 0,
    ) -> None:
        in_range("head.epochs", epochs, low=1, what="give at least 1", whole=True)
        in_range("base_accuracy", base_accuracy, low=0, high=1, what="give a fraction in [0, 1]")
        in_range("head.p_min", p_min, low=1e-6, high=1, what="must lie in (0, 1]")
        in_range("head.p_start", p_start, low=p_min, high=1, what=f"must lie in [{p_min}, 1]")
        in_range("head.gamma", gamma, low=1e-6, high=1, what="must lie in (0, 1]")
        in_range("head.delta_max", delta_max, low=1e-6, high=1, what="must lie in (0, 1]")
        what = f"must lie in (0, {delta_max}], the range up to delta_max"
        in_range("head.delta_min", delta_min, low=1e-9, high=delta_max, what=what)
        self.epochs, self.base_accuracy, self.chance = epochs, base_accuracy, chance
        self.p_min, self.gamma = p_min, gamma
        self.delta_max, self.delta_min = delta_max, delta_min
        self.p = p_start
        self.epoch = 0  # epochs done
        self.history: list[dict[str, float]] = []
        self.generator = torch.Generator().manual_seed(seed)

    def delta(self, epoch: int) -> float:
        """Largest change of p after this epoch, counted from 0. Eq. (13)."""
        return self.delta_max * math.pow(self.delta_min / self.delta_max, epoch / self.epochs)

    def end_epoch(self, *, accuracy: float, confidence: float) -> float:
        """Record the epoch and return p for the next one. Eq. (12).

        Args:
            accuracy, confidence: means over the epoch's masked training passes, in [0, 1].
        Raises:
            ValueError: a value lies outside [0, 1], or all epochs are done.
        """
        for name, value in (("accuracy", accuracy), ("confidence", confidence)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} = {value}: give a fraction in [0, 1]")
        if self.epoch >= self.epochs:
            raise ValueError(f"epoch = {self.epoch}: all {self.epochs} epochs are done")
        delta = self.delta(self.epoch)
        self.history.append(
            {
                "epoch": self.epoch,
                "p": self.p,  # in force during the epoch
                "delta": delta,
                "accuracy": accuracy,
                "confidence": confidence,
            }
        )
        change = min(max(self.gamma * accuracy - confidence, -delta), delta)
        if accuracy < self.base_accuracy - ACCURACY_GUARD:
            change = max(change, 0.0)
        if self.at_chance() or self._keeps_falling():
            change = self.delta_max
        self.p = min(max(self.p + change, self.p_min), 1.0)
        self.epoch += 1
        return self.p

    def at_chance(self) -> bool:
        """Whether the last epochs were hardly better than a guess, unlike stage one."""
        gain = self.base_accuracy - self.chance
        last = self._accuracies(CHANCE_EPOCHS)
        decidable = len(last) == CHANCE_EPOCHS and gain > ACCURACY_GUARD
        return decidable and max(last) <= self.chance + CHANCE_MARGIN * gain

    def _keeps_falling(self) -> bool:
        """Whether accuracy fell in each of the last epochs, to below half of stage one's gain."""
        last = self._accuracies(CHANCE_EPOCHS + 1)
        fell = all(after < before for before, after in pairwise(last))
        decidable = len(last) == CHANCE_EPOCHS + 1
        return decidable and fell and last[-1] < (self.base_accuracy + self.chance) / 2

    def _accuracies(self, count: int) -> list[float]:
        return [line["accuracy"] for line in self.history[-count:]]

    def state_dict(self) -> ControllerState:
        """The state for a checkpoint; the masks are buffers of the head."""
        return {
            "p": self.p,
            "epoch": self.epoch,
            "history": [dict(line) for line in self.history],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: ControllerState) -> None:
        self.p, self.epoch = state["p"], state["epoch"]
        self.history = [dict(line) for line in state["history"]]
        self.generator.set_state(state["generator"])


HIDDEN = 3  # times the latent width, as in the official code


class TSTHead(nn.Module):
    """Features [N, D] to logits [N, K]: D -> 3Z, ReLU, 3Z -> Z, then linear Z -> K.

    Args:
        in_features: D.
        num_classes: K.
        latent: Z.
    Raises:
        InputError: a latent width below 1.

    Source: Jordahn and Olmos 2024 (arXiv 2405.01196), two-stage training, and its code.
    """

    def __init__(self, in_features: int, num_classes: int, *, latent: int = 10) -> None:
        super().__init__()
        self.encoder = encoder(in_features, latent)
        self.classifier = nn.Linear(latent, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.encoder(features))
        return logits


def encoder(in_features: int, latent: int) -> nn.Sequential:
    """Features [N, D] to [N, Z] through one hidden layer."""
    what = "give a whole number of at least 1"
    in_range("head.latent", latent, low=1, what=what, whole=True)
    hidden = HIDDEN * latent
    return nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU(), nn.Linear(hidden, latent))


class VTSTHead(nn.Module):
    """Features [N, D] to logits [N, K] through z ~ N(mean, variance), both of the features.

    Two networks D -> 3Z -> Z give the mean and, through log sigmoid, the log variance, so the
    variance is below 1. In training mode z is drawn once per sample from torch's global generator.
    In eval mode the result is the log of the class probabilities' mean over `samples` draws. Their
    noise is a buffer, the same for all samples, so a prediction depends only on its features.

    Args:
        in_features: D.
        num_classes: K.
        latent: Z.
        samples: draws per prediction.
    Raises:
        InputError: a latent width or a number of draws below 1.

    Source: Jordahn and Olmos 2024 (arXiv 2405.01196), variational two-stage training.
    """

    noise: Tensor  # [S, 1, Z] float32, standard normal

    def __init__(
        self, in_features: int, num_classes: int, *, latent: int = 10, samples: int = 10
    ) -> None:
        super().__init__()
        what = "give a whole number of at least 1"
        in_range("head.samples", samples, low=1, what=what, whole=True)
        self.mean = encoder(in_features, latent)
        self.log_variance = encoder(in_features, latent)
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
        """Logits at mean + deviation * noise, [..., N, K]."""
        logits: Tensor = self.classifier(mean + (log_variance / 2).exp() * noise)
        return logits


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) || N(0, I)) / Z, averaged over the batch: a scalar from 0 up."""
    terms = mean.square() + log_variance.exp() - log_variance - 1  # [N, Z]
    return terms.mean() / 2


def build_head(config: HeadConfig, in_features: int, num_classes: int) -> nn.Module:
    """A fresh head, features [N, D] to logits [N, K]. Raises InputError for invalid values."""
    if config.method == "mac_cal":
        chance = 1 / num_classes
        SparsityController(base_accuracy=1.0, chance=chance, **controller_params(config))  # checks
        return MaskedBottleneckHead(
            in_features,
            num_classes,
            hidden=config.hidden,
            mask_mode=config.mask_mode,
            inference=config.inference,
            allow_unscaled=config.allow_unscaled,
        )
    if config.method == "tst":
        return TSTHead(in_features, num_classes, latent=config.latent)
    return VTSTHead(in_features, num_classes, latent=config.latent, samples=config.samples)


def controller_params(config: MaCCalConfig) -> dict[str, Any]:
    """The arguments of `SparsityController` that are settings."""
    names = {"epochs", "p_start", "p_min", "gamma", "delta_max", "delta_min"}
    return config.model_dump(include=names)
