"""A real file system that fills up in the middle of a build."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.root import Root
from data.verify import damage
from tests.integration.conftest import contents

PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; needs the right to mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    found = subprocess.run(mount, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no file system can be mounted here: {found.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def used(disk: Path) -> int:
    fields = subprocess.check_output(["df", "-B1", "--output=used", str(disk)], text=True)
    return int(fields.split()[-1])


@pytest.mark.parametrize("pages_left", [1, 2, 4, 6, 8])
def test_a_build_on_a_full_disk_fails_by_name_and_goes_on_later(tiny, unbroken, disk, pages_left):
    root = tiny.start(str(disk / "mixed"))
    tiny.make(root, 0)
    before = contents(root)
    resize(disk, str(used(disk) + pages_left * PAGE))
    with pytest.raises(OSError, match="No space left on device"):
        for shard in root.missing():
            tiny.make(root, shard)
    seen = Root(root.url)
    assert damage(seen, full=True) == []
    assert contents(seen).items() >= before.items()
    assert not list(disk.rglob("*.partial"))
    resize(disk, "16m")
    assert contents(tiny.finish(seen)) == unbroken
