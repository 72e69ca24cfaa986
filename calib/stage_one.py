"""Stage one: train a network on real images, and on mixed images if the settings name any."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from semix.calib.batches import TrainingBatch, base_batches
from semix.calib.checkpoint import StateDict, save_tensors
from semix.calib.config import TrainConfig, check_accumulation
from semix.calib.divergence import check_finite, divergence_remedy
from semix.calib.loop import EpochMetrics, Stage
from semix.calib.losses import build_training_loss
from semix.calib.losses.base import Outputs
from semix.calib.methods import Method
from semix.calib.network import Network, SplitOutputs, WeightAverage
from semix.calib.processes import average_buffers
from semix.calib.selection import EpochSelection
from semix.calib.stopping import ShouldStop
from semix.calib.training_data import TrainingData
from semix.calib.training_step import EpochRecord, check_compiler, prepare_step
from semix.data.fingerprint import derived_seed


class BaseStage(Stage):
    """Trains a network epoch by epoch, with a training method, a real and a mixed loss."""

    name = "base"

    def __init__(
        self, config: TrainConfig, data: TrainingData, *, seed: int, accelerator: Accelerator
    ) -> None:
        self.config, self.seed, self.accelerator = config, seed, accelerator
        self.epochs = config.epochs
        self.batches = base_batches(config, data, accelerator)
        check_accumulation(self.batches.batch_size // accelerator.num_processes, config.accumulate)
        if config.compile:
            check_compiler(accelerator.device)
        self.steps = len(self.batches)
        self.images_per_epoch = self.steps * self.batches.batch_size
        torch.manual_seed(derived_seed(seed, "weights"))
        # The method is built first because it adapts the network. Building the method draws no
        # random numbers, so the seed still determines the weights.
        self.method: Method = config.method.build(data.num_classes)
        network = Network(config, data.num_classes, method=self.method)
        network.normalise.fit(data.train_histogram)
        self.network = network.to(accelerator.device).to(memory_format=torch.channels_last)
        self.loss = build_training_loss(
            config.loss, data.num_classes, num_samples=len(data.train_targets)
        )
        for module in (self.method, self.loss):
            module.to(accelerator.device)
        self.average = WeightAverage(self.network, config.ema) if config.ema else None
        self.step = prepare_step(
            config, self.network, self.method, self.loss, accelerator=accelerator
        )
        self.optimiser, self.optimiser_config = self.step.optimiser, config.optimiser
        self.selection = EpochSelection(config.select, config.early_stop)
        self.record = EpochRecord(self.steps, accelerator)
        self.generator_state: Tensor | None = None  # after the last step; None before the first
        self.split_outputs = SplitOutputs(self.network, data, accelerator)
        self.trained_outputs = (
            SplitOutputs(self.trained, data, accelerator) if self.average else self.split_outputs
        )

    @property
    def trained(self) -> torch.nn.Module:
        """With `ema` the averaged network, else the network itself."""
        return self.average.network if self.average else self.network

    @property
    def remedy(self) -> str:
        return divergence_remedy(self.config.mixed_precision)

    def begin_epoch(self, epoch: int, stop: ShouldStop) -> None:
        # For dropout and methods.
        process = self.accelerator.process_index
        torch.manual_seed(derived_seed(self.seed, "base", epoch, process))
        for module in (self.network, self.loss, self.method):
            module.train()
        self.method.start_epoch(self.network.backbone, epoch, self.epochs)

    def batches_of(self, epoch: int, steps_done: int) -> Generator[TrainingBatch, None, None]:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "base", epoch))
        return self.batches.epoch(
            generator, steps_done=steps_done, generator_state=self.generator_state
        )

    def update(self, step: int, batch: TrainingBatch) -> None:
        self.record.note(step, self.step(batch))
        self.generator_state = batch.generator_state
        if self.average:
            self.average.update(self.network)

    def end_steps(self) -> EpochMetrics:
        average_buffers(self.network, self.accelerator)
        self._check_finite()
        means = self.record.means()
        shown = {name: mean for name, mean in means.items() if self._has_images_for(name)}
        rate = self.optimiser.param_groups[0]["lr"]  # of the last step
        return {**shown, "learning_rate": rate, **self.loss.pop_diagnostics()}

    def end_epoch(self, epoch: int, metrics: EpochMetrics) -> EpochMetrics:
        self.split_outputs.clear_cache()
        self.method.end_epoch(self.network.backbone, self.split_outputs)
        self.split_outputs.clear_cache()  # the method may have changed the outputs
        self.loss.end_epoch(self.split_outputs)
        if self.average:
            average_buffers(self.average.network, self.accelerator)
            self.average.copy_buffers(self.network)
            self.trained_outputs.clear_cache()
        return metrics

    def validation_outputs(self) -> Outputs:
        return self.trained_outputs.outputs("validation")

    def export(self, path: Path, *, digest: str) -> None:
        tensors = self.selection.best or self.trained.state_dict()
        save_tensors(path, tensors, metadata={"digest": digest})

    def start_progress(self, epoch: int) -> None:
        self.record = EpochRecord(self.steps, self.accelerator)
        self.generator_state = None

    def progress(self, steps_done: int) -> StateDict:
        self._check_finite()
        figures = self.record.metrics[:steps_done].cpu()
        return {"figures": figures, "drawn": self.generator_state}

    def load_progress(self, progress: StateDict, steps_done: int) -> None:
        self.record = EpochRecord(self.steps, self.accelerator)
        self.record.metrics[:steps_done] = progress["figures"]
        self.generator_state = progress["drawn"]

    @staticmethod
    def merge_progress(processes: Sequence[StateDict], index: int) -> StateDict:
        """The mean of the metrics of all processes; the generator's state is the same in all."""
        metrics = torch.stack([process["figures"] for process in processes]).mean(0)
        return {"figures": metrics, "drawn": processes[0]["drawn"]}

    def modules(self) -> Mapping[str, torch.nn.Module]:
        modules = {"network": self.network, "loss": self.loss, "method": self.method}
        # `average.model` also holds the number of updates, `average.network` the weights alone.
        return {**modules, "average": self.average.model} if self.average else modules

    def own_objects(self) -> StateDict:
        scaler = self.accelerator.scaler
        return {"scaler": scaler.state_dict() if scaler else {}}

    def load_own_objects(self, objects: StateDict) -> None:
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(objects["scaler"])

    def _has_images_for(self, name: str) -> bool:
        """Whether an epoch has images for this metric."""
        if self.config.mixed is None:
            return not name.startswith("mixed_")
        # With one image per series, chance decides whether it is an end point or an inner image.
        return self.batches.images_per_series > 1 or not name.endswith(("_end", "_interior"))

    def _check_finite(self) -> None:
        """Raise Diverged if a loss or a weight is not finite."""
        self.record.check()
        check_finite(self.network.state_dict())
