"""A bit that flipped in a local tar is named by whatever reads it; each tar is hashed once."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from semix.data.dataset import MixedDataset
from semix.data.export import write_image_folder
from semix.data.formats import ShardEntry
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.stream import mixed_pipeline
from semix.data.verify import damage
from tests.command import semix
from tests.handmade import committed, make_root


@pytest.fixture
def root(tmp_path, monkeypatch) -> Root:
    """A root of JPEGs, in which most flipped bits change pixels and raise no error."""
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "cache"))
    return make_root(tmp_path / "root", extension="jpg", side=32)


def flip(root: Root, shard: int = 1, *, keep_times: bool = False) -> ShardEntry:
    """Flip one bit of the last image of a tar; returns the shard's entry.

    Args:
        keep_times: leave the file's times as they were.
    """
    entry = committed(root)[shard]
    path = Path(root.url, entry.tar)
    state, content = path.stat(), bytearray(path.read_bytes())
    offset = content.rindex(b"\xff\xd9") - 40  # in front of the end of a JPEG
    content[offset] ^= 1
    path.write_bytes(content)
    if keep_times:
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    return entry


def stream_all(root: Root) -> None:
    list(mixed_pipeline(root.url))


def open_dataset(root: Root) -> MixedDataset:
    return MixedDataset(root.url)


def export_images(root: Root) -> None:
    target = Path(root.url).with_name("exported")
    shutil.rmtree(target, ignore_errors=True)
    write_image_folder(PinnedRoot(Root(root.url)), target)


READERS: list[Callable[[Root], object]] = [open_dataset, stream_all, export_images]


@pytest.mark.parametrize("read", READERS)
def test_a_flipped_bit_is_named(root, read):
    read(root)
    entry = flip(root)
    assert [p for p in damage(root) if p.shard == 1] == []  # its size is right
    with pytest.raises(ValueError, match=rf"^{entry.tar}: does not have the recorded SHA-256"):
        read(root)


def test_a_tar_that_is_as_it_was_is_not_hashed_again(root):
    open_dataset(root)
    flip(root, keep_times=True)
    open_dataset(root)
    stream_all(root)
    entry = committed(root)[1]
    os.utime(Path(root.url, entry.tar))
    with pytest.raises(ValueError, match=entry.tar):
        open_dataset(root)


def test_a_copy_of_a_root_is_another_one(root, tmp_path):
    open_dataset(root)
    Path(root.url).rename(tmp_path / "moved")
    moved = Root(str(tmp_path / "moved"))
    flip(moved, keep_times=True)
    with pytest.raises(ValueError, match="recorded SHA-256"):
        open_dataset(moved)


def test_a_cache_that_cannot_be_written_costs_time_alone(root, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "file" / "cache"))
    open_dataset(root)
    entry = flip(root)
    with pytest.raises(ValueError, match=entry.tar):
        open_dataset(root)


def test_export_names_it_and_leaves_nothing(root, tmp_path):
    entry = flip(root)
    status, _, err = semix("export", root.url, "--to", str(tmp_path / "out"), "--format", "folder")
    assert status == 1 and entry.tar in err and "resume" in err
    assert not (tmp_path / "out").exists()


READER = """
import sys
from semix.data.dataset import MixedDataset
print(len(MixedDataset(sys.argv[1], memory_limit=0)))
"""


@pytest.mark.process
def test_what_one_process_hashed_another_need_not(root):
    def run_reader() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", READER, root.url]
        return subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True
        )

    assert run_reader().stdout == "6\n"
    flip(root, keep_times=True)
    assert run_reader().stdout == "6\n"
    os.utime(Path(root.url, committed(root)[1].tar))
    assert "recorded SHA-256" in run_reader().stderr


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_a_root_that_nobody_may_write(root, method):
    for path in (Path(root.url), *Path(root.url).rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    mixed = MixedDataset(root.url, memory_limit=0)
    context = multiprocessing.get_context(method)
    loader = DataLoader(mixed, num_workers=2, multiprocessing_context=context)
    assert sorted(int(sample["group"]) for sample in loader) == list(range(6))
