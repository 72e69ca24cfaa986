"""Verification of a root against its records, and quarantine of damaged files.

Sizes are compared from listings; with `full` every byte, image and label is read.
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from semix.data.errors import InputError, TooLarge
from semix.data.formats import (
    DISCARDED,
    PAIRS,
    PROTOTYPES,
    SHARDS,
    Pairs,
    Plan,
    ShardEntry,
    record_name,
)
from semix.data.images import decode_image
from semix.data.index import index_names, open_index
from semix.data.label_sets import LabelSet, label_sets
from semix.data.leases import claim, release
from semix.data.machine import cores
from semix.data.records import FILES, RECORD, Folder, Records, numbered_folders
from semix.data.root import Root, ShardInput
from semix.data.store import FileInfo, Store
from semix.data.tar import GroupSample, Hashing, read_tar
from semix.data.tensors import open_sealed, read_arrays
from semix.data.threads import mapped

ProblemKind = Literal["shard", "record", "prototypes", "pairs", "index", "labels", "orphan"]
Listing = Mapping[str, FileInfo]
REMEDY = "restore the earlier file, or build into a new folder"


@dataclass(frozen=True)
class Problem:
    """A problem of a root or of one shard.

    Attributes:
        shard: number of the shard; None for a problem of the whole root.
        kind: an orphan is a file that nothing refers to; it only takes space.
        files: the files to remove before their content can be made again.
    """

    shard: int | None
    text: str
    kind: ProblemKind = "shard"
    files: tuple[str, ...] = ()

    @property
    def damage(self) -> bool:
        return self.kind != "orphan"

    def __str__(self) -> str:
        return self.text if self.shard is None else f"shard {self.shard}: {self.text}"


def verify(root: Root, *, full: bool = False) -> Iterator[Problem]:
    """All problems of a root, one by one; one folder of shards is in memory at a time.

    Args:
        full: read every record, hash every file, decode every image, check every label.
    """
    store, shards = root.store, root.plan.num_shards
    records = Records(store, root.plan.digest, shards=shards, use_index=not full)
    records.refresh()
    known, damaged = records.folders(), set()
    for number in sorted(numbered_folders(store, SHARDS) | known.keys()):
        for problem in _folder_problems(root, number, known.get(number, Folder()), full=full):
            damaged |= {problem.shard} if problem.damage else set()
            yield problem
    yield from _orphans(_files_outside_folders(root), ())
    rows = records.rows()
    intact = {shard: digest for shard, digest in rows.images().items() if shard not in damaged}
    yield from _made_with_problems(root, rows.array)
    yield from _index_problems(root, intact)
    yield from _label_problems(root, full=full)


def damage(root: Root, *, full: bool = False) -> list[Problem]:
    """The problems of `verify` without orphans."""
    return [problem for problem in verify(root, full=full) if problem.damage]


def quarantine(root: Root, problems: Iterable[Problem]) -> int:
    """Discard damaged files, with tombstones, so that they are made again; returns how many.

    A shard that a living process works on is skipped. So are problems that a person must repair,
    such as a damaged index, or a folder where a record should be.
    """
    return sum(_quarantine(root, problem) for problem in problems)


def check_same_origin(root: Root, file: ShardInput, digest: str) -> None:
    """Raises InputError if committed shards were made with another prototypes or pairs file.

    Args:
        digest: SHA-256 of the file that exists, or is about to be written.
    """
    counts = root.shards_by_input(file)
    if count := counts.total() - counts[""] - counts[digest]:
        first = next(e.shard for e in root.entries() if getattr(e, file) not in ("", digest))
        name = PROTOTYPES if file == "prototypes" else PAIRS
        remedy = f"are not those that {count} shards, {first} on, were made with; {REMEDY}"
        raise InputError(f"{root.url}/{name}", digest[:12], remedy)


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


def unusable_pairs(content: bytes, plan: Plan, *, count: int | None = None) -> str | None:
    """The reason why pairs.json is unusable for this plan; None if it is usable."""
    try:
        pairs = Pairs.read(content)
    except ValueError as error:
        return f"cannot be read: {error}"
    if any(second >= len(plan.class_names) for _, second in pairs):
        return f"names a class beyond the {len(plan.class_names)} of the plan"
    if count is not None and len(pairs) != count:
        return f"holds {len(pairs)} pairs, the plan has {count}"
    return None


def _folder_problems(root: Root, number: int, records: Folder, *, full: bool) -> Iterator[Problem]:
    """Compare the listed files of a thousand shards with their records."""
    infos, folders = root.store.scan(f"{SHARDS}/{number:04d}")
    for folder in folders:
        infos |= root.store.infos(folder)
    for shard, (_, reason) in records.rejected.items():
        name = record_name(shard)
        yield Problem(shard, f"its commit record {reason}", "record", (name,))
    for name in folders:
        if RECORD.fullmatch(name):
            text = f"{name} is a folder, not a commit record; move it away"
            yield Problem(int(name[-12:-5]), text, "record")
    entries = records.entries()
    for entry in entries:
        if entry.shard >= root.plan.num_shards:
            text = f"{record_name(entry.shard)} is beyond the shards of the plan; "
            yield Problem(entry.shard, f"{text}is an extension missing?", "record")
    planned = [entry for entry in entries if entry.shard < root.plan.num_shards]
    check = partial(_shard_problem, root, infos, full=full)
    problems = mapped(check, planned, threads=max(2, cores())) if full else map(check, planned)
    yield from filter(None, problems)
    yield from _orphans(infos, {name for e in entries for name in (e.tar, e.features.name)})


def _shard_problem(root: Root, infos: Listing, entry: ShardEntry, *, full: bool) -> Problem | None:
    problems: dict[str, str] = {}
    planned = root.layout.groups_of(entry.shard)
    omitted = {series.group for series in entry.left_out}
    if entry.group_numbers != [group for group in planned if group not in omitted]:
        problems[""] = f"holds {entry.groups} groups from {entry.first} on, the plan says otherwise"
    checks: dict[str, tuple[int, Callable[[Root, ShardEntry], Iterator[str]]]] = {
        entry.tar: (entry.bytes, _tar_problems),
        entry.features.name: (entry.features.bytes, _features_problems),
    }
    for name, (size, check) in checks.items():
        problem = _size_problem(infos.get(name), size)
        if problem is None and full and "" not in problems:  # else the record itself is wrong
            problem = "; ".join(check(root, entry)) or None
        if problem:
            problems[name] = problem
    if not problems:
        return None
    text = "; ".join(f"{name} {problem}".strip() for name, problem in problems.items())
    return Problem(entry.shard, text, files=tuple(name for name in problems if name in infos))


def _size_problem(info: FileInfo | None, size: int) -> str | None:
    if info is None:
        return "is missing"
    return None if info.bytes == size else f"has {info.bytes} bytes, not {size}"


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
    groups = []
    try:
        for sample in read_tar(file, max_bytes=entry.bytes):
            groups.append(sample.record.group)
            _check_series(sample, root)
    except ValueError as error:
        return str(error)
    if groups != entry.group_numbers:
        return f"holds {len(groups)} groups that are not those of its record"
    return None


def _check_series(sample: GroupSample, root: Root) -> None:
    record, images, classes = sample.record, root.plan.images_per_group, root.num_classes
    if len(sample.images) != images:
        raise ValueError(f"group {record.group} has {len(sample.images)} images, not {images}")
    label_classes = {*record.classes, *(target for label in record.labels for target, _ in label)}
    if max(label_classes) >= classes:
        raise ValueError(f"group {record.group} names class {max(label_classes)} of {classes}")
    shapes = set()
    for position, image in enumerate(sample.images):
        try:
            shapes.add(decode_image(image).shape)
        except ValueError as error:
            raise ValueError(f"group {record.group}, image {position}: {error}") from None
    if len(shapes) > 1:
        raise ValueError(f"group {record.group} has images of several sizes")


def _features_problems(root: Root, entry: ShardEntry) -> Iterator[str]:
    try:
        content = root.store.get(entry.features.name, max_bytes=entry.features.max_bytes)
    except TooLarge as error:
        yield str(error)
        return
    if hashlib.sha256(content).hexdigest() != entry.features.sha256:
        yield "does not have the recorded SHA-256"
    try:
        tensors, _ = read_arrays(content, where="features")
    except ValueError as error:
        yield f"damaged safetensors: {error}"
        return
    if "features" not in tensors:
        yield "has no tensor 'features'"
    sizes = (entry.groups, root.plan.images_per_group)
    for name, tensor in sorted(tensors.items()):
        if tensor.ndim != 3 or tensor.shape[:2] != sizes:
            yield f"{name} has shape {list(tensor.shape)}, not [{sizes[0]}, {sizes[1]}, width]"
        if tensor.dtype != np.float16:
            yield f"{name} is {tensor.dtype}, not float16"
        elif not np.isfinite(tensor).all():
            yield f"{name} holds values that are not finite"


def _made_with_problems(root: Root, rows: np.ndarray) -> Iterator[Problem]:
    """Problems of the prototypes and pairs files: damaged, of another plan, or of other shards."""
    pairs = root.plan.config["mixing"].get("pairs", {})
    checks: list[tuple[ShardInput, str, Callable[[bytes, Plan], str | None]]]
    checks = [("prototypes", PROTOTYPES, unusable_prototypes)]
    if pairs.get("kind") == "similar":
        checks.append(("pairs", PAIRS, partial(unusable_pairs, count=pairs.get("count"))))
    for kind, name, unusable in checks:
        counts = Counter(value.decode() for value in rows[kind].tolist())
        try:
            content = root.store.get(name)
        except FileNotFoundError:
            if counts:
                yield Problem(None, f"{name} is missing", kind)
            continue
        except TooLarge as error:
            yield Problem(None, str(error), kind, (name,))
            continue
        if reason := unusable(content, root.plan):
            yield Problem(None, f"{name} {reason}", kind, (name,))
            continue
        digest = hashlib.sha256(content).hexdigest()
        if count := counts.total() - counts[""] - counts[digest]:
            yield Problem(None, f"{name} is not what {count} shards were made with", kind)


def _index_problems(root: Root, intact: Mapping[int, str]) -> Iterator[Problem]:
    """Indices that cannot be read, or that pin missing or changed tars."""
    for name in index_names(root.store):
        try:
            index = open_index(root.store, name, plan_digest=root.plan.digest)
        except (FileNotFoundError, ValueError) as error:
            yield Problem(None, str(error), "index", (name,))
            continue
        unverified = [e for e in index.rows if intact.get(e.shard) != e.sha256]
        changed = [e for e in unverified if _size_problem(_file_info(root.store, e.tar), e.bytes)]
        if changed:
            text = f"{name}: pins {len(changed)} tars that are missing or cut, {changed[0].tar} on"
            yield Problem(changed[0].shard, text, "index")


def _file_info(store: Store, name: str) -> FileInfo | None:
    try:
        return FileInfo(store.size(name), 0.0)
    except FileNotFoundError:
        return None


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
        where, headers = f"labels/{digest[:12]}", labels.headers()
        for entry in root.entries():
            name = labels.name(entry.shard)
            if entry.shard in headers:
                if list(labels.labels(entry.shard)) != entry.group_numbers:
                    text = f"{where}: other groups than the shard's"
                    yield Problem(entry.shard, text, "labels")
            elif root.store.exists(name):
                text = f"{where}: damaged, or of other images"
                yield Problem(entry.shard, text, "labels", (name,))


def _orphans(infos: Listing, named: Iterable[str]) -> Iterator[Problem]:
    """Files in the folders of shards that no commit record names."""
    named = set(named)
    for name, info in infos.items():
        if RECORD.match(name) or name in named:
            continue
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
    if problem.kind in ("prototypes", "pairs") and problem.files:
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
