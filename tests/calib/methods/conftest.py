"""Small batches, and a linear network on which every method can be worked out by hand."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from semix.calib.batches import TrainingBatch

CLASSES, SIZE = 5, 4


class Linear(nn.Module):
    """Logits W x of the flattened pixels in 0..1; its features are those pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * SIZE * SIZE, CLASSES)
        self.inputs: list[Tensor] = []

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        self.inputs.append(images)
        pixels = images.float().flatten(1) / 255
        return self.layer(pixels), pixels


@pytest.fixture
def linear() -> Linear:
    torch.manual_seed(0)
    return Linear()


@pytest.fixture
def make_batch() -> Callable[..., TrainingBatch]:
    """make_batch(samples, seed): random images of random classes."""

    def make(samples: int = 8, seed: int = 0) -> TrainingBatch:
        rng = torch.Generator().manual_seed(seed)
        shape = (samples, SIZE, SIZE, 3)
        images = torch.randint(256, shape, generator=rng, dtype=torch.uint8)
        targets = torch.randint(CLASSES, (samples,), generator=rng)
        return TrainingBatch(images, targets, torch.arange(samples))

    return make


@pytest.fixture
def peer() -> "Peer":
    return Peer()


class Peer:
    """The linear network and soft cross-entropy once more, in NumPy and float64."""

    def logits(self, network: Linear, images: Tensor) -> np.ndarray:
        weight, bias = (p.detach().double().numpy() for p in network.layer.parameters())
        return self.pixels(images) @ weight.T + bias

    def pixels(self, images: Tensor) -> np.ndarray:
        return images.double().numpy().reshape(len(images), -1) / 255

    def softmax(self, logits: np.ndarray) -> np.ndarray:
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)

    def one_hot(self, targets: Tensor) -> np.ndarray:
        return np.eye(CLASSES)[targets.numpy()]

    def cross_entropy(self, logits: np.ndarray, labels: np.ndarray) -> float:
        return float(-(labels * np.log(self.softmax(logits))).sum(1).mean())

    def weight_gradient(self, network: Linear, images: Tensor, labels: np.ndarray) -> np.ndarray:
        """The gradient of the mean soft cross-entropy."""
        errors = self.softmax(self.logits(network, images)) - labels
        return errors.T @ self.pixels(images) / len(images)
