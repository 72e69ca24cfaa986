"""Encoding and decoding of images, by an allow-list of formats; headers are checked first."""

import io
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from semix.data.files import open_regular
from semix.data.marks import xmp_settings

MAX_PIXELS = 4096 * 4096  # models here generate at most a quarter of this side
# Pixels of a user's picture: as many as phones and nearly all cameras take.
MAX_PICTURE_PIXELS = 1 << 27
MAX_BYTES = 1 << 28  # of a user's picture
MAX_PIXELS_AT_ONCE = 1 << 28  # of all threads; a pixel takes 8 to 16 bytes
BACKGROUND = "white"  # background of transparent pixels
MAX_SCANS = 64  # of a progressive JPEG; semix writes one, common tools about ten
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\0\0\0\0IEND\xaeB`\x82"
JPEG_START, JPEG_END, JPEG_SCAN = b"\xff\xd8\xff", b"\xff\xd9", b"\xff\xda"
ANIMATED = 0x02  # flag of an extended WebP
MAX_SCANNED_PIXELS = 1 << 31  # pixels in all scans of a user's picture together
# The next marker: within a scan 0xFF is followed by zero, or by the number of a restart.
JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])", re.DOTALL)
UNSUPPORTED = {  # kinds of files that may be named like pictures, by their first bytes
    "HTML or XML": rb"\s*<",
    "HEIC": rb"....ftyp(?:he|mif|msf)",
    "AVIF": rb"....ftypavi",
    "BigTIFF": rb"II\+\0|MM\0\+",
}
PICTURE_READERS = {  # further formats of users' pictures, whose size Pillow reads without decoding
    "TIFF": rb"II\*\0|MM\0\*",
    "BMP": rb"BM",
    "GIF": rb"GIF8[79]a",
}
MODES_16_BIT = ("I;16", "I;16B", "I;16L")  # Pillow's modes of 16 bits and one channel
WHITE_IS_ZERO, PHOTOMETRIC, TILE_WIDTH, TILE_HEIGHT = 0, 262, 322, 323  # of a TIFF's tags
PICTURES = "PNG, JPEG, WebP, TIFF, BMP or GIF"  # formats of users' pictures
JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers with a size; the three are tables


def encode_image(pixels: np.ndarray, extension: str, *, mark: bool = False) -> bytes:
    """Encode uint8 [H, W, 3] as the bytes of a file; lossless for webp and png.

    Args:
        mark: say in the file's metadata that the image is generated; see `semix.data.marks`.
    """
    buffer = io.BytesIO()
    encoding = ENCODINGS[extension]
    settings = {**encoding.settings, **(xmp_settings(encoding.reader) if mark else {})}
    Image.fromarray(pixels, "RGB").save(buffer, encoding.reader, **settings)
    return buffer.getvalue()


def decode_image(content: bytes, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode the bytes of a file to uint8 [H, W, 3].

    Raises:
        ValueError: not one complete still image, or by its header more than `max_pixels`: a file of
            a few bytes can decode to gigabytes of one colour.
    """
    try:
        check_header(content, max_pixels=max_pixels)
        with Image.open(io.BytesIO(content), formats=READERS) as image:
            if image.format not in READERS or getattr(image, "n_frames", 1) != 1:
                raise ValueError("it holds several pictures")
            if image.width * image.height > max_pixels:
                raise ValueError(f"{image.width} x {image.height} pixels, at most {max_pixels}")
            return np.asarray(image.convert("RGB"))
    # Pillow's readers raise any error of their parsers: struct.error, SyntaxError, ...
    except Exception as error:
        raise ValueError(f"not a complete WebP, PNG or JPEG image: {error}") from None


def decode_series(
    images: Sequence[bytes], *, group: int, positions: Sequence[int] | None = None
) -> np.ndarray:
    """Decode the images of one series, or some of them, as `decode_image` does.

    Args:
        positions: of these images in their series; 0, 1, ... by default.
    Returns:
        uint8 [A, H, W, 3].
    Raises:
        ValueError: an image cannot be decoded, or they differ in size; it names series and image.
    """
    pixels = []
    for position, content in zip(positions or range(len(images)), images, strict=True):
        try:
            pixels.append(decode_image(content))
        except ValueError as error:
            raise ValueError(f"group {group}, image {position}: {error}") from None
    if any(image.shape != pixels[0].shape for image in pixels[1:]):
        raise ValueError(f"group {group} has images of several sizes")
    return np.array(pixels)  # faster than np.stack, which counts where a stream gives single images


def scaled(pixels: np.ndarray, side: int) -> np.ndarray:
    """Scale uint8 [H, W, 3] to [side, side, 3], as `load_square` scales pictures."""
    size = (side, side)
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def fit_square(image: Image.Image, size: int) -> np.ndarray:
    """A picture that is open already, as `load_square` reads files."""
    upright = ImageOps.exif_transpose(image)
    return _cropped(_opaque(upright, is_16_bit=False), size)


def load_square(path: Path, size: int) -> np.ndarray:
    """Read a picture file as uint8 [size, size, 3]: upright, shorter side scaled, centre cropped.

    Transparency gets a white background; 16 bits are divided by 257; a GIF's first frame is read.

    Raises:
        OSError: with an `errno`, it cannot be read; without, it is not a picture, is animated, has
            several pages, more than 16 bits per channel, or more than `MAX_PICTURE_PIXELS`
            pixels, which the header shows before anything is decoded.
    """
    with _reasons():
        content = _content(path)
    return decode_square(content, size)


def decode_square(content: bytes, size: int) -> np.ndarray:
    """As `load_square`, of the bytes of a file."""
    with _reasons():
        width, height = picture_size(content)
        if width * height > MAX_PICTURE_PIXELS:
            limit = f"at most {MAX_PICTURE_PIXELS} are decoded; save it smaller"
            raise ValueError(f"{width} x {height} pixels, {limit}")
        with _decode_budget.reserve(width * height):
            return _square(content, size, claimed=width * height)


@contextmanager
def _reasons() -> Iterator[None]:
    """Raise every error of a decoder as an OSError without `errno`."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except ValueError as error:
        raise OSError(str(error)) from None
    except Exception as error:  # of any type, as in `decode_image`
        raise OSError(f"{type(error).__name__}: {error}") from None


class DecodeBudget:
    """Bounds the pixels that the threads of a process decode at a time."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # a fork has no threads of its parent

    def _begin(self) -> None:
        self._available, self._changed = MAX_PIXELS_AT_ONCE, Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Wait until this many pixels are available, and hold them until the end of the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._available >= pixels)
            self._available -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._available += pixels
                self._changed.notify_all()


_decode_budget = DecodeBudget()


def _content(path: Path) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes; save it smaller")
        return file.read(size)


def _square(content: bytes, size: int, *, claimed: int) -> np.ndarray:
    with Image.open(io.BytesIO(content), formats=[*READERS, *PICTURE_READERS]) as image:
        if image.width * image.height > claimed:
            raise ValueError(f"{image.width} x {image.height} pixels, its first header says fewer")
        # Cameras append a second, smaller or deeper, picture to a JPEG.
        if image.format not in ("MPO", "GIF") and getattr(image, "is_animated", False):
            raise ValueError("it is animated or has several pages; save one of them")
        _check_bit_depth(image)
        ImageOps.exif_transpose(image, in_place=True)
        upright = _opaque(image, is_16_bit=image.format == "PNG" and content[24] == 16)
    return _cropped(upright, size)


def _cropped(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC))


def _check_bit_depth(image: Image.Image) -> None:
    """Raises ValueError for pixels of unknown range, or that Pillow would invert."""
    if image.mode == "F" or (image.mode.startswith("I") and image.format == "TIFF"):
        if image.mode not in MODES_16_BIT:
            raise ValueError(f"pixels of mode {image.mode}; save it with 8 or 16 bits per channel")
        if image.getexif().get(PHOTOMETRIC) == WHITE_IS_ZERO:
            raise ValueError("16 bits where 0 is white; save it with 0 as black")


def _opaque(image: Image.Image, *, is_16_bit: bool) -> Image.Image:
    """Convert to RGB over a plain background; `is_16_bit`: the file has 16 bits per channel."""
    key = image.info.get("transparency")
    if image.mode.startswith("I"):  # Pillow would cut these at 255 instead of scaling them
        values = np.asarray(image).astype(np.uint16)
        quotient, remainder = np.divmod(values, 257)
        grey = (quotient + (remainder > 128)).astype(np.uint8)
        if key is not None:
            grey[values == key] = 255
        return Image.fromarray(grey).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    if is_16_bit and key is not None:  # only the high bytes of colours are decoded
        image.info["transparency"] = tuple(value >> 8 for value in key)
    image = image.convert("RGBA")
    opaque = Image.new("RGB", image.size, BACKGROUND)
    opaque.paste(image, mask=image)
    return opaque


def check_header(content: bytes, *, max_pixels: int) -> None:
    """Reject an image that is cut, has bytes after its end, or would be costly to decode.

    Pillow allocates the whole canvas of a WebP to get its size, and draws each of the scans of
    a JPEG, which may be many, over the whole picture. It accepts a PNG without its end, and ignores
    bytes after the end of any image.

    Raises:
        ValueError: with the reason.
    """
    encoding = _encoding_of(content)
    if encoding is None:
        raise ValueError(f"it starts with {content[:8]!r}")
    encoding.check(content, max_pixels)


def picture_size(content: bytes) -> tuple[int, int]:
    """Width and height in the header of a user's picture.

    Unlike `check_header`, it allows bytes after the end and many scans, which cameras write.

    Raises:
        ValueError: it is cut within its header, is of another format, or has so many scans that
            it would take minutes to decode.
    """
    encoding = _encoding_of(content)
    if encoding is not None:
        return encoding.size(content)
    for reader, start in PICTURE_READERS.items():
        if re.match(start, content):
            return _size_by_pillow(content, reader)
    raise ValueError(_unsupported_kind(content))


def _size_by_pillow(content: bytes, reader: str) -> tuple[int, int]:
    """The size in the header; at least that of a tile of a TIFF, which is decoded at once."""
    with Image.open(io.BytesIO(content), formats=[reader]) as image:
        tags = image.getexif() if reader == "TIFF" else {}
        width, height = tags.get(TILE_WIDTH, 0), tags.get(TILE_HEIGHT, 0)
        return max(image.width, width), max(image.height, height)


@dataclass(frozen=True)
class Encoding:
    """An image format: how it is written, recognised, and checked by its header.

    Attributes:
        reader: Pillow's name of the format.
        start: regular expression of its first bytes.
        check: raises as `check_header`; its arguments are the content and `max_pixels`.
        size: width and height, as from `picture_size`.
        bytes_at: mean bytes of files by side in pixels, for CIFAR-10 images (32) and photographs
            (224, 512), with Pillow 13. Generated images differ by 10 to 30 %.
        mark_bytes: bytes that the mark of a generated image adds.
    """

    reader: str
    settings: Mapping[str, Any]
    lossless: bool
    start: bytes
    check: Callable[[bytes, int], None]
    size: Callable[[bytes], tuple[int, int]]
    bytes_at: dict[int, int]
    mark_bytes: int

    def expected_bytes(self, side: int) -> float:
        """Expected bytes of a square image; a pixel costs less the larger the image is."""
        sides = np.array(list(self.bytes_at))
        per_pixel = np.array(list(self.bytes_at.values())) / sides**2
        return float(np.interp(np.log(side), np.log(sides), per_pixel)) * side**2


def _encoding_of(content: bytes) -> Encoding | None:
    matching = (e for e in ENCODINGS.values() if re.match(e.start, content, re.DOTALL))
    return next(matching, None)


def _unsupported_kind(content: bytes) -> str:
    if not content:
        return "it is empty"
    kinds = [kind for kind, start in UNSUPPORTED.items() if re.match(start, content, re.DOTALL)]
    return f"it is {kinds[0] if kinds else 'something else'}, no {PICTURES}"


def _check_png(content: bytes, max_pixels: int) -> None:
    _check_size(*_png_size(content), max_pixels)
    _check_end(content.endswith(PNG_END))


def _png_size(content: bytes) -> tuple[int, int]:
    width, height = struct.unpack(">II", _bytes(content, 16, 24))
    return width, height


def _check_jpeg(content: bytes, max_pixels: int) -> None:
    """Check end and scans; Pillow reads the size later, without allocating memory."""
    _check_end(content.endswith(JPEG_END))
    # Inside a scan 0xFF is always followed by zero, so this count is at least that of the scans.
    if content.count(JPEG_SCAN) > MAX_SCANS:
        raise ValueError(f"more than {MAX_SCANS} scans")


def _jpeg_size(content: bytes) -> tuple[int, int]:
    """The largest width and height of its frames. Raises ValueError for too many scans."""
    width = height = scans = 0
    offset = len(JPEG_START) - 1
    while (marker := JPEG_MARKER.search(content, offset)) and marker[1] != JPEG_END[1:]:
        offset = marker.end()
        if marker[1][0] in JPEG_FRAMES:
            tall, wide = struct.unpack(">HH", _bytes(content, offset + 3, offset + 7))
            width, height = max(width, wide), max(height, tall)
        scans += marker[1] == JPEG_SCAN[1:]
        offset += int.from_bytes(_bytes(content, offset, offset + 2))
    if not scans:
        raise ValueError("it is cut")
    if scans * width * height > MAX_SCANNED_PIXELS:
        raise ValueError(f"{scans} scans over {width} x {height} pixels; save it as baseline")
    return width, height


def _check_webp(content: bytes, max_pixels: int) -> None:
    size = int.from_bytes(_bytes(content, 4, 8), "little")
    _check_end(len(content) == 8 + size + size % 2)
    if content[12:16] == b"VP8X" and _bytes(content, 20, 21)[0] & ANIMATED:
        raise ValueError("it is animated")
    _check_size(*_webp_size(content), max_pixels)


def _complete_webp_size(content: bytes) -> tuple[int, int]:
    end = 8 + int.from_bytes(_bytes(content, 4, 8), "little")
    _bytes(content, end, end)
    return _webp_size(content)


def _webp_size(content: bytes) -> tuple[int, int]:
    kind = content[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(_bytes(content, 24, 27), "little") + 1
        height = int.from_bytes(_bytes(content, 27, 30), "little") + 1
    elif kind == b"VP8L":  # 14 bits per side, after a signature byte
        bits = int.from_bytes(_bytes(content, 21, 25), "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":  # after frame tag and start code: 14 bits per side, 2 of scaling
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", _bytes(content, 26, 30)))
    else:
        raise ValueError(f"its first chunk is {kind!r}")
    return width, height


def _bytes(content: bytes, start: int, stop: int) -> bytes:
    if len(content) < stop:
        raise ValueError("it is cut")
    return content[start:stop]


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ValueError(f"{width} x {height} pixels, at most {max_pixels}")


def _check_end(complete: bool) -> None:
    if not complete:
        raise ValueError("it is cut, or has bytes after its end")


# WebP's method 0 is about fifteen times cheaper than Pillow's default PNG, for 9 % more bytes at
# 512 pixels. JPEG moves labels, because CLIP and training see its altered pixels.
ENCODINGS: dict[str, Encoding] = {
    "webp": Encoding(
        reader="WEBP",
        settings={"lossless": True, "quality": 0, "method": 0},
        lossless=True,
        start=rb"RIFF....WEBP",
        check=_check_webp,
        size=_complete_webp_size,
        bytes_at={32: 1_664, 224: 77_000, 512: 346_000},
        mark_bytes=420,
    ),
    "png": Encoding(
        reader="PNG",
        settings={"compress_level": 1},
        lossless=True,
        start=re.escape(PNG_START),
        check=_check_png,
        size=_png_size,
        bytes_at={32: 2_272, 224: 92_000, 512: 434_000},
        mark_bytes=427,
    ),
    "jpg": Encoding(
        reader="JPEG",
        settings={"quality": 95, "subsampling": 0},
        lossless=False,
        start=re.escape(JPEG_START),
        check=_check_jpeg,
        size=_jpeg_size,
        bytes_at={32: 1_284, 224: 31_000, 512: 132_000},
        mark_bytes=426,
    ),
}
# Pillow selects a reader by content, not by file name; only these readers may run.
READERS = [encoding.reader for encoding in ENCODINGS.values()]
