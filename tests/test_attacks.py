"""Attacks by people who give semix files, and how it withstands them.

Each test is one attack: its docstring says what the attacker does.
"""

import hashlib
import io
import os
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from semix.calib.study import StudyConfig
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.formats import shard_stem
from semix.data.garbage import garbage, remove
from semix.data.images import load_square
from semix.data.real import RealDataConfig, load_real
from semix.data.root import Root
from semix.data.settings import Settings, load_settings, read_config_file
from semix.data.shard_files import ShardCache
from semix.data.store import Store
from semix.data.verify import damage, quarantine
from tests.data.test_images import PICTURE, chunk, encode, png, webp
from tests.data.whole_roots import commit_record, whole_root

# Files and folders: what lies outside a root, or was not made by semix


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside the root, with a file whose name semix could have given."""
    folder = tmp_path / "elsewhere"
    for name in (64 * "a" + "/0000000.safetensors", "0000/0000000.1.json", "0000007.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    return folder


def remove_garbage(root: Root) -> list[str]:
    """Remove all garbage, however young; returns the names that were removed."""
    return [item.name for item in remove(root, garbage(root, older_than_s=0), older_than_s=0)]


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["prototypes", "failed", "leases", "labels", "index", "shards"])
def test_gc_deletes_nothing_behind_a_folder_that_is_a_link(tmp_path, elsewhere, name):
    """Puts a link to another folder where semix keeps its own, and waits for `semix gc`."""
    root, before = whole_root(tmp_path / "root"), files_below(elsewhere)
    folder = Path(root.url, name)
    if folder.exists():
        folder.rename(tmp_path / "moved")
    folder.symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError, match=f"a link to a folder is not followed.*/{name}'"):
        remove_garbage(root)
    assert files_below(elsewhere) == before


def test_gc_deletes_nothing_behind_a_link_deeper_down(tmp_path, elsewhere):
    """Links a folder of attempts, and one of measurements, to folders of the same shape."""
    root, before = whole_root(tmp_path / "root"), files_below(elsewhere)
    for name, target in (("failed/0000", "0000"), ("prototypes/" + 64 * "a", 64 * "a")):
        Path(root.url, name).parent.mkdir()
        Path(root.url, name).symlink_to(elsewhere / target)
    assert remove_garbage(root) == []
    assert files_below(elsewhere) == before


def test_gc_takes_only_names_that_semix_gives(tmp_path):
    """Leaves files of their own in semix's folders, or has a user leave them there."""
    root = whole_root(tmp_path / "root")
    foreign = [
        "prototypes/paper.pdf",
        "prototypes/0123abcd/0000000.safetensors.bak",
        "failed/0000/0000000.1.json.orig",
        "failed/0000000.1.json",
        "leases/notes.txt",
        "leases/notes.json",
        "index/mine.json",
        "shards/0000/0000001.tar",
        ".thesis.partial",
        "shards/.thesis.tex.partial",
    ]
    for name in foreign:
        Path(root.url, name).parent.mkdir(parents=True, exist_ok=True)
        Path(root.url, name).write_text("{}")
    assert remove_garbage(root) == []
    assert all(Path(root.url, name).exists() for name in foreign)


def test_nothing_is_read_written_or_deleted_through_a_link(tmp_path, elsewhere):
    """Makes a folder of a root a link to another folder, and has it read, written and emptied."""
    store, before = Store(str(tmp_path / "root")), files_below(elsewhere)
    store.put("plan.json", b"{}")
    Path(store.url, "shards").symlink_to(elsewhere)
    with store.staging("other") as partial:
        for attempt in (
            lambda: store.get("shards/0000007.json"),
            lambda: store.get_many(["shards/0000007.json"]),
            lambda: store.open("shards/0000007.json"),
            lambda: store.exists("shards/0000007.json"),
            lambda: store.size("shards/0000007.json"),
            lambda: store.scan("shards/0000"),
            lambda: store.put("shards/new/0000008.json", b"x"),
            lambda: store.create("shards/0000008.json", b"x"),
            lambda: store.publish(partial, "shards/0000007.json"),
            lambda: store.delete("shards/0000007.json"),
        ):
            with pytest.raises(NotADirectoryError, match="not followed inside a root"):
                attempt()
    assert store.list("") == ["plan.json"]
    assert files_below(elsewhere) == before
    assert {path.read_text() for path in before} == {"precious"}


def test_links_that_go_round_end_at_once(tmp_path):
    """Puts links into a root that lead back to it, to each other, and to nothing."""
    store = Store(str(tmp_path / "root"))
    store.put("shards/0000/0000000.json", b"{}")
    for name, target in (("a", "."), ("shards/b", ".."), ("c", "c"), ("d", "e"), ("e", "d")):
        Path(store.url, name).symlink_to(target)
    Path(store.url, "f").symlink_to("nothing")
    assert store.list("") == list(store.infos("")) == ["shards/0000/0000000.json"]
    assert store.scan("")[1] == ["shards"]
    assert store.partials() == {}
    assert store.sweep(older_than_s=0) == 0


def test_a_root_may_be_a_link_and_hold_links_to_files(tmp_path):
    """No attack: people keep roots behind links, and some tools keep files as links."""
    root = whole_root(tmp_path / "disk" / "root")
    (tmp_path / "far").symlink_to("disk")
    (tmp_path / "near").symlink_to("far/root")
    tar = Path(root.record(1).tar)
    Path(root.url, tar).rename(tmp_path / "kept.tar")
    Path(root.url, tar).symlink_to(tmp_path / "kept.tar")
    for path in ("near", "far/root"):
        linked = Root(str(tmp_path / path))
        assert linked.store.list("") == root.store.list("")
        assert damage(linked, full=True) == []
        assert linked.store.size(str(tar)) == (tmp_path / "kept.tar").stat().st_size
        assert remove_garbage(linked) == []
        stray = f"{shard_stem(1)}-0123abcd.tar"
        linked.store.put(stray, b"x")
        assert remove_garbage(linked) == [stray]


def test_a_full_cache_makes_room_by_its_own_copies_alone(tmp_path):
    """Has the cache put in a folder of other tars, and fills it until it must make room."""
    store, content = Store(str(tmp_path / "bucket")), 1000 * b"x"
    store.put("a.tar", content)
    foreign = [tmp_path / "cache" / name for name in ("imagenet-000.tar", ".notes.partial")]
    cache = ShardCache(tmp_path / "cache", limit=1)
    for path in foreign:
        path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    shard = commit_record(0).model_copy(update={"tar": "a.tar", "bytes": 1000, "sha256": digest})
    os.close(cache.open(shard, store))
    assert all(path.exists() for path in foreign)


def test_a_repair_removes_nothing_behind_a_link(tmp_path, elsewhere):
    """Swaps the folder of a root's shards for a link, and has the damage repaired."""
    root, before = whole_root(tmp_path / "root"), files_below(elsewhere)
    tar = Path(root.url, root.record(1).tar)
    tar.write_bytes(b"cut")
    problems = damage(root)
    assert problems
    tar.parent.rename(tmp_path / "moved")
    tar.parent.symlink_to(elsewhere)
    (elsewhere / tar.name).write_text("precious")
    with pytest.raises(NotADirectoryError, match="not followed"):
        quarantine(root, problems)
    assert files_below(elsewhere) == before | {elsewhere / tar.name}
    assert len(files_below(tmp_path / "moved")) == 9


def test_training_reads_no_image_behind_a_link(tmp_path):
    """Swaps the folder of a root's shards for a link to another that fits its index."""
    root = whole_root(tmp_path / "root")
    shards = Path(root.url, root.record(1).tar).parent
    shards.rename(tmp_path / "moved")
    shards.symlink_to(tmp_path / "moved")
    with pytest.raises(NotADirectoryError, match="not followed"):
        MixedDataset(root.url)


