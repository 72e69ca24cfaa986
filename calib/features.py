"""Features of a frozen network: the memory they take, views for training, outputs of splits."""

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
from semix.calib.network import CHUNK, Network, Outputs, apply_in_chunks, apply_to_chunks
from semix.calib.real_images import ranges
from semix.calib.stopping import ShouldStop, Stopped, never
from semix.calib.training_data import TrainingData
from semix.data.errors import InputError
from semix.data.fingerprint import derived_seed

MEMORY_LIMIT = 16 * 2**30  # bytes


def check_memory(config: TrainConfig, *, images: int, num_classes: int) -> None:
    """Check that the features for a head, 4 * views * images * width bytes, fit MEMORY_LIMIT.

    Args:
        images: number of training images.
    Raises:
        InputError: the features do not fit; names `head.views` and how many views would fit.
    """
    if config.head is None:
        return
    with torch.device("meta"):  # shapes only
        width = Network(config, num_classes).num_features
    view_bytes, views = 4 * images * width, 1
    if is_augmented(config.head.augmentation(config.augment)) and config.head.views is not None:
        views = min(config.head.views, config.head.epochs)
    if views * view_bytes > MEMORY_LIMIT:
        size = f"{width} features of {images} images take {views * view_bytes / 2**30:.1f} GiB"
        max_views = MEMORY_LIMIT // view_bytes
        choice = (
            f"choose at most {max_views}" if max_views else "choose a smaller real.train_per_class"
        )
        remedy = f"{size}, the limit is {MEMORY_LIMIT / 2**30:g} GiB; {choice}"
        raise InputError("head.views", config.head.views, remedy)


def is_augmented(augment: AugmentConfig) -> bool:
    return augment.shift > 0 or augment.flip


# Pixels in one forward pass: 2048 images of 32x32 occupy a GPU, 64 fill a CPU's caches.
PASS_PIXELS, CPU_PASS_PIXELS = 2**21, 2**16
MIN_PASS_IMAGES = 64  # images in one forward pass, however large they are


