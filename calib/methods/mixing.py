"""Pairs within a batch: who with whom, how much of each, and their blend."""

import torch
from torch import Tensor
from torch.nn import functional

from calib.batches import pin
from calib.losses.mixed import soft_cross_entropy
from calib.methods.base import Forward, Outcome
from calib.parameters import in_range


def check_alpha(alpha: float) -> None:
    """Raises InputError unless Beta(alpha, alpha) is a distribution."""
    in_range("method.alpha", alpha, low=1e-6, high=1e6, what="must be above 0")


def draw_weight(alpha: float) -> float:
    """lambda ~ Beta(alpha, alpha), from torch's global generator on the CPU."""
    return float(torch.distributions.Beta(alpha, alpha).sample())


def draw_partners(targets: Tensor) -> Tensor:
    """A random order of the batch [B], drawn on the CPU so that every device has the same."""
    partners = pin(torch.randperm(len(targets)), targets.device)
    return partners.to(targets.device, non_blocking=True)


def blend(values: Tensor, partners: Tensor, weight: float) -> Tensor:
    """weight x_i + (1 - weight) x_partner(i), float32, of images or labels [B, ...]."""
    values = values.float()
    return weight * values + (1 - weight) * values[partners]


def blended_labels(targets: Tensor, partners: Tensor, weight: float, num_classes: int) -> Tensor:
    """Soft labels [B, K] of a blend; one-hot where both images are of one class."""
    return blend(functional.one_hot(targets, num_classes), partners, weight)


def soft_outcome(network: Forward, images: Tensor, labels: Tensor) -> Outcome:
    """Cross-entropy of images [B, S, S, 3] against soft labels [B, K]."""
    logits, _ = network(images)
    return Outcome(soft_cross_entropy(logits, labels), logits, labels.argmax(1))
