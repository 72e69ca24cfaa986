"""What WebP, PNG and JPEG bytes claim, looked at before any decoder runs."""

import re
import struct

MOST_SCANS = 64  # of a progressive JPEG; ours has one, common tools write about ten
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\0\0\0\0IEND\xaeB`\x82"
JPEG_START, JPEG_END, JPEG_SCAN = b"\xff\xd8\xff", b"\xff\xd9", b"\xff\xda"
ANIMATED = 0x02  # flag of an extended WebP
MOST_DRAWN = 1 << 31  # pixels that the scans of a picture from elsewhere draw, one over another
# The next marker: within a scan 0xFF is followed by zero, or by the number of a restart.
JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])", re.DOTALL)
FOREIGN = {  # what is met under the name of a picture, by how it starts
    "HTML or XML": rb"\s*<",
    "HEIC": rb"....ftyp(?:he|mif|msf)",
    "AVIF": rb"....ftypavi",
    "GIF": rb"GIF8",
    "TIFF": rb"II\*\0|MM\0\*",
    "BMP": rb"BM",
}
JPEG_SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # frames; the others are tables


def check_header(content: bytes, *, most_pixels: int) -> None:
    """Refuse what is cut, goes on behind its end, or would cost much to decode.

    Pillow allots a WebP's whole canvas to learn its size, and draws each scan of a JPEG over the
    whole picture, however many there are. It reads a PNG without its end, and stops at the end
    of any, whatever follows.

    Raises:
        ValueError: with the reason.
    """
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        _check_webp(content, most_pixels)
    elif content.startswith(PNG_START):
        width, height = struct.unpack(">II", _bytes(content, 16, 24))
        _check_size(width, height, most_pixels)
        _check_end(content.endswith(PNG_END))
    elif content.startswith(JPEG_START):
        _check_end(content.endswith(JPEG_END))
        # Inside a scan 0xFF is always followed by zero, so this counts scans, or more than them.
        if content.count(JPEG_SCAN) > MOST_SCANS:
            raise ValueError(f"more than {MOST_SCANS} scans")
    else:
        raise ValueError(f"it starts with {content[:8]!r}")


def picture_size(content: bytes) -> tuple[int, int]:
    """Width and height that a picture from elsewhere claims.

    What cameras and tools write is let through: bytes behind the end, many scans.

    Raises:
        ValueError: it is cut within its header, is none of the three formats, or draws so many
            scans that it would take minutes to decode.
    """
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        end = 8 + int.from_bytes(_bytes(content, 4, 8), "little")
        _bytes(content, end, end)
        return _webp_size(content)
    if content.startswith(PNG_START):
        width, height = struct.unpack(">II", _bytes(content, 16, 24))
        return width, height
    if not content.startswith(JPEG_START):
        raise ValueError(_foreign(content))
    width, height, scans = _jpeg_size(content)
    if scans * width * height > MOST_DRAWN:
        raise ValueError(f"{scans} scans over {width} x {height} pixels; save it as baseline")
    return width, height


def _foreign(content: bytes) -> str:
    if not content:
        return "it is empty"
    kinds = [kind for kind, start in FOREIGN.items() if re.match(start, content, re.DOTALL)]
    return f"it is {kinds[0] if kinds else 'something else'}, no WebP, PNG or JPEG"


def _jpeg_size(content: bytes) -> tuple[int, int, int]:
    """The largest width and height of its frames, and how many scans there are up to its end."""
    width = height = scans = 0
    at = len(JPEG_START) - 1
    while (found := JPEG_MARKER.search(content, at)) and found[1] != JPEG_END[1:]:
        at = found.end()
        if found[1][0] in JPEG_SIZES:
            tall, wide = struct.unpack(">HH", _bytes(content, at + 3, at + 7))
            width, height = max(width, wide), max(height, tall)
        scans += found[1] == JPEG_SCAN[1:]
        at += int.from_bytes(_bytes(content, at, at + 2))
    if not scans:
        raise ValueError("it is cut")
    return width, height, scans


def _check_webp(content: bytes, most_pixels: int) -> None:
    size = int.from_bytes(_bytes(content, 4, 8), "little")
    _check_end(len(content) == 8 + size + size % 2)
    if content[12:16] == b"VP8X" and _bytes(content, 20, 21)[0] & ANIMATED:
        raise ValueError("it is animated")
    _check_size(*_webp_size(content), most_pixels)


def _webp_size(content: bytes) -> tuple[int, int]:
    kind = content[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(_bytes(content, 24, 27), "little") + 1
        height = int.from_bytes(_bytes(content, 27, 30), "little") + 1
    elif kind == b"VP8L":  # after a signature byte 14 bits each
        bits = int.from_bytes(_bytes(content, 21, 25), "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":  # after frame tag and start code 14 bits each, 2 of scaling
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", _bytes(content, 26, 30)))
    else:
        raise ValueError(f"its first part is {kind!r}")
    return width, height


def _bytes(content: bytes, start: int, stop: int) -> bytes:
    if len(content) < stop:
        raise ValueError("it is cut")
    return content[start:stop]


def _check_size(width: int, height: int, most_pixels: int) -> None:
    if width * height > most_pixels:
        raise ValueError(f"{width} x {height} pixels, at most {most_pixels}")


def _check_end(whole: bool) -> None:
    if not whole:
        raise ValueError("it is cut, or goes on behind its end")
