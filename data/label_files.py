"""The label files of one set, a shard each: where they lie, and what is read from them."""

from collections.abc import Iterable, Iterator, Mapping

from data.label_records import Record, read_shard_labels, write_record
from data.root import spec_digest
from data.schemas import PER_FOLDER
from data.shards import shard_name
from data.store import Fact, Store

SETS = "labels"
AT_ONCE = 64  # label files read at once; a shard's are some ten kilobytes


class LabelFiles:
    """What a head is: the labels' record with the number of its groups in place of them.

    Files that are damaged, or that lie where another's belong, count as missing.

    Args:
        digest: of the set.
    """

    def __init__(self, store: Store, digest: str) -> None:
        self.folder = f"{SETS}/{digest}"
        self._store, self._digest = store, digest

    def name(self, shard: int) -> str:
        return f"{self.stem(shard)}.json"

    def stem(self, shard: int) -> str:
        return shard_name(shard).replace("shards", self.folder, 1)

    def listed(self, number: int) -> dict[int, Fact]:
        """The files of 1000 shards, from 1000 x `number` on."""
        facts = self._store.scan(f"{self.folder}/{number:04d}", suffix=".json")[0]
        shards = range(number * PER_FOLDER, (number + 1) * PER_FOLDER)
        return {s: facts[self.name(s)] for s in shards if self.name(s) in facts}

    def head(self, shard: int) -> Record | None:
        """Of the labels that are there now, whatever images they are of."""
        return next((head for _, head in self.heads([shard])), None)

    def heads(self, shards: Iterable[int]) -> Iterator[tuple[int, Record]]:
        """By shard, of those that can be read."""
        names = [(self.name(shard), shard) for shard in shards]
        for start in range(0, len(names), AT_ONCE):
            some = dict(names[start : start + AT_ONCE])
            for name, content in self._store.get_many(list(some)).items():
                try:
                    record = read_shard_labels(content)
                except ValueError:
                    continue
                if self._in_place(record, some[name]):
                    yield some[name], record | {"groups": len(record["groups"])}

    def heads_of(self, images: Mapping[int, Record]) -> dict[int, Record]:
        """Heads of labels that are of just these images, given by their commit records."""
        found = self.heads(images)
        return {s: head for s, head in found if head["images"] == images[s]["sha256"]}

    def read(self, shard: int, *, images: Record | None) -> Record:
        """The whole record of labels of these images.

        Raises:
            ValueError: there are none, they are damaged, or of other images.
        """
        name = self.name(shard)
        try:
            record = read_shard_labels(self._store.get(name))
        except FileNotFoundError:
            raise ValueError(f"{name}: shard {shard} has no labels of this set") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if not self._in_place(record, shard):
            raise ValueError(f"{name}: these labels are of another set or shard")
        if images is None or record["images"] != images["sha256"]:
            raise ValueError(f"{name}: these labels are of other images; run `semix relabel`")
        return record

    def write(self, shard: int, labels: Record) -> bool:
        """Publish a shard's labels in one object; False if it has labels of the same images.

        Raises:
            ValueError: they would not be read back, as a label that is not a number.
        """
        record = {"spec": spec_digest(self._digest, shard), "shard": shard} | labels
        content = write_record(record)
        read_shard_labels(content)
        if self._store.create(self.name(shard), content):
            return True
        head = self.head(shard)
        if head is not None and head["images"] == record["images"]:
            return False
        self._store.put(self.name(shard), content)  # what stood there was damaged, or outdated
        return True

    def _in_place(self, record: Record, shard: int) -> bool:
        spec = spec_digest(self._digest, shard)
        return (record["shard"], record["spec"]) == (shard, spec)
