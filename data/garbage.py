"""Garbage collection: files that are not needed any more, removed only on request."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from semix.data.errors import TooLarge
from semix.data.formats import FAILED, INDICES, PROTOTYPES, ShardLabels
from semix.data.index import index_names, iterate_index
from semix.data.label_sets import LabelSet, label_sets
from semix.data.leases import claim, forgotten, lease_name, living, release
from semix.data.records import FILES, numbered_folders
from semix.data.root import Root
from semix.data.store import FileInfo

HOUR = 3600.0
ATTEMPT = re.compile(r"failed/\d{4}/(\d{7})\.\d+\.json")
FEATURES = re.compile(r"\d{4}/(\d{7})-[0-9a-f]{8}\.features\.safetensors")
PROTOTYPE_MEASUREMENT = re.compile(r"prototypes/[0-9a-f]{64}/\d{7}\.safetensors")
UNFINISHED = "was never finished"


@dataclass(frozen=True)
class Garbage:
    """One file that can be removed.

    Attributes:
        shard: the shard that it belonged to.
        lease: name of the work that may still use the file; it is removed under this lease only.
    """

    name: str
    bytes: int
    why: str
    shard: int | None = None
    lease: int | str | None = None


def garbage(root: Root, *, older_than_s: float = HOUR) -> list[Garbage]:
    """Files that no commit record, index or label set names, and that no living process may use.

    Args:
        older_than_s: seconds by the store's clock; younger files stay, because a build publishes
            a tar before the record that names it.
    """
    newest = root.store.now() - older_than_s
    candidates = [item for item, info in _candidates(root) if info.modified <= newest]
    leased = living(root.store)
    return [g for g in candidates if g.lease is None or lease_name(g.lease) not in leased]


def remove(root: Root, items: Iterable[Garbage], *, older_than_s: float = HOUR) -> list[Garbage]:
    """Remove these files and what unfinished writes left; returns the removed ones.

    The files of a shard are removed under its lease, and only if they are still garbage.
    """
    items = list(items)
    root.store.sweep(older_than_s=older_than_s)
    partial = root.store.partials()
    removed = [item for item in items if item.why == UNFINISHED and item.name not in partial]
    for item in items:
        if item.why == UNFINISHED:
            continue
        if item.lease is not None and not claim(root.store, item.lease):
            continue
        try:
            if _is_still_garbage(root, item) and root.store.exists(item.name):
                root.store.delete(item.name)
                removed.append(item)
        finally:
            if item.lease is not None:
                release(root.store, item.lease)
    return removed


def _candidates(root: Root) -> Iterator[tuple[Garbage, FileInfo]]:
    # Files are listed before the records that name them, so that no newer file is listed.
    failed = root.store.infos(FAILED)
    for name, info in root.store.partials().items():
        yield Garbage(name, info.bytes, UNFINISHED), info
    for name, info in forgotten(root.store).items():
        yield Garbage(name, info.bytes, "its process is gone"), info
    yield from _unreferred(root)
    done = set(root.done())
    for name, info in failed.items():
        if (match := ATTEMPT.fullmatch(name)) and int(match[1]) in done:
            yield Garbage(name, info.bytes, "the shard was made since", int(match[1])), info
    yield from _unreferred_labels(root)
    yield from _prototype_measurements(root)


def _unreferred(root: Root) -> Iterator[tuple[Garbage, FileInfo]]:
    """Damaged indices; if there are none, files of shards that no record and no index names."""
    unrecorded = {
        name: (int(match[1]), info)
        for folder in root.folders()
        for name, info in folder.unnamed().items()
        if (match := FILES.fullmatch(name))
    }
    pins, damaged = _pins(root, unrecorded)
    infos = root.store.scan(INDICES, suffix=".json")[0] if damaged else {}
    for name, reason in damaged.items():
        if name in infos:
            yield Garbage(name, infos[name].bytes, reason), infos[name]
    if damaged:
        return  # a damaged index may pin any of them
    for name, (shard, info) in unrecorded.items():
        if name not in pins:
            yield Garbage(name, info.bytes, "no record names it", shard, shard), info


def _pins(root: Root, unrecorded: Mapping[str, object]) -> tuple[set[str], dict[str, str]]:
    """Those of the files that an index names, and the damaged indices, with the reason."""
    pinned: set[str] = set()
    damaged = {}
    for name in index_names(root.store):
        try:
            for entry in iterate_index(root.store, name, plan_digest=root.plan.digest):
                pinned |= {entry.tar, entry.features.name} & unrecorded.keys()
        except ValueError as error:
            damaged[name] = str(error)
    return pinned, damaged


def _unreferred_labels(root: Root) -> Iterator[tuple[Garbage, FileInfo]]:
    """Features in label sets that no labels name, and failures before a success."""
    for digest in label_sets(root):
        labels = LabelSet(root, digest)
        failed = root.store.infos(f"{labels.folder}/{FAILED}")
        headers = dict(labels.headers())
        named = {header.features.name for header in headers.values() if header.features}
        for number in sorted(numbered_folders(root.store, labels.folder)):
            for name, info in root.store.scan(f"{labels.folder}/{number:04d}")[0].items():
                match = FEATURES.fullmatch(name.removeprefix(f"{labels.folder}/"))
                if match and name not in named:
                    shard = int(match[1])
                    lease = f"labels-{digest[:12]}-{shard:07d}"
                    yield Garbage(name, info.bytes, "no labels name it", shard, lease), info
        for name, info in failed.items():
            match = ATTEMPT.fullmatch(name.removeprefix(f"{labels.folder}/"))
            if match and int(match[1]) in headers:
                yield Garbage(name, info.bytes, "the labels were made since", int(match[1])), info


def _prototype_measurements(root: Root) -> Iterator[tuple[Garbage, FileInfo]]:
    """Measured features, once prototypes exist; all count as old as the newest of them."""
    infos = root.store.infos("prototypes")
    files = {name: info for name, info in infos.items() if PROTOTYPE_MEASUREMENT.fullmatch(name)}
    if files and root.store.exists(PROTOTYPES):
        newest = max(info.modified for info in files.values())
        for name, info in files.items():
            yield Garbage(name, info.bytes, "its measurement is over"), FileInfo(info.bytes, newest)


def _is_still_garbage(root: Root, item: Garbage) -> bool:
    """Whether a file is garbage even now, when this process holds its lease."""
    if item.lease is None:
        return True
    record = re.sub(r"-[0-9a-f]{8}\.(tar|features\.safetensors)$", ".json", item.name)
    try:
        return item.name.encode() not in root.store.get(record, max_bytes=ShardLabels.MAX_BYTES)
    except FileNotFoundError:
        return True
    except TooLarge:  # it may name the file
        return False
