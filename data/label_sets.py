"""Further labels over a root's images: which shards a set covers, and what it says of them."""

import re
from collections.abc import Iterable
from typing import Any

from data.errors import InputError
from data.failures import Failures
from data.label_records import Record, read_set_record, read_shard_labels, write_record
from data.progress import Progress
from data.root import Root, spec_digest
from data.shards import shard_name
from data.store import Store

SETS = "labels"
SHORTEST = 6  # digits that may stand for a digest
AT_ONCE = 64  # label files read at once; a shard's are some ten kilobytes


class LabelSet:
    """One label set of a root, read from the store alone.

    A shard counts as labelled if its labels name the sha256 of the tar that is committed now;
    where images were made again, their labels are missing again.

    Args:
        digest: of the set, or at least its first 6 digits.
    Raises:
        InputError: no such set, or more than one.
        ValueError: set.json is damaged.
    """

    def __init__(self, root: Root, digest: str) -> None:
        self.root = root
        self.store = root.store
        self.digest = _resolved(root, digest)
        self.folder = f"{SETS}/{self.digest}"
        self.plan: Record = _read_plan(root, self.digest)
        self._heads: dict[int, Record] = {}  # labels do not change while their images do not
        self._failures = Failures(Store(f"{root.url}/{self.folder}"))

    def images(self) -> dict[int, Record]:
        """Commit records of the images, by shard: what there is to label."""
        return self.root.committed()

    def committed(self) -> dict[int, Record]:
        """By shard what its labels say but the labels: images, number of groups, features."""
        return self._look()[1]

    def missing(self) -> list[int]:
        """Shards whose images are committed and have no labels of this set."""
        images, done = self._look()
        return [shard for shard in images if shard not in done]

    def is_committed(self, shard: int, images: str) -> bool:
        """Whether the tar with this sha256 is labelled."""
        head = self.head(shard)
        return head is not None and head["images"] == images

    def head(self, shard: int) -> Record | None:
        """As in `committed`, of one shard and read now, whatever images it is of."""
        found = self._read_some([shard])
        return _head(found[shard]) if shard in found else None

    def labels(self, shard: int) -> dict[int, Record]:
        """weights, labels and what else the rule gives, by group number.

        Raises:
            ValueError: the shard is not labelled, its labels are damaged, or of other images.
        """
        name, images = self.name(shard), self.root.record(shard)
        try:
            record = read_shard_labels(self.store.get(name))
        except FileNotFoundError:
            raise ValueError(f"{name}: shard {shard} has no labels of this set") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if not self._in_place(record, shard):
            raise ValueError(f"{name}: these labels are of another set or shard")
        if images is None or record["images"] != images["sha256"]:
            raise ValueError(f"{name}: these labels are of other images; run `semix relabel`")
        return {series.pop("group"): series for series in record["groups"]}

    def commit(
        self, shard: int, *, images: str, groups: list[Record], features: Record | None = None
    ) -> bool:
        """Publish a shard's labels in one object; False if they are there already.

        Args:
            images: sha256 of the tar that they belong to.
            groups: `group` and the parts of `PARTS`, one a series.
            features: name, sha256 and bytes of the file stored beside them.
        Raises:
            ValueError: they would not be read back, as a label that is not a number.
        """
        record = {"spec": spec_digest(self.digest, shard), "shard": shard, "images": images}
        record |= {"groups": groups} | ({"features": features} if features else {})
        content = write_record(record)
        read_shard_labels(content)
        name = self.name(shard)
        if self.store.create(name, content):
            return True
        if self.is_committed(shard, images):
            return False
        self.store.put(name, content)  # what stood there was damaged, or of earlier images
        return True

    def record_failure(self, shard: int, error: Record) -> None:
        """Write `failed/...N.json` of this set for the next free attempt number N."""
        self._failures.add(shard, error)

    def failures(self) -> dict[int, list[Record]]:
        """Attempt records of shards that are still not labelled."""
        return self._failures.of_missing(self.committed())

    def progress(self) -> Progress:
        """How many of the shards that have images are labelled."""
        images, done = self._look()
        series = self.root.plan["images_per_group"]
        groups = sum(record["groups"] for record in images.values())
        groups_done = sum(head["groups"] for head in done.values())
        return Progress(
            shards=len(images),
            done=len(done),
            failed=len(self._failures.of_missing(done)),
            groups=groups,
            groups_done=groups_done,
            images=groups * series,
            images_done=groups_done * series,
            seconds=0.0,
            stages={},
            tflop=None,
        )

    def status(self) -> Record:
        """One line about the set, as plain values."""
        annotation, progress = self.plan["annotation"], self.progress()
        return {
            "digest": self.digest,
            "rule": annotation.get("rule"),
            "scale": annotation.get("scale"),
            "encoder": annotation.get("model"),
            "features": self.plan["features"],
            "shards": progress.shards,
            "done": progress.done,
            "failed": progress.failed,
        }

    def name(self, shard: int) -> str:
        """Where a shard's labels are."""
        return f"{self.stem(shard)}.json"

    def stem(self, shard: int) -> str:
        return shard_name(shard).replace("shards", self.folder, 1)

    def _look(self) -> tuple[dict[int, Record], dict[int, Record]]:
        """Commit records of the images, and heads of the labels that are of just these."""
        images = self.images()
        there = set(self.store.list(self.folder))
        named = {shard: name for shard in images if (name := self.name(shard)) in there}
        heads = {
            shard: self._heads[shard]
            for shard in named
            if shard in self._heads and self._heads[shard]["images"] == images[shard]["sha256"]
        }
        unknown = [shard for shard in named if shard not in heads]
        for start in range(0, len(unknown), AT_ONCE):
            for shard, record in self._read_some(unknown[start : start + AT_ONCE]).items():
                if record["images"] == images[shard]["sha256"]:
                    heads[shard] = _head(record)
        self._heads = heads
        return images, dict(sorted(heads.items()))

    def _read_some(self, shards: Iterable[int]) -> dict[int, Record]:
        """Labels that can be read and lie in their place; damaged ones count as missing."""
        names = {self.name(shard): shard for shard in shards}
        found = {}
        for name, content in self.store.get_many(list(names)).items():
            try:
                record = read_shard_labels(content)
            except ValueError:
                continue
            if self._in_place(record, names[name]):
                found[names[name]] = record
        return found

    def _in_place(self, record: Record, shard: int) -> bool:
        spec = spec_digest(self.digest, shard)
        return (record["shard"], record["spec"]) == (shard, spec)


