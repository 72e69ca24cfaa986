"""Label sets: additional labels for the images of a root, one file per shard."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from semix.data.errors import InputError
from semix.data.formats import (
    FAILED,
    PROTOTYPES,
    SETS,
    SHARDS,
    Failure,
    File,
    LabelSetRecord,
    SeriesLabels,
    ShardEntry,
    ShardLabels,
    record_name,
    spec_digest,
)
from semix.data.records import Attempts, numbered_folders, record_infos
from semix.data.root import Root, RootProgress
from semix.data.store import FileInfo

ROOT, IMAGES = "root", "images"  # sources of features, besides another set
MIN_DIGITS = 6  # digits of an abbreviated digest
PROJECTION = "projection"  # the one rule of labels that has a scale
REMAKE = "remove it and run `semix relabel` again"
LABEL_FILES_AT_ONCE = 64  # files read in parallel; each has some ten kilobytes


@dataclass(frozen=True, slots=True)
class LabelHeader:
    """A shard's label file without the labels.

    Attributes:
        images: sha256 of the labelled tar; groups: number of series.
    """

    images: str
    groups: int
    features: File | None


class NotLabelled(ValueError):
    """A shard has no labels of a set, or the labels there are of other images."""


class LabelSet:
    """One label set of a root, read from the store alone.

    A shard is labelled if its file of labels is listed and is newer than its commit record. If it
    is not newer, it is read: labels of other images, which were made again since, do not count.

    Attributes:
        record: the content of set.json.

    Args:
        digest: digest of the set, or at least its first 6 digits.
    Raises:
        InputError: no such set, or more than one, or a newer version of semix wrote it.
        ValueError: set.json is damaged, or of another root.
    """

    def __init__(self, root: Root, digest: str) -> None:
        self.root, self.store = root, root.store
        self.digest = _resolve(root, digest)
        self.folder = f"{SETS}/{self.digest}"
        self.record = _read_set(root, self.digest)
        self.prototypes = f"{self.folder}/{PROTOTYPES}"
        self._attempts = Attempts(self.store, f"{self.folder}/{FAILED}")
        self._read: dict[int, tuple[FileInfo, FileInfo]] = {}  # records and labels that agreed

    @cached_property
    def feature_source(self) -> "LabelSet | None":
        """The set that stores the features of these labels; None if the root stores them."""
        source = self.record.features
        if source == ROOT:
            return None
        return self if source == IMAGES else LabelSet(self.root, source)

    def done(self) -> list[int]:
        """Shards whose images are committed and labelled, ascending."""
        return self._listed()[0]

    def missing(self) -> list[int]:
        """Shards whose images are committed and not labelled, ascending."""
        return self._listed()[1]

    def is_labelled(self, shard: int) -> bool:
        """Whether there are labels of the images that are committed now."""
        try:
            record = self.root.record(shard)
        except ValueError:  # damaged: nobody knows which images these are
            return False
        header = self.header(shard)
        return bool(record and header and header.images == record.sha256)

    def headers(self) -> Iterator[tuple[int, LabelHeader]]:
        """Shard and header of each readable file of labels; all are read, even of other images."""
        for number in sorted(numbered_folders(self.store, self.folder)):
            yield from self._read_headers(sorted(self._labels_in(number)))

    def header(self, shard: int) -> LabelHeader | None:
        """The header of a shard's stored labels, even if they are of other images."""
        return dict(self._read_headers([shard])).get(shard)

    def labels(self, shard: int, *, images: str | None = None) -> dict[int, SeriesLabels]:
        """The labels of each series of a shard, by group number.

        Args:
            images: sha256 of the tar that they must belong to; the committed one by default.
        Raises:
            NotLabelled: the shard has no labels, or labels of other images.
            ValueError: they are damaged.
        """
        name = self.name(shard)
        if images is None:
            record = self.root.record(shard)
            images = record.sha256 if record else ""
        try:
            content = self.store.get(name, max_bytes=ShardLabels.MAX_BYTES)
        except FileNotFoundError:
            raise NotLabelled(f"{name}: shard {shard} has no labels of this set") from None
        try:
            stored = self._parse(content, shard)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; {REMAKE}") from None
        if stored.images != images:
            raise NotLabelled(f"{name}: these labels are of other images; {REMAKE}")
        return {series.group: series for series in stored.groups}

    def commit(
        self,
        shard: int,
        *,
        images: str,
        groups: Sequence[SeriesLabels],
        features: File | None = None,
    ) -> bool:
        """Publish a shard's labels as one file; False if it has labels of these images already.

        Args:
            images: sha256 of the tar that they belong to.
            features: file that is stored beside the labels.
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
        header = self.header(shard)
        if header is not None and header.images == images:
            return False
        self.store.put(self.name(shard), content)  # the labels there were damaged or outdated
        return True

    def name(self, shard: int) -> str:
        """Name of the file of a shard's labels."""
        return record_name(shard, self.folder)

    def record_failure(self, failure: Failure) -> None:
        """Write `failed/...N.json` of this set for the next free attempt number N."""
        self._attempts.add(failure)

    def failed_attempts(self, missing: Sequence[int]) -> dict[int, int]:
        """Failed attempts at each of these shards that has any; no record of them is read."""
        return {s: len(numbers) for s, numbers in self._attempts.numbers(missing).items()}

    def failures(self) -> dict[int, list[Failure]]:
        """The failed attempts at shards that are still not labelled."""
        return self._attempts.read(self._attempts.numbers(self.missing()))

    def progress(self) -> RootProgress:
        """How many of the shards that have images are labelled."""
        (done, missing), plan = self._listed(), self.root.plan
        groups_of = self.root.layout.groups_of
        groups_done = sum(len(groups_of(shard)) for shard in done)
        groups = groups_done + sum(len(groups_of(shard)) for shard in missing)
        return RootProgress(
            shards=len(done) + len(missing),
            done=len(done),
            failed=len(self.failed_attempts(missing)),
            groups=groups,
            groups_done=groups_done,
            images=groups * plan.images_per_group,
            images_done=groups_done * plan.images_per_group,
        )

    def status(self) -> dict[str, Any]:
        """A summary of the set, as plain values."""
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

    def _listed(self) -> tuple[list[int], list[int]]:
        """The committed shards that are labelled, and those that are not, ascending."""
        done: list[int] = []
        missing: list[int] = []
        labelled = numbered_folders(self.store, self.folder)
        for number in sorted(numbered_folders(self.store, SHARDS)):
            records = record_infos(self.store.scan(f"{SHARDS}/{number:04d}", suffix=".json")[0])
            labels = self._labels_in(number) if number in labelled else {}
            for shard, record in records.items():
                if shard >= self.root.plan.num_shards:
                    continue
                info = labels.get(shard)
                is_done = info is not None and self._is_current(shard, record, info)
                (done if is_done else missing).append(shard)
            self.root.heartbeat()
        return done, missing

    def _is_current(self, shard: int, record: FileInfo, labels: FileInfo) -> bool:
        """Whether the listed labels of a shard are of the images of the listed record."""
        if labels.modified > record.modified or self._read.get(shard) == (record, labels):
            return True
        # Also of two files of one second, and of a copied root, whose times are those of the copy.
        if is_current := self.is_labelled(shard):
            self._read[shard] = record, labels
        return is_current

    def _labels_in(self, number: int) -> dict[int, FileInfo]:
        """The listed files of labels of one folder, by shard."""
        infos = self.store.scan(f"{self.folder}/{number:04d}", suffix=".json")[0]
        return record_infos(infos, self.folder)

    def _read_headers(self, shards: Iterable[int]) -> Iterator[tuple[int, LabelHeader]]:
        """Shard and header for each of these shards whose labels can be read."""
        names = {self.name(shard): shard for shard in shards}
        for start in range(0, len(names), LABEL_FILES_AT_ONCE):
            batch = list(names)[start : start + LABEL_FILES_AT_ONCE]
            contents = self.store.get_many(batch, max_bytes=ShardLabels.MAX_BYTES)
            for name, content in contents.items():
                try:
                    stored = self._parse(content, names[name])
                except ValueError:
                    continue
                yield names[name], LabelHeader(stored.images, len(stored.groups), stored.features)

    def _parse(self, content: bytes, shard: int) -> ShardLabels:
        stored = ShardLabels.read(content, where=f"{self.store.url}/{self.name(shard)}")
        if (stored.shard, stored.spec) != (shard, spec_digest(self.digest, shard)):
            raise ValueError("these labels are of another set or shard")
        return stored


