"""Label sets of a root: what each stored set says of images that are there."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from data.verification.problem import Problem

if TYPE_CHECKING:
    from data.label_sets import LabelSet
    from data.root import Root

Record = dict[str, Any]


def label_problems(root: "Root", *, full: bool) -> Iterator[Problem]:
    """Sets that cannot be opened; with `full` also labels that do not count or do not fit."""
    from data.label_sets import LabelSet, label_sets  # it builds on roots, which verify themselves

    for digest in label_sets(root):
        try:
            labels = LabelSet(root, digest)
        except ValueError as error:
            yield Problem(None, str(error), "labels")
            continue
        if not full:
            continue
        for images, counting in labels.folders():
            yield from _folder_problems(root, labels, images, counting)


def _folder_problems(
    root: "Root", labels: "LabelSet", images: Mapping[int, Record], counting: Mapping[int, Record]
) -> Iterator[Problem]:
    where = f"labels/{labels.digest[:12]}"
    for shard in images:
        name = labels.name(shard)
        if shard in counting:
            if set(labels.labels(shard)) != set(root.layout.groups_of(shard)):
                yield Problem(shard, f"{where}: other groups than the shard's", "labels")
        elif root.store.exists(name):
            yield Problem(shard, f"{where}: damaged, or of other images", "labels", (name,))
