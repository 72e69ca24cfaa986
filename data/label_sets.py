"""Further labels over a root's images: which shards a set covers, and what it says of them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from semix.data.errors import InputError
from semix.data.formats import (
    FAILED,
    PROTOTYPES,
    SETS,
    Failure,
    File,
    LabelSetRecord,
    SeriesLabels,
    ShardLabels,
    record_name,
    shard_stem,
    spec_digest,
)
from semix.data.records import Attempts, numbered_folders, record_infos
from semix.data.root import Root, RootProgress
from semix.data.store import FileInfo

ROOT, IMAGES = "root", "images"  # where features come from, besides another set
SHORTEST = 6  # digits that may stand for a digest
PROJECTION = "projection"  # the one rule of labels that has a scale
AT_ONCE = 64  # label files that are read at once; a shard's are some ten kilobytes


@dataclass(frozen=True, slots=True)
class LabelHeader:
    """What the labels of a shard say but the labels.

    Attributes:
        images: sha256 of the tar that they belong to; groups: how many series.
    """

    images: str
    groups: int
    features: File | None


class NotLabelled(ValueError):
    """A shard has no labels of a set, or those of other images."""


class LabelSet:
    """One label set of a root, read from the store alone.

    A shard counts as labelled if its labels name the sha256 of the tar that is committed now;
    where images were made again, their labels are missing again. Labels that are damaged, or that
    lie where another's belong, count as missing.

    Attributes:
        record: what set.json says.

    Args:
        digest: of the set, or at least its first 6 digits.
    Raises:
        InputError: no such set, or more than one; of a newer version of semix.
        ValueError: set.json is damaged, or of another root.
    """

    def __init__(self, root: Root, digest: str) -> None:
        self.root, self.store = root, root.store
        self.digest = _resolved(root, digest)
        self.folder = f"{SETS}/{self.digest}"
        self.record = _read_set(root, self.digest)
        self.prototypes = f"{self.folder}/{PROTOTYPES}"
        self._headers: dict[int, tuple[FileInfo, LabelHeader | None]] = {}
        self._attempts = Attempts(self.store, f"{self.folder}/{FAILED}")

    @cached_property
    def feature_source(self) -> "LabelSet | None":
        """The set that keeps the features these labels are made from; None where the root does."""
        source = self.record.features
        if source == ROOT:
            return None
        return self if source == IMAGES else LabelSet(self.root, source)

    def headers(self) -> dict[int, LabelHeader]:
        """Of labels that are of just the images that are committed now, by shard ascending."""
        self._refresh()
        images = self.root.images()
        known = ((shard, header) for shard, (_, header) in sorted(self._headers.items()) if header)
        return {shard: header for shard, header in known if images.get(shard) == header.images}

    def done(self) -> list[int]:
        """Shards whose images are committed and labelled."""
        return list(self.headers())

    def missing(self) -> list[int]:
        """Shards whose images are committed and have no labels of this set."""
        done = self.headers()
        return [shard for shard in self.root.images() if shard not in done]

    def header(self, shard: int) -> LabelHeader | None:
        """Of the labels that are there now, whatever images they are of."""
        return dict(self._read([shard])).get(shard)

    def is_committed(self, shard: int, images: str) -> bool:
        """Whether the tar with this sha256 is labelled."""
        header = self.header(shard)
        return header is not None and header.images == images

    def labels(self, shard: int, *, images: str | None = None) -> dict[int, SeriesLabels]:
        """What the set says of each series, by group number.

        Args:
            images: sha256 of the tar that they must be of; the committed one by default.
        Raises:
            NotLabelled: there are none, or of other images.
            ValueError: they are damaged.
        """
        name = self.name(shard)
        if images is None:
            record = self.root.record(shard)
            images = record.sha256 if record else ""
        try:
            content = self.store.get(name, most=ShardLabels.MOST)
        except FileNotFoundError:
            raise NotLabelled(f"{name}: shard {shard} has no labels of this set") from None
        try:
            found = self._checked(content, shard)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if found.images != images:
            raise NotLabelled(f"{name}: these labels are of other images; run `semix relabel`")
        return {series.group: series for series in found.groups}

    def commit(
        self,
        shard: int,
        *,
        images: str,
        groups: Sequence[SeriesLabels],
        features: File | None = None,
    ) -> bool:
        """Publish a shard's labels in one object; False if it has labels of these images.

        Args:
            images: sha256 of the tar that they belong to.
            features: stored beside them.
        """
        record = ShardLabels(
            spec=spec_digest(self.digest, shard),
            shard=shard,
            images=images,
            groups=list(groups),
            features=features,
        )
        content = record.written()
        if self.store.create(self.name(shard), content):
            return True
        if self.is_committed(shard, images):
            return False
        self.store.put(self.name(shard), content)  # what stood there was damaged, or outdated
        return True

    def name(self, shard: int) -> str:
        """Where a shard's labels are."""
        return record_name(shard, self.folder)

    def stem(self, shard: int) -> str:
        """The same without its ending, for what is stored beside them."""
        return shard_stem(shard, self.folder)

    def record_failure(self, failure: Failure) -> None:
        """Write `failed/...N.json` of this set for the next free attempt number N."""
        self._attempts.add(failure)

    def failed_attempts(self, missing: Sequence[int]) -> dict[int, int]:
        """How many attempts failed at each of these shards, of those that any did; none is read."""
        return {s: len(numbers) for s, numbers in self._attempts.numbers(missing).items()}

    def failures(self) -> dict[int, list[Failure]]:
        """Attempts that failed, of shards that are still not labelled."""
        return self._attempts.read(self._failed())

    def progress(self) -> RootProgress:
        """How many of the shards that have images are labelled."""
        images, headers = self.root.progress(), self.headers()
        groups, series = sum(h.groups for h in headers.values()), self.root.plan.images_per_group
        return RootProgress(
            shards=images.done,
            done=len(headers),
            failed=len(self._failed()),
            groups=images.groups_done,
            groups_done=groups,
            images=images.images_done,
            images_done=groups * series,
            left_out=0,
            seconds=0.0,
            stages={},
            tflop=None,
        )

    def status(self) -> dict[str, Any]:
        """One line about the set, as plain values."""
        annotation, progress = self.record.annotation, self.progress()
        return {
            "digest": self.digest,
            "rule": annotation.get("rule"),
            **({"scale": annotation.get("scale")} if annotation.get("rule") == PROJECTION else {}),
            "encoder": annotation.get("model"),
            "features": self.record.features,
            "shards": progress.shards,
            "done": progress.done,
            "failed": progress.failed,
        }

    def _failed(self) -> Mapping[int, Sequence[int]]:
        done = set(self.done())
        planned = range(self.root.plan.num_shards)
        return self._attempts.numbers(shard for shard in planned if shard not in done)

    def _refresh(self) -> None:
        """Read the heads of labels that are new, or not as they were."""
        listed: dict[int, FileInfo] = {}
        for number in sorted(numbered_folders(self.store, self.folder)):
            infos = self.store.scan(f"{self.folder}/{number:04d}", suffix=".json")[0]
            listed |= record_infos(infos, self.folder)
            self.root.heartbeat()
        known = self._headers
        self._headers = {s: known[s] for s, f in listed.items() if s in known and known[s][0] == f}
        unread = [shard for shard in listed if shard not in self._headers]
        self._headers |= {shard: (listed[shard], None) for shard in unread}
        for shard, header in self._read(unread):
            self._headers[shard] = listed[shard], header

    def _read(self, shards: Iterable[int]) -> Iterator[tuple[int, LabelHeader]]:
        """Heads of those that can be read."""
        names = {self.name(shard): shard for shard in shards}
        for start in range(0, len(names), AT_ONCE):
            some = list(names)[start : start + AT_ONCE]
            for name, content in self.store.get_many(some, most=ShardLabels.MOST).items():
                try:
                    found = self._checked(content, names[name])
                except ValueError:
                    continue
                yield names[name], LabelHeader(found.images, len(found.groups), found.features)

    def _checked(self, content: bytes, shard: int) -> ShardLabels:
        found = ShardLabels.read(content, where=f"{self.store.url}/{self.name(shard)}")
        if (found.shard, found.spec) != (shard, spec_digest(self.digest, shard)):
            raise ValueError("these labels are of another set or shard")
        return found


