"""Further labels over a root's images: which shards a set covers, and what it says of them."""

import re
from collections.abc import Iterator
from typing import Any

from data.errors import InputError
from data.failures import FailedShards, Failures
from data.label_files import SETS, LabelFiles
from data.label_records import Record, read_set_record, write_record
from data.labelled_folder import LabelledFolder
from data.progress import Progress
from data.root import Root
from data.shard_numbers import ShardNumbers
from data.store import Store
from data.tombstones import numbered_folders

SHORTEST = 6  # digits that may stand for a digest


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
        self._files = LabelFiles(self.store, self.digest)
        self.folder = self._files.folder
        self.plan: Record = _read_plan(root, self.digest)
        self._seen: dict[int, LabelledFolder] = {}
        self._failures = Failures(Store(f"{root.url}/{self.folder}"))

    def images(self) -> dict[int, Record]:
        """Commit records of the images, by shard: what there is to label."""
        return self.root.committed()

    def folders(self) -> Iterator[tuple[dict[int, Record], dict[int, Record]]]:
        """A thousand shards at a time: commit records of the images, and heads of labels that
        are of just these."""
        for images in self.root.folders():
            yield images, self._files.heads_of(images)

    def heads(self, number: int) -> dict[int, Record]:
        """As in `committed`, of the shards from 1000 x `number` on."""
        return self._files.heads_of(self.root.folder(number))

    def committed(self) -> dict[int, Record]:
        """By shard what its labels say but the labels: images, number of groups, features.

        Takes a kilobyte a shard.
        """
        return {s: head for _, heads in self.folders() for s, head in heads.items()}

    def done(self) -> ShardNumbers:
        """Shards whose images are committed and labelled."""
        self._look()
        return ShardNumbers.joined(self._seen[number].numbers() for number in sorted(self._seen))

    def missing(self) -> ShardNumbers:
        """Shards whose images are committed and have no labels of this set."""
        done = self.done()
        return self.root.done() - done

    def is_committed(self, shard: int, images: str) -> bool:
        """Whether the tar with this sha256 is labelled."""
        head = self.head(shard)
        return head is not None and head["images"] == images

    def head(self, shard: int) -> Record | None:
        """As in `committed`, of one shard and read now, whatever images it is of."""
        return self._files.head(shard)

    def labels(self, shard: int) -> dict[int, Record]:
        """weights, labels and what else the rule gives, by group number.

        Raises:
            ValueError: the shard is not labelled, its labels are damaged, or of other images.
        """
        record = self._files.read(shard, images=self.root.record(shard))
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
        labels: Record = {"images": images, "groups": groups}
        return self._files.write(shard, labels | ({"features": features} if features else {}))

    def record_failure(self, shard: int, error: Record) -> None:
        """Write `failed/...N.json` of this set for the next free attempt number N."""
        self._failures.add(shard, error)

    def failures(self) -> FailedShards:
        """Attempts that failed, of shards that are still not labelled."""
        return self._failures.of_missing(self._unlabelled())

    def progress(self) -> Progress:
        """How many of the shards that have images are labelled."""
        failed = self._failures.of_missing(self._unlabelled())
        images, series = self.root.sums(), self.root.plan["images_per_group"]
        groups, groups_done = images.groups, sum(seen.groups for seen in self._seen.values())
        return Progress(
            shards=images.shards,
            done=sum(seen.shards for seen in self._seen.values()),
            failed=len(failed),
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
        return self._files.name(shard)

    def stem(self, shard: int) -> str:
        """The same without its ending, for what is stored beside them."""
        return self._files.stem(shard)

    def _unlabelled(self) -> ShardNumbers:
        return ShardNumbers.spans([(0, self.root.plan["num_shards"])]) - self.done()

    def _look(self) -> None:
        """Bring what is remembered up to date: folders with images or labels that are new."""
        images = self.root.seen()
        for number in self._seen.keys() - images.keys():
            del self._seen[number]
        there = numbered_folders(self.store, self.folder)
        for number, (digest, count) in images.items():
            digest = f"{digest} {count}"
            seen = self._seen.get(number)
            if number not in there:
                self._seen.pop(number, None)
            elif seen is None or not seen.is_complete(digest):
                self._update(number, digest, count)
            self.root.beat()

    def _update(self, number: int, digest: str, count: int) -> None:
        """Read labels of one folder that are new, or not of the images that are there now."""
        seen = self._seen.setdefault(number, LabelledFolder(number))
        listed = self._files.listed(number)
        if seen.is_as_before(digest, listed):
            return
        unsettled = seen.reopen(digest, listed)
        images = {s: e["sha256"] for s, e in self.root.folder(number, only=unsettled).items()}
        unread = [shard for shard in images if not seen.knows(shard, images[shard])]
        for shard, head in self._files.heads(unread):
            seen.learn(shard, head["images"], head["groups"])
        labelled = [shard for shard in images if seen.knows(shard, images[shard])]
        seen.settle(digest, listed, labelled, of=count)


def label_sets(root: Root) -> list[str]:
    """Digests of the root's label sets, sorted."""
    found = (re.fullmatch(rf"{SETS}/([0-9a-f]{{64}})", name) for name in root.store.scan(SETS)[1])
    return sorted(m[1] for m in found if m and root.store.exists(f"{m[0]}/set.json"))


def create_set(root: Root, record: Record) -> LabelSet:
    """Open the set of this set.json, writing it where it is new."""
    read_set_record(write_record(record))
    root.store.create(f"{SETS}/{record['digest']}/set.json", write_record(record))
    return LabelSet(root, record["digest"])


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
