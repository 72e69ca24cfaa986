"""The two-layer head of MaC-Cal, whose weights are masked anew each epoch."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from calib.parameters import in_range, one_of
from data.errors import InputError

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
        mask_mode: "reset" sets masked weights to 0 for good when an epoch starts; "preserve"
            keeps their value for the epochs that unmask them.
        inference: the weights in eval mode. "last": under the last mask. "expected": all,
            times p. "dense": all as they are, which makes calibration worse than no head.
        allow_unscaled: permit "dense".
    Raises:
        InputError: a size below 1, an unknown mode, or an inference that does not fit the mode.

    Source: MaC-Cal (arXiv 2508.09116), eqs. (8)-(11). The paper leaves open how masked weights
    live on; "reset" is the reading under which its ablation makes sense.
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
