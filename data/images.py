"""Image arrays to bytes and back, by an allow-list of formats."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from data.image_header import check_header, picture_size

# Method 0 is about fifteen times cheaper than Pillow's default PNG for about 9 % more bytes at
# 512 pixels. JPEG moves labels, because CLIP and training would see other pixels.
ENCODINGS: dict[str, dict[str, Any]] = {
    "webp": {"format": "WEBP", "lossless": True, "quality": 0, "method": 0},
    "png": {"format": "PNG", "compress_level": 1},
    "jpg": {"format": "JPEG", "quality": 95, "subsampling": 0},
}
LOSSY = ("jpg",)
# Pillow picks a reader by content; only these may run, whatever the file is called.
READABLE = ("WEBP", "PNG", "JPEG")
MOST_PIXELS = 4096 * 4096  # four times the side that any model here generates
# Of pictures from elsewhere: the largest that phones and most cameras take.
MOST_TAKEN = 1 << 27
MOST_BYTES = 1 << 28  # of such a file
MOST_AT_ONCE = 1 << 28  # pixels of them that threads decode, at 8 to 16 bytes each
BEHIND = "white"  # what shows through transparent pixels of them


def encode_image(pixels: np.ndarray, extension: str) -> bytes:
    """uint8 [H, W, 3] to the bytes of a file; lossless for webp and png."""
    buffer = io.BytesIO()
    Image.fromarray(pixels, "RGB").save(buffer, **ENCODINGS[extension])
    return buffer.getvalue()


def decode_image(content: bytes, *, most_pixels: int = MOST_PIXELS) -> np.ndarray:
    """Bytes to uint8 [H, W, 3].

    Raises:
        ValueError: not one whole still image, or one of more than `most_pixels`, which is found
            out from its header: a few bytes can claim gigabytes of one colour.
    """
    try:
        check_header(content, most_pixels=most_pixels)
        with Image.open(io.BytesIO(content), formats=READABLE) as image:
            if image.format not in READABLE or getattr(image, "n_frames", 1) != 1:
                raise ValueError("it holds several pictures")
            if image.width * image.height > most_pixels:
                raise ValueError(f"{image.width} x {image.height} pixels, at most {most_pixels}")
            return np.asarray(image.convert("RGB"))
    # Pillow's readers raise whatever their parsers ran into: struct.error, SyntaxError, ...
    except Exception as error:
        raise ValueError(f"not a complete WebP, PNG or JPEG image: {error}") from None


def scaled(pixels: np.ndarray, side: int) -> np.ndarray:
    """uint8 [H, W, 3] to [side, side, 3], as `load_square` scales pictures."""
    size = (side, side)
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def load_square(path: Path, size: int) -> np.ndarray:
    """A picture file as uint8 [size, size, 3]: upright, shorter side scaled, centre cropped.

    What is transparent shows white behind it; 16 bits become 8 by division by 257.

    Raises:
        OSError: with an `errno`, it cannot be read; without, it is no picture, is animated, or
            has more than `MOST_TAKEN` pixels, which is found out from its header before anything
            is decoded.
    """
    try:
        content = _content(path)
        width, height = picture_size(content)
        if width * height > MOST_TAKEN:
            most = f"at most {MOST_TAKEN} are decoded; save it smaller"
            raise ValueError(f"{width} x {height} pixels, {most}")
        with _room.taken(width * height):
            return _square(content, size, claimed=width * height)
    except (OSError, MemoryError):
        raise
    except ValueError as error:
        raise OSError(str(error)) from None
    except Exception as error:  # as above
        raise OSError(f"{type(error).__name__}: {error}") from None


class _Room:
    """What the threads of a process decode at a time."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # its parent's threads are not in it

    def _begin(self) -> None:
        self._left, self._changed = MOST_AT_ONCE, Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        """Wait until so many are left, and give them back at the end of the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._left >= pixels)
            self._left -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._left += pixels
                self._changed.notify_all()


_room = _Room()


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes; save it smaller")
    return content


def _square(content: bytes, size: int, *, claimed: int) -> np.ndarray:
    with Image.open(io.BytesIO(content), formats=READABLE) as image:
        if image.width * image.height > claimed:
            raise ValueError(f"{image.width} x {image.height} pixels, its first header says fewer")
        # Of JPEGs, cameras put a second, smaller or deeper, picture behind the first.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise ValueError("it is animated; save one of its frames")
        ImageOps.exif_transpose(image, in_place=True)
        upright = _opaque(image, deep=image.format == "PNG" and content[24] == 16)
    return np.asarray(ImageOps.fit(upright, (size, size), Image.Resampling.BICUBIC))


def _opaque(image: Image.Image, *, deep: bool) -> Image.Image:
    """As RGB, over a plain background; `deep` if the file has 16 bits a channel."""
    key = image.info.get("transparency")
    if image.mode.startswith("I"):  # Pillow would cut these at 255 instead of scaling them
        values = np.asarray(image).astype(np.uint16)
        quotient, rest = np.divmod(values, 257)
        grey = (quotient + (rest > 128)).astype(np.uint8)
        if key is not None:
            grey[values == key] = 255
        return Image.fromarray(grey).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    if deep and key is not None:  # of colours only the high bytes are decoded
        image.info["transparency"] = tuple(value >> 8 for value in key)
    image = image.convert("RGBA")
    found = Image.new("RGB", image.size, BEHIND)
    found.paste(image, mask=image)
    return found
