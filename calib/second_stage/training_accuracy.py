"""Accuracy and mean confidence on the training images, over all processes."""

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from calib.second_stage.feedback import predict


def batch_sums(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Loss, right predictions and confidence of a batch, summed: float32 [3], without gradient."""
    confidence, predicted = logits.detach().softmax(1).max(1)
    right = (predicted == targets).float().sum()
    return torch.stack([loss.detach() * len(targets), right, confidence.sum()])


def means(sums: Tensor, count: int, accelerator: Accelerator) -> list[float]:
    """Sums of every process, over the images of all of them."""
    found = accelerator.reduce(sums, reduction="sum").tolist()
    return [total / count for total in found]


def measure(
    classifier: nn.Module, features: Tensor, targets: Tensor, accelerator: Accelerator
) -> tuple[float, float]:
    """Accuracy and confidence of a classifier of features, in eval mode; the work is shared.

    Args:
        features, targets: [N, D] and [N], all of them in every process.
    """
    process, processes = accelerator.process_index, accelerator.num_processes
    own, right = (t.tensor_split(processes)[process] for t in (features, targets))
    logits = predict(classifier, own)
    sums = batch_sums(logits.new_zeros(()), logits, right)
    _, accuracy, confidence = means(sums, len(targets), accelerator)
    return accuracy, confidence
