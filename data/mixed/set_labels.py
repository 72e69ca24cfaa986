"""Labels of a label set for the shards of an index, which must have all of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data.errors import InputError
from data.label_records import read_shard_labels, with_labels
from data.label_sets import LabelSet
from data.mixed.contents import Record
from data.root import Root, spec_digest

AT_ONCE = 64  # shards whose labels are read at once


def open_label_set(root: Root, digest: str, shards: Sequence[Mapping[str, Any]]) -> LabelSet:
    """A label set that covers all of these shards.

    Raises:
        InputError: there is no such set, or it lacks some of them.
    """
    found = LabelSet(root, digest)
    there = set(root.store.list(found.folder))
    _refuse_missing(found, [s["shard"] for s in shards if found.name(s["shard"]) not in there])
    return found


def _refuse_missing(label_set: LabelSet, missing: Sequence[int]) -> None:
    if missing:
        command = f"run `semix relabel {label_set.root.url}` with its settings again"
        text = f"has no labels for {len(missing):,} shards of the index, shard {missing[0]} first"
        raise InputError("mixed.labels", label_set.digest[:12], f"{text}; {command}")


def set_labels(
    label_set: LabelSet, shards: Sequence[Mapping[str, Any]]
) -> Iterator[dict[int, Record]]:
    """For each of the shards what a label set says of its groups, by group number."""
    for start in range(0, len(shards), AT_ONCE):
        some = shards[start : start + AT_ONCE]
        contents = label_set.store.get_many([label_set.name(shard["shard"]) for shard in some])
        for shard in some:
            yield _labels_of(label_set, shard, contents)


def _labels_of(
    label_set: LabelSet, shard: Mapping[str, Any], contents: Mapping[str, bytes]
) -> dict[int, Record]:
    number = shard["shard"]
    name = label_set.name(number)
    if name not in contents:
        _refuse_missing(label_set, [number])
    try:
        record = read_shard_labels(contents[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    own = record["spec"] == spec_digest(label_set.digest, number)
    if not own or record["images"] != shard["sha256"]:
        _refuse_missing(label_set, [number])  # they are of images that were made again since
    return {group.pop("group"): group for group in record["groups"]}


def relabelled(records: Sequence[Record], labels: Mapping[int, Record]) -> list[Record]:
    """The records with the labels of a set in place of their own.

    Raises:
        ValueError: the set says nothing of a group, or of another number of images.
    """
    found = []
    for record in records:
        own = labels.get(record["group"])
        if own is None or len(own["weights"]) != len(record["alphas"]):
            raise ValueError(f"group {record['group']} has labels of other images")
        found.append(with_labels(record, own))
    return found
