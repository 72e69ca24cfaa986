"""Compare a root with its records: sizes by listing; on request every byte and image."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from data.commit_records import SHARDS
from data.records import Records
from data.store import Fact
from data.tombstones import FOLDER as TOMBSTONES
from data.tombstones import numbered_folders
from data.verification.folder import FolderCheck
from data.verification.label_sets import label_problems
from data.verification.problem import Problem
from data.verification.prototypes import prototypes_problems
from data.verification.references import Pins, stray_files

if TYPE_CHECKING:
    from data.root import Root


def verify(root: "Root", *, full: bool = False) -> Iterator[Problem]:
    """All that is wrong, as it is found; a folder of shards is in memory at a time.

    Args:
        full: read every record, hash every file, decode every image, check every label.
    """
    store = root.store
    digest, shards = root.plan["digest"], root.plan["num_shards"]
    records = Records(store, digest, shards=shards, compact=not full)
    pins = Pins(root, full=full)
    prototypes: Counter[str] = Counter()
    buried = numbered_folders(store, TOMBSTONES)
    for number in sorted(numbered_folders(store, SHARDS) | set(pins.folders)):
        folder = FolderCheck(root, records, number, buried=buried)
        yield from folder.problems(full=full)
        yield from pins.problems(folder)
        prototypes += folder.prototypes
    yield from stray_files(_beside_folders(root), ())
    yield from prototypes_problems(root, prototypes)
    yield from pins.summary()
    yield from label_problems(root, full=full)


def _beside_folders(root: "Root") -> dict[str, Fact]:
    """Files below shards/ that are in no folder of shards."""
    files, folders = root.store.scan(SHARDS)
    numbered = {f"{SHARDS}/{number:04d}" for number in numbered_folders(root.store, SHARDS)}
    for folder in folders:
        if folder not in numbered:
            files |= root.store.facts(folder)
    return files