def label_sets(root: Root) -> list[str]:
    """Digests of the root's label sets, sorted."""
    found = (
        re.fullmatch(rf"{SETS}/([0-9a-f]{{64}})/set\.json", name) for name in root.store.list(SETS)
    )
    return sorted(match[1] for match in found if match)


def create_set(root: Root, record: Record) -> LabelSet:
    """Open the set of this set.json, writing it where it is new."""
    read_set_record(write_record(record))
    root.store.create(f"{SETS}/{record['digest']}/set.json", write_record(record))
    return LabelSet(root, record["digest"])


def _head(record: Record) -> Record:
    return record | {"groups": len(record["groups"])}


def _resolved(root: Root, digest: str) -> str:
    if re.fullmatch("[0-9a-f]{64}", digest) and root.store.exists(f"{SETS}/{digest}/set.json"):
        return digest
    known = label_sets(root)
    matching = [d for d in known if d.startswith(digest) and len(digest) >= SHORTEST]
    if len(matching) == 1:
        return matching[0]
    there = ", ".join(d[:12] for d in known) or "none; make one with `semix relabel`"
    problem = "several sets begin so" if matching else "is no label set here"
    raise InputError("labels", digest, f"{problem}; {root.url} has: {there}")


def _read_plan(root: Root, digest: str) -> Any:
    name = f"{SETS}/{digest}/set.json"
    try:
        record = read_set_record(root.store.get(name))
    except ValueError as error:
        raise ValueError(f"{name}: {error}; remove it and run `semix relabel` again") from None
    if (record["digest"], record["plan"]) != (digest, root.plan["digest"]):
        raise InputError("labels", digest[:12], f"{name} belongs to another root or set")
    return record
