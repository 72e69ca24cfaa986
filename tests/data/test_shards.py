import io
import tarfile

import numpy as np
import pytest
import webdataset as wds

from data.images import decode_image, encode_image
from data.shards import GroupSample, read_tar, write_tar


def sample(group: int, count: int = 2) -> GroupSample:
    rng = np.random.default_rng(group)
    images = [encode_image(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8), "webp")] * count
    record = {"group": group, "alphas": [0.0] * count, "classes": [0, 1]}
    return GroupSample(record, images, "webp")


def tar_of(*samples: GroupSample) -> bytes:
    buffer = io.BytesIO()
    write_tar(buffer, samples)
    return buffer.getvalue()


def test_bytes_depend_on_content_alone_and_read_back():
    assert tar_of(sample(3), sample(4)) == tar_of(sample(3), sample(4))
    assert list(read_tar(io.BytesIO(tar_of(sample(3), sample(4))))) == [sample(3), sample(4)]


def test_plain_webdataset_reads_the_same_groups(tmp_path):
    path = tmp_path / "shard.tar"
    path.write_bytes(tar_of(sample(3), sample(4)))
    found = list(wds.WebDataset([str(path)], shardshuffle=False))
    assert [s["__key__"] for s in found] == ["00000003", "00000004"]
    assert found[0]["01.webp"] == sample(3).images[1]


@pytest.mark.parametrize("extension", ["webp", "png"])
def test_lossless_formats_keep_every_pixel(extension):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 12, 3), dtype=np.uint8)
    np.testing.assert_array_equal(decode_image(encode_image(pixels, extension)), pixels)


@pytest.mark.parametrize("cut", [1, 700, 1500, 2600, 3000])
def test_a_tar_cut_anywhere_is_damaged_not_short(cut):
    # Cuts between whole groups cannot be seen here; the commit record's size catches those.
    whole = tar_of(sample(3))
    with pytest.raises(ValueError, match="damaged tar"):
        list(read_tar(io.BytesIO(whole[:cut])))


@pytest.mark.parametrize(
    "name", ["../00000003.json", "00000003.pyd", "a.b.json", "00000003.0.webp"]
)
def test_members_that_no_shard_has_are_refused(name):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    buffer.seek(0)
    with pytest.raises(ValueError, match="does not belong in a shard"):
        list(read_tar(buffer))


def test_compressed_tars_and_other_images_are_refused():
    import gzip

    with pytest.raises(ValueError, match="damaged tar"):
        list(read_tar(io.BytesIO(gzip.compress(tar_of(sample(3))))))
    with pytest.raises(ValueError, match="not a complete WebP, PNG or JPEG"):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0")


def test_a_group_with_a_missing_image_is_refused():
    short = GroupSample(sample(3).record, sample(3).images[:1], "webp")
    with pytest.raises(ValueError, match="wanted 2 images"):
        list(read_tar(io.BytesIO(tar_of(short))))