class FeatureViews:
    """The frozen network's features of all training images, for each epoch.

    A view is the features of all training images, augmented as in one epoch. Without augmentation
    all epochs use one view. With `views` = k, epoch e uses view e mod k, and each view is computed
    once; if k is the number of epochs, every epoch has its own augmentation. Without `views`, a new
    view is computed for each epoch and replaces the previous one.

    Each process computes a part of a view and gathers the others. The network runs without
    gradients, in the accelerator's precision; features are float32, on the accelerator's device.

    Args:
        network: in eval mode, on the accelerator's device.
        seed: of the run.
    Attributes:
        steps, images_per_epoch: over all processes.
    Raises:
        InputError: the processes cannot share a batch equally.
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
        self.steps = len(self.batches)
        self.images_per_epoch = self.steps * self.batches.batch_size
        self._features_by_view: dict[int, Tensor] = {}
        self.progress_lines = EpochLines(
            f"{config.name} seed {seed} head",
            epochs=config.head.epochs,
            images=self.images_per_epoch,
            steps=self.steps,
            first=0,
            printing=accelerator.is_main_process,
        )

    def features_of_epoch(self, epoch: int, stop: ShouldStop = never) -> Tensor:
        """The features for an epoch, [N, D] float32; row i belongs to training image i.

        Raises:
            Stopped: `stop` returned true between two forward passes; the incomplete view is
                discarded.
        """
        view = self._view(epoch)
        if view not in self._features_by_view:
            if self.augmented and self.views is None:
                self._features_by_view.clear()  # first, because two views need not fit
            self._features_by_view[view] = self._compute_view(view, stop)
        return self._features_by_view[view]

    def unaugmented(self) -> Tensor:
        """Features of the images without augmentation, [N, D] float32; not cached."""
        if not self.augmented:
            return self.features_of_epoch(0)
        images = self.batches.images
        with closing(images.chunks(ranges(0, len(images), self.pass_size))) as chunks:
            return torch.cat([self._features(chunk.to(self.device)) for chunk in chunks])

    def order(self, epoch: int) -> Tensor:
        """Indices of this process's images in each step, int64 [steps, B] on the device."""
        indices = self._order(epoch)[: self.images_per_epoch]
        indices = indices.view(self.steps, self.accelerator.num_processes, -1)
        return indices[:, self.accelerator.process_index].to(self.device)

    @property
    def pass_size(self) -> int:
        """The least number of images in one forward pass, which takes whole batches."""
        pixels = CPU_PASS_PIXELS if self.device.type == "cpu" else PASS_PIXELS
        return max(MIN_PASS_IMAGES, pixels // self.batches.images.side**2)

    def _view(self, epoch: int) -> int:
        if not self.augmented:
            return 0
        return epoch if self.views is None else epoch % self.views

    def _order(self, epoch: int) -> Tensor:
        """All indices in the order of an epoch; the last ones may not fill a batch."""
        return torch.randperm(len(self.batches.images), generator=self._generator(epoch))

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.seed, "head", epoch))

    def _compute_view(self, view: int, stop: ShouldStop) -> Tensor:
        generator, images = self._generator(view), self.batches.images
        view_features = torch.empty(len(images), self.network.num_features, device=self.device)
        images_done = 0
        with closing(self.batches.epoch(generator)) as batches:
            for i, group in enumerate(_group_batches(batches, self.pass_size)):
                if i and stop():
                    raise Stopped
                features = self._features(torch.cat([batch.images for batch in group]))
                indices = torch.cat([batch.indices for batch in group])
                rows = self.accelerator.gather(indices)
                view_features[rows] = self.accelerator.gather(features)
                images_done += len(rows)
                self.progress_lines.show_features(images_done)
        left_out = self._order(view)[self.images_per_epoch :].to(self.device)
        if len(left_out):  # another epoch with this view has another order and uses these images
            view_features[left_out] = self._features(self._augment(left_out, generator))
        return view_features

    def _augment(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        changes = draw_changes(len(indices), self.batches.augment, generator)
        with closing(self.batches.images.chunks([indices.cpu()])) as chunks:
            images = next(chunks).to(self.device)
        return apply_changes(images, changes.to(self.device), self.batches.augment)

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        with self.accelerator.autocast():
            return self.network.features(images).float()


def _group_batches(batches: Iterator[TrainingBatch], size: int) -> Iterator[list[TrainingBatch]]:
    """Group batches into lists of at least `size` images; the last may have fewer."""
    group: list[TrainingBatch] = []
    for batch in batches:
        group.append(batch)
        if sum(len(batch.images) for batch in group) >= size:
            yield group
            group = []
    if group:
        yield group


class UnaugmentedFeatures:
    """Features of whole splits without augmentation, of a frozen network.

    Features of the validation images are cached, as they are used after every epoch.
    """

    def __init__(self, network: Network, data: TrainingData, views: FeatureViews) -> None:
        self.network, self.data, self.views = network, data, views

    @cached_property
    def validation(self) -> Tensor:
        """Features [N, D], computed in float32, the precision in which classifiers are
        measured too."""
        images = self.data.stream(self.data.real.validation)
        with closing(images.chunks(ranges(0, len(images), CHUNK))) as chunks:
            return apply_to_chunks(self.network.features, chunks, device=self.views.device)

    def of(self, split: Literal["train", "validation"]) -> Tensor:
        return self.validation if split == "validation" else self.views.unaugmented()

    def targets(self, split: Literal["train", "validation"]) -> Tensor:
        return torch.from_numpy(getattr(self.data.real, split).targets)


class HeadFeedback:
    """The outputs of a head for whole splits, as `Feedback`; a new object for each epoch.

    Args:
        head: maps features to logits; its training mode is restored after each use.
    """

    def __init__(self, head: nn.Module, features: UnaugmentedFeatures) -> None:
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
    """Logits in eval mode, float32 [N, K]; restores the head's training mode."""
    training = head.training
    head.eval()
    try:
        return apply_in_chunks(head, features).float()
    finally:
        head.train(training)


def sum_over_batch(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Loss, number of correct predictions and confidence, summed over a batch: float32 [3]."""
    confidence, predicted = logits.detach().softmax(1).max(1)
    correct = (predicted == targets).float().sum()
    return torch.stack([loss.detach() * len(targets), correct, confidence.sum()])


def means(sums: Tensor, count: int, accelerator: Accelerator) -> list[float]:
    """Means over the `count` images of all processes, from this process's sums."""
    totals = accelerator.reduce(sums, reduction="sum").tolist()
    return [total / count for total in totals]


def accuracy_and_confidence(
    classifier: nn.Module, features: Tensor, targets: Tensor, accelerator: Accelerator
) -> tuple[float, float]:
    """Accuracy and confidence of a classifier of features, in eval mode.

    Args:
        features, targets: [N, D] and [N], equal in every process; each process takes a part.
    """
    process, processes = accelerator.process_index, accelerator.num_processes
    rows, classes = (t.tensor_split(processes)[process] for t in (features, targets))
    logits = predict(classifier, rows)
    sums = sum_over_batch(logits.new_zeros(()), logits, classes)
    _, accuracy, confidence = means(sums, len(targets), accelerator)
    return accuracy, confidence
