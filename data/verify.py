"""Verification of a root against its records, and quarantine of damaged files.

Sizes are compared from listings; with `full` every byte, image and label is read.
"""

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from semix.data.errors import TooLarge
from semix.data.features import read_features
from semix.data.flags import DamagedFlags, read_excluded
from semix.data.formats import (
    DISCARDED,
    PROTOTYPES,
    SHARDS,
    CommitRecord,
    Plan,
    ShardEntry,
)
from semix.data.index import index_names, iterate_index
from semix.data.label_sets import LabelSet, label_sets
from semix.data.leases import claim, release
from semix.data.machine import cores
from semix.data.records import (
    FILES,
    RECORD,
    Folder,
    Problem,
    numbered_folders,
    size_problem,
)
from semix.data.root import REMEDY, Root
from semix.data.store import FileInfo
from semix.data.tar import Hashing, checked_samples, read_tar
from semix.data.tensors import open_sealed
from semix.data.threads import mapped

log = logging.getLogger("semix.build")


def verify(root: Root, *, full: bool = False) -> Iterator[Problem]:
    """All problems of a root, one by one; one folder of shards is in memory at a time.

    Args:
        full: also hash every file, decode every image, check every label.
    """
    intact: dict[int, str] = {}
    made_with: dict[str, list[int]] = {}  # shards by the SHA-256 of their prototypes
    for folder in root.folders():
        damaged = set()
        for problem in _folder_problems(root, folder, full=full):
            damaged |= {problem.shard} if problem.damage else set()
            yield problem
        for record in folder.intact:
            made_with.setdefault(record.prototypes, []).append(record.shard)
            if record.shard not in damaged:
                intact[record.shard] = record.sha256
    yield from orphans(_files_outside_folders(root))
    yield from _prototypes_problems(root, made_with)
    yield from _index_problems(root, intact)
    yield from _label_problems(root, full=full)
    yield from _flag_problems(root)


def damage(root: Root, *, full: bool = False) -> list[Problem]:
    """The problems of `verify` without orphans."""
    return [problem for problem in verify(root, full=full) if problem.damage]


def quarantine(root: Root, problems: Iterable[Problem]) -> int:
    """Discard damaged files, with tombstones, so that they are made again; returns how many.

    A shard that a living process works on is skipped. So are problems that a person must repair,
    such as a damaged index, or a folder where a record should be.
    """
    return sum(_quarantine(root, problem) for problem in problems)


def quarantine_prototypes(root: Root) -> None:
    """Discard a prototypes file that cannot be used, so that it is measured again."""
    problems = [p for p in _prototypes_problems(root, {}) if p.files]
    for problem in problems:
        log.warning("%s", problem)
    quarantine(root, problems)


def unusable_prototypes(content: bytes, plan: Plan) -> str | None:
    """The reason why a prototypes file is unusable for this plan; None if it is usable."""
    try:
        tensors, metadata = open_sealed(content)
        encoder = json.loads(metadata["encoder"])
    except (ValueError, KeyError, RecursionError) as error:
        return f"cannot be read: {error}"
    vectors, classes = tensors.get("prototypes"), len(plan.class_names)
    if vectors is None or vectors.ndim != 2 or len(vectors) != classes:
        shape = None if vectors is None else list(vectors.shape)
        return f"has prototypes of shape {shape}, not [{classes}, width]"
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        return "holds values that are not finite"
    if encoder != plan.models["annotation"]:
        return "was measured with another encoder than the plan's"
    return None


def _folder_problems(root: Root, folder: Folder, *, full: bool) -> Iterator[Problem]:
    """What is wrong with a thousand shards, and files there that no record names."""
    for name in folder.subfolders:
        if RECORD.fullmatch(name):
            text = f"{name} is a folder, not a commit record; move it away"
            yield Problem(int(name[-12:-5]), text, "record")
    yield from folder.problems
    if full:
        check = partial(_content_problem, root)
        yield from filter(None, mapped(check, folder.intact, threads=max(2, cores())))
    yield from orphans(folder.unnamed())
    for name in folder.subfolders:
        yield from orphans(root.store.infos(name))


def _content_problem(root: Root, record: CommitRecord) -> Problem | None:
    """What is wrong inside the files of a shard, whose sizes are as recorded."""
    checks: dict[str, Callable[[Root, ShardEntry], Iterator[str]]] = {
        record.tar: _tar_problems,
        record.features.name: _features_problems,
    }
    problems = {name: "; ".join(check(root, record)) for name, check in checks.items()}
    if not any(problems.values()):
        return None
    text = "; ".join(f"{name} {problem}" for name, problem in problems.items() if problem)
    return Problem(record.shard, text, files=tuple(n for n, problem in problems.items() if problem))


def _tar_problems(root: Root, entry: ShardEntry) -> Iterator[str]:
    """Read the tar once, with one series in memory at a time."""
    with root.store.open(entry.tar) as file:
        hashing = Hashing(file)
        problem = _series_problem(io.BufferedReader(hashing, 2**20), entry, root)
        if hashing.hexdigest() != entry.sha256:
            yield "does not have the recorded SHA-256"
        if problem:
            yield problem


def _series_problem(file: io.BufferedReader, entry: ShardEntry, root: Root) -> str | None:
    sizes = {"num_classes": root.num_classes, "num_images": root.plan.images_per_group}
    try:
        for sample in checked_samples(read_tar(file, max_bytes=entry.bytes), entry, **sizes):
            sample.pixels()
    except ValueError as error:
        return str(error)
    return None


