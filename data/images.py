"""Image arrays to bytes and back, by an allow-list of formats."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from data.image_header import check_header

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


def load_square(path: Path, size: int) -> np.ndarray:
    """A picture file as uint8 [size, size, 3]: upright, shorter side scaled, centre cropped.

    Raises:
        OSError: it cannot be read, or is no picture.
    """
    try:
        with Image.open(path, formats=READABLE) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        return np.asarray(ImageOps.fit(upright, (size, size), Image.Resampling.BICUBIC))
    except OSError:
        raise
    except Exception as error:  # as above
        raise OSError(f"{type(error).__name__}: {error}") from None
