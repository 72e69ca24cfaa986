"""Stage two: train a new head on the frozen network's features of real images."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from semix.calib.checkpoint import StateDict, save_tensors, sum_in_first_process
from semix.calib.config import HeadConfig, TrainConfig
from semix.calib.config.loss import CrossEntropyConfig
from semix.calib.divergence import Diverged, check_finite
from semix.calib.epoch_lines import SILENT, EpochLines
from semix.calib.features import (
    FeatureViews,
    HeadFeedback,
    UnaugmentedFeatures,
    accuracy_and_confidence,
    check_memory,
    means,
    sum_over_batch,
)
from semix.calib.heads import (
    MaskedBottleneckHead,
    SparsityController,
    VTSTHead,
    build_head,
    kl_divergence,
)
from semix.calib.loop import EpochMetrics, Stage
from semix.calib.losses import build_training_loss
from semix.calib.losses.base import CrossEntropy, Outputs, RealLoss
from semix.calib.network import Network
from semix.calib.optimiser import build_optimiser
from semix.calib.processes import average_gradients
from semix.calib.selection import EpochSelection
from semix.calib.stopping import ShouldStop, never
from semix.calib.training_data import TrainingData
from semix.data.files import write_json
from semix.data.fingerprint import derived_seed


class Objective(nn.Module):
    """The loss of a head on a batch of features; its parameters are those of head and loss.

    This base class is for heads that need only the gradient of the loss, such as TST's.
    The stage calls, in this order:

        objective.start_epoch()
        loss, logits = objective(features, targets, indices); loss.backward()
        objective.after_backward(); optimiser.step(); objective.after_step()
        objective.end_epoch(accuracy=..., confidence=...)

    and, after the last epoch, `objective.check_head_above_chance()`.

    Attributes:
        extra_pass: whether accuracy and confidence come from a separate pass in eval mode after
            the epoch, and not from the training passes.
    """

    extra_pass = False

    def __init__(self, head: nn.Module, loss: RealLoss) -> None:
        super().__init__()
        self.head, self.loss = head, loss

    def forward(self, features: Tensor, targets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss, and the logits [B, K] of features [B, D], all float32."""
        logits = self.head(features)
        return self.loss(logits, targets, features=features, indices=indices), logits

    def start_epoch(self) -> EpochMetrics:
        """Called before every epoch; returns metrics that are constant during the epoch."""
        return {}

    def after_backward(self) -> None:
        """Called between backward and the optimiser's step."""

    def after_step(self) -> None:
        """Called after the optimiser's step."""

    def end_epoch(self, *, accuracy: float, confidence: float) -> None:
        """Called after every epoch, with means over the training images in [0, 1]."""

    def check_head_above_chance(self) -> None:
        """Called after the last epoch. Raises Diverged if the head is no better than chance."""

    def objects(self) -> StateDict:
        """State besides that of head and loss, as tensors and plain values."""
        return {}

    def load_objects(self, objects: StateDict) -> None:
        """Restore the state that `objects` returned."""

    def describe(self, state: Mapping[str, Tensor]) -> dict[str, object]:
        """Facts about a head in this state, as JSON values."""
        return {}


