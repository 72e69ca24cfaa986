"""The cost of a network per image, and whether its stem fits the images."""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from semix.calib.config import TrainConfig
from semix.calib.config.model import TimmConfig

# Sides of the last feature map. Networks are designed to end in maps of 4 to 8 pixels; larger
# ones cost much for no gain in accuracy, smaller ones lose the positions of things in the image.
SMALLEST_MAP, LARGEST_MAP = 2, 16


@dataclass(frozen=True)
class Complexity:
    """Cost of a classifier in inference; training takes about three times the multiplications.

    Attributes:
        name: of the model, with its stem.
        side: of its images, pixels.
        gmac: billions of multiply-accumulate operations per image, forward.
        parameters: number of trainable weights.
        map_side: of the last feature map; None if the features are tokens.
    """

    name: str
    side: int
    gmac: float
    parameters: int
    map_side: int | None

    def __str__(self) -> str:
        """`resnet50 (imagenet stem): 4.09 GMAC per image of 224 pixels, 23.5 million weights`."""
        cost = f"{self.gmac:.3g} GMAC per image of {self.side} pixels"
        text = f"{self.name}: {cost}, {self.parameters / 1e6:.3g} million weights"
        return text if self.map_side is None else f"{text}, last map {self._map}"

    @property
    def remedy(self) -> str:
        """How the stem does not fit the images, and what to choose; empty if it fits."""
        if self.map_side is None or SMALLEST_MAP <= self.map_side <= LARGEST_MAP:
            return ""
        if self.map_side > LARGEST_MAP:
            problem = f"its stem is for smaller images: the last map is larger than {LARGEST_MAP} x"
            choice = "resnet18 to resnet152 with `stem: imagenet`, or a network of timm"
            return f"{problem} {LARGEST_MAP}; choose {choice}, or a smaller real.image_size"
        problem = f"it is made for larger images: the last map is smaller than {SMALLEST_MAP} x"
        choice = "resnet18 to resnet152 with `stem: small`, resnet8 to resnet110"
        return f"{problem} {SMALLEST_MAP}; choose {choice}, or a larger real.image_size"

    @property
    def _map(self) -> str:
        return f"{self.map_side} x {self.map_side}"


def complexity(config: TrainConfig, num_classes: int) -> Complexity:
    """Count with torch's FLOP counter on the meta device, without computing anything.

    Raises:
        InputError: a model that cannot be built.
    """
    model, side = config.model, config.real.image_size
    with torch.device("meta"):
        network = model.build(num_classes).eval()
        image = torch.empty(1, 3, side, side)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(image)
        map_side = network.map_side(image)
    name = model.architecture if isinstance(model, TimmConfig) else model.name
    stem = f" ({model.params['stem']} stem)" if "stem" in model.params else ""
    return Complexity(
        f"{name}{stem}",
        side,
        counter.get_total_flops() / 2e9,  # a multiplication and an addition count as two
        sum(parameter.numel() for parameter in network.parameters()),
        map_side,
    )
