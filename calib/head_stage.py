"""Stage two: a new head on the frozen network, from features of real images alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from calib.checkpoint import Checkpoint, save_tensors
from calib.classifier import Network
from calib.config import TrainConfig
from calib.epochs import Figures
from calib.middle import Middle
from calib.optimiser import build_optimiser, learning_rate, set_learning_rate
from calib.processes import share_gradients
from calib.second_stage import build_objective
from calib.second_stage.divergence import refuse_diverged
from calib.second_stage.feedback import HeadFeedback, PlainFeatures
from calib.second_stage.memory import check_memory
from calib.second_stage.training_accuracy import batch_sums, means, measure
from calib.second_stage.views import FeatureViews
from calib.selection import Selection, validation_measures
from calib.stopping import Stop, Stopped, never
from calib.training_data import TrainingData
from data.files import write_json
from data.fingerprint import derived_seed


class HeadStage:
    """Trains a head on features of a network in eval mode, which are made for a whole epoch.

    What a kind of head does besides following the gradient of its loss is its objective's. The
    loss's parameters are in the optimiser, outside the clipping. The features are made in the
    accelerator's precision, the head is trained in float32.

    Args:
        network: of stage one; its weights and batch norms are left as they are.
    Raises:
        InputError: features that do not fit, or a batch that cannot be shared out equally.
    """

    name = "head"
    finished = False

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
        check_memory(config, images=len(data.real.train), num_classes=data.num_classes)
        self.settings, self.seed, self.accelerator = config.head, seed, accelerator
        self.epochs = config.head.epochs
        network = network.to(accelerator.device).to(memory_format=torch.channels_last)
        self.network = network.eval().requires_grad_(False)
        self.views = FeatureViews(config, data, network=network, seed=seed, accelerator=accelerator)
        self.steps, self.images = self.views.steps, self.views.images
        self.targets = data.train_targets.to(accelerator.device)
        self.plain = PlainFeatures(network, data, self.views)
        self.objective = build_objective(
            config.head,
            in_features=network.num_features,
            num_classes=data.num_classes,
            num_samples=len(self.targets),
            base_accuracy=self._base_accuracy,
            seed=seed,
        ).to(accelerator.device)
        self.head, self.loss = self.objective.head, self.objective.loss
        self.selection = Selection(config.head.select, None)
        self.history: list[dict[str, Any]] = []
        self.middle: Middle | None = None
        # Not accelerate's wrappers: a step of theirs takes longer than one of so small a head.
        self.parameters = list(self.objective.parameters())
        self.optimiser = build_optimiser(config.head.optimiser, self.parameters)

    def train_epoch(self, epoch: int, stop: Stop = never) -> Figures:
        """Train an epoch, or what is left of it after `middle`; returns its figures.

        Raises:
            Diverged: the loss or a weight is NaN or infinite.
            Stopped: `stop` said so; `middle` holds the place, or is None where no step was made.
        """
        features = self.views.of_epoch(epoch, stop)
        process = self.accelerator.process_index
        torch.manual_seed(derived_seed(self.seed, "latents", epoch, process))
        done, figures, sums = self._start()
        self.objective.train()
        for step, chosen in enumerate(self.views.order(epoch)[done:], done):
            self._set_learning_rate(epoch * self.steps + step)
            sums += self._step(features[chosen], chosen)
            if step + 1 < self.steps and stop():
                self._stop(step + 1, figures, sums)
        loss, accuracy, confidence = means(sums, self.images, self.accelerator)
        refuse_diverged(loss, self.objective)
        if self.objective.extra_pass:
            accuracy, confidence = measure(self.head, features, self.targets, self.accelerator)
        self.objective.end_epoch(accuracy=accuracy, confidence=confidence)
        figures |= {"loss": loss, "accuracy": accuracy, "confidence": confidence}
        figures |= {**self.loss.pop_health(), **self._judge(epoch)}
        self.history.append({"epoch": epoch, **figures})
        return figures

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        named = {"head": self.head.state_dict(), "loss": self.loss.state_dict()}
        return {**named, "best": self.selection.best} if self.selection.best else named

    def objects(self) -> Mapping[str, Any]:
        return {
            "optimiser": self.optimiser.state_dict(),
            "objective": self.objective.objects(),
            "selection": self.selection.state_dict(),
            "history": self.history,
            "middle": self.middle.state_dict() if self.middle else None,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        checkpoint.load_module("head", self.head)
        checkpoint.load_module("loss", self.loss)
        objects = checkpoint.objects()
        self.optimiser.load_state_dict(objects["optimiser"])
        self.objective.load_objects(objects["objective"])
        chosen = objects["selection"]["best_epoch"] is not None
        best = checkpoint.tensors("best") if chosen else {}
        self.selection.load_state_dict(objects["selection"], best)
        self.history = objects["history"]
        self.middle = Middle.of(objects.get("middle"), self.accelerator)

    def export(self, path: Path, *, digest: str) -> None:
        """Write the chosen head, and beside it, as .json, what became of it epoch by epoch."""
        kept = self.selection.best or self.head.state_dict()
        epoch = self.selection.state_dict()["best_epoch"]
        record = {
            "digest": digest,
            "method": self.settings.method,
            "select": self.settings.select,
            "epoch": self.epochs - 1 if epoch is None else epoch,
            **self.objective.describe(kept),
            "history": self.history,
        }
        write_json(path.with_suffix(".json"), record)
        save_tensors(path, kept, metadata={"digest": digest})  # last: it says that all is there

    def _start(self) -> tuple[int, Figures, Tensor]:
        """Steps done before, what is in force in the epoch, and the sums over those steps."""
        middle, self.middle = self.middle, None
        if middle is None:
            return 0, self.objective.start_epoch(), torch.zeros(3, device=self.accelerator.device)
        kept = middle.restore({"objective": self.objective}, self.accelerator)
        return middle.step, kept["figures"], kept["sums"].to(self.accelerator.device)

    def _stop(self, done: int, figures: Figures, sums: Tensor) -> None:
        """Raises Stopped, or Diverged rather than keep what is of no use."""
        refuse_diverged(means(sums, self.images, self.accelerator)[0], self.objective)
        self.middle = Middle.here(
            done,
            {"figures": figures, "sums": sums.cpu()},
            modules={"objective": self.objective},
            accelerator=self.accelerator,
        )
        raise Stopped

    def _set_learning_rate(self, step: int) -> None:
        settings = self.settings.optimiser
        rate = learning_rate(settings, step, steps=self.steps, epochs=self.epochs)
        set_learning_rate(self.optimiser, rate)

    def _step(self, features: Tensor, chosen: Tensor) -> Tensor:
        """One update; returns loss, right predictions and confidence, summed."""
        targets = self.targets[chosen]
        loss, logits = self.objective(features, targets, chosen)
        loss.backward()
        share_gradients(self.parameters, self.accelerator)
        self.objective.after_backward()
        if self.settings.optimiser.clip_norm is not None:
            clip_grad_norm_(self.head.parameters(), self.settings.optimiser.clip_norm)
        self.optimiser.step()
        self.objective.zero_grad()
        self.objective.after_step()
        return batch_sums(loss, logits, targets)

    def _judge(self, epoch: int) -> Figures:
        """Let the loss learn from the epoch; measure validation where a setting asks for it."""
        feedback = HeadFeedback(self.head, self.plain)
        self.loss.end_epoch(feedback)
        if not self.selection.watching:
            return {}
        measures = validation_measures(feedback.outputs("validation"))
        self.selection.note(measures, self.head, epoch)
        return {f"validation_{name}": value for name, value in measures.items()}

    def _base_accuracy(self) -> float:
        """Of stage one, on the training images as they are."""
        classifier = self.network.backbone.classifier
        features = self.plain.of("train")
        return measure(classifier, features, self.targets, self.accelerator)[0]
