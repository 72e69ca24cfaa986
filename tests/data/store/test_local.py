"""A folder as a store: what dead processes leave there, full disks, names of unfinished files."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semix.data.errors import InputError
from semix.data.machine import machine
from semix.data.store import Store
from semix.data.store.local import WRITTEN_WITHIN_S, abandoned, in_use, link, staged, written_here

GONE = 2**22 + 1  # above the highest process number


@pytest.mark.parametrize("host", ["b", "a.b", "a-b.c-1.example", "7.8.abc", "x" * 64])
@pytest.mark.parametrize("name", ["clock", "0000001-0123abcd.features.safetensors", "a.b-1.2.3"])
def test_a_name_is_read_back(tmp_path, monkeypatch, host, name):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    with staged(tmp_path, name) as partial:
        assert len(partial.name) < 255
        assert written_here(partial)
        assert in_use(partial, age_s=0.0)
        assert not in_use(partial, age_s=WRITTEN_WITHIN_S)
        for other_host in ("a.b.b", "c", "1.example"):
            monkeypatch.setattr(socket, "gethostname", lambda other_host=other_host: other_host)
            assert not written_here(partial)
        monkeypatch.setattr(socket, "gethostname", lambda: host)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        (".x.tar.{machine}.{pid}.abc.partial", True),
        (".x.tar.{machine}.{gone}.abc.partial", True),
        (".x.tar.{host}.{pid}.abc.partial", False),  # as they were named once
        (".x.tar.{machine}.pid.abc.partial", False),
        (".x.tar.{machine}.99999999999999999999.abc.partial", False),
        (".{machine}.{pid}.abc.partial", False),
        (".x.partial", False),
        (".partial", False),
    ],
)
def test_names_that_others_may_have_given(name, here):
    values = {"machine": machine(), "host": socket.gethostname(), "pid": os.getpid(), "gone": GONE}
    assert written_here(Path(name.format_map(values))) == here
    assert in_use(Path(name.format_map(values)), age_s=0.0) == (here and "{pid}" in name)


def test_of_other_machines_age_tells_and_of_other_programs_nothing():
    own, another, foreign = (
        Path(f".x.{machine()}.{GONE}.abc.partial"),
        Path(".x.host-0123456789ab.1.abc.partial"),
        Path(".x.host.1.abc.partial"),
    )
    old_age_s = WRITTEN_WITHIN_S + 1
    assert [abandoned(path, age_s=0.0) for path in (own, another, foreign)] == [True, False, False]
    assert [abandoned(path, age_s=old_age_s) for path in (own, another, foreign)] == [
        True,
        True,
        False,
    ]


@pytest.mark.process
def test_what_dead_processes_left_is_listed_and_swept_and_nothing_else(tmp_path):
    store = Store(str(tmp_path))
    script = (
        "import os, sys\nfrom semix.data.store import Store\n"
        "with Store(sys.argv[1]).staging('shards/x.tar') as p:\n"
        "    p.write_bytes(b'half')\n    os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    elsewhere = tmp_path / "shards" / ".z.tar.another-host.12.abc.partial"
    elsewhere.write_bytes(b"12")
    with store.staging("shards/y.tar") as staged_file:
        partials = store.partials()
        assert sorted(fact.bytes for fact in partials.values()) == [2, 4]
        assert store.list("") == []
        assert store.sweep() == 1  # of another machine's only that machine knows
        assert store.sweep() == 0
        os.utime(elsewhere, (time.time() - 7200,) * 2)
        assert store.sweep(older_than_s=3600) == 1
        assert store.partials() == {}
        assert staged_file.exists()


@pytest.mark.process
def test_what_a_process_of_another_container_stages_stays(tmp_path, in_a_container):
    script = (
        "import sys\nfrom semix.data.store import Store\n"
        "print(*(Store(sys.argv[1]).sweep(older_than_s=float(age)) for age in sys.argv[2:]))"
    )
    with Store(str(tmp_path)).staging("shards/x.tar") as partial:
        os.utime(partial, (time.time() - 7200,) * 2)
        assert in_a_container(script, str(tmp_path), "86400") == "0\n"
        assert partial.exists()
        assert in_a_container(script, str(tmp_path), "3600") == "1\n"


def test_the_number_of_a_dead_process_is_used_again(tmp_path):
    store = Store(str(tmp_path))
    with store.staging("x.tar") as partial:
        os.utime(partial, (time.time() - 3 * 24 * 3600,) * 2)
        assert [fact.bytes for fact in store.partials().values()] == [0]


def test_a_link_whose_answer_was_lost_counts(tmp_path):
    partial, target = tmp_path / "partial", tmp_path / "target"
    partial.write_bytes(b"x")
    os.link(partial, target)
    assert link(partial, target)
    target.unlink()
    target.write_bytes(b"another's")
    assert not link(partial, target)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"out = .*/file/root: cannot be written \(.+\); choose"):
        Store(str(tmp_path / "file" / "root")).check_writable()
    if Path("/proc/1").is_dir():
        with pytest.raises(InputError, match="cannot be written"):
            Store("/proc/semix").check_writable()


def test_a_full_disk_harms_nothing(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(full)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system of limited size")
    try:
        store = Store(str(full))
        store.put("shards/a.tar", b"a" * 100_000)
        content = b"b" * 300_000
        for write in (store.put, store.create, _publish):
            for name in ("shards/a.tar", "shards/b.tar"):
                arguments = (store, name) if write is _publish else (name,)
                with pytest.raises(OSError, match="No space left"):
                    write(*arguments, content)
                assert [path.name for path in (full / "shards").iterdir()] == ["a.tar"]
                assert store.get("shards/a.tar") == b"a" * 100_000
        assert store.create("shards/c.json", b"{}")  # what fits still goes in
        (full / "filler").write_bytes(b"c" * (os.statvfs(full).f_bavail * 4096))
        with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
            store.check_writable()
    finally:
        subprocess.run(["umount", str(full)], check=True)


def _publish(store, name, content):
    with store.staging(name) as partial:
        partial.write_bytes(content)
        store.publish(partial, name)
