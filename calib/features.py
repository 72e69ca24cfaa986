"""Features of a frozen network: memory check, views to train on, outputs for feedback."""

from collections.abc import Iterator
from contextlib import closing
from functools import cached_property
from typing import Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from semix.calib.batches import TrainingBatch, apply_changes, draw_changes, head_batches
from semix.calib.config import AugmentConfig, TrainConfig
from semix.calib.epoch_lines import EpochLines
from semix.calib.network import CHUNK, Network, Outputs, in_chunks, in_parts
from semix.calib.real_data import TrainingData
from semix.calib.real_images import ranges
from semix.calib.stopping import ShouldStop, Stopped, never
from semix.data.errors import InputError
from semix.data.fingerprint import derived_seed

MEMORY_LIMIT = 16 * 2**30  # bytes


def check_memory(config: TrainConfig, *, images: int, num_classes: int) -> None:
    """Compare views * images * width * 4 bytes with MEMORY_LIMIT, if a head is trained.

    Args:
        images: number of training images.
    Raises:
        InputError: the features do not fit; names `head.views` and how many would fit.
    """
    if config.head is None:
        return
    with torch.device("meta"):  # shapes only
        width = Network(config, num_classes).num_features
    view_bytes, views = 4 * images * width, 1
    if is_augmented(config.head.changes(config.augment)) and config.head.views is not None:
        views = min(config.head.views, config.head.epochs)
    if views * view_bytes > MEMORY_LIMIT:
        need = f"{width} features of {images} images take {views * view_bytes / 2**30:.1f} GiB"
        most = MEMORY_LIMIT // view_bytes
        change = f"choose at most {most}" if most else "choose a smaller real.train_per_class"
        remedy = f"{need}, the limit is {MEMORY_LIMIT / 2**30:g} GiB; {change}"
        raise InputError("head.views", config.head.views, remedy)


def is_augmented(augment: AugmentConfig) -> bool:
    return augment.shift > 0 or augment.flip


# Per pass through the frozen network: 2048 images of 32x32 fill a GPU, 64 fill a CPU's caches.
PASS_PIXELS, CPU_PASS_PIXELS = 2**21, 2**16
MIN_PASS_IMAGES = 64  # images in one pass, however large they are