def _features_problems(root: Root, entry: ShardEntry) -> Iterator[str]:
    file, images = entry.features, root.plan.images_per_group
    try:
        arrays = read_features(root.store, file, groups=entry.groups, images=images)
    except ValueError as error:
        yield str(error).removeprefix(f"{file.name}: ")
        return
    for name, array in sorted(arrays.items()):
        if not np.isfinite(array).all():
            yield f"{name} holds values that are not finite"


def _prototypes_problems(root: Root, made_with: Mapping[str, list[int]]) -> Iterator[Problem]:
    """Problems of the prototypes file: damaged, of another plan, or not what shards were made with.

    Args:
        made_with: shards by the SHA-256 of the prototypes that they were made with.
    """
    try:
        content = root.store.get(PROTOTYPES)
    except FileNotFoundError:
        if made_with:
            yield Problem(None, f"{PROTOTYPES} is missing", "prototypes")
        return
    except TooLarge as error:
        yield Problem(None, str(error), "prototypes", (PROTOTYPES,))
        return
    if reason := unusable_prototypes(content, root.plan):
        yield Problem(None, f"{PROTOTYPES} {reason}", "prototypes", (PROTOTYPES,))
        return
    digest = hashlib.sha256(content).hexdigest()
    others = [s for other, shards in made_with.items() if other not in ("", digest) for s in shards]
    if others:
        text = f"{PROTOTYPES} is not what {len(others)} shards were made with, {min(others)} on"
        yield Problem(None, f"{text}; {REMEDY}", "prototypes")


def _index_problems(root: Root, intact: Mapping[int, str]) -> Iterator[Problem]:
    """Indices that cannot be read, or that pin missing or changed tars."""
    for name in index_names(root.store):
        changed = []
        try:
            for entry in iterate_index(root.store, name, plan_digest=root.plan.digest):
                is_intact = intact.get(entry.shard) == entry.sha256
                if not is_intact and size_problem(root.store, entry.tar, entry.bytes):
                    changed.append(entry)
        except (FileNotFoundError, ValueError) as error:
            yield Problem(None, str(error), "index", (name,))
            continue
        if changed:
            text = f"{name}: pins {len(changed)} tars that are missing or cut, {changed[0].tar} on"
            yield Problem(changed[0].shard, text, "index")


def _label_problems(root: Root, *, full: bool) -> Iterator[Problem]:
    """Label sets that cannot be opened; with `full` also labels that do not fit the shards."""
    for digest in label_sets(root):
        try:
            labels = LabelSet(root, digest)
        except ValueError as error:
            yield Problem(None, str(error), "labels")
            continue
        if not full:
            continue
        for record in (record for folder in root.folders() for record in folder.intact):
            yield from _shard_label_problems(labels, record)


def _flag_problems(root: Root) -> Iterator[Problem]:
    try:
        read_excluded(root)
    except DamagedFlags as error:
        yield Problem(None, str(error), "flags")


def _shard_label_problems(labels: LabelSet, record: CommitRecord) -> Iterator[Problem]:
    name, where = labels.name(record.shard), f"labels/{labels.digest[:12]}"
    try:
        groups = list(labels.labels(record.shard, images=record.sha256))
    except ValueError:
        if labels.store.exists(name):
            text = f"{where}: damaged, or of other images"
            yield Problem(record.shard, text, "labels", (name,))
        return
    if groups != record.group_numbers:
        yield Problem(record.shard, f"{where}: other groups than the shard's", "labels", (name,))


def orphans(unnamed: Mapping[str, FileInfo]) -> Iterator[Problem]:
    """Files in the folders of shards that no commit record names."""
    for name, info in unnamed.items():
        match = FILES.fullmatch(name)
        what = "no commit record names it" if match else "does not belong here"
        text = f"{name}: {what} ({info.bytes} bytes)"
        yield Problem(int(match[1]) if match else None, text, "orphan")


def _files_outside_folders(root: Root) -> dict[str, FileInfo]:
    """Files below shards/ that are not in a folder of shards."""
    files, folders = root.store.scan(SHARDS)
    numbered = {f"{SHARDS}/{number:04d}" for number in numbered_folders(root.store, SHARDS)}
    for folder in folders:
        if folder not in numbered:
            files |= root.store.infos(folder)
    return files


def _quarantine(root: Root, problem: Problem) -> bool:
    discardable = problem.kind == "shard" or (problem.kind == "record" and bool(problem.files))
    if problem.kind == "prototypes" and problem.files:
        _discard_file(root, problem)
    elif problem.shard is not None and discardable:
        if not claim(root.store, problem.shard):
            return False
        try:
            root.discard(problem.shard, why=problem.text)
            # The same bytes get the same name, and a store may keep an existing file.
            record = f"{problem.shard:07d}.json"
            _remove(root, (name for name in problem.files if not name.endswith(record)))
        finally:
            release(root.store, problem.shard)
    elif problem.kind == "labels" and problem.files:
        _remove(root, problem.files)
    else:
        return False
    return True


def _discard_file(root: Root, problem: Problem) -> None:
    number = 1
    note = json.dumps({"why": problem.text}).encode()
    while not root.store.create(f"{DISCARDED}/{problem.kind}.{number}.json", note):
        number += 1
    _remove(root, problem.files)


def _remove(root: Root, names: Iterable[str]) -> None:
    for name in names:
        root.store.delete(name)
