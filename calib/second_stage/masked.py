"""MaC-Cal's particulars: masks drawn anew each epoch, at a share that follows the last one."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from calib.epochs import Figures
from calib.heads.bottleneck import MaskedBottleneckHead
from calib.heads.sparsity import SparsityController
from calib.losses.base import RealLoss
from calib.second_stage.objective import Objective


class MaskedObjective(Objective):
    """Trains a masked head; a controller sets the share of kept weights for each epoch."""

    head: MaskedBottleneckHead

    def __init__(
        self,
        head: MaskedBottleneckHead,
        loss: RealLoss,
        *,
        controller: SparsityController,
        extra_pass: bool,
    ) -> None:
        super().__init__(head, loss)
        self.controller, self.extra_pass = controller, extra_pass

    def start_epoch(self) -> Figures:
        rule = self.controller
        self.head.start_epoch(rule.p, rule.generator)
        return {"p": rule.p, "delta": rule.delta(rule.epoch)}

    def after_backward(self) -> None:
        self.head.after_backward()

    def after_step(self) -> None:
        self.head.after_step()

    def end_epoch(self, *, accuracy: float, confidence: float) -> None:
        # Rounding may lift a mean of float32 confidences above 1 by a last digit.
        self.controller.end_epoch(accuracy=accuracy, confidence=min(confidence, 1.0))

    def objects(self) -> dict[str, Any]:
        return {"controller": self.controller.state_dict()}

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(objects["controller"])

    def describe(self, kept: Mapping[str, Tensor]) -> dict[str, Any]:
        """The p of the masks, and the share of weights that each mask really keeps."""
        shares = {name: kept[name].float().mean().item() for name in ("mask1", "mask2")}
        return {"p": kept["retention"].item(), "kept_weights": shares}