def features_file(shard: ShardEntry, labels: LabelSet | None) -> File:
    """The stored features that labels of a shard are made from: the shard's own, or a label set's.

    Raises:
        ValueError: the set that stores the features has none for these images.
    """
    source = labels.feature_source if labels else None
    if source is None:
        return shard.features
    header = source.header(shard.shard)
    if header is None or header.images != shard.sha256 or header.features is None:
        raise ValueError(
            f"{source.name(shard.shard)}: has no features of {shard.tar}; complete that set first"
        )
    return header.features


def label_sets(root: Root) -> list[str]:
    """Digests of the root's label sets, sorted."""
    matches = (re.fullmatch(rf"{SETS}/([0-9a-f]{{64}})", name) for name in root.store.scan(SETS)[1])
    return sorted(m[1] for m in matches if m and root.store.exists(f"{m[0]}/set.json"))


def create_set(root: Root, record: LabelSetRecord) -> LabelSet:
    """Open the set of this record; writes set.json where the set is new."""
    root.store.create(f"{SETS}/{record.digest}/set.json", record.written())
    return LabelSet(root, record.digest)


def _resolve(root: Root, digest: str) -> str:
    if re.fullmatch("[0-9a-f]{64}", digest) and root.store.exists(f"{SETS}/{digest}/set.json"):
        return digest
    digests = label_sets(root)
    matching = [d for d in digests if d.startswith(digest)]
    if len(matching) == 1 and len(digest) >= MIN_DIGITS:
        return matching[0]
    available = ", ".join(d[:12] for d in digests) or "none; make one with `semix relabel`"
    problem = "several sets begin with it" if len(matching) > 1 else "is no label set here"
    if len(digest) < MIN_DIGITS:
        problem = f"give at least {MIN_DIGITS} digits of its name"
    raise InputError("labels", digest, f"{problem}; {root.url} has: {available}")


def _read_set(root: Root, digest: str) -> LabelSetRecord:
    name = f"{SETS}/{digest}/set.json"
    content = root.store.get(name, max_bytes=LabelSetRecord.MAX_BYTES)
    try:
        record = LabelSetRecord.read(content, where=f"{root.url}/{name}")
        if (record.digest, record.plan) != (digest, root.plan.digest):
            raise ValueError("belongs to another root or set")
    except ValueError as error:
        raise ValueError(f"{name}: {error}; {REMAKE}") from None
    return record
