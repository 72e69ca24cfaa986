"""Stage one: train a network on real images, and on mixed images if the settings name any."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from semix.calib.batches import TrainingBatch, base_batches
from semix.calib.checkpoint import Checkpoint, MidEpochState, StateDict, save_tensors
from semix.calib.config import TrainConfig, check_accumulation
from semix.calib.epoch_lines import SILENT, EpochLines
from semix.calib.loop import (
    Diverged,
    EpochMetrics,
    EpochRecord,
    check_compiler,
    check_finite,
    divergence_remedy,
    learning_rate,
    prepare_step,
    set_learning_rate,
)
from semix.calib.losses import build_training_loss
from semix.calib.methods import Method
from semix.calib.network import Network, SplitOutputs, WeightAverage
from semix.calib.processes import average_buffers
from semix.calib.real_data import TrainingData
from semix.calib.selection import EpochSelection, validation_measures
from semix.calib.stopping import ShouldStop, Stopped, never
from semix.data.fingerprint import derived_seed


class BaseStage:
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
        self.optimiser = self.step.optimiser
        self.selection = EpochSelection(config.select, config.early_stop)
        self.mid_epoch: MidEpochState | None = None
        self.split_outputs = SplitOutputs(self.network, data, accelerator)
        self.validation_outputs = (
            SplitOutputs(self.evaluated_network, data, accelerator)
            if self.average
            else self.split_outputs
        )

    @property
    def evaluated_network(self) -> torch.nn.Module:
        """The network that is measured: with `ema` the averaged network, else the trained one."""
        return self.average.network if self.average else self.network

    @property
    def finished(self) -> bool:
        return self.selection.finished

    def train_epoch(
        self, epoch: int, stop: ShouldStop = never, progress_lines: EpochLines = SILENT
    ) -> EpochMetrics:
        """Train an epoch, or the rest of it after `mid_epoch`; returns its metrics.

        Raises:
            Diverged: a loss or a weight is NaN or infinite.
            Stopped: `stop` returned true after a step; `mid_epoch` says after which.
        """
        try:
            metrics = self._train_steps(epoch, stop, progress_lines)
        except Diverged as error:
            raise Diverged(f"{error}; {divergence_remedy(self.config.mixed_precision)}") from None
        self.split_outputs.clear_cache()
        self.method.end_epoch(self.network.backbone, self.split_outputs)
        self.split_outputs.clear_cache()  # the method may have changed the outputs
        self.loss.end_epoch(self.split_outputs)
        if self.average:
            average_buffers(self.average.network, self.accelerator)
            self.average.copy_buffers(self.network)
            self.validation_outputs.clear_cache()
        return metrics | self._measure_validation(epoch)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        tensors = {name: module.state_dict() for name, module in self._modules().items()}
        return {**tensors, "best": self.selection.best} if self.selection.best else tensors

    def objects(self) -> StateDict:
        scaler = self.accelerator.scaler
        return {
            "optimiser": self.optimiser.state_dict(),
            "scaler": scaler.state_dict() if scaler else {},
            "selection": self.selection.state_dict(),
            "middle": self.mid_epoch.state_dict() if self.mid_epoch else None,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        for name, module in self._modules().items():
            checkpoint.load_module(name, module)
        objects = checkpoint.objects()
        self.optimiser.load_state_dict(objects["optimiser"])
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(objects["scaler"])
        has_best = objects["selection"]["best_epoch"] is not None
        best = checkpoint.tensors("best") if has_best else {}
        self.selection.load_state_dict(objects["selection"], best)
        self.mid_epoch = MidEpochState.from_checkpoint(objects["middle"])

    def export(self, path: Path, *, digest: str) -> None:
        """Write the selected weights, with the digest of settings and data in the metadata."""
        tensors = self.selection.best or self.evaluated_network.state_dict()
        save_tensors(path, tensors, metadata={"digest": digest})

    def _modules(self) -> dict[str, torch.nn.Module]:
        """The modules that have state, by the names of their files in a checkpoint."""
        modules = {"network": self.network, "loss": self.loss, "method": self.method}
        # `average.model` also holds the number of updates, `average.network` the weights alone.
        return {**modules, "average": self.average.model} if self.average else modules

    def _train_steps(
        self, epoch: int, stop: ShouldStop, progress_lines: EpochLines
    ) -> EpochMetrics:
        """Train on the batches of an epoch, or on the rest of them."""
        process, steps = self.accelerator.process_index, self.steps
        # For dropout and methods.
        torch.manual_seed(derived_seed(self.seed, "base", epoch, process))
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "base", epoch))
        for module in (self.network, self.loss, self.method):
            module.train()
        self.method.start_epoch(self.network.backbone, epoch, self.epochs)
        record = EpochRecord(steps, self.accelerator)
        steps_done, generator_state = self._resume_epoch(record)
        with closing(
            self.batches.epoch(generator, steps_done=steps_done, generator_state=generator_state)
        ) as batches:
            for step, batch in enumerate(batches, steps_done):
                rate = self._set_learning_rate(epoch * steps + step)
                record.note(step, self.step(batch))
                if self.average:
                    self.average.update(self.network)
                progress_lines.show_step(epoch, step + 1)
                if step + 1 < steps and stop():
                    self._stop(step + 1, record, batch)
        average_buffers(self.network, self.accelerator)
        record.check()
        check_finite(self.network.state_dict())
        means = {name: mean for name, mean in record.means().items() if self._has_images_for(name)}
        return {**means, "learning_rate": rate, **self.loss.pop_diagnostics()}

    def _has_images_for(self, name: str) -> bool:
        """Whether an epoch has images for this metric."""
        if self.config.mixed is None:
            return not name.startswith("mixed_")
        # With one image per series, chance decides whether it is an end point or an inner image.
        return self.batches.images_per_series > 1 or not name.endswith(("_end", "_interior"))

    def _stop(self, steps_done: int, record: EpochRecord, batch: TrainingBatch) -> None:
        """Set `mid_epoch` and raise Stopped; raises Diverged if a loss or weight is not finite."""
        record.check()
        check_finite(self.network.state_dict())
        progress = {"figures": record.metrics[:steps_done].cpu(), "drawn": batch.generator_state}
        self.mid_epoch = MidEpochState.gather(
            steps_done, progress, modules=self._modules(), accelerator=self.accelerator
        )
        raise Stopped

    def _resume_epoch(self, record: EpochRecord) -> tuple[int, Tensor | None]:
        """Resume from `mid_epoch`; returns the number of steps done and the generator's state."""
        mid_epoch, self.mid_epoch = self.mid_epoch, None
        if mid_epoch is None:
            return 0, None
        progress = mid_epoch.restore(self._modules(), self.accelerator, reshard=_merge_progress)
        record.metrics[: mid_epoch.step] = progress["figures"]
        return mid_epoch.step, progress["drawn"]

    def _measure_validation(self, epoch: int) -> EpochMetrics:
        """Measure the validation images, if the selection of an epoch needs it."""
        if not self.selection.needs_validation:
            return {}
        outputs = self.validation_outputs.outputs("validation")
        measures = validation_measures(outputs, scaled=self.selection.needs_temperature)
        self.selection.note(measures, self.evaluated_network, epoch)
        return {f"validation_{name}": value for name, value in measures.items()}

    def _set_learning_rate(self, step: int) -> float:
        settings = self.config.optimiser
        rate = learning_rate(settings, step, steps=self.steps, epochs=self.epochs)
        set_learning_rate(self.optimiser, rate)
        return rate


def _merge_progress(processes: Sequence[StateDict], index: int) -> StateDict:
    """Progress for a resume with another number of processes.

    The metrics are the mean of all processes; the generator's state is the same in all.
    """
    metrics = torch.stack([process["figures"] for process in processes]).mean(0)
    return {"figures": metrics, "drawn": processes[0]["drawn"]}
