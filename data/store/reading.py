"""An object as a file: read in ranges, each complete or read again."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

FIRST_RANGE = 1 << 18  # bytes; a single image is read without its whole shard
LONGEST_RANGE = 1 << 23


class RangeFile(io.RawIOBase):
    """Read-only and seekable; ends only where the object ends.

    Args:
        read: bytes [start, end) of the object, all of them.
        size: of the object in bytes.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size = read, size
        self._position = 0
        self._start, self._bytes = 0, b""  # the range that was read last
        self._length = FIRST_RANGE

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise ValueError(f"position {origin + offset} is before the file")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        if self._position >= self._size:
            return 0
        end = self._start + len(self._bytes)
        if not self._start <= self._position < end:
            # Longer and longer ranges for who reads on, short ones for who jumps.
            on = self._position == end and end > 0
            self._length = min(2 * self._length, LONGEST_RANGE) if on else FIRST_RANGE
            self._start = self._position
            self._bytes = self._read(self._start, min(self._start + self._length, self._size))
        at, view = self._position - self._start, memoryview(buffer).cast("B")
        part = self._bytes[at : at + len(view)]
        view[: len(part)] = part
        self._position += len(part)
        return len(part)
