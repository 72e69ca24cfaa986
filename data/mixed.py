"""MixedDataset: the committed groups of a root as training samples."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from data.errors import InputError
from data.fingerprint import fingerprint
from data.images import decode_image
from data.labels import sharpen, soft_labels
from data.root import Root
from data.shards import GroupSample, read_tar

MEMORY_LIMIT = 8 * 2**30  # bytes of decoded images


class MixedDataset:
    """All groups of one pinned index, decoded once into memory.

    G groups, A alphas, K classes.

    Attributes:
        images: uint8 [G, A, H, W, 3]; alphas, weights: float32 [G, A], of the first class in
            the conditioning and in CLIP's projection; labels: float32 [G, A, K]; classes: int64
            [G, k], the classes of each group, two but in a simplex; mixtures: float32 [G, A, k],
            the conditioning weights of all of them.
        groups: the JSON record of each group.

    Args:
        index: name of the index to pin; the newest one by default.
        scale: sharpen the stored raw weights anew; None takes the labels as stored.
    Raises:
        InputError: no index yet, an index that is not there, more images than fit, or a scale
            for labels of more than two classes.
        ValueError: a shard does not read as its index says; run `semix verify`.
    """

    def __init__(self, url: str, *, index: str | None = None, scale: float | None = None) -> None:
        root = Root(url)
        self.url = root.url
        self.class_names: tuple[str, ...] = tuple(root.plan["class_names"])
        self.index_name = index or _newest_index(root)
        if not root.store.exists(self.index_name):
            raise InputError("mixed.index", self.index_name, f"is not in {self.url}")
        pinned = json.loads(root.store.get(self.index_name))
        self.digest = fingerprint(pinned)
        samples = [sample for shard in pinned["shards"] for sample in _read(root, shard)]
        self.groups = [sample.record for sample in samples]
        self.images = _decode(samples)
        self.alphas = torch.tensor([g["alphas"] for g in self.groups], dtype=torch.float32)
        self.weights = torch.tensor([g["weights"] for g in self.groups], dtype=torch.float32)
        self.classes = torch.tensor([g["classes"] for g in self.groups], dtype=torch.int64)
        self.mixtures = torch.tensor([_mixture(g) for g in self.groups], dtype=torch.float32)
        self.labels = self._stored_labels() if scale is None else self._sharpened(scale)
        self._of_class = [
            (self.classes == k).any(1).nonzero()[:, 0] for k in range(self.num_classes)
        ]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def draw(
        self, targets: torch.Tensor, *, rng: torch.Generator, class_matched: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An end point and an interior image of one random group for each real image.

        As CSM's loader: a group that contains the real image's class; of its images, ordered by
        the label of that class, the most certain one and a random one of those between the
        ends. Without `class_matched` any group, and a random one of its classes.

        Args:
            targets: classes of the real images, int64 [B].
        Returns:
            images uint8 [B, 2, H, W, 3] and soft labels float32 [B, 2, K].
        """
        group = (
            self._groups_for(targets, rng)
            if class_matched
            else _pick(len(self.groups), targets, rng)
        )
        own = targets
        if not class_matched:
            side = torch.randint(self.classes.shape[1], group.shape, generator=rng)
            own = self.classes[group, side]
        certainty = self.labels[group, :, own]  # [B, A]
        order = certainty.argsort(dim=1, descending=True)
        # A series of two images has no interior; its far end stands in for it.
        last = max(order.shape[1] - 1, 2)
        inside = torch.randint(1, last, (len(group), 1), generator=rng)
        position = torch.cat([order[:, :1], order.gather(1, inside)], dim=1)  # [B, 2]
        return self.images[group[:, None], position], self.labels[group[:, None], position]

    def _groups_for(self, targets: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        counts = torch.tensor([len(groups) for groups in self._of_class])
        if not counts[targets].all():
            missing = self.class_names[int(targets[counts[targets] == 0][0])]
            raise InputError("mixed.url", self.url, f"has no group of class {missing!r}")
        share = torch.rand(len(targets), generator=rng, dtype=torch.float64)
        chosen = (share * counts[targets]).long()
        starts = counts.cumsum(0) - counts
        return torch.cat(self._of_class)[starts[targets] + chosen]

    def _stored_labels(self) -> torch.Tensor:
        labels = torch.zeros(*self.weights.shape, self.num_classes)
        for group, record in enumerate(self.groups):
            for position, sparse in enumerate(record["labels"]):
                for target, probability in sparse:
                    labels[group, position, target] = probability
        return labels

    def _sharpened(self, scale: float) -> torch.Tensor:
        if self.classes.shape[1] > 2:
            remedy = (
                f"{self.url} mixes {self.classes.shape[1]} classes, whose labels stay as stored"
            )
            raise InputError("mixed.scale", scale, remedy)
        first, second = self.classes[:, :1], self.classes[:, 1:]
        labels = soft_labels(
            sharpen(self.weights.flatten(), scale),
            first.expand_as(self.weights).flatten(),
            second.expand_as(self.weights).flatten(),
            self.num_classes,
        )
        return labels.view(*self.weights.shape, self.num_classes)


def _mixture(record: dict[str, Any]) -> list[list[float]]:
    pairs = [[alpha, 1 - alpha] for alpha in record["alphas"]]
    return record.get("mixture", pairs)


def _pick(count: int, like: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(count, like.shape, generator=rng)


def _newest_index(root: Root) -> str:
    indices = root.indices()
    if not indices:
        raise InputError("mixed.url", root.url, "is not finished; run `semix resume` first")
    return indices[-1]


def _read(root: Root, shard: dict) -> Iterator[GroupSample]:
    count = 0
    with root.store.open(shard["tar"]) as file:
        for sample in read_tar(file):
            count += 1
            yield sample
    if count != shard["groups"]:
        raise ValueError(f"{shard['tar']}: {count} groups, its index says {shard['groups']}")


def _decode(samples: list[GroupSample]) -> torch.Tensor:
    first = decode_image(samples[0].images[0])
    total = first.nbytes * sum(len(sample.images) for sample in samples)
    if total > MEMORY_LIMIT:
        limit = f"the limit is {MEMORY_LIMIT >> 30} GiB; store smaller images (shards.store_size)"
        raise InputError("mixed images", f"{total >> 30} GiB", limit)
    return torch.from_numpy(
        np.stack([np.stack([decode_image(image) for image in s.images]) for s in samples])
    )
