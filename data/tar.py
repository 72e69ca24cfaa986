"""The tar of a shard, whose bytes follow from its images and labels alone.

It is written with fixed times, owners and order, and read strictly: headers, contents, exact end.
"""

import hashlib
import io
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, get_args

import numpy as np

from semix.data.formats import ImageFormat, SeriesRecord, ShardEntry
from semix.data.images import decode_series
from semix.data.tar_hashes import check_tar

if TYPE_CHECKING:
    from semix.data.store import Store

IMAGES = "|".join(get_args(ImageFormat))
MEMBER = re.compile(rf"(?P<key>\d{{8}})\.(?:\d{{2}}\.(?P<image>{IMAGES})|json)", re.ASCII)
BLOCK = tarfile.BLOCKSIZE  # bytes; a header is one block, contents are padded to whole blocks
RECORD = tarfile.RECORDSIZE  # an archive ends in zeros up to a multiple of this
MAGIC = slice(257, 265), b"ustar\x0000"
SIZE = slice(124, 136), re.compile(rb"[0-7]+[ \0]*")  # GNU tar also has a binary form
MAX_MEMBER = 64 * 2**20  # far more than our images have; a header could claim eight exabytes


class Span(NamedTuple):
    """A range of bytes in a file."""

    offset: int
    size: int


class Member(NamedTuple):
    """One file of a tar; its content is empty where only headers are read."""

    name: str
    span: Span
    content: bytes


@dataclass(frozen=True)
class GroupSample:
    """One series of images from one initial noise, as a webdataset sample.

    Attributes:
        images: encoded images, one per alpha, in the order of the record's alphas.
        extension: webp, png or jpg.
    """

    record: SeriesRecord
    images: list[bytes]
    extension: str

    def pixels(self) -> np.ndarray:
        """uint8 [A, H, W, 3]. Raises ValueError, which names the series and the image."""
        return decode_series(self.images, group=self.record.group)


@dataclass(frozen=True)
class SeriesSpans:
    """Where the files of one series lie in its tar.

    Attributes:
        record: range of its JSON; images: one range per alpha.
    """

    group: int
    record: Span
    images: tuple[Span, ...]
    extension: str


def group_key(group: int) -> str:
    return f"{group:08d}"


def write_tar(file: BinaryIO, samples: Iterable[GroupSample]) -> None:
    """Write samples as `KEY.00.webp .. KEY.json`; fixed times, owners and order."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            key = group_key(sample.record.group)
            for position, content in enumerate(sample.images):
                _add(tar, f"{key}.{position:02d}.{sample.extension}", content)
            _add(tar, f"{key}.json", sample.record.written())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its defaults are time 0, owner 0, mode 0644
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def read_tar(file: BinaryIO, *, max_bytes: int | None = None) -> Iterator[GroupSample]:
    """Samples of a plain tar; reading it writes no file, runs no code, decompresses nothing.

    Args:
        max_bytes: size of the whole tar according to its commit record.
    Raises:
        ValueError: a damaged or compressed tar, a member that no shard has, members out of
            order, or a series whose record and images do not fit together.
    """
    for series in _group_by_keys(tar_file_iterator(file, read_content, max_bytes=max_bytes)):
        *images, record_file = series.members
        try:
            record = SeriesRecord.read(record_file.content)
        except ValueError as error:
            raise ValueError(f"{record_file.name}: {error}") from None
        count = len(record.alphas)
        if group_key(record.group) != series.key or len(images) != count:
            names = ", ".join(member.name for member in series.members)
            raise ValueError(f"group {series.key} has members {names}; wanted {count} images")
        yield GroupSample(record, [image.content for image in images], series.extension)


def scan_tar(file: BinaryIO, *, max_bytes: int | None = None) -> Iterator[SeriesSpans]:
    """The spans of each series of a plain, seekable tar, from its headers alone.

    Raises:
        ValueError: as `read_tar`, except for damage within contents.
    """
    for series in _group_by_keys(tar_file_iterator(file, skip_content, max_bytes=max_bytes)):
        *images, record = (member.span for member in series.members)
        yield SeriesSpans(int(series.key), record, tuple(images), series.extension)


def read_shard(
    store: "Store", entry: ShardEntry, *, num_classes: int | None = None, hashed: bool = False
) -> Iterator[GroupSample]:
    """Samples of one shard, read once, and checked against its commit record.

    Args:
        num_classes: of the plan; no record may name a class beyond it.
        hashed: hash a local tar while it is read, even if it was hashed before. The end of the
            iteration then proves, as for a tar in a bucket, that this is the recorded tar. New
            labels are bound to their images by that hash.
    Raises:
        ValueError: as `read_tar`, or other series or bytes than recorded; starts with its name.
        FileNotFoundError: there is no such tar.
    """
    try:
        with store.open(entry.tar) as file:
            hashed = hashed or not store.local
            if not hashed:
                check_tar(file.fileno(), entry, path=f"{store.url}/{entry.tar}")
            hashing = Hashing(file)
            buffered = io.BufferedReader(hashing, 2**20) if hashed else file
            samples = read_tar(buffered, max_bytes=entry.bytes)
            yield from checked_samples(samples, entry, num_classes=num_classes)
            if hashed and hashing.hexdigest() != entry.sha256:
                raise ValueError("does not have the recorded SHA-256")
    except ValueError as error:
        raise ValueError(f"{entry.tar}: {error}") from None


def checked_samples(
    samples: Iterator[GroupSample],
    entry: ShardEntry,
    *,
    num_classes: int | None = None,
    num_images: int | None = None,
) -> Iterator[GroupSample]:
    """The same samples; raises ValueError where they differ from the record of their shard.

    Args:
        num_classes, num_images: of the plan: no record may name a class beyond, and every series
            has as many images.
    """
    expected = entry.group_numbers
    count = 0
    for count, sample in enumerate(samples, start=1):
        group = sample.record.group
        if count > len(expected) or group != expected[count - 1]:
            raise ValueError(f"holds group {group}, its record says otherwise")
        labels = {*sample.record.classes}
        labels |= {target for row in sample.record.labels for target, _ in row}
        if num_classes is not None and max(labels) >= num_classes:
            raise ValueError(f"group {group} names class {max(labels)}, the plan has {num_classes}")
        if num_images not in (None, len(sample.images)):
            raise ValueError(f"group {group} has {len(sample.images)} images, not {num_images}")
        yield sample
    if count != len(expected):
        raise ValueError(f"holds {count} groups, its record says {len(expected)}")


class _SeriesMembers(NamedTuple):
    """The files of one sample: its images, then its record."""

    key: str
    extension: str
    members: list[Member]


def _group_by_keys(files: Iterator[Member]) -> Iterator[_SeriesMembers]:
    """Group members into samples: images from position 0 on, then the record; keys ascend."""
    last, series = "", None
    for member in files:
        match = MEMBER.fullmatch(member.name)
        if match is None:
            raise ValueError(f"{member.name!r} does not belong in a shard")
        key, image = match.group("key", "image")
        series = series or _SeriesMembers(key, image or "", [])
        expected = f"{key}.{len(series.members):02d}.{series.extension}" if image else f"{key}.json"
        if key <= last or key != series.key or member.name != expected:
            raise ValueError(f"{member.name!r} is out of order")
        if not image and not series.members:
            raise ValueError(f"group {key} has no images")
        series.members.append(member)
        if not image:
            yield series
            last, series = key, None
    if series:
        raise ValueError(f"damaged tar: it ends inside group {series.key}")


class Hashing(io.RawIOBase):
    """A file that hashes the bytes that are read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._hash.update(content)
        return len(content)

    def hexdigest(self) -> str:
        """SHA-256 of the whole file; reads the remainder of it."""
        while content := self._file.read(2**20):
            self._hash.update(content)
        return self._hash.hexdigest()


