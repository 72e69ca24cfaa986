import subprocess
import sys
from pathlib import Path

import pytest

from data.errors import InputError
from data.store import Store


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    return Store(str(tmp_path / "root") if request.param == "file" else f"memory://{tmp_path}")


def test_put_get_list_delete(store):
    assert store.list("shards") == []
    store.put("shards/0/b", b"two")
    store.put("shards/0/a", b"one")
    store.put("shards/0/a", b"three")
    assert store.list("shards") == ["shards/0/a", "shards/0/b"]
    assert (store.get("shards/0/a"), store.size("shards/0/b")) == (b"three", 3)
    store.delete("shards/0/a")
    assert not store.exists("shards/0/a")


def test_create_never_replaces(store):
    assert store.create("plan", b"first")
    assert not store.create("plan", b"second")
    assert store.get("plan") == b"first"


def test_an_exception_while_staging_publishes_nothing(store):
    with pytest.raises(RuntimeError), store.staging("shards/x.tar") as partial:
        partial.write_bytes(b"half")
        raise RuntimeError
    assert store.list("") == []


def test_sweep_removes_what_dead_processes_left_and_nothing_else(tmp_path):
    store = Store(str(tmp_path))
    script = (
        "import os, sys\nfrom data.store import Store\n"
        "with Store(sys.argv[1]).staging('shards/x.tar') as p:\n"
        "    p.write_bytes(b'half')\n    os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    with store.staging("shards/y.tar") as mine:
        assert len(list(tmp_path.rglob("*.partial"))) == 2
        assert store.sweep() == 1
        assert mine.exists()


@pytest.mark.parametrize("url", ["http://host/x", "simplecache::file:///x", "pipe:cat"])
def test_other_protocols_are_refused(url):
    if url == "pipe:cat":  # no protocol, so a plain relative path; nothing is executed
        assert Store(url).url.endswith("/pipe:cat")
        return
    with pytest.raises(InputError, match="use one of file, memory"):
        Store(url)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"out = .*/file/root: cannot be written \(.+\); choose"):
        Store(str(tmp_path / "file" / "root")).check_writable()
    if Path("/proc/1").is_dir():
        with pytest.raises(InputError, match="cannot be written"):
            Store("/proc/semix").check_writable()
