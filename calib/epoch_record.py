"""What each step of an epoch says, kept on the device, so that no step waits for it."""

import torch
from accelerate import Accelerator
from torch import Tensor

from calib.divergence import Diverged

FIGURES = ("loss", "mixed_loss", "accuracy")
LOSSES = {"real": 0, "mixed": 1}  # the figures that must be finite
CHECK_EVERY = 50  # steps between two looks, each a wait for the device


class EpochRecord:
    """Real loss, mixed loss and accuracy of this process's share of every step.

    Args:
        steps: of the epoch.
        accelerator: of the processes, which look and stop together.
    """

    def __init__(self, steps: int, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.figures = torch.zeros(steps, len(FIGURES), device=accelerator.device)

    def note(self, step: int, figures: Tensor) -> None:
        """Keep the figures of a step, float32 [3].

        Raises:
            Diverged: every CHECK_EVERY steps, as `check`.
        """
        self.figures[step] = figures
        if (step + 1) % CHECK_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Raises Diverged, in every process, for the first loss that is NaN or infinite."""
        bad = ~self.figures[:, : len(LOSSES)].isfinite().flatten()
        places = torch.arange(len(bad), device=bad.device)
        first = torch.where(bad, places, len(bad)).min()
        place = int(self.accelerator.gather(first[None]).min())
        if place < len(bad):
            step, part = divmod(place, len(LOSSES))
            where = f"step {step + 1} of {len(self.figures)}"
            raise Diverged(f"{where}: the {list(LOSSES)[part]} loss is NaN or infinite")

    def means(self) -> dict[str, float]:
        """Over the steps and processes, which all have equally many images."""
        means = self.accelerator.reduce(self.figures.double().mean(0), reduction="mean")
        return dict(zip(FIGURES, means.tolist(), strict=True))
