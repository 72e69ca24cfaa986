"""One step of stage one: forward passes, losses, gradients, the update, and its metrics."""

import os
import shutil
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from semix.calib.batches import MicroBatch, TrainingBatch, split_batch
from semix.calib.config import TrainConfig
from semix.calib.divergence import Diverged
from semix.calib.losses import MixedLoss, build_mixed_loss
from semix.calib.losses.base import RealLoss
from semix.calib.methods import Method
from semix.calib.network import Network, mixed_pass
from semix.calib.optimiser import build_optimiser
from semix.calib.processes import average_gradients
from semix.data.errors import InputError
from semix.data.machine import keep_compiled_to_ourselves


@dataclass(frozen=True)
class TrainingStep:
    """Makes one update per batch, of L = L_real(real images) + weight * L_mixed(mixed images).

    Real and mixed images have separate forward passes, the mixed ones second, as in CSM's code. The
    real loss and its state never get a mixed image. The optimiser also trains the parameters of
    loss and method, whose gradients are not clipped.

    Attributes:
        forward: the network, prepared by accelerate.
    """

    config: TrainConfig
    network: Network
    forward: nn.Module
    method: Method
    loss: RealLoss
    mixed_loss: MixedLoss
    optimiser: AcceleratedOptimizer
    accelerator: Accelerator

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """Make one update; returns this process's STEP_METRICS, float32 [7]."""
        *others, last = split_batch(batch, self.config.accumulate)
        metrics = []
        for micro_batch in others:
            with self.accelerator.no_sync(self.forward):
                metrics.append(self._backward(micro_batch))
        metrics.append(self._backward(last))
        self._update()
        return torch.stack(metrics).sum(0) if others else metrics[0]

    def _backward(self, micro_batch: MicroBatch) -> Tensor:
        """Add the gradients of a micro-batch; returns its summand of the step's metrics."""
        batch = micro_batch.batch
        real_pass = self.method(self.forward, batch, self.loss)
        real = total = micro_batch.real_fraction * real_pass.loss
        mixed, mixed_means = torch.zeros_like(real), real.new_zeros(4, dtype=torch.float32)
        settings = self.config.mixed
        if settings is not None and batch.mixed_images is not None:
            assert batch.mixed_labels is not None
            assert batch.mixed_kinds is not None
            with mixed_pass(self.network, settings.batch_norm):
                loss, logits = self.method.on_mixed(
                    self.forward, batch.mixed_images, batch.mixed_labels, self.mixed_loss
                )
            mixed = micro_batch.mixed_fraction * loss
            mixed_means = confidence_and_label(logits, batch.mixed_labels, batch.mixed_kinds)
            total = real + settings.weight * mixed
        self.accelerator.backward(total)
        correct = (real_pass.logits.argmax(1) == real_pass.targets).float()
        accuracy = micro_batch.real_fraction * correct.mean()
        metrics = torch.stack([real.detach().float(), mixed.detach().float(), accuracy])
        return torch.cat([metrics, mixed_means])

    def _update(self) -> None:
        average_gradients(self.loss.parameters(), self.accelerator)
        average_gradients(self.method.parameters(), self.accelerator)
        self.method.after_backward(self.network.backbone)
        if self.config.optimiser.clip_norm is not None:
            limit = self.config.optimiser.clip_norm
            self.accelerator.clip_grad_norm_(self.network.parameters(), limit)
        self.optimiser.step()
        self.optimiser.zero_grad()


def prepare_step(
    config: TrainConfig,
    network: Network,
    method: Method,
    loss: RealLoss,
    *,
    accelerator: Accelerator,
) -> TrainingStep:
    """Build the training step, with an optimiser for all parameters; accelerate prepares both."""
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


class TrainingForward(nn.Module):
    """The forward pass of a network in training.

    accelerate replaces a module's forward by one of another precision, and torch.compile replaces
    its class. Both change this wrapper and not the network, which keeps the names of its state, can
    be copied, and is measured in float32.

    Raises:
        InputError: there is no folder for compiled programs.
    """

    def __init__(self, network: nn.Module, *, compiled: bool) -> None:
        super().__init__()
        if compiled:
            keep_compiled_to_ourselves()
        # Batches of real and of mixed images differ in size; each size gets its own program.
        self.network = torch.compile(network, dynamic=False) if compiled else network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, K] and features [N, D] of images, uint8 or float [N, S, S, 3]."""
        logits, features = self.network(images)
        return logits, features


def check_compiler(device: torch.device) -> None:
    """Raise InputError if the compiler is missing that torch.compile calls for this device."""
    variable, program = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc")
    compiler = os.environ.get(variable, program)
    if shutil.which(compiler) is None:
        remedy = f"needs the compiler {compiler}, which is missing; install it, name another in "
        raise InputError("compile", True, f"{remedy}{variable}, or leave compile off")


def confidence_and_label(logits: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
    """Mean predicted probability and mean label of mixed images, of the class with largest label.

    Args:
        logits, labels: [M, K].
        kinds: as `TrainingBatch.mixed_kinds`, [M, 2]. Results of micro-batches add up to the means
            over the batch.
    Returns:
        float32 [4], without gradient: for end points the mean probability of the class with the
        largest label, and the mean of that label; then the same for inner images. Both are 0
        where a batch has no such images.
    """
    label, label_class = labels.max(1, keepdim=True)  # [M, 1]
    confidence = logits.detach().float().softmax(1).gather(1, label_class)
    pairs = torch.cat([confidence, label], dim=1)  # [M, 2]
    return (kinds[:, :, None] * pairs[:, None]).sum(0).flatten()


STEP_METRICS = (
    "loss",
    "mixed_loss",
    "accuracy",
    "mixed_confidence_end",
    "mixed_label_end",
    "mixed_confidence_interior",
    "mixed_label_interior",
)
LOSS_METRICS = {"real": 0, "mixed": 1}  # columns of the metrics that must be finite
CHECK_EVERY = 50  # steps between checks, each of which waits for the device


class EpochRecord:
    """The STEP_METRICS of every step of an epoch, of this process.

    Args:
        steps: number of steps of the epoch.
        accelerator: of the processes, which all raise Diverged if one of them does.
    """

    def __init__(self, steps: int, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.metrics = torch.zeros(steps, len(STEP_METRICS), device=accelerator.device)

    def note(self, step: int, metrics: Tensor) -> None:
        """Store the metrics of a step, float32 [7].

        Raises:
            Diverged: as `check`, which is called every CHECK_EVERY steps.
        """
        self.metrics[step] = metrics
        if (step + 1) % CHECK_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Raise Diverged, in every process, for the first loss that is NaN or infinite."""
        not_finite = ~self.metrics[:, : len(LOSS_METRICS)].isfinite().flatten()
        indices = torch.arange(len(not_finite), device=not_finite.device)
        first = torch.where(not_finite, indices, len(not_finite)).min()
        index = int(self.accelerator.gather(first[None]).min())
        if index < len(not_finite):
            step, column = divmod(index, len(LOSS_METRICS))
            position = f"step {step + 1} of {len(self.metrics)}"
            raise Diverged(f"{position}: the {list(LOSS_METRICS)[column]} loss is NaN or infinite")

    def means(self) -> dict[str, float]:
        """Means over all steps and processes, each of which has equally many images."""
        means = self.accelerator.reduce(self.metrics.double().mean(0), reduction="mean")
        return dict(zip(STEP_METRICS, means.tolist(), strict=True))