def tar_file_iterator(
    file: BinaryIO, load: Callable[[BinaryIO, Span], bytes], *, max_bytes: int | None = None
) -> Iterator[Member]:
    """Members of the tar in `file`, from its position on; the file must end where the tar ends.

    tarfile's own reader is not used: it unpacks compressed tars, follows links and extended
    headers, accepts any size, and takes zeros or a cut between members for the end.

    Args:
        load: `read_content` or `skip_content`.
        max_bytes: of the whole tar.
    Raises:
        ValueError: anything but regular files with plain headers in a complete tar.
    """
    offset = 0
    while any(header := _read_block(file, offset)):
        name, size = _parse_header(header, offset)
        span = Span(offset + BLOCK, size)
        offset = _padded(span.offset + size, BLOCK)
        if max_bytes is not None and offset > max_bytes:
            raise ValueError(f"damaged tar: {name!r} goes beyond its {max_bytes} bytes")
        yield Member(name, span, load(file, span))
    _check_end(file, offset, max_bytes)


def read_content(file: BinaryIO, span: Span) -> bytes:
    padded = _padded(span.size, BLOCK)
    content = file.read(padded)
    if len(content) != padded:
        raise ValueError(f"damaged tar: it ends inside the member at byte {span.offset}")
    if content[span.size :].strip(b"\0"):
        raise ValueError(f"damaged tar: bytes behind the member at byte {span.offset}")
    return content[: span.size]


def skip_content(file: BinaryIO, span: Span) -> bytes:
    file.seek(_padded(span.size, BLOCK), 1)
    return b""


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _read_block(file: BinaryIO, offset: int) -> bytes:
    block = file.read(BLOCK)
    if len(block) < BLOCK:
        raise ValueError(f"damaged tar: it ends before byte {offset + BLOCK}, without an end mark")
    return block


def _parse_header(header: bytes, offset: int) -> tuple[str, int]:
    """Name and size of a member, from its header."""
    location = f"damaged tar: header at byte {offset}"
    try:
        info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
    except (tarfile.HeaderError, ValueError) as error:  # a name that is not ASCII is a ValueError
        raise ValueError(f"{location}: {error}") from None
    if info.type != tarfile.REGTYPE or info.linkname or header[MAGIC[0]] != MAGIC[1]:
        raise ValueError(f"{info.name!r} does not belong in a shard: it is no regular file")
    if not SIZE[1].fullmatch(header[SIZE[0]]) or info.size > MAX_MEMBER:
        raise ValueError(f"{location}: {info.name!r} claims {info.size} bytes")
    return info.name, info.size


def _check_end(file: BinaryIO, offset: int, max_bytes: int | None) -> None:
    """Check that the block of zeros at `offset` is followed by the zeros that tar writes, alone."""
    end = _padded(offset + 2 * BLOCK, RECORD)
    remaining = end - offset - BLOCK
    content = file.read(remaining + 1)
    if len(content) != remaining or any(content) or (max_bytes is not None and end > max_bytes):
        raise ValueError(f"damaged tar: it must end in zeros from byte {offset} to {end}")
