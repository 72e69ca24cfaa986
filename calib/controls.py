"""Controls of CSM: the same number of generated images, without one of the things it adds."""

import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.config import ControlName
from semix.data.dataset import MixedDataset

LABEL_SEED = 0  # of the order in which labels are shuffled


class ControlledDraws:
    """Draws from a mixed dataset as `MixedDataset.choose` and `read` do, but for one thing.

    Args:
        control: "end_points": only images of the largest share of a class, with that class as a
            hard label; "interior": no end points; "shuffled_labels": every image has the label of
            another one, always the same; "pixel_mixup": every image is the mean of its series' end
            points in pixels, weighted by its label.
    """

    def __init__(self, mixed: MixedDataset, control: ControlName) -> None:
        self.mixed, self.control = mixed, control
        # [G, k]: the position of the largest share of each class of a series
        self.ends = mixed.mixtures.argmax(dim=1)
        images = mixed.mixtures.shape[0] * mixed.mixtures.shape[1]
        rng = torch.Generator().manual_seed(LABEL_SEED)
        self.label_of = torch.randperm(images, generator=rng)

    def choose(
        self, targets: Tensor, *, rng: torch.Generator, class_matched: bool = True, count: int = 2
    ) -> tuple[Tensor, Tensor]:
        """Groups int64 [B, 1] and positions int64 [B, count]."""
        extra = self.control == "interior"  # the first image is an end point
        group, position = self.mixed.choose(
            targets, rng=rng, class_matched=class_matched, count=count + extra
        )
        if self.control == "interior":
            return group, position[:, 1:]
        if self.control == "end_points":
            own = self.mixed.mixtures[group, position[:, :1]].argmax(-1)  # [B, 1]
            ends = self.ends[group[:, 0]]
            return group, ends.gather(1, (own + torch.arange(count)) % ends.shape[1])
        return group, position

    def read(self, group: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Images, uint8 [..., H, W, 3], and labels, float32 [..., K]."""
        group, position = torch.broadcast_tensors(group, position)
        if self.control == "pixel_mixup":
            return self._blended(group, position)
        images, labels = self.mixed.read(group, position)
        if self.control == "end_points":
            share = self.mixed.mixtures[group, position].argmax(-1)
            classes = self.mixed.classes[group].gather(-1, share[..., None])[..., 0]
            labels = functional.one_hot(classes, self.mixed.num_classes).float()
        elif self.control == "shuffled_labels":
            length = self.mixed.mixtures.shape[1]
            other = self.label_of[group * length + position]
            labels = self.mixed.soft_labels.dense(other // length, other % length)
        return images, labels

    def _blended(self, group: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        labels = self.mixed.soft_labels.dense(group, position)
        shares = labels.gather(-1, self.mixed.classes[group])  # [..., k]
        shares = shares / shares.sum(-1, keepdim=True)
        ends, _ = self.mixed.read(group[..., None], self.ends[group])  # [..., k, H, W, 3]
        blend = (ends.float() * shares[..., None, None, None]).sum(-4)
        return blend.round().to(torch.uint8), labels
