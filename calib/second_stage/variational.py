"""VTST's objective: cross-entropy at one latent draw, with the latent's divergence."""

import torch
from torch import Tensor

from calib.heads.vtst import VTSTHead, divergence
from calib.second_stage.objective import Objective


class VariationalObjective(Objective):
    """Adds KL(q || N(0, I)) / Z to the loss."""

    head: VTSTHead

    def forward(self, features: Tensor, targets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.head.encode(features)
        logits = self.head.decode(mean, log_variance, torch.randn_like(mean))
        loss = self.loss(logits, targets, features=features, indices=indices)
        return loss + divergence(mean, log_variance), logits
