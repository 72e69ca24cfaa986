import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from semix.data.images import decode_image, encode_image, load_square

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 12, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


def encode(image: Image.Image, **options) -> bytes:
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
    body = b"WEBP" + kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("extension", ["webp", "png"])
def test_lossless_formats_keep_every_pixel(extension):
    np.testing.assert_array_equal(decode_image(encode_image(PIXELS, extension)), PIXELS)


def test_jpeg_is_close():
    again = decode_image(encode_image(PIXELS, "jpg")).astype(int)
    assert np.abs(again - PIXELS).mean() < 12


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_other_kinds_of_pixels_become_rgb(mode):
    expected = np.asarray(PICTURE.convert(mode).convert("RGB"))
    np.testing.assert_array_equal(
        decode_image(encode(PICTURE.convert(mode), format="PNG")), expected
    )


@pytest.mark.parametrize("extension", ["webp", "png", "jpg"])
def test_an_image_cut_anywhere_or_followed_by_more_is_refused(extension):
    complete = encode_image(PIXELS, extension)
    for content in (*(complete[:cut] for cut in range(0, len(complete), 7)), complete + b"\0\0"):
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
        (webp(b"ANIM", bytes(6)), "its first chunk is b'ANIM'"),
        (png(16, 16, chunk(b"zTXt", b"k\0\0" + BOMB)), "too large"),
        (png(16, 16, chunk(b"iTXt", b"k\0\1\0\0\0" + BOMB)), "too large"),
        (png(16, 16, chunk(b"iCCP", b"k\0\0" + BOMB)), "too large"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "starts with b'%!PS-Ado'"),
        (encode(PICTURE, format="GIF"), "starts with b'GIF89a|starts with b'GIF87a"),
        (encode(PICTURE, format="TIFF"), "starts with"),
        (encode(PICTURE, format="WEBP", save_all=True, append_images=[PICTURE.rotate(90)]), "anim"),
        (
            encode(PICTURE, format="PNG", save_all=True, append_images=[PICTURE.rotate(9)]),
            "several",
        ),
        (
            encode(PICTURE, format="MPO", save_all=True, append_images=[PICTURE.rotate(9)]),
            "several",
        ),
        (b"", "it starts with b''"),
    ],
)
def test_what_is_no_plain_small_picture_is_refused(content, message):
    with pytest.raises(ValueError, match=f"not a complete WebP, PNG or JPEG image: .*{message}"):
        decode_image(content)


def test_the_limit_is_on_pixels_and_can_be_lower():
    for extension in ("webp", "png", "jpg"):
        content = encode_image(PIXELS, extension)
        assert decode_image(content, max_pixels=192).shape == (16, 12, 3)
        with pytest.raises(ValueError, match="12 x 16 pixels, at most 191"):
            decode_image(content, max_pixels=191)


def test_a_jpeg_of_very_many_scans_is_refused():
    """Every scan is decoded over the whole picture: a megabyte of scans would take hours."""
    content = encode(Image.new("L", (64, 64)), format="JPEG", progressive=True)
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