class VariationalObjective(Objective):
    """Adds KL(q || N(0, I)) / Z to the loss."""

    head: VTSTHead

    def forward(self, features: Tensor, targets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.head.encode(features)
        logits = self.head.decode(mean, log_variance, torch.randn_like(mean))
        loss = self.loss(logits, targets, features=features, indices=indices)
        return loss + kl_divergence(mean, log_variance), logits


class MaskedObjective(Objective):
    """The loss of a masked head; a controller sets the fraction of kept weights for each epoch."""

    head: MaskedBottleneckHead

    def __init__(
        self,
        head: MaskedBottleneckHead,
        loss: RealLoss,
        *,
        controller: SparsityController,
        extra_pass: bool,
    ) -> None:
        super().__init__(head, loss)
        self.controller, self.extra_pass = controller, extra_pass

    def start_epoch(self) -> EpochMetrics:
        controller = self.controller
        self.head.start_epoch(controller.p, controller.generator)
        return {"p": controller.p, "delta": controller.delta(controller.epoch)}

    def after_backward(self) -> None:
        self.head.after_backward()

    def after_step(self) -> None:
        self.head.after_step()

    def end_epoch(self, *, accuracy: float, confidence: float) -> None:
        # A mean of float32 confidences may exceed 1 by rounding.
        self.controller.end_epoch(accuracy=accuracy, confidence=min(confidence, 1.0))

    def check_head_above_chance(self) -> None:
        if self.controller.at_chance():
            percent = 100 * self.controller.history[-1]["accuracy"]
            reason = f"the masked head is right in {percent:.1f} % of training images, as by chance"
            settings = "head.p_start, head.p_min or head.optimiser.learning_rate"
            raise Diverged(f"{reason}; raise {settings}, and train in a fresh run folder")

    def objects(self) -> StateDict:
        return {"controller": self.controller.state_dict()}

    def load_objects(self, objects: StateDict) -> None:
        self.controller.load_state_dict(objects["controller"])

    def describe(self, state: Mapping[str, Tensor]) -> dict[str, object]:
        """The p of the masks, and the fraction of weights that each mask keeps."""
        shares = {name: state[name].float().mean().item() for name in ("mask1", "mask2")}
        return {"p": state["retention"].item(), "kept_weights": shares}


def build_objective(
    config: HeadConfig,
    *,
    in_features: int,
    num_classes: int,
    num_samples: int,
    base_accuracy: Callable[[], float],
    seed: int,
) -> Objective:
    """Build an untrained head and its objective, on the CPU.

    Args:
        num_samples: number of training images.
        base_accuracy: returns stage one's accuracy on the training set; called only if needed.
        seed: the run's seed, from which those of weights and masks are derived.
    """
    torch.manual_seed(derived_seed(seed, "head weights"))
    head = build_head(config, in_features, num_classes)
    if config.method == "mac_cal":
        assert isinstance(head, MaskedBottleneckHead)
        controller = SparsityController(
            config,
            base_accuracy=base_accuracy(),
            chance=1 / num_classes,
            seed=derived_seed(seed, "masks"),
        )
        loss = build_training_loss(config.loss, num_classes, num_samples=num_samples)
        return MaskedObjective(head, loss, controller=controller, extra_pass=config.extra_pass)
    loss = CrossEntropy(num_classes, CrossEntropyConfig())
    if isinstance(head, VTSTHead):
        return VariationalObjective(head, loss)
    return Objective(head, loss)


class HeadStage(Stage):
    """Trains a head on the features of a frozen network, which are computed before each epoch.

    The objective does what a kind of head needs besides the gradient of its loss. The optimiser
    also trains the parameters of the loss, whose gradients are not clipped. Features are computed
    in the accelerator's precision; the head is trained in float32.

    Args:
        network: of stage one; its weights and batch norms do not change.
    Raises:
        InputError: the features do not fit into memory, or the processes cannot share a batch
            equally.
    """

    name = "head"
    remedy = "lower head.optimiser.learning_rate, and train in a fresh run folder"

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
        self.steps, self.images_per_epoch = self.views.steps, self.views.images_per_epoch
        self.loss_scale = self.views.batches.batch_size if config.head.reduction == "sum" else 1
        self.targets = data.train_targets.to(accelerator.device)
        self.unaugmented = UnaugmentedFeatures(network, data, self.views)
        self.objective = build_objective(
            config.head,
            in_features=network.num_features,
            num_classes=data.num_classes,
            num_samples=len(self.targets),
            base_accuracy=self._base_accuracy,
            seed=seed,
        ).to(accelerator.device)
        self.head, self.loss = self.objective.head, self.objective.loss
        self.selection = EpochSelection(config.head.select, None)
        self.history: list[EpochMetrics] = []
        self.features = torch.empty(0)  # of the epoch's training images, [N, D]
        self.constants: EpochMetrics = {}  # metrics that are constant during the epoch
        self.sums = torch.zeros(3, device=accelerator.device)  # see `sum_over_batch`
        # Not wrapped by accelerate: that takes more time than a step of so small a head.
        self.parameters = list(self.objective.parameters())
        self.optimiser_config = config.head.optimiser_for(len(self.targets))
        self.optimiser = build_optimiser(self.optimiser_config, self.parameters)

    @property
    def trained(self) -> nn.Module:
        return self.head

    def train_epoch(
        self, epoch: int, stop: ShouldStop = never, progress_lines: EpochLines = SILENT
    ) -> EpochMetrics:
        metrics = super().train_epoch(epoch, stop, progress_lines)
        self.history.append({"epoch": epoch, **metrics})
        return metrics

    def begin_epoch(self, epoch: int, stop: ShouldStop) -> None:
        self.features = self.views.features_of_epoch(epoch, stop)
        process = self.accelerator.process_index
        torch.manual_seed(derived_seed(self.seed, "latents", epoch, process))
        self.objective.train()

    def batches_of(self, epoch: int, steps_done: int) -> Generator[Tensor, None, None]:
        """Indices of training images, of each step."""
        yield from self.views.order(epoch)[steps_done:]

    def update(self, step: int, batch: Tensor) -> None:
        self.sums += self._step(self.features[batch], batch)

    def end_steps(self) -> EpochMetrics:
        loss, accuracy, confidence = means(self.sums, self.images_per_epoch, self.accelerator)
        self._check_finite(loss)
        return {**self.constants, "loss": loss, "accuracy": accuracy, "confidence": confidence}

    def end_epoch(self, epoch: int, metrics: EpochMetrics) -> EpochMetrics:
        """As for every stage. Raises Diverged if the trained head is at chance."""
        accuracy, confidence = metrics["accuracy"], metrics["confidence"]
        if self.objective.extra_pass:
            accuracy, confidence = accuracy_and_confidence(
                self.head, self.features, self.targets, self.accelerator
            )
        assert accuracy is not None
        assert confidence is not None
        self.objective.end_epoch(accuracy=accuracy, confidence=confidence)
        if epoch + 1 == self.epochs:
            self.objective.check_head_above_chance()
        metrics |= {"accuracy": accuracy, "confidence": confidence, **self.loss.pop_diagnostics()}
        self.feedback = HeadFeedback(self.head, self.unaugmented)
        self.loss.end_epoch(self.feedback)
        return metrics

    def validation_outputs(self) -> Outputs:
        return self.feedback.outputs("validation")

    def export(self, path: Path, *, digest: str) -> None:
        """Write the selected head, and next to it a JSON file with the history of its epochs."""
        state = self.selection.best or self.head.state_dict()
        epoch = self.selection.state_dict()["best_epoch"]
        record = {
            "digest": digest,
            "method": self.settings.method,
            "select": self.settings.select,
            "epoch": self.epochs - 1 if epoch is None else epoch,
            **self.objective.describe(state),
            "history": self.history,
        }
        write_json(path.with_suffix(".json"), record)
        # Last, because a head with this file is complete.
        save_tensors(path, state, metadata={"digest": digest})

    def start_progress(self, epoch: int) -> None:
        self.constants = self.objective.start_epoch()
        self.sums = torch.zeros(3, device=self.accelerator.device)

    def progress(self, steps_done: int) -> StateDict:
        self._check_finite(means(self.sums, self.images_per_epoch, self.accelerator)[0])
        return {"figures": self.constants, "sums": self.sums.cpu()}

    def load_progress(self, progress: StateDict, steps_done: int) -> None:
        self.constants = progress["figures"]
        self.sums = progress["sums"].to(self.accelerator.device)

    @staticmethod
    def merge_progress(processes: Sequence[StateDict], index: int) -> StateDict:
        """The epoch's constant metrics, which all processes share, and the sums of this process."""
        sums = [process["sums"] for process in processes]
        return {**processes[0], "sums": sum_in_first_process(sums, index)}

    def modules(self) -> Mapping[str, nn.Module]:
        return {"head": self.head, "loss": self.loss}

    def own_objects(self) -> StateDict:
        return {"objective": self.objective.objects(), "history": self.history}

    def load_own_objects(self, objects: StateDict) -> None:
        self.objective.load_objects(objects["objective"])
        self.history = objects["history"]

    def _step(self, features: Tensor, indices: Tensor) -> Tensor:
        """Make one update; returns loss, correct predictions and confidence, each summed."""
        targets = self.targets[indices]
        loss, logits = self.objective(features, targets, indices)
        # Gradients are averaged over processes, so the scale is the batch size over all processes.
        (loss * self.loss_scale).backward()
        average_gradients(self.parameters, self.accelerator)
        self.objective.after_backward()
        if self.optimiser_config.clip_norm is not None:
            clip_grad_norm_(self.head.parameters(), self.optimiser_config.clip_norm)
        self.optimiser.step()
        self.objective.zero_grad()
        self.objective.after_step()
        return sum_over_batch(loss, logits, targets)

    def _check_finite(self, loss: float) -> None:
        """Raise Diverged if the loss, or a value of the state, is NaN or infinite."""
        if not math.isfinite(loss):
            raise Diverged("the loss is NaN or infinite")
        check_finite(self.objective.state_dict())

    def _base_accuracy(self) -> float:
        """Accuracy of stage one on the unaugmented training images."""
        classifier = self.network.backbone.classifier
        features = self.unaugmented.of("train")
        return accuracy_and_confidence(classifier, features, self.targets, self.accelerator)[0]
