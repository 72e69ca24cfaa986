"""Features of the training images under each epoch's changes, from large parts at once."""

from collections.abc import Iterator
from contextlib import closing

import torch
from accelerate import Accelerator
from torch import Tensor

from calib.batches import Batch, apply_changes, draw_changes
from calib.classifier import Network
from calib.config import TrainConfig
from calib.second_stage.memory import is_augmented
from calib.stopping import Stop, Stopped, never
from calib.training_batches import head_batches
from calib.training_data import TrainingData
from data.fingerprint import derived_seed

# In one pass through the frozen network: 2048 images of 32x32 fill a GPU, 64 a CPU's caches.
PIXELS, CPU_PIXELS = 2**21, 2**16
FEWEST = 64  # images in one pass, however large they are


class FeatureViews:
    """The frozen network's features of all training images, as each epoch sees them.

    A view is one pass over the training images under the random changes of one epoch. Where
    nothing is augmented all epochs see one view. With `views` = k epoch e sees view e mod k, and
    each view is made once; from k = the number of epochs on, that is what new changes in every
    epoch give. Without it each epoch's view replaces the one before.

    The processes share the work and then have all features. The network runs without graph, in
    the accelerator's precision; features are float32, on its device.

    Args:
        network: in eval mode, on the accelerator's device.
        seed: of the run.
    Attributes:
        steps, images: of an epoch, over all processes.
    Raises:
        InputError: a batch that cannot be shared out equally.
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
        self.augmented = is_augmented(config.augment)
        self.batches = head_batches(config, data, accelerator)
        self.steps, self.images = len(self.batches), len(self.batches) * self.batches.batch_size
        self._kept: dict[int, Tensor] = {}

    def of_epoch(self, epoch: int, stop: Stop = never) -> Tensor:
        """[N, D] float32, row i of training image i.

        Raises:
            Stopped: `stop` said so between two parts of a view; nothing of it is kept.
        """
        view = self._view(epoch)
        if view not in self._kept:
            if self.augmented and self.views is None:
                self._kept.clear()  # before the next is made: two need not fit
            self._kept[view] = self._make(view, stop)
        return self._kept[view]

    def as_they_are(self) -> Tensor:
        """[N, D] float32 of the unchanged images; nothing is kept for it."""
        if not self.augmented:
            return self.of_epoch(0)
        parts = self.batches.images.split(self.part)
        return torch.cat([self._features(images) for images in parts])

    def order(self, epoch: int) -> Tensor:
        """Which images this process takes in each step, int64 [steps, B] on the device."""
        shared = self._order(epoch)[: self.images]
        shared = shared.view(self.steps, self.accelerator.num_processes, -1)
        return shared[:, self.accelerator.process_index].to(self.device)

    @property
    def part(self) -> int:
        """Images in one pass, at least; whole batches make it up."""
        pixels = CPU_PIXELS if self.device.type == "cpu" else PIXELS
        return max(FEWEST, pixels // self.batches.images.shape[1] ** 2)

    def _view(self, epoch: int) -> int:
        if not self.augmented:
            return 0
        return epoch if self.views is None else epoch % self.views

    def _order(self, epoch: int) -> Tensor:
        """All images; those after the last step's fill no batch."""
        return torch.randperm(len(self.batches.images), generator=self._generator(epoch))

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.seed, "head", epoch))

    def _make(self, view: int, stop: Stop) -> Tensor:
        generator, images = self._generator(view), self.batches.images
        found = torch.empty(len(images), self.network.num_features, device=self.device)
        with closing(self.batches.epoch(generator)) as batches:
            for i, part in enumerate(_in_parts(batches, self.part)):
                if i and stop():
                    raise Stopped
                features = self._features(torch.cat([batch.images for batch in part]))
                indices = torch.cat([batch.indices for batch in part])
                found[self.accelerator.gather(indices)] = self.accelerator.gather(features)
        rest = self._order(view)[self.images :].to(self.device)
        if len(rest):  # other epochs, in their order, take them
            found[rest] = self._features(self._changed(rest, generator))
        return found

    def _changed(self, chosen: Tensor, generator: torch.Generator) -> Tensor:
        changes = draw_changes(len(chosen), self.batches.augment, generator)
        images = self.batches.images[chosen]
        return apply_changes(images, changes.to(self.device), self.batches.augment)

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        with self.accelerator.autocast():
            return self.network.features(images).float()


def _in_parts(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Batches in lists of at least `size` images; the last may have fewer."""
    part: list[Batch] = []
    for batch in batches:
        part.append(batch)
        if sum(len(batch.images) for batch in part) >= size:
            yield part
            part = []
    if part:
        yield part
