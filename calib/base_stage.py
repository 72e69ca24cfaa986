"""Stage one: a network on real images, and on mixed ones beside them."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from calib.batches import Batch, Batches
from calib.checkpoint import Checkpoint, save_tensors
from calib.classifier import Classifier, Network
from calib.config import TrainConfig
from calib.epochs import Figures
from calib.evaluate import predict
from calib.losses import build_loss, build_mixed_loss
from calib.optimiser import build_optimiser, learning_rate, set_learning_rate
from calib.training_data import TrainingData, decode
from data.fingerprint import derived_seed


class BaseStage:
    """Trains L = L_real(real images) + weight * L_mixed(mixed images), one step a batch.

    Two forward passes a step share the batch norms, the mixed one last, as in CSM's code. The
    real loss, with whatever state it has, never sees a mixed image. Parameters of the loss are
    in the optimiser, outside the clipping.
    """

    name = "base"

    def __init__(
        self, config: TrainConfig, data: TrainingData, *, seed: int, accelerator: Accelerator
    ) -> None:
        self.config, self.data, self.seed, self.accelerator = config, data, seed, accelerator
        self.epochs = config.epochs
        self.batches = _batches(config, data, accelerator)
        self.images = len(self.batches) * self.batches.batch_size
        torch.manual_seed(derived_seed(seed, "weights"))
        network = Network(config, data.num_classes)
        network.normalise.fit(data.train_images)
        self.network = network.to(accelerator.device).to(memory_format=torch.channels_last)
        self.loss = build_loss(config.loss.name, data.num_classes, **config.loss.params)
        self.loss.to(accelerator.device)
        self.mixed_loss = build_mixed_loss(config.mixed.loss if config.mixed else "l2")
        self.weight = config.mixed.weight if config.mixed else 0.0
        optimiser = build_optimiser(
            config.optimiser, [*self.network.parameters(), *self.loss.parameters()]
        )
        self.prepared, self.optimiser = accelerator.prepare(self.network, optimiser)
        self.best_accuracy = -1.0
        self.best: dict[str, Tensor] = {}

    def train_epoch(self, epoch: int) -> Figures:
        torch.manual_seed(
            derived_seed(self.seed, "base", epoch, self.accelerator.process_index)
        )  # for dropout
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "base", epoch))
        self.network.train()
        self.loss.train()
        sums = torch.zeros(4, device=self.accelerator.device)
        rate = 0.0
        for step, batch in enumerate(self.batches.epoch(generator)):
            rate = self._set_learning_rate(epoch * len(self.batches) + step)
            sums += self._step(batch)
        self._share_buffers()
        figures = {**self._means(sums), "learning_rate": rate, **self.loss.pop_health()}
        if self.config.select == "best_accuracy":
            figures["validation_accuracy"] = self._keep_if_best()
        return figures

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        named = {"network": self.network.state_dict(), "loss": self.loss.state_dict()}
        return {**named, "best": self.best} if self.best else named

    def objects(self) -> Mapping[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "optimiser": self.optimiser.state_dict(),
            "scaler": scaler.state_dict() if scaler else {},
            "best_accuracy": self.best_accuracy,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        checkpoint.load_module("network", self.network)
        checkpoint.load_module("loss", self.loss)
        objects = checkpoint.objects()
        self.optimiser.load_state_dict(objects["optimiser"])
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(objects["scaler"])
        self.best_accuracy = objects["best_accuracy"]
        if self.config.select == "best_accuracy":
            self.best = checkpoint.tensors("best")

    def export(self, path: Path, *, digest: str) -> None:
        """Write the chosen weights, which say what settings and data they come from."""
        tensors = self.best or self.network.state_dict()
        save_tensors(path, tensors, metadata={"digest": digest})

    def _set_learning_rate(self, step: int) -> float:
        settings, steps = self.config.optimiser, len(self.batches)
        rate = learning_rate(settings, step, steps=steps, epochs=self.epochs)
        set_learning_rate(self.optimiser, rate)
        return rate

    def _step(self, batch: Batch) -> Tensor:
        """One update; returns real loss, mixed loss, right predictions and images, summed."""
        count = len(batch.targets)
        logits, features = self.prepared(batch.images)
        real = self.loss(logits, batch.targets, features=features, indices=batch.indices)
        mixed = torch.zeros_like(real)
        if batch.mixed_images is not None and batch.mixed_labels is not None:
            mixed = self.mixed_loss(self.prepared(batch.mixed_images)[0], batch.mixed_labels)
        self.accelerator.backward(real + self.weight * mixed)
        self._share_loss_gradients()
        if self.config.optimiser.clip_norm is not None:
            limit = self.config.optimiser.clip_norm
            self.accelerator.clip_grad_norm_(self.network.parameters(), limit)
        self.optimiser.step()
        self.optimiser.zero_grad()
        right = (logits.argmax(1) == batch.targets).sum()
        sums = [real * count, mixed * count, right, torch.full_like(real, count)]
        return torch.stack([part.detach().float() for part in sums])

    def _means(self, sums: Tensor) -> Figures:
        real, mixed, right, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        figures: Figures = {"loss": real / count, "accuracy": right / count}
        if self.config.mixed is not None:
            figures["mixed_loss"] = mixed / count
        return figures

    def _share_loss_gradients(self) -> None:
        for parameter in self.loss.parameters():
            if parameter.grad is not None:
                parameter.grad = self.accelerator.reduce(parameter.grad, reduction="mean")

    def _share_buffers(self) -> None:
        """Average the batch norms' statistics, of which each process has its own."""
        if self.accelerator.num_processes > 1:
            for buffer in self.network.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(self.accelerator.reduce(buffer, reduction="mean"))

    def _keep_if_best(self) -> float:
        validation = self.data.real.validation
        classifier = Classifier(self.network).eval()
        logits = predict(classifier, decode(validation), device=self.accelerator.device)
        accuracy = (logits.argmax(1) == torch.from_numpy(validation.targets)).float().mean().item()
        if accuracy > self.best_accuracy:
            self.best_accuracy, self.best = accuracy, copy.deepcopy(self.network.state_dict())
        return accuracy


def _batches(config: TrainConfig, data: TrainingData, accelerator: Accelerator) -> Batches:
    return Batches(
        data.train_images,
        data.train_targets,
        batch_size=config.batch_size,
        augment=config.augment,
        device=accelerator.device,
        mixed=data.mixed,
        class_matched=config.mixed is not None and config.mixed.class_matched,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )
