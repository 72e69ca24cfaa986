"""Shards as tars: the same bytes for the same content, and read strictly or refused."""

import io
import tarfile

import pytest
import webdataset as wds

from semix.data.formats import LeftOut
from semix.data.images import encode_image
from semix.data.tar import MEMBER, GroupSample, read_shard, read_tar, scan_tar
from tests.data.hostile import TYPES, edit_header, tar_of_members
from tests.handmade import committed, make_root, pixels, sample, tar_of


def read_bytes(content: bytes, **limits):
    return list(read_tar(io.BytesIO(content), **limits))


def scan_bytes(content: bytes, **limits):
    return list(scan_tar(io.BytesIO(content), **limits))


def members_of(content: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return [(m.name, tar.extractfile(m).read()) for m in tar]


WHOLE = tar_of(sample(3), sample(4))


def test_bytes_depend_on_content_alone_and_read_back():
    assert WHOLE == tar_of(sample(3), sample(4)) == tar_of_members(members_of(WHOLE))
    assert read_bytes(WHOLE) == [sample(3), sample(4)]


def test_plain_webdataset_reads_the_same_groups(tmp_path):
    path = tmp_path / "shard.tar"
    path.write_bytes(WHOLE)
    samples = list(wds.WebDataset([str(path)], shardshuffle=False))
    assert [s["__key__"] for s in samples] == ["00000003", "00000004"]
    assert samples[0]["01.webp"] == sample(3).images[1]


def test_scanning_finds_where_everything_lies():
    first, second = scan_bytes(WHOLE)
    assert (first.group, second.group, first.extension) == (3, 4, "webp")
    for location, expected in ((first, sample(3)), (second, sample(4))):
        assert [WHOLE[s.offset : s.offset + s.size] for s in location.images] == expected.images
        start, size = location.record
        assert (b'"group":%d,' % location.group) in WHOLE[start : start + size]


def test_scanning_reads_headers_only():
    class Counting(io.BytesIO):
        taken = 0

        def read_bytes(self, size=-1):
            self.taken += size
            return super().read(size)

    file = Counting(tar_of(*(sample(g, 8, side=64) for g in range(9))))
    assert len(list(scan_tar(file))) == 9
    assert file.taken <= 512 * (9 * 9 + 2) + 10240


def test_a_tar_cut_anywhere_is_damaged_not_short():
    """Also between members or series, where tarfile takes the cut for the end."""
    boundaries = {span.offset - 512 for p in scan_bytes(WHOLE) for span in (*p.images, p.record)}
    for cut in {*boundaries, *range(1, len(WHOLE), 509)} - {0}:
        for reading in (read_bytes, scan_bytes):
            with pytest.raises(ValueError, match="damaged tar: it "):
                reading(WHOLE[:cut])


def test_zeros_inside_are_damage_not_an_end():
    offset = scan_bytes(WHOLE)[1].images[0].offset - 512
    gap = WHOLE[:offset] + bytes(3072) + WHOLE[offset:]
    erased = WHOLE[:offset] + bytes(512) + WHOLE[offset + 512 :]
    for content in (gap, erased, WHOLE + bytes(512), WHOLE + WHOLE):
        for reading in (read_bytes, scan_bytes):
            with pytest.raises(ValueError, match="damaged tar: it must end in zeros from byte"):
                reading(content)


def test_a_tar_larger_than_recorded_is_refused_before_it_is_read():
    assert read_bytes(WHOLE, max_bytes=len(WHOLE)) == [sample(3), sample(4)]
    with pytest.raises(ValueError, match="damaged tar"):
        read_bytes(WHOLE, max_bytes=len(WHOLE) - 1)
    with pytest.raises(ValueError, match=r"'00000003\.00\.webp' goes beyond its 600 bytes"):
        read_bytes(WHOLE, max_bytes=600)


def test_hidden_bytes_behind_a_member_are_refused():
    (span, *_), _ = scan_bytes(WHOLE)[0].images, None
    hidden = bytearray(WHOLE)
    hidden[span.offset + span.size] = 1
    with pytest.raises(ValueError, match="bytes behind the member"):
        read_bytes(bytes(hidden))


@pytest.mark.parametrize(
    "name",
    [
        *("../00000003.json", "/00000003.json", "a/00000003.json", "00000003.pyd", "a.b.json"),
        *("00000003.0.webp", "img_0.25.jpg", "00000003.00.WEBP", "00000003.00.jpeg"),
        *("00000003.json.gz", "__00000003.json", "0000003.json", "000000003.json"),
    ],
)
def test_members_that_no_shard_has_are_refused(name):
    for reading in (read_bytes, scan_bytes):
        with pytest.raises(ValueError, match="does not belong in a shard"):
            reading(tar_of_members([(name, b"")]))


def test_headers_of_anything_but_plain_files_are_refused():
    """Everything but the changed header field is that of a valid shard."""
    assert read_bytes(edit_header(WHOLE, 156, b"0")) == read_bytes(WHOLE)
    irregular = [edit_header(WHOLE, 156, kind) for kind in TYPES]
    irregular += [edit_header(WHOLE, 157, b"/etc/passwd"), edit_header(WHOLE, 257, bytes(8))]
    size = len(sample(3).images[0])
    sizes = [b"\x80" + size.to_bytes(11, "big"), b"%11o\0" % size, b"00400000001\0", b"-1"]
    for content, message in [
        *((content, "it is no regular file") for content in irregular),
        *(
            (edit_header(WHOLE, 124, field), r"claims -?\d+ bytes|invalid header")
            for field in sizes
        ),
    ]:
        for reading in (read_bytes, scan_bytes):
            with pytest.raises(ValueError, match=message):
                reading(content)


def test_digits_of_other_scripts_are_no_key():
    name = "\u0660" * 8 + ".json"
    assert not MEMBER.fullmatch(name)
    with pytest.raises(ValueError, match="damaged tar: header at byte 0"):
        read_bytes(tar_of_members([(name, b"")]))


def test_members_must_come_in_order():
    a0, a1, a, b0, b1, b = members_of(WHOLE)
    for members, message in [
        ([a1, a0, a], r"'00000003\.01\.webp' is out of order"),
        ([a0, a, a1], r"out of order|wanted 2 images"),
        ([a0, a0, a1, a], r"'00000003\.00\.webp' is out of order"),
        ([a0, a1, a, a0, a1, a], r"'00000003\.00\.webp' is out of order"),
        ([a0, b0, a1, b1, a, b], r"'00000004\.00\.webp' is out of order"),
        ([b0, b1, b, a0, a1, a], r"'00000003\.00\.webp' is out of order"),
        ([a0, a1, b], r"'00000004\.json' is out of order"),
        ([a0, ("00000003.01.png", a1[1]), a], r"'00000003\.01\.png' is out of order"),
        ([a], "group 00000003 has no images"),
        ([a0, a1], "it ends inside group 00000003"),
        ([a0, a1, a, b0], "it ends inside group 00000004"),
    ]:
        for reading in (read_bytes, scan_bytes):
            with pytest.raises(ValueError, match=message):
                reading(tar_of_members(members))


def test_the_record_must_fit_its_images():
    series = members_of(tar_of(sample(3, 3)))
    lacking = [series[0], series[1], series[3]]
    with pytest.raises(ValueError, match=r"group 00000003 has members .*; wanted 3 images"):
        read_bytes(tar_of_members(lacking))
    renamed = [(name.replace("3.", "5.", 1), content) for name, content in series]
    with pytest.raises(ValueError, match="group 00000005 has members"):
        read_bytes(tar_of_members(renamed))
    series[3] = ("00000003.json", b"{}")
    with pytest.raises(ValueError, match=r"00000003\.json: record of a series: weights"):
        read_bytes(tar_of_members(series))


def test_a_shard_is_read_as_its_record_says(tmp_path):
    root = make_root(tmp_path, shards=2, groups=3)
    record = committed(root)[1]
    assert list(read_shard(root.store, record, num_classes=3)) == [sample(g) for g in (3, 4, 5)]
    name, left_out = record.tar, [LeftOut(group=4, reason="flat")]
    for changes, message in [
        ({"groups": 4}, f"{name}: holds 3 groups, its record says 4"),
        ({"groups": 2}, f"{name}: holds group 5, its record says otherwise"),
        ({"first": 2}, f"{name}: holds group 3, its record says otherwise"),
        ({"groups": 2, "left_out": left_out}, f"{name}: holds group 4, its record says otherwise"),
        ({"bytes": 600}, f"{name}: 10,240 bytes, its record says 600"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(read_shard(root.store, record.model_copy(update=changes)))
    with pytest.raises(ValueError, match=f"{name}: group 4 names class 2, the plan has 2"):
        list(read_shard(root.store, record, num_classes=2))


def test_a_shard_is_the_recorded_one_byte_for_byte(tmp_path):
    root = make_root(tmp_path, shards=1, groups=2)
    record = committed(root)[0]
    content = root.store.get(record.tar)
    assert list(read_shard(root.store, record, hashed=True)) == [sample(0), sample(1)]
    changed = content.replace(b'"seed":1000', b'"seed":1001')
    root.store.put(record.tar, changed)
    assert len(changed) == len(content)
    for hashed in (False, True):
        with pytest.raises(ValueError, match=f"^{record.tar}: does not have the recorded SHA-256"):
            list(read_shard(root.store, record, hashed=hashed))
    root.store.delete(record.tar)
    with pytest.raises(FileNotFoundError):
        list(read_shard(root.store, record))


def test_the_most_images_a_series_can_have():
    images = [encode_image(image, "webp") for image in pixels(3, 100, 4)]
    series = GroupSample(sample(3, 100, side=4).record, images, "webp")
    assert read_bytes(tar_of(series)) == [series]
