"""The series of a shard, sure to be those that its commit record names."""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from data.shards import GroupSample, read_tar
from data.store import Store
from pipeline.plan import MixGroup


class Hashed(io.RawIOBase):
    """Reads another stream forward, and knows the sha256 of what it gave."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._hash.update(content)
        return content

    def finish(self) -> str:
        """Read what is left; returns the sha256 of everything, as hexadecimal digits."""
        while self.read(1 << 20):
            pass
        return self._hash.hexdigest()


def verified_series(
    store: Store, record: Mapping[str, Any], groups: Sequence[MixGroup]
) -> Iterator[GroupSample]:
    """Samples of one shard, read once and hashed on the way.

    New labels are bound to their images by the tar's hash, so the bytes must be those that were
    recorded; what was yielded may only be used once this has ended.

    Args:
        record: commit record of the shard; groups: what it holds, by the plan.
    Raises:
        ValueError: a damaged tar, other bytes than recorded, or other series; it starts with
            the tar's name, or the group's.
        FileNotFoundError: the tar is not there.
    """
    count = 0
    try:
        with store.open(record["tar"]) as file:
            hashed = Hashed(file)
            for sample in read_tar(hashed, most_bytes=record["bytes"]):  # type: ignore[arg-type]
                _check(sample, groups[count] if count < len(groups) else None)
                count += 1
                yield sample
            if count != len(groups):
                raise ValueError(f"holds {count} series, not {len(groups)}")
            if hashed.finish() != record["sha256"]:
                raise ValueError("does not have the recorded SHA-256")
    except ValueError as error:
        raise ValueError(f"{record['tar']}: {error}") from None


def _check(sample: GroupSample, group: MixGroup | None) -> None:
    found = sample.record
    if group is None or (found["group"], found["classes"]) != (group.index, list(group.classes)):
        raise ValueError(f"group {found['group']} is none of its plan here")
    if len(sample.images) != len(group.mixture):
        raise ValueError(f"group {group.index} has {len(sample.images)} images")
