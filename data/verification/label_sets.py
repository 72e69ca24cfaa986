"""Label sets of a root: what each stored set says of images that are there."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from data.verification.problem import Problem

if TYPE_CHECKING:
    from data.root import Root


def label_problems(root: "Root", *, full: bool) -> Iterator[Problem]:
    """Sets that cannot be opened; with `full` also labels that do not count or do not fit."""
    from data.label_sets import LabelSet, label_sets  # it builds on roots, which verify themselves

    for digest in label_sets(root):
        where = f"labels/{digest[:12]}"
        try:
            labels = LabelSet(root, digest)
        except ValueError as error:
            yield Problem(None, str(error), "labels")
            continue
        if not full:
            continue
        there = set(root.store.list(labels.folder))
        counting = labels.committed()
        for shard in labels.images():
            name = labels.name(shard)
            if name in there and shard not in counting:
                yield Problem(shard, f"{where}: damaged, or of other images", "labels", (name,))
            elif shard in counting:
                wanted = set(root.layout.groups_of(shard))
                if set(labels.labels(shard)) != wanted:
                    yield Problem(shard, f"{where}: other groups than the shard's", "labels")
