"""A shard: groups of images and labels in one plain tar, byte for byte a function of them."""

import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from data.fingerprint import canonical_json
from data.schemas import read_group_record
from data.ustar import Member, Span, members, read, skip

if TYPE_CHECKING:
    from data.store import Store

MEMBER = re.compile(r"(?P<key>\d{8})\.(?:\d{2}\.(?P<image>webp|png|jpg)|json)", re.ASCII)


@dataclass(frozen=True)
class GroupSample:
    """One series of images from one initial noise, as a webdataset sample.

    Attributes:
        record: group, classes, names, seed, alphas, weights, labels, noise (see docs/format.md).
        images: encoded images, one an alpha, in the order of `record["alphas"]`.
        extension: webp, png or jpg.
    """

    record: dict[str, Any]
    images: list[bytes]
    extension: str


@dataclass(frozen=True)
class GroupPlace:
    """Where one series lies in its plain tar.

    Attributes:
        record: of its JSON; images: one an alpha.
    """

    group: int
    record: Span
    images: tuple[Span, ...]
    extension: str


def group_key(group: int) -> str:
    return f"{group:08d}"


def shard_name(index: int) -> str:
    """Where shard `index` lives, without extension; at most a thousand shards a folder."""
    return f"shards/{index // 1000:04d}/{index:07d}"


def write_tar(file: BinaryIO, samples: Iterable[GroupSample]) -> None:
    """Write samples as `KEY.00.webp .. KEY.json`; fixed times, owners and order."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            key = group_key(sample.record["group"])
            for position, content in enumerate(sample.images):
                _add(tar, f"{key}.{position:02d}.{sample.extension}", content)
            _add(tar, f"{key}.json", canonical_json(sample.record).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its defaults are time 0, owner 0, mode 0644
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def read_tar(file: BinaryIO, *, most_bytes: int | None = None) -> Iterator[GroupSample]:
    """Samples of a plain tar; nothing in it can name a file, run, or grow by unpacking.

    Args:
        most_bytes: of the whole tar, as its commit record says.
    Raises:
        ValueError: a damaged or compressed tar, a member that no shard has, members out of
            order, or a series whose record and images do not fit together.
    """
    for series in _series(members(file, read, most_bytes=most_bytes)):
        *images, last = series.members
        try:
            record = read_group_record(last.content)
        except ValueError as error:
            raise ValueError(f"{last.name}: {error}") from None
        count = len(record["alphas"])
        if group_key(record["group"]) != series.key or len(images) != count:
            names = ", ".join(member.name for member in series.members)
            raise ValueError(f"group {series.key} has members {names}; wanted {count} images")
        yield GroupSample(record, [image.content for image in images], series.extension)


def scan_tar(file: BinaryIO, *, most_bytes: int | None = None) -> Iterator[GroupPlace]:
    """Where the series of a plain, seekable tar lie, from its headers alone.

    Raises:
        ValueError: as `read_tar`, but for what only contents show.
    """
    for series in _series(members(file, skip, most_bytes=most_bytes)):
        *images, record = (member.span for member in series.members)
        yield GroupPlace(int(series.key), record, tuple(images), series.extension)


def read_shard(
    store: "Store", record: Mapping[str, Any], *, num_classes: int | None = None
) -> Iterator[GroupSample]:
    """Samples of one shard, checked against its commit record or its entry in an index.

    Args:
        num_classes: of the plan; no record may speak of another class.
    Raises:
        ValueError: as `read_tar`, or other groups than recorded; it starts with the tar's name.
        FileNotFoundError: the tar is not there.
    """
    groups, first = 0, record.get("first")
    try:
        with store.open(record["tar"]) as file:
            for sample in read_tar(file, most_bytes=record["bytes"]):
                group = sample.record["group"]
                if first is not None and group != first + groups:
                    raise ValueError(f"holds group {group}, its record says {first + groups}")
                _check_classes(sample.record, num_classes)
                groups += 1
                yield sample
        if groups != record["groups"]:
            raise ValueError(f"{groups} groups, its record says {record['groups']}")
    except ValueError as error:
        raise ValueError(f"{record['tar']}: {error}") from None


def _check_classes(record: dict[str, Any], num_classes: int | None) -> None:
    if num_classes is None:
        return
    named = {*record["classes"], *(target for row in record["labels"] for target, _ in row)}
    if max(named) >= num_classes:
        raise ValueError(
            f"group {record['group']} names class {max(named)}, the plan has {num_classes}"
        )


class _Series(NamedTuple):
    """The members of one sample: its images, then its record."""

    key: str
    extension: str
    members: list[Member]


def _series(found: Iterator[Member]) -> Iterator[_Series]:
    """Members by sample: images from position 0 on, then the record; keys ascend."""
    last, series = "", None
    for member in found:
        match = MEMBER.fullmatch(member.name)
        if match is None:
            raise ValueError(f"{member.name!r} does not belong in a shard")
        key, image = match.group("key", "image")
        series = series or _Series(key, image or "", [])
        wanted = f"{key}.{len(series.members):02d}.{series.extension}" if image else f"{key}.json"
        if key <= last or key != series.key or member.name != wanted:
            raise ValueError(f"{member.name!r} is out of order")
        if not image and not series.members:
            raise ValueError(f"group {key} has no images")
        series.members.append(member)
        if not image:
            yield series
            last, series = key, None
    if series:
        raise ValueError(f"damaged tar: it ends inside group {series.key}")
