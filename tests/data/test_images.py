import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from data.images import decode_image, encode_image, load_square

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 12, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


def saved(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + crc


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + chunk(b"IEND", b"")


def webp(kind: bytes, content: bytes) -> bytes:
    part = b"WEBP" + kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    return b"RIFF" + struct.pack("<I", len(part)) + part


@pytest.mark.parametrize("extension", ["webp", "png"])
def test_lossless_formats_keep_every_pixel(extension):
    np.testing.assert_array_equal(decode_image(encode_image(PIXELS, extension)), PIXELS)


def test_jpeg_is_close():
    again = decode_image(encode_image(PIXELS, "jpg")).astype(int)
    assert np.abs(again - PIXELS).mean() < 12


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_other_kinds_of_pixels_become_rgb(mode):
    wanted = np.asarray(PICTURE.convert(mode).convert("RGB"))
    np.testing.assert_array_equal(decode_image(saved(PICTURE.convert(mode), format="PNG")), wanted)


@pytest.mark.parametrize("extension", ["webp", "png", "jpg"])
def test_an_image_cut_anywhere_or_followed_by_more_is_refused(extension):
    whole = encode_image(PIXELS, extension)
    for content in (*(whole[:cut] for cut in range(0, len(whole), 7)), whole + b"\0\0"):
        with pytest.raises(ValueError, match="not a complete WebP, PNG or JPEG image"):
            decode_image(content)


HUGE_SECOND_HEADER = chunk(b"IHDR", struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0))
BOMB = zlib.compress(bytes(50 << 20))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (png(60_000, 60_000), "60000 x 60000 pixels, at most 16777216"),
        (png(16, 16, HUGE_SECOND_HEADER), "9000 x 9000 pixels"),
        (
            webp(b"VP8X", bytes(4) + (59_999).to_bytes(3, "little") * 2),
            "60000 x 60000 pixels, at most",
        ),
        (webp(b"VP8L", b"\x2f" + (0x3FFF | 0x3FFF << 14).to_bytes(4, "little")), "16384 x 16384"),
        (webp(b"VP8 ", bytes(6) + b"\xff\x3f\xff\x3f"), "16383 x 16383"),
        (webp(b"ANIM", bytes(6)), "its first part is b'ANIM'"),
        (png(16, 16, chunk(b"zTXt", b"k\0\0" + BOMB)), "too large"),
        (png(16, 16, chunk(b"iTXt", b"k\0\1\0\0\0" + BOMB)), "too large"),
        (png(16, 16, chunk(b"iCCP", b"k\0\0" + BOMB)), "too large"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "starts with b'%!PS-Ado'"),
        (saved(PICTURE, format="GIF"), "starts with b'GIF89a|starts with b'GIF87a"),
        (saved(PICTURE, format="TIFF"), "starts with"),
        (saved(PICTURE, format="WEBP", save_all=True, append_images=[PICTURE.rotate(90)]), "anim"),
        (saved(PICTURE, format="PNG", save_all=True, append_images=[PICTURE.rotate(9)]), "several"),
        (saved(PICTURE, format="MPO", save_all=True, append_images=[PICTURE.rotate(9)]), "several"),
        (b"", "it starts with b''"),
    ],
)
def test_what_is_no_plain_small_picture_is_refused(content, message):
    with pytest.raises(ValueError, match=f"not a complete WebP, PNG or JPEG image: .*{message}"):
        decode_image(content)


def test_the_limit_is_on_pixels_and_can_be_lower():
    for extension in ("webp", "png", "jpg"):
        content = encode_image(PIXELS, extension)
        assert decode_image(content, most_pixels=192).shape == (16, 12, 3)
        with pytest.raises(ValueError, match="12 x 16 pixels, at most 191"):
            decode_image(content, most_pixels=191)


def test_a_jpeg_of_very_many_scans_is_refused():
    """Each is drawn over the whole picture: a megabyte of them would take hours."""
    content = saved(Image.new("L", (64, 64)), format="JPEG", progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    assert decode_image(content[:-2] + last * 20 + content[-2:]).shape == (64, 64, 3)
    with pytest.raises(ValueError, match="more than 64 scans"):
        decode_image(content[:-2] + last * 99 + content[-2:])


def test_your_own_pictures_are_no_picture_or_refused_as_unreadable(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encode_image(PIXELS, "png"))
    assert load_square(path, 8).shape == (8, 8, 3)
    for content in (
        png(60_000, 60_000),
        b"%!PS-Adobe-3.0 EPSF-3.0",
        encode_image(PIXELS, "png")[:80],
    ):
        path.write_bytes(content)
        with pytest.raises(OSError, match=r"."):
            load_square(path, 8)
