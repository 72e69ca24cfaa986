"""The mark of generated images: read back by Pillow and exiftool, and no pixel changes."""

import io
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from semix.data.export import write_image_folder, write_parquet
from semix.data.images import ENCODINGS, MAX_PIXELS, check_header, decode_image, encode_image
from semix.data.marks import SOURCE_TYPE, XMP, is_marked
from semix.data.pinned import PinnedRoot
from tests.handmade import make_root, pixels, root_of, sample

IMAGE = pixels(0, 1, 20)[0]


@pytest.mark.parametrize("extension", ENCODINGS)
def test_pillow_reads_the_mark_back_and_no_pixel_changes(extension):
    marked, plain = (encode_image(IMAGE, extension, mark=mark) for mark in (True, False))
    with Image.open(io.BytesIO(marked)) as image:
        assert image.info["xmp"] == XMP
    assert SOURCE_TYPE.endswith("/trainedAlgorithmicMedia") and SOURCE_TYPE.encode() in XMP
    assert is_marked(marked) and not is_marked(plain)
    np.testing.assert_array_equal(decode_image(marked), decode_image(plain))
    assert len(marked) - len(plain) == ENCODINGS[extension].mark_bytes
    assert encode_image(IMAGE, extension, mark=True) == marked
    check_header(marked, max_pixels=MAX_PIXELS)
    with pytest.raises(ValueError, match="cut, or has bytes after its end"):
        check_header(marked + b"more", max_pixels=MAX_PIXELS)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("exiftool") is None, reason="there is no exiftool")
@pytest.mark.parametrize("extension", ENCODINGS)
def test_exiftool_reads_the_mark(extension, tmp_path):
    path = tmp_path / f"image.{extension}"
    path.write_bytes(encode_image(IMAGE, extension, mark=True))
    command = ["exiftool", "-s3", "-n", "-XMP-iptcExt:DigitalSourceType", str(path)]
    assert subprocess.check_output(command, text=True).strip() == SOURCE_TYPE


@pytest.mark.parametrize("image_format", ["keep", "png"])
def test_exports_keep_the_mark_and_add_none(image_format, tmp_path):
    import pyarrow.parquet as pq

    marked = root_of(tmp_path / "marked", [sample(g, mark=True) for g in range(2)], ["a", "b", "c"])
    for root, expected in ((marked, True), (make_root(tmp_path / "plain"), False)):
        name = Path(root.url).name
        source = PinnedRoot(root)
        write_image_folder(source, tmp_path / f"{name}-folder", image_format=image_format)
        write_parquet(source, tmp_path / f"{name}-parquet", image_format=image_format)
        files = [path.read_bytes() for path in tmp_path.glob(f"{name}-folder/*/*.*")]
        rows = pq.read_table(tmp_path / f"{name}-parquet", columns=["image"]).to_pylist()
        contents = files + [row["image"]["bytes"] for row in rows]
        assert contents and all(is_marked(content) is expected for content in contents)
