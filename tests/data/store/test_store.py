import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data.errors import InputError
from data.store import Store
from data.store.local import link


@pytest.mark.process
def test_put_get_list_delete(store):
    assert store.list("shards") == []
    store.put("shards/0/b", b"two")
    store.put("shards/0/a", b"one")
    store.put("shards/0/a", b"three")
    store.put("shards-of-another/a", b"")
    assert store.list("shards") == ["shards/0/a", "shards/0/b"]
    assert store.list("") == ["shards-of-another/a", "shards/0/a", "shards/0/b"]
    assert (store.get("shards/0/a"), store.size("shards/0/b")) == (b"three", 3)
    store.delete("shards/0/a")
    assert not store.exists("shards/0/a")
    store.delete("shards/0/a")  # gone is gone
    with pytest.raises(FileNotFoundError):
        store.get("shards/0/a")
    with pytest.raises(FileNotFoundError):
        store.size("shards/0/a")
    with pytest.raises(FileNotFoundError):
        store.open("shards/0/a")


def test_facts_are_by_the_clock_of_the_store(store):
    before = store.now()
    store.put("a/b/c/d.json", b"12345")
    store.put("a/e.json", b"")
    facts = store.facts("a")
    assert [(name, fact.bytes) for name, fact in facts.items()] == [
        ("a/b/c/d.json", 5),
        ("a/e.json", 0),
    ]
    # S3 tells whole seconds.
    assert all(before - 1 <= fact.modified <= store.now() + 1 for fact in facts.values())
    assert abs(store.now() - time.time()) < 5
    assert store.facts("none") == {}


def test_get_many_leaves_out_what_is_not_there(store):
    names = [f"records/{number:03d}.json" for number in range(150)]
    for name in names[::2]:
        store.put(name, name.encode())
    found = store.get_many([*reversed(names), names[0]])
    assert found == {name: name.encode() for name in names[::2]}
    assert list(found) == names[::2][::-1]
    assert store.get_many([]) == {}


def test_create_never_replaces(store):
    assert store.create("plan", b"first")
    assert not store.create("plan", b"second")
    assert not store.create("plan", b"first")
    assert store.get("plan") == b"first"


def test_of_eight_that_create_at_once_one_wins(store, tmp_path):
    if not store.shared:
        pytest.skip("the memory of one process has no other writers")
    contents = [str(number).encode() for number in range(8)]
    for attempt in range(5):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda c, a=attempt: store.create(f"lease/{a}", c), contents))
        assert [c for c, w in zip(contents, won, strict=True) if w] == [
            store.get(f"lease/{attempt}")
        ]


@pytest.mark.process
def test_of_four_processes_that_create_at_once_one_wins(store):
    if not store.shared:
        pytest.skip("other processes do not see the memory of this one")
    script = (
        "import sys\nfrom data.store import Store\nstore = Store(sys.argv[1])\n"
        "store.exists('x'); print(flush=True); sys.stdin.readline()\n"
        "print(sum(store.create(f'lease/{n}', sys.argv[2].encode()) for n in range(20)))\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, store.url, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for process in started:
        process.stdout.readline()  # all are ready before the first begins
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [int(process.communicate()[0]) for process in started]
    winners = [store.get(f"lease/{number}").decode() for number in range(20)]
    assert won == [winners.count(str(number)) for number in range(4)]
    assert sum(won) == 20


def test_publish_gives_a_staged_file_its_name(store):
    for content in (b"one", b"another"):
        with store.staging("shards/x.tar") as partial:
            partial.write_bytes(content)
            store.publish(partial, "shards/x-0123.tar")
        assert not partial.exists()
        assert store.get("shards/x-0123.tar") == content
    assert store.list("") == ["shards/x-0123.tar"]


def test_an_exception_while_staging_publishes_nothing(store):
    with pytest.raises(RuntimeError), store.staging("shards/x.tar") as partial:
        partial.write_bytes(b"half")
        raise RuntimeError
    assert store.list("") == []
    assert not partial.exists()


def test_an_open_file_is_read_in_any_order(store):
    content = bytes(range(256)) * 4000  # longer than one range
    store.put("shard.tar", content)
    with store.open("shard.tar") as file:
        assert file.read(1000) == content[:1000]
        file.seek(-10, os.SEEK_END)
        assert file.read() == content[-10:]
        assert file.read() == b""
        file.seek(300_000)
        assert file.read(300_000) == content[300_000:600_000]
        assert file.tell() == 600_000
        file.seek(0)
        assert file.read() == content


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a//b", "a/../../b", ".", "", "a/\x00", "a?b"]
)
def test_names_that_lead_out_of_the_store_are_refused(store, name):
    for attempt in (
        lambda: store.get(name),
        lambda: store.open(name),
        lambda: store.exists(name),
        lambda: store.put(name, b""),
        lambda: store.create(name, b""),
        lambda: store.delete(name),
        lambda: store.get_many([name]),
        lambda: store.staging(name),
        lambda: store.publish(Path("x"), name),
        lambda: store.facts(name or "/"),
    ):
        with pytest.raises(ValueError, match="is not a name within a store"):
            attempt()


