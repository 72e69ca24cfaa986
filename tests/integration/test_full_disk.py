"""A real file system that is too small for a build, or fills up in the middle of it."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from prefect import flow

from semix.data.root import Root
from semix.data.verify import damage
from semix.flows.slots import SlotSettings, slot
from semix.flows.slots.slot import WorkerLost, generate, worker_arguments
from semix.pipeline.worker import main as worker
from tests.command import semix
from tests.integration.conftest import contents
from tests.pipeline.roots import altered, create_root

PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; needs the right to mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


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
    reopened = Root(root.url)
    assert damage(reopened, full=True) == []
    assert contents(reopened).items() >= before.items()
    assert not list(disk.rglob("*.partial"))
    resize(disk, "16m")
    assert contents(tiny.finish(reopened)) == unbroken


def test_a_build_that_cannot_fit_is_refused_before_it_starts(hasty_config, disk, tmp_path):
    """With the message of its check."""
    large = altered(hasty_config, "mixing.groups_per_pair=400")
    path, out = tmp_path / "build.yaml", disk / "mixed"
    path.write_text(large.model_dump_json(exclude_defaults=True))
    ends = [semix("build", str(path), "--out", str(out), *more) for more in (["--check"], [])]
    assert [status for status, _, _ in ends] == [2, 2]
    refusals = [err.splitlines()[-1] for _, _, err in ends]
    assert f"error: out = {out}: has " in refusals[1] and "choose another place" in refusals[1]
    assert refusals[0].split(": has")[0] == refusals[1].split(": has")[0]
    assert not list(out.rglob("*.tar"))


@pytest.fixture
def full(hasty_config, disk) -> Root:
    """A root whose disk takes no further shard."""
    root = create_root(hasty_config, str(disk / "mixed"))
    assert worker([root.url, "--device=cpu", "--shards=0"]) == 0
    resize(disk, str(used(disk) + PAGE))
    return root


@pytest.mark.process
def test_every_restart_on_a_full_disk_has_a_line_with_its_cause(
    full, prefect_api, caplog, monkeypatch
):
    monkeypatch.setattr(slot, "RETRIES", 1)

    @flow
    def one() -> list[object]:
        arguments = worker_arguments(full.url, 0, 1, settings=SlotSettings())
        options = {"environment": {}, "stop": Event(), "device": "cpu", "pause_s": 0.0}
        future = generate.submit(0, arguments, **options, url=full.url)
        return [future.result(raise_on_failure=False)]

    with caplog.at_level("WARNING", "semix.build"):
        [error] = one()
    assert isinstance(error, WorkerLost)
    cause = f"slot 0: its worker ended: exit status 75: [^\n]*disk full at {full.url}"
    messages = [r.getMessage() for r in caplog.records if r.name == "semix.build"]
    lines = [message for message in messages if "its worker ended" in message]
    assert re.match(rf"{cause}[^\n]*; restart 1 of 1 in 0 s$", lines[0])
    assert re.match(cause, str(error))
