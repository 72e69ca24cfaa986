"""One step of stage one: both losses, their gradients, one update of the weights."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from calib.batch_norms import mixed_pass
from calib.batches import Batch
from calib.classifier import Network
from calib.config import TrainConfig
from calib.losses import MixedLoss, build_mixed_loss
from calib.losses.base import RealLoss
from calib.methods import Method
from calib.micro_batches import Part, micro_batches
from calib.optimiser import build_optimiser
from calib.processes import share_gradients
from calib.training_forward import TrainingForward


@dataclass(frozen=True)
class TrainingStep:
    """L = L_real(real images) + weight * L_mixed(mixed images), one update a batch.

    Two forward passes share the network, the mixed one last, as in CSM's code. The real loss,
    with whatever state it has, never sees a mixed image. Parameters of loss and method are in the
    optimiser, outside the clipping.

    Attributes:
        forward: the network as accelerate has prepared it.
    """

    config: TrainConfig
    network: Network
    forward: nn.Module
    method: Method
    loss: RealLoss
    mixed_loss: MixedLoss
    optimiser: AcceleratedOptimizer
    accelerator: Accelerator

    def __call__(self, batch: Batch) -> Tensor:
        """Returns real loss, mixed loss and accuracy of this process's share, float32 [3]."""
        *first, last = micro_batches(batch, self.config.accumulate)
        figures = []
        for part in first:
            with self.accelerator.no_sync(self.forward):
                figures.append(self._backward(part))
        figures.append(self._backward(last))
        self._update()
        return torch.stack(figures).sum(0) if first else figures[0]

    def _backward(self, part: Part) -> Tensor:
        """Add a part's gradients; returns its share of the step's figures."""
        batch = part.batch
        outcome = self.method(self.forward, batch, self.loss)
        real = total = part.real * outcome.loss
        mixed = torch.zeros_like(real)
        settings = self.config.mixed
        if settings is not None and batch.mixed_images is not None:
            assert batch.mixed_labels is not None
            with mixed_pass(self.network, settings.batch_norm):
                mixed = part.mixed * self.method.on_mixed(
                    self.forward, batch.mixed_images, batch.mixed_labels, self.mixed_loss
                )
            total = real + settings.weight * mixed
        self.accelerator.backward(total)
        right = part.real * (outcome.logits.argmax(1) == outcome.targets).float().mean()
        return torch.stack([real.detach().float(), mixed.detach().float(), right])

    def _update(self) -> None:
        share_gradients(self.loss.parameters(), self.accelerator)
        share_gradients(self.method.parameters(), self.accelerator)
        self.method.after_backward(self.network.backbone)
        if self.config.optimiser.clip_norm is not None:
            limit = self.config.optimiser.clip_norm
            self.accelerator.clip_grad_norm_(self.network.parameters(), limit)
        self.optimiser.step()
        self.optimiser.zero_grad()


def prepared_step(
    config: TrainConfig,
    network: Network,
    method: Method,
    loss: RealLoss,
    *,
    accelerator: Accelerator,
) -> TrainingStep:
    """A step with an optimiser for all that these modules learn, both as accelerate wants them."""
    parameters = [p for module in (network, loss, method) for p in module.parameters()]
    forward, optimiser = accelerator.prepare(
        TrainingForward(network, compiled=config.compile),
        build_optimiser(config.optimiser, parameters),
    )
    return TrainingStep(
        config=config,
        network=network,
        forward=forward,
        method=method,
        loss=loss,
        mixed_loss=build_mixed_loss(config.mixed.loss if config.mixed else "l2"),
        optimiser=optimiser,
        accelerator=accelerator,
    )