def deep_png(kind: int, values: list[int], key: list[int] | None = None) -> bytes:
    """A square PNG of 16 bits per channel; `values` is one row in file order."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[kind]
    width = len(values) // channels
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, width, 16, kind, 0, 0, 0))
    transparency = chunk(b"tRNS", np.array(key, ">u2").tobytes()) if key else b""
    row = b"\0" + np.array(values, ">u2").tobytes()
    pixels = chunk(b"IDAT", zlib.compress(row * width))
    return b"\x89PNG\r\n\x1a\n" + header + transparency + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (deep_png(0, [0, 128, 129, 1536, 55_040, 65_535]), [0, 0, 1, 6, 214, 255]),
        (deep_png(0, [1536, 1537, 25_700], [1536]), [255, 6, 100]),
        (deep_png(2, [1536, 1536, 1536, 55_040, 55_040, 55_040]), [6, 215]),  # high bytes
        (deep_png(2, [0, 0, 0, 1536, 1536, 1536], [1536] * 3), [0, 255]),
        (deep_png(4, [5120, 65_535, 5120, 0]), [20, 255]),
        (deep_png(6, [5120, 5120, 5120, 65_535, 5120, 5120, 5120, 0]), [20, 255]),
    ],
)
def test_sixteen_bits_are_scaled_to_eight_and_what_is_transparent_is_white(
    content, wanted, tmp_path
):
    (tmp_path / "a.png").write_bytes(content)
    pixels = load_square(tmp_path / "a.png", len(wanted))
    np.testing.assert_array_equal(pixels[0], np.repeat(wanted, 3).reshape(-1, 3))


def test_transparent_pixels_show_white_and_not_their_hidden_colour(tmp_path):
    red, white, pink = (200, 0, 0), (255, 255, 255), (228, 128, 128)
    image = Image.new("RGBA", (2, 2), red)
    image.putalpha(Image.fromarray(np.array([[255, 0], [127, 255]], np.uint8)))
    for kind in ("PNG", "WEBP"):
        image.save(tmp_path / "a", kind, lossless=True, exact=True)
        pixels = load_square(tmp_path / "a", 2).reshape(4, 3).tolist()
        assert [tuple(pixel) for pixel in pixels] == [red, white, pink, red]
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([*red, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "a", "PNG", transparency=1)
    pixels = load_square(tmp_path / "a", 2).reshape(4, 3).tolist()
    assert [tuple(pixel) for pixel in pixels] == [red, white, red, red]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_opaque_pictures_keep_every_pixel(mode, tmp_path):
    square = PICTURE.resize((16, 16))
    square.convert(mode).save(tmp_path / "a", "JPEG" if mode == "CMYK" else "PNG")
    with Image.open(tmp_path / "a") as image:
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(load_square(tmp_path / "a", 16), expected)


def grey(values: list[int], kind: type) -> Image.Image:
    return Image.fromarray(np.tile(np.array(values, kind), (len(values), 1)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_tiff_keeps_every_pixel(mode, tmp_path):
    square = PICTURE.resize((16, 16)).convert(mode)
    square.save(tmp_path / "a", "TIFF", compression="tiff_lzw")
    np.testing.assert_array_equal(
        load_square(tmp_path / "a", 16), np.asarray(square.convert("RGB"))
    )


def test_a_tiff_of_sixteen_bits_is_scaled_and_an_upright_one_is_turned(tmp_path):
    grey([0, 129, 1536, 65_535], np.uint16).save(tmp_path / "a", "TIFF")
    pixels = load_square(tmp_path / "a", 4)
    np.testing.assert_array_equal(pixels[0], np.repeat([0, 1, 6, 255], 3).reshape(-1, 3))
    square = PICTURE.resize((16, 16))
    square.save(tmp_path / "a", "TIFF", exif={0x0112: 3})  # upside down
    np.testing.assert_array_equal(load_square(tmp_path / "a", 16), np.asarray(square)[::-1, ::-1])


def test_of_a_gif_the_first_frame_is_read_and_what_is_transparent_is_white(tmp_path):
    first = Image.new("P", (2, 2), 0)
    first.putpalette([200, 0, 0, 0, 0, 255])
    first.putpixel((1, 0), 1)
    first.save(tmp_path / "a", "GIF", save_all=True, append_images=[Image.new("P", (2, 2), 1)])
    pixels = load_square(tmp_path / "a", 2).reshape(4, 3).tolist()
    assert pixels == [[200, 0, 0], [0, 0, 255], [200, 0, 0], [200, 0, 0]]
    first.save(tmp_path / "a", "GIF", transparency=1)
    assert load_square(tmp_path / "a", 2).reshape(4, 3).tolist()[1] == [255, 255, 255]


def tiled_tiff(side: int, tile: int) -> bytes:
    """A TIFF of `side` pixels in one larger tile of `tile` pixels, without data."""
    rows = [(256, side), (257, side), (258, 8), (259, 1), (262, 1), (277, 1), (322, tile)]
    rows += [(323, tile), (324, 300), (325, 9)]
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in rows)
    return b"II*\0" + struct.pack("<IH", 8, len(rows)) + tags + bytes(4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encode(grey([0.5, 2.0], np.float32), format="TIFF"), "pixels of mode F; save it with 8"),
        (encode(grey([7, 70_000], np.int32), format="TIFF"), "pixels of mode I; save it with 8 or"),
        (
            encode(PICTURE, format="TIFF", save_all=True, append_images=[PICTURE]),
            "it is animated or has several pages; save one of them",
        ),
        (
            encode(grey([7, 9], np.uint16), format="TIFF", tiffinfo={262: 0}),
            "16 bits where 0 is white; save it with 0 as black",
        ),
        (encode(PICTURE, format="TIFF")[:300], "."),
        (encode(PICTURE, format="GIF")[:30], "."),
        (encode(PICTURE, format="BMP")[:90], "truncated"),
        (b"BM" + bytes(60), "."),
        (b"II*\0", "."),
        (b"II+\0", "it is BigTIFF, no PNG, JPEG"),
        (tiled_tiff(16, 1 << 15), "32768 x 32768 pixels, at most 134217728 are decoded"),
        (
            b"BM"
            + struct.pack("<IIIIiiHHIIIIII", 70, 0, 54, 40, 1 << 15, 1 << 15, 1, 24, *[0] * 6),
            "exceeds limit of 178956970 pixels",
        ),
        (b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0) + b";", "."),
    ],
)
def test_other_formats_that_cannot_be_read_as_pictures_are_named(content, message, tmp_path):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(OSError, match=message) as caught:
        load_square(tmp_path / "a", 8)
    assert caught.value.errno is None
