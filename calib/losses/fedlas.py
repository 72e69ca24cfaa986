"""FeDLaS-LS and FeDLaS-MbLS: smoothing by each sample's feature norm and a learnt gate."""

from torch import Tensor

from calib.losses.fedlas_smoothing import FeDLaS, NormStart, Variant
from calib.losses.label_smoothing import uniform_cross_entropy
from calib.losses.mbls import check_margin, excess_over_margin
from calib.parameters import in_range


class FeDLaSLabelSmoothing(FeDLaS):
    """FeDLaS-LS: the penalty is cross-entropy against the uniform distribution.

    With beta = 0 it is label smoothing.

    Args:
        smoothing: base strength, in [0, 0.5]; 0.05 is usual, 0.1 for CIFAR-100.
        beta, momentum, norm_start, variant: see `FeDLaS`.
    Raises:
        InputError: a value out of range.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        smoothing: float = 0.05,
        beta: float = 4.0,
        momentum: float = 0.95,
        norm_start: NormStart = "fixed",
        variant: Variant = "code",
    ) -> None:
        in_range("loss.smoothing", smoothing, low=0, high=0.5, what="must lie in [0, 0.5]")
        super().__init__(
            num_classes,
            strength=smoothing,
            beta=beta,
            momentum=momentum,
            norm_start=norm_start,
            variant=variant,
        )

    def penalty(self, logits: Tensor) -> Tensor:
        return uniform_cross_entropy(logits)


class FeDLaSMarginSmoothing(FeDLaS):
    """FeDLaS-MbLS: the penalty is that of MbLS, max(0, max_l z_l - z_k - margin) over classes.

    With beta = 0 it is (1 - weight) cross-entropy + weight penalty, which is not MbLS.

    Args:
        weight: base strength, in [0, 0.5]; 0.1 for CIFAR, 0.05 for Tiny-ImageNet.
        margin: m, from 0; 6 for CIFAR, 10 for Tiny-ImageNet.
        beta: 0.5, or 1 for CIFAR-100.
        momentum, norm_start: see `FeDLaS`.
        variant: also of the penalty: "code" takes its mean over classes, "paper" the sum.
    Raises:
        InputError: a value out of range.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 0.1,
        margin: float = 6.0,
        beta: float = 0.5,
        momentum: float = 0.95,
        norm_start: NormStart = "fixed",
        variant: Variant = "code",
    ) -> None:
        in_range("loss.weight", weight, low=0, high=0.5, what="must lie in [0, 0.5]")
        check_margin(margin)
        super().__init__(
            num_classes,
            strength=weight,
            beta=beta,
            momentum=momentum,
            norm_start=norm_start,
            variant=variant,
        )
        self.margin = margin

    def penalty(self, logits: Tensor) -> Tensor:
        excess = excess_over_margin(logits, self.margin)
        return excess.mean(1) if self.variant == "code" else excess.sum(1)