# Settings: memory that a config costs, and what errors reveal of it


def config_error(text: str, tmp_path: Path, kind: type[Settings] = StudyConfig) -> str:
    """The message of the error that a config of this content raises."""
    (tmp_path / "given.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_settings(kind, tmp_path / "given.yaml")
    return str(caught.value)


def bomb(depth: int, last_line: str = "") -> str:
    """YAML lists, each of ten aliases of the list before it: 10 ** depth texts when expanded."""
    lines = [f"a0: &a0 [{', '.join(10 * ['lol'])}]"]
    lines += [f"a{n}: &a{n} [{', '.join(10 * [f'*a{n - 1}'])}]" for n in range(1, depth)]
    return "\n".join([*lines, last_line])


@pytest.mark.parametrize(
    "text",
    [
        bomb(9, "name: *a8"),
        bomb(9, "baseline: [*a8, *a8]\nname: x"),
        "a: &a {k: 1}"
        + "".join(f"\n{m}: &{m} {{<<: [{500 * f'*{n},'}]}}" for n, m in ("ab", "bc", "cd")),
        f"name: &a {9999 * 'x'}\nbase: [{', '.join(9999 * ['*a'])}]",
    ],
    ids=["as a text", "as a list", "merged", "one long text"],
)
def test_a_config_of_few_bytes_and_very_many_aliases(tmp_path, text):
    """Writes a config whose aliases stand for gigabytes, which an error would then print."""
    message = config_error(text, tmp_path)
    assert "given.yaml: cannot be read as YAML: line " in message
    assert message.endswith("write the values out")


def test_a_value_that_holds_itself(tmp_path):
    """Names a list by an alias inside it."""
    assert "an alias stands inside its own anchor" in config_error("name: &a [*a]", tmp_path)


def test_a_config_nested_without_end(tmp_path):
    """Opens a hundred thousand brackets."""
    assert "cannot be read as YAML: nested too deeply" in config_error(
        "name: " + 100_000 * "[", tmp_path
    )


def test_aliases_on_the_command_line():
    """Gives the same bomb to --set."""
    text = "{" + bomb(9, "z: *a8").replace("\n", ", ") + "}"
    with pytest.raises(
        InputError, match=r"^--set = base: cannot be read as YAML: line 1, .*write the values"
    ):
        load_settings(StudyConfig, {}, [f"base={text}"])


def test_aliases_as_people_write_them(tmp_path):
    """No attack: shared settings are named once, and merged."""
    (tmp_path / "c.yaml").write_text("a: &a {x: 1, y: [1]}\nb: {<<: *a, x: 2}\nc: *a\n")
    assert read_config_file(tmp_path / "c.yaml") == {
        "a": {"x": 1, "y": [1]},
        "b": {"x": 2, "y": [1]},
        "c": {"x": 1, "y": [1]},
    }


SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"[default]\naws_secret_access_key = {SECRET}\n", "line 2, column 1"),
        (f"password: '{SECRET}\n", "line 2, column 1"),
        (f"password: *{SECRET}\n", "line 1, column 11"),
        (f"password: !{SECRET} x\n", "line 1, column 11"),
        (f"password: !{SECRET}!x y\n", "line 1, column 11"),
        (f"password: !!int {SECRET}\n", "line 1, column 11"),
        (f"password: !!bool {SECRET}\n", "line 1, column 11"),
        (f"a: &{SECRET} 1\nb: &{SECRET} 2\nc: {{[{SECRET}]: 1}}", "line"),
        (f"password: {SECRET}\n\x01", "position"),
        (f"machine x login y password {SECRET}\n", "must hold `key: value` lines"),
        (f"- {SECRET}\n", "must hold `key: value` lines"),
        (f"aws_secret_access_key: {SECRET}\n", "aws_secret_access_key: unknown setting"),
        (f"naem: {SECRET}\n", "naem: unknown setting; did you mean name?"),
        (f'{{"type": "{SECRET}", "private_key": "{SECRET}"}}', "type: unknown setting"),
    ],
)
def test_a_file_of_credentials_that_is_taken_for_a_config(tmp_path, text, where):
    """Has a user name a file of credentials as config; errors go to terminals and logs."""
    message = config_error(text, tmp_path)
    assert where in message
    assert SECRET[:6] not in message
    assert all(": " in line for line in message.splitlines())


def test_an_error_prints_no_large_value(tmp_path):
    """Gives a megabyte where a number or a name belongs."""
    text = f"name: x\nbase: {{}}\nbaseline: a\ndatasets: {{}}\nmethods: {{}}\nseeds: {'x' * 10**6}"
    message = config_error(text, tmp_path)
    assert message.startswith("datasets: ") or message.startswith("seeds = 'xxx")
    assert len(config_error(f"{'k' * 10**6}: 1", tmp_path)) < 2000
    assert len(message) < 2000


# Pictures: memory and time that a file of few bytes costs a decoder


def picture_error(content: bytes, tmp_path: Path, name: str = "a.png") -> str:
    """The message of the error that loading a folder with this picture raises."""
    for split in ("train", "test"):
        for label in "xy":
            (tmp_path / split / label).mkdir(parents=True, exist_ok=True)
            for number in range(2):
                PICTURE.save(tmp_path / split / label / f"{number}.png")
    (tmp_path / "test" / "x" / name).write_bytes(content)
    config = RealDataConfig(name="imagefolder", path=str(tmp_path), image_size=8)
    with pytest.raises(InputError) as caught:
        load_real(config).test.images()
    message = str(caught.value)
    assert message.startswith(f"image = {tmp_path}/test/x/{name}: cannot be read (")
    assert message.endswith("replace or remove it, or leave out such images with real.skip_bad")
    return message


def large_png(side: int) -> bytes:
    """A valid picture of one colour; the file is a thousandth of its pixels' bytes."""
    row, packer = bytes(1 + 3 * side), zlib.compressobj(9)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return png(side, side, chunk(b"IDAT", pixels))


def large_jpeg(side: int, *, scans: int = 1) -> bytes:
    """A progressive JPEG whose header claims another size than it was saved with."""
    content = encode(PICTURE, format="JPEG", progressive=True)
    size_offset, last_scan = content.index(b"\xff\xc2") + 5, content.rindex(b"\xff\xda")
    content = content[:size_offset] + struct.pack(">HH", side, side) + content[size_offset + 4 : -2]
    return content + content[last_scan:] * (scans - 1) + b"\xff\xd9"


CANVAS = (12_999).to_bytes(3, "little") * 2
AT_MOST = "at most 134217728 are decoded; save it smaller"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.webp", webp(b"VP8L", b"\x2f" + (12_999 | 12_999 << 14).to_bytes(4, "little"))),
        ("a.webp", webp(b"VP8X", bytes(4) + CANVAS)),
        ("a.webp", webp(b"VP8X", b"\x02\0\0\0" + CANVAS)),
        ("a.webp", webp(b"VP8 ", bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", 13_000, 13_000))),
        ("a.png", png(13_000, 13_000)),
        ("a.jpg", large_jpeg(13_000)),
        ("a.jpg", png(13_000, 13_000)),
    ],
)
def test_a_real_picture_that_claims_gigabytes(tmp_path, name, content):
    """Puts a file of few bytes, whose header claims 169 megapixels, among real pictures."""
    assert len(content) < 1000
    assert f"(13000 x 13000 pixels, {AT_MOST})" in picture_error(content, tmp_path, name)


