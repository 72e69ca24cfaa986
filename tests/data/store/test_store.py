"""All kinds of store: their URLs, names and objects; a file appears only when it is complete."""

import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from semix.data.errors import InputError, TooLarge
from semix.data.installation import install_command
from semix.data.store import Store


def test_accepted_urls():
    assert Store("some/root").url == str(Path("some/root").absolute())
    assert Store("file:///some/root").url == "/some/root"
    assert Store("s3://bucket/some/root/").url == "s3://bucket/some/root"
    assert Store("gs://bucket").url == "gs://bucket"
    assert Store("memory://x").url == "memory://x"
    assert Store("some/root").local and not Store("s3://bucket").local
    assert Store("s3://bucket").shared and not Store("memory://x").shared


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("http://host/x", "use one of file, s3, gs, memory"),
        ("https://host/x", "use one of file, s3, gs, memory"),
        ("pipe://cat", "use one of file, s3, gs, memory"),
        ("hf://datasets/x", "use one of file, s3, gs, memory"),
        ("github://owner:repo@/x", "use one of file, s3, gs, memory"),
        ("simplecache::file:///x", "chained URLs are not used"),
        ("s3://bucket/x::file:///y", "chained URLs are not used"),
        ("s3://", "write s3://BUCKET/FOLDER"),
        ("s3://a/x", "write s3://BUCKET/FOLDER"),
        ("gs:///x", "write gs://BUCKET/FOLDER"),
        ("s3://bucket/../other", r"no empty names, \. or \.\. in a URL"),
        ("s3://bucket//x", r"no empty names, \. or \.\. in a URL"),
        ("memory://x/../y", r"no empty names, \. or \.\. in a URL"),
        ("s3://bucket/x?versionId=1", "no query, fragment"),
        ("s3://bucket/x#1", "no query, fragment"),
        ("s3://bucket/*", "no query, fragment"),
        ("file://some/root", "write file:///absolute/path"),
        ("s3://bucket/x\n", "has control characters"),
        ("some\x00root", "has control characters"),
        ("", "give a local path or a URL"),
    ],
)
def test_other_urls_are_refused(url, remedy):
    with pytest.raises(InputError, match=remedy):
        Store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hunter2@bucket/x",
        "s3://user:hun/ter2@bucket/x",
        "s3://user:hun@ter2@bucket/x",
        "https://user:hunter2@host/x",
        "s3://bucket/x?secret=hunter2",
        "simplecache::s3://user:hunter2@bucket",
        "s3://user:hunter2@bucket/\x00",
    ],
)
def test_a_refusal_does_not_repeat_a_secret(url):
    with pytest.raises(InputError) as caught:
        Store(url)
    assert "hunter2" not in f"{caught.value} {caught.value.value} {caught.value.args}"
    assert "ter2" not in str(caught.value)


def test_a_path_that_looks_like_a_command_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("pipe:touch executed")
    store.put("a", b"1")
    assert store.get("a") == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["pipe:touch executed"]


@pytest.mark.process
@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_package_is_named(protocol, package):
    script = (
        f"import sys\nsys.modules['{package}'] = None\n"
        f"from semix.data.store import Store\nStore('{protocol}://bucket/x')\n"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    message = f"url = {protocol}://bucket/x: needs {package}: {install_command(protocol)}"
    assert message in completed.stderr


@pytest.mark.process
def test_a_local_store_needs_no_cloud_package():
    script = (
        "import sys\nfrom semix.data.store import Store\nStore('/tmp').exists('x')\n"
        "print([m for m in ('torch', 'fsspec', 's3fs', 'gcsfs', 'botocore') if m in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert completed.stdout.strip() == "[]", completed.stderr


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
    facts = store.infos("a")
    assert [(name, fact.bytes) for name, fact in facts.items()] == [
        ("a/b/c/d.json", 5),
        ("a/e.json", 0),
    ]
    # S3 tells whole seconds.
    assert all(before - 1 <= fact.modified <= store.now() + 1 for fact in facts.values())
    assert abs(store.now() - time.time()) < 5
    assert store.infos("none") == {}


def test_get_many_leaves_out_what_is_not_there(store):
    names = [f"records/{number:03d}.json" for number in range(150)]
    for name in names[::2]:
        store.put(name, name.encode())
    contents = store.get_many([*reversed(names), names[0]])
    assert contents == {name: name.encode() for name in names[::2]}
    assert list(contents) == names[::2][::-1]
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
        "import sys\nfrom semix.data.store import Store\nstore = Store(sys.argv[1])\n"
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
        lambda: store.infos(name or "/"),
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


def test_a_place_that_can_be_written_is_left_as_it_was(store, tmp_path):
    store.put("a", b"")
    store.check_writable(tidy=True)
    assert store.list("") == ["a"]
    Store(str(tmp_path / "new" / "root")).check_writable(tidy=True)
    assert not (tmp_path / "new").exists()


def test_a_place_that_holds_something_else_is_refused(store):
    for name in (".DS_Store", ".cache/a", "probe-host-1"):  # hidden, or another who tries it
        store.put(name, b"")
    store.require_empty_or_own("mixed dataset", own="plan.json")
    for name in ("cats/1.jpg", "dogs/1.jpg", "readme.txt", "x/y/z"):
        store.put(name, b"")
    message = (
        rf"^out = {store.url}: holds cats, dogs, readme.txt and 1 more, and is no mixed dataset;"
    )
    with pytest.raises(InputError, match=message):
        store.require_empty_or_own("mixed dataset", own="plan.json")
    store.put("plan.json", b"{}")
    store.require_empty_or_own("mixed dataset", own="plan.json")


def test_what_is_larger_than_its_reader_takes_is_refused_by_name(store):
    for name, content in (("all", b"12345"), ("more", b"123456"), ("none", b"")):
        store.put(name, content)
    assert (store.get("all", max_bytes=5), store.get("none", max_bytes=5)) == (b"12345", b"")
    with pytest.raises(TooLarge) as caught:
        store.get("more", max_bytes=5)
    assert caught.value.field == f"{store.url}/more"
    assert caught.value.value == "6 bytes"
    assert caught.value.remedy.startswith("at most 5 bytes of it are read; restore it")
    assert store.get_many(["all", "more", "none", "nothing"], max_bytes=5) == {
        "all": b"12345",
        "none": b"",
    }