class FeatureViews:
    """The frozen network's features of all training images, for each epoch.

    A view is one pass over the training images under the random changes of one epoch. Without
    augmentation all epochs use one view. With `views` = k, epoch e uses view e mod k, and each view
    is computed once; k = the number of epochs equals new changes in every epoch. Without `views`,
    each epoch's view replaces the one before.

    The processes share the work, and then each holds all features. The network runs without
    gradients, in the accelerator's precision; features are float32, on its device.

    Args:
        network: in eval mode, on the accelerator's device.
        seed: of the run.
    Attributes:
        steps, images: per epoch, over all processes.
    Raises:
        InputError: a batch that the processes cannot share equally.
    """

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
        self.network, self.seed, self.accelerator = network, seed, accelerator
        self.device, self.views = accelerator.device, config.head.views
        self.batches = head_batches(config, data, accelerator)
        self.augmented = is_augmented(self.batches.augment)
        self.steps, self.images = len(self.batches), len(self.batches) * self.batches.batch_size
        self._features_by_view: dict[int, Tensor] = {}
        self.lines = EpochLines(
            f"{config.name} seed {seed} head",
            epochs=config.head.epochs,
            images=self.images,
            steps=self.steps,
            first=0,
            printing=accelerator.is_main_process,
        )

    def of_epoch(self, epoch: int, stop: ShouldStop = never) -> Tensor:
        """Features of an epoch, [N, D] float32; row i belongs to training image i.

        Raises:
            Stopped: `stop` returned true between two passes; the incomplete view is discarded.
        """
        view = self._view(epoch)
        if view not in self._features_by_view:
            if self.augmented and self.views is None:
                self._features_by_view.clear()  # before the next view is computed: two need not fit
            self._features_by_view[view] = self._make(view, stop)
        return self._features_by_view[view]

    def unaugmented(self) -> Tensor:
        """Features of the unchanged images, [N, D] float32; not cached."""
        if not self.augmented:
            return self.of_epoch(0)
        images = self.batches.images
        with closing(images.parts(ranges(0, len(images), self.pass_size))) as parts:
            return torch.cat([self._features(part.to(self.device)) for part in parts])

    def order(self, epoch: int) -> Tensor:
        """Indices of this process's images in each step, int64 [steps, B] on the device."""
        shared = self._order(epoch)[: self.images]
        shared = shared.view(self.steps, self.accelerator.num_processes, -1)
        return shared[:, self.accelerator.process_index].to(self.device)

    @property
    def pass_size(self) -> int:
        """The least number of images in one pass, which consists of whole batches."""
        pixels = CPU_PASS_PIXELS if self.device.type == "cpu" else PASS_PIXELS
        return max(MIN_PASS_IMAGES, pixels // self.batches.images.side**2)

    def _view(self, epoch: int) -> int:
        if not self.augmented:
            return 0
        return epoch if self.views is None else epoch % self.views

    def _order(self, epoch: int) -> Tensor:
        """Indices of all images; those beyond the last step do not fill a batch."""
        return torch.randperm(len(self.batches.images), generator=self._generator(epoch))

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.seed, "head", epoch))

    def _make(self, view: int, stop: ShouldStop) -> Tensor:
        generator, images = self._generator(view), self.batches.images
        view_features = torch.empty(len(images), self.network.num_features, device=self.device)
        done = 0
        with closing(self.batches.epoch(generator)) as batches:
            for i, part in enumerate(_grouped(batches, self.pass_size)):
                if i and stop():
                    raise Stopped
                features = self._features(torch.cat([batch.images for batch in part]))
                indices = torch.cat([batch.indices for batch in part])
                rows = self.accelerator.gather(indices)
                view_features[rows] = self.accelerator.gather(features)
                done += len(rows)
                self.lines.show_features(done)
        rest = self._order(view)[self.images :].to(self.device)
        if len(rest):  # other epochs that use this view have another order and need these images
            view_features[rest] = self._features(self._changed(rest, generator))
        return view_features

    def _changed(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        changes = draw_changes(len(indices), self.batches.augment, generator)
        with closing(self.batches.images.parts([indices.cpu()])) as parts:
            images = next(parts).to(self.device)
        return apply_changes(images, changes.to(self.device), self.batches.augment)

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        with self.accelerator.autocast():
            return self.network.features(images).float()


def _grouped(batches: Iterator[TrainingBatch], size: int) -> Iterator[list[TrainingBatch]]:
    """Group batches into lists of at least `size` images; the last may have fewer."""
    part: list[TrainingBatch] = []
    for batch in batches:
        part.append(batch)
        if sum(len(batch.images) for batch in part) >= size:
            yield part
            part = []
    if part:
        yield part


class PlainFeatures:
    """Unaugmented features of whole splits, of a frozen network.

    Features of the validation images, which are used after every epoch, are cached.
    """

    def __init__(self, network: Network, data: TrainingData, views: FeatureViews) -> None:
        self.network, self.data, self.views = network, data, views

    @cached_property
    def validation(self) -> Tensor:
        """Features [N, D] float32, in the precision in which classifiers are measured."""
        images = self.data.read(self.data.real.validation)
        with closing(images.parts(ranges(0, len(images), CHUNK))) as parts:
            return in_parts(self.network.features, parts, device=self.views.device)

    def of(self, split: Literal["train", "validation"]) -> Tensor:
        return self.validation if split == "validation" else self.views.unaugmented()

    def targets(self, split: Literal["train", "validation"]) -> Tensor:
        return torch.from_numpy(getattr(self.data.real, split).targets)


class HeadFeedback:
    """The Feedback of a head; one object per epoch.

    Args:
        head: features to logits; its mode does not change.
    """

    def __init__(self, head: nn.Module, features: PlainFeatures) -> None:
        self.head, self.features = head, features
        self._outputs: dict[str, Outputs] = {}

    def outputs(self, split: Literal["train", "validation"]) -> Outputs:
        if split not in self._outputs:
            features = self.features.of(split)
            logits = predict(self.head, features)
            targets = self.features.targets(split).to(features.device)
            self._outputs[split] = Outputs(logits, features, targets)
        return self._outputs[split]


def predict(head: nn.Module, features: Tensor) -> Tensor:
    """Logits in eval mode, float32 [N, K]; restores the head's mode."""
    training = head.training
    head.eval()
    try:
        return in_chunks(head, features).float()
    finally:
        head.train(training)


def batch_sums(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Sums over a batch of loss, right predictions and confidence: float32 [3], no gradient."""
    confidence, predicted = logits.detach().softmax(1).max(1)
    right = (predicted == targets).float().sum()
    return torch.stack([loss.detach() * len(targets), right, confidence.sum()])


def means(sums: Tensor, count: int, accelerator: Accelerator) -> list[float]:
    """Means over `count` images, from the sums of each process."""
    totals = accelerator.reduce(sums, reduction="sum").tolist()
    return [total / count for total in totals]


def measure(
    classifier: nn.Module, features: Tensor, targets: Tensor, accelerator: Accelerator
) -> tuple[float, float]:
    """Accuracy and confidence of a classifier of features, in eval mode.

    Args:
        features, targets: [N, D] and [N], equal in every process; each measures a part.
    """
    process, processes = accelerator.process_index, accelerator.num_processes
    rows, classes = (t.tensor_split(processes)[process] for t in (features, targets))
    logits = predict(classifier, rows)
    sums = batch_sums(logits.new_zeros(()), logits, classes)
    _, accuracy, confidence = means(sums, len(targets), accelerator)
    return accuracy, confidence