def test_a_store_survives_pickling(store):
    store.put("a", b"1")
    again = pickle.loads(pickle.dumps(store))
    assert (again.url, again.get("a"), repr(again)) == (store.url, b"1", f"Store({store.url!r})")


@pytest.mark.process
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_read(store, start):
    if not store.shared and start == "spawn":
        pytest.skip("other processes do not see the memory of this one")
    from torch.utils.data import DataLoader

    for number in range(8):
        store.put(f"part/{number}", bytes([number]))  # used here first: a loop is running
    count = 2 if start == "fork" else 1  # a spawned one imports torch again
    loader = DataLoader(
        _Parts(store), batch_size=4, num_workers=count, multiprocessing_context=start, timeout=60
    )
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert store.get("part/3") == b"\x03"  # and still works here


class _Parts:
    def __init__(self, store):
        self.store = store

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.store.get(f"part/{index}")[0]


@pytest.mark.process
def test_what_dead_processes_left_is_listed_and_swept_and_nothing_else(tmp_path):
    store = Store(str(tmp_path))
    script = (
        "import os, sys\nfrom data.store import Store\n"
        "with Store(sys.argv[1]).staging('shards/x.tar') as p:\n"
        "    p.write_bytes(b'half')\n    os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    elsewhere = tmp_path / "shards" / ".z.tar.another-host.12.abc.partial"
    elsewhere.write_bytes(b"12")
    with store.staging("shards/y.tar") as mine:
        left = store.partials()
        assert sorted(fact.bytes for fact in left.values()) == [2, 4]
        assert store.list("") == []
        assert store.sweep() == 1  # of another machine's only that machine knows
        assert store.sweep() == 0
        os.utime(elsewhere, (time.time() - 7200,) * 2)
        assert store.sweep(older_than_s=3600) == 1
        assert store.partials() == {}
        assert mine.exists()


@pytest.mark.process
def test_what_a_process_of_another_container_stages_stays(tmp_path, in_a_container):
    script = (
        "import sys\nfrom data.store import Store\n"
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


def test_a_place_that_can_be_written_is_left_as_it_was(store, tmp_path):
    store.put("a", b"")
    store.check_writable(tidy=True)
    assert store.list("") == ["a"]
    Store(str(tmp_path / "new" / "root")).check_writable(tidy=True)
    assert not (tmp_path / "new").exists()


def test_a_place_that_holds_something_else_is_refused(store):
    for name in (".DS_Store", ".cache/a", "probe-host-1"):  # hidden, or another who tries it
        store.put(name, b"")
    store.refuse_strangers("mixed dataset", own="plan.json")
    for name in ("cats/1.jpg", "dogs/1.jpg", "readme.txt", "x/y/z"):
        store.put(name, b"")
    told = rf"^out = {store.url}: holds cats, dogs, readme.txt and 1 more, and is no mixed dataset;"
    with pytest.raises(InputError, match=told):
        store.refuse_strangers("mixed dataset", own="plan.json")
    store.put("plan.json", b"{}")
    store.refuse_strangers("mixed dataset", own="plan.json")


def test_a_full_disk_harms_nothing(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(full)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system of limited size")
    try:
        store = Store(str(full))
        store.put("shards/a.tar", b"a" * 100_000)
        much = b"b" * 300_000
        for write in (store.put, store.create, _publish):
            for name in ("shards/a.tar", "shards/b.tar"):
                arguments = (store, name) if write is _publish else (name,)
                with pytest.raises(OSError, match="No space left"):
                    write(*arguments, much)
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
