"""Stage two: MaC-Cal's masked head on the frozen network, from real images alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional

from calib.batches import Batch, Batches
from calib.checkpoint import Checkpoint, save_tensors
from calib.classifier import Network
from calib.config import HeadConfig, TrainConfig
from calib.epochs import Figures
from calib.evaluate import in_chunks
from calib.heads import SparsityController, build_head, controller_params
from calib.optimiser import build_optimiser, learning_rate, set_learning_rate
from calib.training_data import TrainingData
from data.fingerprint import derived_seed


class HeadStage:
    """Trains a masked head with cross-entropy on features of a network in eval mode.

    Without augmentation the features are the same in every epoch and computed once.

    Args:
        network: of stage one; its weights and batch norms are left as they are.
    """

    name = "head"

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        *,
        network: Network,
        seed: int,
        accelerator: Accelerator,
    ) -> None:
        assert config.head is not None
        self.settings, self.seed, self.accelerator = config.head, seed, accelerator
        self.epochs = config.head.epochs
        self.network = network.to(accelerator.device).eval().requires_grad_(False)
        self.batches = _batches(config, config.head, data, accelerator)
        self.images = len(self.batches) * self.batches.batch_size
        features = in_chunks(self.network.features, self.batches.images)  # [N, D]
        augmented = config.augment.shift > 0 or config.augment.flip
        self._cached = None if augmented else features
        torch.manual_seed(derived_seed(seed, "head weights"))
        head = build_head(config.head, network.num_features, data.num_classes)
        self.head = head.to(accelerator.device)
        self.controller = SparsityController(
            base_accuracy=self._base_accuracy(features),
            seed=derived_seed(seed, "masks"),
            **controller_params(config.head),
        )
        optimiser = build_optimiser(config.head.optimiser, self.head.parameters())
        self.prepared, self.optimiser = accelerator.prepare(self.head, optimiser)

    def train_epoch(self, epoch: int) -> Figures:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "head", epoch))
        self.head.train()
        self.head.start_epoch(self.controller.p, self.controller.generator)
        sums = torch.zeros(4, device=self.accelerator.device)
        for step, batch in enumerate(self.batches.epoch(generator)):
            self._set_learning_rate(epoch * len(self.batches) + step)
            sums += self._step(batch)
        loss, right, confidence, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        figures: Figures = {"loss": loss / count, "accuracy": right / count}
        figures |= {"confidence": confidence / count, "p": self.controller.p}
        # Rounding may lift a mean of float32 confidences above 1 by a last digit.
        confidence = min(confidence / count, 1.0)
        self.controller.end_epoch(accuracy=right / count, confidence=confidence)
        return figures

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"head": self.head.state_dict()}

    def objects(self) -> Mapping[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "optimiser": self.optimiser.state_dict(),
            "scaler": scaler.state_dict() if scaler else {},
            "controller": self.controller.state_dict(),
        }

    def load(self, checkpoint: Checkpoint) -> None:
        checkpoint.load_module("head", self.head)
        objects = checkpoint.objects()
        self.optimiser.load_state_dict(objects["optimiser"])
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(objects["scaler"])
        self.controller.load_state_dict(objects["controller"])

    def export(self, path: Path, *, digest: str) -> None:
        save_tensors(path, self.head.state_dict(), metadata={"digest": digest})

    def _base_accuracy(self, features: Tensor) -> float:
        """Stage one's accuracy on the training images as they are, agreed by all processes."""
        found = in_chunks(self.network.backbone.classifier, features).argmax(1).cpu()
        share = (found == self.batches.targets).float().mean().to(self.accelerator.device)
        return self.accelerator.reduce(share, reduction="mean").item()

    def _set_learning_rate(self, step: int) -> None:
        settings, steps = self.settings.optimiser, len(self.batches)
        rate = learning_rate(settings, step, steps=steps, epochs=self.epochs)
        set_learning_rate(self.optimiser, rate)

    def _features(self, batch: Batch) -> Tensor:
        if self._cached is not None:
            return self._cached[batch.indices]
        with torch.no_grad():
            return self.network.features(batch.images)

    def _step(self, batch: Batch) -> Tensor:
        """One update; returns loss, right predictions, confidence and images, summed."""
        logits = self.prepared(self._features(batch)).float()
        loss = functional.cross_entropy(logits, batch.targets)
        self.accelerator.backward(loss)
        self.head.after_backward()
        if self.settings.optimiser.clip_norm is not None:
            limit = self.settings.optimiser.clip_norm
            self.accelerator.clip_grad_norm_(self.head.parameters(), limit)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.head.after_step()
        confidence, predicted = logits.detach().softmax(1).max(1)
        count = len(batch.targets)
        sums = [loss * count, (predicted == batch.targets).sum(), confidence.sum()]
        return torch.stack([p.detach().float() for p in [*sums, torch.full_like(loss, count)]])


def _batches(
    config: TrainConfig, head: HeadConfig, data: TrainingData, accelerator: Accelerator
) -> Batches:
    return Batches(
        data.train_images,
        data.train_targets,
        batch_size=head.batch_size,
        augment=config.augment,
        device=accelerator.device,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )
