"""Logits of many images, a part at a time, shared out among processes."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from calib.processes import wait_for_all
from data.device import float32_precision
from data.splits import ImageSplit

if TYPE_CHECKING:
    from accelerate import Accelerator

CHUNK = 500  # images in one forward pass
Load = Callable[[int, int], Tensor]  # images start..stop-1, uint8 [B, S, S, 3]


def predict(classifier: nn.Module, images: Tensor, *, device: torch.device) -> Tensor:
    """Logits of uint8 [N, S, S, 3], float32 [N, K] on the CPU. Takes the module's mode as it is."""
    return in_chunks(classifier.to(device), images, device=device).cpu()


@torch.no_grad()
@float32_precision("ieee")
def in_chunks(
    function: Callable[[Tensor], Tensor], rows: Tensor, *, device: torch.device | None = None
) -> Tensor:
    """Apply a function without gradients to many rows, a part at a time."""
    return torch.cat([function(part.to(device or part.device)) for part in rows.split(CHUNK)])


@torch.no_grad()
@float32_precision("ieee")
def predict_all(
    classifiers: Sequence[nn.Module],
    load: Load,
    count: int,
    *,
    num_classes: int,
    device: torch.device,
    accelerator: "Accelerator | None" = None,
) -> Tensor:
    """Logits of several classifiers for the same images, which are loaded once.

    Several processes each run whole chunks, the same as one process would, and gather the
    others': all of them must call, and all get the same complete logits in order.

    Args:
        classifiers: on any device, in eval mode; are moved to `device`.
        load: called for the images of each chunk.
    Returns:
        float32 [C, N, K] on the CPU.
    """
    processes = 1 if accelerator is None else accelerator.num_processes
    process = 0 if accelerator is None else accelerator.process_index
    share = math.ceil(math.ceil(count / CHUNK) / processes) * CHUNK  # images a process
    found = torch.zeros(share, len(classifiers), num_classes)
    for module in classifiers:
        module.to(device)
    for start in range(process * share, min(count, (process + 1) * share), CHUNK):
        images = load(start, min(count, start + CHUNK)).to(device)
        logits = torch.stack([module(images).float() for module in classifiers], dim=1)
        found[start - process * share :][: len(images)] = logits.cpu()
    if accelerator is not None and processes > 1:
        wait_for_all(accelerator)  # the main process may still measure what came before
        found = accelerator.gather(found.to(accelerator.device)).cpu()
    return found[:count].movedim(1, 0)


def images_of(split: ImageSplit) -> Load:
    """A split that is decoded as it is asked for."""
    return lambda start, stop: torch.from_numpy(split.images(np.arange(start, stop)))
