"""Whether the features that a second stage keeps fit into memory, before any is made."""

import torch

from calib.classifier import Network
from calib.config import AugmentConfig, TrainConfig
from data.errors import InputError

LIMIT = 16 * 2**30  # bytes


def check_memory(config: TrainConfig, *, images: int, num_classes: int) -> None:
    """Compare views * images * width * 4 bytes with the limit; nothing where there is no head.

    Args:
        images: of the training set.
    Raises:
        InputError: names `head.views`, and how many would fit.
    """
    if config.head is None:
        return
    with torch.device("meta"):  # shapes only
        width = Network(config, num_classes).num_features
    each, views = 4 * images * width, 1
    if is_augmented(config.augment) and config.head.views is not None:
        views = min(config.head.views, config.head.epochs)
    if views * each > LIMIT:
        need = f"{width} features of {images} images take {views * each / 2**30:.1f} GiB"
        most = LIMIT // each
        change = f"choose at most {most}" if most else "choose a smaller real.train_per_class"
        remedy = f"{need}, the limit is {LIMIT / 2**30:g} GiB; {change}"
        raise InputError("head.views", config.head.views, remedy)


def is_augmented(augment: AugmentConfig) -> bool:
    return augment.shift > 0 or augment.flip