def label_sets(root: Root) -> list[str]:
    """Digests of the root's label sets, sorted."""
    found = (re.fullmatch(rf"{SETS}/([0-9a-f]{{64}})", name) for name in root.store.scan(SETS)[1])
    return sorted(m[1] for m in found if m and root.store.exists(f"{m[0]}/set.json"))


def create_set(root: Root, record: LabelSetRecord) -> LabelSet:
    """Open the set of this set.json, writing it where it is new."""
    root.store.create(f"{SETS}/{record.digest}/set.json", record.written())
    return LabelSet(root, record.digest)


def _resolved(root: Root, digest: str) -> str:
    if re.fullmatch("[0-9a-f]{64}", digest) and root.store.exists(f"{SETS}/{digest}/set.json"):
        return digest
    known = label_sets(root)
    matching = [d for d in known if d.startswith(digest)]
    if len(matching) == 1 and len(digest) >= SHORTEST:
        return matching[0]
    there = ", ".join(d[:12] for d in known) or "none; make one with `semix relabel`"
    problem = "several sets begin so" if len(matching) > 1 else "is no label set here"
    if len(digest) < SHORTEST:
        problem = f"give at least {SHORTEST} digits of its name"
    raise InputError("labels", digest, f"{problem}; {root.url} has: {there}")


def _read_set(root: Root, digest: str) -> LabelSetRecord:
    name = f"{SETS}/{digest}/set.json"
    content = root.store.get(name, most=LabelSetRecord.MOST)
    try:
        record = LabelSetRecord.read(content, where=f"{root.url}/{name}")
        if (record.digest, record.plan) != (digest, root.plan.digest):
            raise ValueError("belongs to another root or set")
    except ValueError as error:
        raise ValueError(f"{name}: {error}; remove it and run `semix relabel` again") from None
    return record
