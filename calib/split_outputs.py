"""Outputs of a network for whole splits, worked out by all processes together."""

import math
from typing import Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from calib.evaluate import in_chunks
from calib.feedback import Outputs
from calib.training_data import TrainingData, decode

Split = Literal["train", "validation"]


class SplitOutputs:
    """The Feedback of one network: eval mode, float32, images without augmentation.

    Each process runs an equal part and gathers the others', so that all hold the same numbers.
    They are kept until `forget`.

    Args:
        network: uint8 [N, S, S, 3] to logits and features; left in the mode it was in.
    """

    def __init__(self, network: nn.Module, data: TrainingData, accelerator: Accelerator) -> None:
        self.network, self.data, self.accelerator = network, data, accelerator
        self._images: dict[Split, Tensor] = {}
        self._found: dict[Split, Outputs] = {}

    def outputs(self, split: Split) -> Outputs:
        """Of all images of the split, on the device. Every process must ask."""
        if split not in self._found:
            self._found[split] = self._run(split)
        return self._found[split]

    def forget(self) -> None:
        """The network has changed."""
        self._found.clear()

    def _run(self, split: Split) -> Outputs:
        training = self.network.training
        self.network.eval()
        device = self.accelerator.device
        rows = self.accelerator.gather(in_chunks(self._rows, self._own(split), device=device))
        self.network.train(training)
        targets = torch.from_numpy(getattr(self.data.real, split).targets).to(device)
        logits, features = rows[: len(targets)].tensor_split([self.data.num_classes], dim=1)
        return Outputs(logits, features, targets)

    def _rows(self, images: Tensor) -> Tensor:
        logits, features = self.network(images)
        return torch.cat([logits.float(), features.float()], dim=1)  # [N, K + D]

    def _own(self, split: Split) -> Tensor:
        """This process's part of the images; the last one's is filled up with first images."""
        if split not in self._images:
            whole = (
                self.data.train_images if split == "train" else decode(self.data.real.validation)
            )
            share = math.ceil(len(whole) / self.accelerator.num_processes)
            own = whole[self.accelerator.process_index * share :][:share]
            missing = share - len(own)
            self._images[split] = torch.cat([own, whole[:missing]]) if missing else own
        return self._images[split]