def test_a_whole_png_of_half_a_megabyte_and_gigabytes_of_pixels(tmp_path):
    """Compresses 169 megapixels of one colour, or hides their header behind a small one."""
    content = large_png(13_000)
    assert len(content) < 600_000
    assert f"(13000 x 13000 pixels, {AT_MOST})" in picture_error(content, tmp_path)
    larger = chunk(b"IHDR", struct.pack(">IIBBBBB", 13_000, 13_000, 8, 2, 0, 0, 0))
    assert "(13000 x 13000 pixels, its first header" in picture_error(png(16, 16, larger), tmp_path)


def test_a_real_jpeg_of_very_many_scans(tmp_path):
    """Repeats a scan of a large JPEG: every scan is decoded over the whole picture."""
    jpeg = large_jpeg(9000, scans=50)
    assert "59 scans over 9000 x 9000 pixels; save it as baseline" in picture_error(jpeg, tmp_path)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_real_picture_that_moves(tmp_path, kind):
    """Puts an animation of many frames among real pictures."""
    content = encode(PICTURE, format=kind, save_all=True, append_images=[PICTURE.rotate(90)])
    reason = "(it is animated or has several pages; save one of them)"
    assert reason in picture_error(content, tmp_path)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_a_real_picture_that_is_cut_is_named_wherever_it_is_cut(tmp_path, kind):
    """Sends half a file."""
    content = encode(PICTURE, format=kind)
    for cut in (0, 2, 9, 14, 18, 23, 28, 40, len(content) // 2, len(content) - 40):
        assert "cannot be read (" in picture_error(content[:cut], tmp_path)


def test_pictures_as_cameras_and_tools_write_them(tmp_path):
    """No attack: turned by EXIF, followed by more bytes, progressive, with a second picture."""
    rotation = Image.Exif()
    rotation[0x0112] = 6
    trailer = b"\xff\xda" * 200 + b"motion photo"
    contents = [
        *(encode(PICTURE.convert(mode), format="PNG") for mode in ("1", "L", "LA", "P", "RGBA")),
        *(encode(PICTURE, format=kind, exif=rotation) for kind in ("PNG", "JPEG", "WEBP")),
        *(encode(PICTURE, format=kind) + trailer for kind in ("PNG", "JPEG", "WEBP")),
        encode(PICTURE, format="JPEG", progressive=True),
        encode(PICTURE.convert("CMYK"), format="JPEG"),
        encode(PICTURE.convert("L"), format="JPEG", exif=rotation),
        encode(PICTURE, format="MPO", save_all=True, append_images=[PICTURE.rotate(9)]),
        encode(PICTURE, format="WEBP", lossless=True),
        encode(PICTURE.convert("RGBA"), format="WEBP"),
        b"\xff\xd8\xff\xff" + encode(PICTURE, format="JPEG")[3:],
    ]
    for content in contents:
        (tmp_path / "a").write_bytes(content)
        with Image.open(io.BytesIO(content)) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        expected = np.asarray(ImageOps.fit(upright, (8, 8), Image.Resampling.BICUBIC))
        np.testing.assert_array_equal(load_square(tmp_path / "a", 8), expected)


def test_large_pictures_on_many_threads_wait_for_each_other(tmp_path, monkeypatch):
    """Fills a folder with the largest pictures that are allowed, for sixteen threads."""
    decoding, numbers_decoding = [], []

    (tmp_path / "a.jpg").write_bytes(large_jpeg(9000))
    original_open = Image.open

    def counting_open(*args, **kwargs):
        decoding.append(1)
        numbers_decoding.append(len(decoding))
        time.sleep(0.05)
        decoding.pop()
        raise OSError("seen")

    monkeypatch.setattr(Image, "open", counting_open)
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(load_square, tmp_path / "a.jpg", 8) for _ in range(16)]
    assert {str(future.exception()) for future in futures} == {"seen"}
    assert max(numbers_decoding) <= 3  # of 81 megapixels each
    monkeypatch.setattr(Image, "open", original_open)
    PICTURE.save(tmp_path / "a.png")
    assert load_square(tmp_path / "a.png", 8).shape == (8, 8, 3)
