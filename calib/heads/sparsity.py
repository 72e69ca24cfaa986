"""How many weights of the masked head to keep, steered by training accuracy and confidence."""

import math
from typing import Any

import torch

from calib.parameters import in_range

GUARD = 0.05  # accuracy below stage one's at which more masking would cost too much


class SparsityController:
    """Sets the share p of kept weights for each epoch of the head's training.

        (12)  p <- clamp(p + clip(gamma Acc - Conf, -delta, +delta), p_min, 1)
        (13)  delta_e = delta_max (delta_min / delta_max)^(e / E)

    Overconfident on the training set, so Conf > gamma Acc: p falls, more is masked, confidence
    falls. p never falls while accuracy is 5 points below that of stage one.

    Args:
        epochs: E, of the head's training.
        base_accuracy: of the stage-one model on the training set, in [0, 1].
        p_start: p of the first epoch, in [p_min, 1].
        p_min: in (0, 1]; an unguarded p can fall until nothing is learnt.
        gamma: share of the training accuracy, which is optimistic, to aim confidence at, in
            (0, 1]; choose among 0.7, 0.8, 0.9 and 0.95 on validation data.
        delta_max, delta_min: largest change of p after the first epoch, and at the end.
        seed: of `generator`, from which the head's masks are drawn.
    Raises:
        InputError: a value out of range.

    Source: MaC-Cal (arXiv 2508.09116), eqs. (12), (13), as reconstructed from its text; p_start,
    p_min, both deltas and the guard are ours.
    """

    def __init__(
        self,
        *,
        epochs: int,
        base_accuracy: float,
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
        self.epochs, self.base_accuracy = epochs, base_accuracy
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
        """Note the epoch and set p for the next, which is returned. Eq. (12).

        Args:
            accuracy, confidence: means over the epoch's masked training passes, in [0, 1].
        Raises:
            ValueError: a value is no fraction, or all epochs are done.
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
        if accuracy < self.base_accuracy - GUARD:
            change = max(change, 0.0)
        self.p = min(max(self.p + change, self.p_min), 1.0)
        self.epoch += 1
        return self.p

    def state_dict(self) -> dict[str, Any]:
        """All that changes with the epochs; the masks are buffers of the head."""
        return {
            "p": self.p,
            "epoch": self.epoch,
            "history": [dict(line) for line in self.history],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.p, self.epoch = state["p"], state["epoch"]
        self.history = [dict(line) for line in state["history"]]
        self.generator.set_state(state["generator"])
