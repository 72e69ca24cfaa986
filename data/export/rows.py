"""What is exported: the images of a pinned index, one by one, with their soft labels."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from data.errors import InputError
from data.image_header import check_header
from data.images import MOST_PIXELS, decode_image, encode_image
from data.indices import open_index
from data.label_records import with_labels
from data.label_sets import LabelSet
from data.root import Root
from data.shards import GroupSample, read_shard

Record = dict[str, Any]
ImageFormat = Literal["keep", "png"]


@dataclass(frozen=True)
class ImageRow:
    """One image.

    Attributes:
        classes, names, mixture: the classes mixed and their conditioning weights.
        weight: CLIP's, of the first class, raw.
        label: (class, probability), of the classes that have any.
    """

    group: int
    position: int
    classes: list[int]
    names: list[str]
    mixture: list[float]
    alpha: float
    weight: float
    label: list[tuple[int, float]]
    content: bytes
    extension: str


@dataclass(frozen=True)
class Source:
    """One pinned index of a root, and how to write its labels and images."""

    root: Root
    index: str
    shards: list[Record]
    label_set: LabelSet | None
    scale: float | None
    image_format: ImageFormat

    @property
    def class_names(self) -> list[str]:
        names: list[str] = self.root.plan["class_names"]
        return names

    @property
    def num_images(self) -> int:
        images: int = self.root.plan["images_per_group"]
        return images * sum(shard["groups"] for shard in self.shards)

    def rows(self, shards: Sequence[Record]) -> Iterator[ImageRow]:
        """Images of some of its shards; no more than one series is in memory.

        Raises:
            ValueError: a shard or its labels are damaged, or not what the index says; names it.
        """
        for shard in shards:
            labels = self.label_set.labels(shard["shard"]) if self.label_set else None
            samples = read_shard(self.root.store, shard, num_classes=len(self.class_names))
            for sample in samples:
                try:
                    yield from self._series(sample, labels)
                except ValueError as error:
                    group = sample.record["group"]
                    raise ValueError(f"{shard['tar']}: group {group}: {error}") from None

    def _series(self, sample: GroupSample, others: dict[int, Record] | None) -> Iterator[ImageRow]:
        record = sample.record
        if others is not None:
            record = _relabelled(record, others, num_classes=len(self.class_names))
        labels = record["labels"] if self.scale is None else _sharpened(record, self.scale)
        for position, alpha in enumerate(record["alphas"]):
            extension, content = self._image(sample, position)
            yield ImageRow(
                group=record["group"],
                position=position,
                classes=record["classes"],
                names=[self.class_names[k] for k in record["classes"]],
                mixture=record["mixture"][position] if "mixture" in record else [alpha, 1 - alpha],
                alpha=alpha,
                weight=record["weights"][position],
                label=[(target, share) for target, share in labels[position] if share > 0],
                content=content,
                extension=extension,
            )

    def _image(self, sample: GroupSample, position: int) -> tuple[str, bytes]:
        content = sample.images[position]
        try:
            if self.image_format == "keep":
                check_header(content, most_pixels=MOST_PIXELS)
                return sample.extension, content
            return "png", encode_image(decode_image(content), "png")
        except ValueError as error:
            raise ValueError(f"image {position}: {error}") from None


def open_source(
    url: str,
    *,
    index: str | None = None,
    labels: str | None = None,
    scale: float | None = None,
    image_format: ImageFormat = "keep",
) -> Source:
    """Pin what to export.

    Args:
        index: its name; the newest one by default.
        labels: digest of a label set, or its beginning; None takes the labels in the shards.
        scale: sharpen the raw weights anew; None takes the labels as stored.
        image_format: keep copies the stored bytes.
    Raises:
        InputError: no such index or label set, a label set that lacks shards, or a scale for
            labels of more than two classes.
        ValueError: the index is damaged.
    """
    root = Root(url)
    name = index or _newest(root)
    if not root.store.exists(name):
        raise InputError("--index", name, f"is not in {root.url}")
    shards = list(open_index(root.store, name, plan_digest=root.plan["digest"]).shards())
    label_set = LabelSet(root, labels) if labels else None
    if label_set is not None:
        _refuse_gaps(label_set, shards)
    classes = root.plan["config"].get("mixing", {}).get("classes", 2)
    if scale is not None and classes > 2:
        remedy = f"{root.url} mixes {classes} classes, whose labels stay as they are"
        raise InputError("--scale", scale, remedy)
    return Source(root, name, shards, label_set, scale, image_format)


def label_json(row: ImageRow) -> str:
    """The sparse label as JSON: [[class, probability], ...]."""
    return json.dumps([list(pair) for pair in row.label])


def _newest(root: Root) -> str:
    indices = root.indices()
    if not indices:
        raise InputError("url", root.url, "is not finished; run `semix resume` first")
    return indices[-1]


def _refuse_gaps(label_set: LabelSet, shards: Sequence[Record]) -> None:
    done = label_set.committed()
    gaps = [s["shard"] for s in shards if done.get(s["shard"], {}).get("images") != s["sha256"]]
    if gaps:
        remedy = (
            f"lacks {len(gaps)} shards of the index, shard {gaps[0]} first; run `semix relabel`"
        )
        raise InputError("--labels", label_set.digest[:12], remedy)


def _relabelled(record: Record, others: dict[int, Record], *, num_classes: int) -> Record:
    """The record with the labels of another set."""
    found = others.get(record["group"], {})
    counts = {len(found.get(part, [])) for part in ("weights", "labels")}
    if counts != {len(record["alphas"])}:
        raise ValueError("the label set has no labels, or too many, for it")
    if max(target for label in found["labels"] for target, _ in label) >= num_classes:
        raise ValueError(f"a label names another class than the {num_classes} of the plan")
    return with_labels(record, found)


def _sharpened(record: Record, scale: float) -> list[list[tuple[int, float]]]:
    import torch

    from data.labels import sharpen

    first, second = record["classes"]
    shares = sharpen(torch.tensor(record["weights"], dtype=torch.float32), scale).tolist()
    return [[(first, share), (second, 1 - share)] for share in shares]
