"""A plain ustar archive, read strictly: headers, contents, its exact end."""

import re
import tarfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

BLOCK = tarfile.BLOCKSIZE  # bytes; headers are one, contents are padded to whole ones
RECORD = tarfile.RECORDSIZE  # an archive ends in zeros up to a multiple of this
MAGIC = slice(257, 265), b"ustar\x0000"
SIZE = slice(124, 136), re.compile(rb"[0-7]+[ \0]*")  # GNU tar also knows a binary form
MOST_MEMBER = 64 * 2**20  # far above any image of ours; a header may claim eight exabytes


class Span(NamedTuple):
    """Bytes of a file."""

    offset: int
    size: int


class Member(NamedTuple):
    """One file of a tar; its content is empty where only headers are read."""

    name: str
    span: Span
    content: bytes


def members(
    file: BinaryIO, take: Callable[[BinaryIO, Span], bytes], *, most_bytes: int | None = None
) -> Iterator[Member]:
    """Members of the tar in `file`, from where it stands up to the tar's end and the file's.

    tarfile's own reader unpacks compressed tars, follows links and extended headers, believes
    any size, and takes zeros or a cut between members for the end.

    Args:
        take: `read` or `skip`.
        most_bytes: of the whole tar.
    Raises:
        ValueError: anything but regular files with plain headers in a whole tar.
    """
    offset = 0
    while any(header := _block(file, offset)):
        name, size = _parsed(header, offset)
        span = Span(offset + BLOCK, size)
        offset = _padded(span.offset + size, BLOCK)
        if most_bytes is not None and offset > most_bytes:
            raise ValueError(f"damaged tar: {name!r} goes beyond its {most_bytes} bytes")
        yield Member(name, span, take(file, span))
    _check_end(file, offset, most_bytes)


def read(file: BinaryIO, span: Span) -> bytes:
    padded = _padded(span.size, BLOCK)
    content = file.read(padded)
    if len(content) != padded:
        raise ValueError(f"damaged tar: it ends inside the member at byte {span.offset}")
    if any(content[span.size :]):
        raise ValueError(f"damaged tar: bytes behind the member at byte {span.offset}")
    return content[: span.size]


def skip(file: BinaryIO, span: Span) -> bytes:
    file.seek(_padded(span.size, BLOCK), 1)
    return b""


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _block(file: BinaryIO, offset: int) -> bytes:
    block = file.read(BLOCK)
    if len(block) < BLOCK:
        raise ValueError(f"damaged tar: it ends before byte {offset + BLOCK}, without an end mark")
    return block


def _parsed(header: bytes, offset: int) -> tuple[str, int]:
    """Name and size."""
    place = f"damaged tar: header at byte {offset}"
    try:
        info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
    except (tarfile.HeaderError, ValueError) as error:  # a name that is not ASCII is a ValueError
        raise ValueError(f"{place}: {error}") from None
    if info.type != tarfile.REGTYPE or info.linkname or header[MAGIC[0]] != MAGIC[1]:
        raise ValueError(f"{info.name!r} does not belong in a shard: it is no regular file")
    if not SIZE[1].fullmatch(header[SIZE[0]]) or info.size > MOST_MEMBER:
        raise ValueError(f"{place}: {info.name!r} claims {info.size} bytes")
    return info.name, info.size


def _check_end(file: BinaryIO, offset: int, most_bytes: int | None) -> None:
    """One block of zeros was read at `offset`; as many must follow as tar writes, and no more."""
    whole = _padded(offset + 2 * BLOCK, RECORD)
    left = whole - offset - BLOCK
    rest = file.read(left + 1)
    if len(rest) != left or any(rest) or (most_bytes is not None and whole > most_bytes):
        raise ValueError(f"damaged tar: it must end in zeros from byte {offset} to {whole}")
