"""Choose what trains the head that the settings name."""

from collections.abc import Callable

import torch

from calib.config.head import HeadConfig
from calib.heads import (
    MaskedBottleneckHead,
    SparsityController,
    VTSTHead,
    build_head,
    controller_params,
)
from calib.losses import build_training_loss
from calib.losses.cross_entropy import CrossEntropy
from calib.second_stage.masked import MaskedObjective
from calib.second_stage.objective import Objective
from calib.second_stage.variational import VariationalObjective
from data.fingerprint import derived_seed


def build_objective(
    config: HeadConfig,
    *,
    in_features: int,
    num_classes: int,
    num_samples: int,
    base_accuracy: Callable[[], float],
    seed: int,
) -> Objective:
    """A fresh head with what trains it, on the CPU.

    Args:
        num_samples: training images.
        base_accuracy: of stage one on the training set; asked where it is needed.
        seed: of the run; weights and masks each have a seed of their own.
    """
    torch.manual_seed(derived_seed(seed, "head weights"))
    head = build_head(config, in_features, num_classes)
    if config.method == "mac_cal":
        assert isinstance(head, MaskedBottleneckHead)
        controller = SparsityController(
            base_accuracy=base_accuracy(),
            seed=derived_seed(seed, "masks"),
            **controller_params(config),
        )
        loss = build_training_loss(
            config.loss.name, num_classes, num_samples=num_samples, params=config.loss.params
        )
        return MaskedObjective(head, loss, controller=controller, extra_pass=config.extra_pass)
    loss = CrossEntropy(num_classes)
    if isinstance(head, VTSTHead):
        return VariationalObjective(head, loss)
    return Objective(head, loss)
