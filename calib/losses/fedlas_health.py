"""Figures that show what FeDLaS's gate has learnt, summed over the batches of an epoch."""

import torch
from torch import Tensor, nn

from calib.losses.across_processes import add_up

FIGURES = ("gate_positive", "smoothing_raised", "smoothing")


class FeDLaSHealth(nn.Module):
    """Sums on the device, so that noting a batch does not wait for it; not part of the state."""

    sums: Tensor  # [3, 2] float64: FIGURES over right and over wrong samples
    count: Tensor  # [2] float64: right and wrong samples

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(3, 2).double(), persistent=False)
        self.register_buffer("count", torch.zeros(2).double(), persistent=False)

    @torch.no_grad()
    def note(self, gate: Tensor, push: Tensor, smoothing: Tensor, *, correct: Tensor) -> None:
        """Add a batch.

        Args:
            gate, push, smoothing: psi, psi gamma and a, each [N].
            correct: [N] bool, whether the prediction is right.
        """
        figures = torch.stack([gate > 0, push > 0, smoothing]).double()  # [3, N]
        group = torch.stack([correct, ~correct]).double()  # [2, N]
        self.sums += figures @ group.T
        self.count += group.sum(1)

    def pop(self) -> dict[str, float | None]:
        """Means over what all processes noted since last asked; then starts anew.

        Every process must call.

        Returns:
            gate_positive: share with psi = +1. smoothing_raised: share with psi gamma > 0, so
            with a above the base. smoothing, smoothing_correct, smoothing_wrong: mean a of all,
            of the rightly and of the wrongly predicted. None where there was no such sample.
        """
        count, sums = add_up(self.count).tolist(), add_up(self.sums).tolist()
        self.count.zero_()
        self.sums.zero_()
        rows = zip(FIGURES, sums, strict=True)
        health = {name: _ratio(sum(row), sum(count)) for name, row in rows}
        health["smoothing_correct"] = _ratio(sums[2][0], count[0])
        health["smoothing_wrong"] = _ratio(sums[2][1], count[1])
        return health


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None
