"""Pixels on the device that generated them."""

import torch
import torch.nn.functional as F
from torch import Tensor


def resized(images: Tensor, size: int | None) -> Tensor:
    """Scale uint8 [G, A, H, W, 3] to [G, A, size, size, 3] by area; None leaves it as it is.

    Each new pixel is the mean of those it covers, rounded once; Pillow's BOX filter rounds twice.
    """
    if size is None or images.shape[2:4] == (size, size):
        return images
    flat = images.flatten(0, 1).permute(0, 3, 1, 2).float()
    small = F.interpolate(flat, (size, size), mode="area").round().to(torch.uint8)
    return small.permute(0, 2, 3, 1).unflatten(0, images.shape[:2])
