"""Objects in a bucket: read by ranges, uploaded in parts, listed in pages."""

import io
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from semix.data.store import Store
from semix.data.store.objects import FIRST_RANGE, MAX_RANGE, RangeFile
from tests.s3 import s3_client

TWENTY_MB = bytes(1024) * 20_000  # about 20 MB


@pytest.fixture
def ranges_read():
    return []


@pytest.fixture
def file(ranges_read):
    def read(start, end):
        ranges_read.append((start, end - start))
        return TWENTY_MB[start:end]

    return io.BufferedReader(RangeFile(read, len(TWENTY_MB)))


def test_who_reads_on_gets_longer_ranges(file, ranges_read):
    assert file.read() == TWENTY_MB
    lengths = [length for _, length in ranges_read]
    assert lengths[:3] == [FIRST_RANGE, 2 * FIRST_RANGE, 4 * FIRST_RANGE]
    assert max(lengths) == MAX_RANGE and sum(lengths) == len(TWENTY_MB)


def test_who_jumps_gets_short_ranges(file, ranges_read):
    for start in (10_000_000, 5_000_000, 15_000_000):
        file.seek(start)
        assert len(file.read(1000)) == 1000
    assert ranges_read == [(start, FIRST_RANGE) for start in (10_000_000, 5_000_000, 15_000_000)]


def test_positions_outside_the_file(file):
    file.seek(len(TWENTY_MB) + 5)
    assert file.read(10) == b""
    with pytest.raises(ValueError, match="position -1 is before the file"):
        RangeFile(lambda start, end: b"", 10).seek(-1)


YEAR_S = 365 * 24 * 3600
PART = 5 << 20  # the least that S3 takes


@pytest.fixture
def store(bucket, monkeypatch, quick_pauses, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # only what is staged here counts
    monkeypatch.setattr("semix.data.store.objects.PART", PART)
    return Store(f"{bucket}/root")


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2 * PART + 1000))
    return path


def test_a_large_file_is_published_in_parts(store, large):
    store.publish(large, "x.tar")
    assert store.get("x.tar") == large.read_bytes()
    assert store.partials() == {}
    client = s3_client(os.environ["AWS_ENDPOINT_URL"])
    bucket = store.url.removeprefix("s3://").partition("/")[0]
    etag = client.head_object(Bucket=bucket, Key="root/x.tar")["ETag"]
    assert etag.strip('"').endswith("-3")  # so many parts


@pytest.mark.parametrize("faults", [{"errors": 0.3}, {"lost": 0.3}, {"cut_requests": 0.3}])
def test_parts_that_fail_go_up_again(store, large, faulty_s3, faults):
    faulty_s3.fail(**faults, methods=["PUT", "POST"])
    Store(store.url).publish(large, "x.tar")
    assert sum(faulty_s3.done.values()) > 0
    assert store.get("x.tar") == large.read_bytes()


def test_a_completion_whose_answer_was_lost_counts(store, large, faulty_s3):
    faulty_s3.fail(lost=1.0, methods=["POST"], path="uploadId=", max_faults=4)
    Store(store.url).publish(large, "x.tar")
    assert faulty_s3.done["lost"] == 4
    assert store.get("x.tar") == large.read_bytes()


def test_an_upload_that_fails_for_good_is_given_up(store, large, faulty_s3):
    faulty_s3.fail(errors=1.0, statuses=[403], methods=["PUT"])
    with pytest.raises(PermissionError):
        Store(store.url).publish(large, "x.tar")
    assert store.list("") == []


def test_two_that_publish_the_same_content_both_succeed(store, large):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: store.publish(large, "x.tar"), range(2)))
    assert store.get("x.tar") == large.read_bytes()


@pytest.mark.parametrize("damage", [b"", b"short", b"same length"])
def test_a_damaged_object_is_replaced_and_an_equal_one_is_not(store, tmp_path, damage):
    path = tmp_path / "a.tar"
    path.write_bytes(b"equal bytes")
    store.put("a.tar", damage)
    store.publish(path, "a.tar")
    assert store.get("a.tar") == b"equal bytes"
    modified = store.infos("")["a.tar"]
    time.sleep(1.1)  # S3 tells whole seconds
    store.publish(path, "a.tar")
    assert store.infos("")["a.tar"] == modified


def test_a_killed_upload_shows_nothing_and_can_be_made_again(store, large, faulty_s3):
    """SIGKILL while the second part is on its way."""
    faulty_s3.fail(stalled=1.0, methods=["PUT"], path="partNumber=2")
    script = (
        "import sys\nfrom pathlib import Path\nfrom semix.data.store import Store, objects\n"
        f"objects.PART = {PART}\n"
        "Store(sys.argv[1]).publish(Path(sys.argv[2]), 'shards/x.tar')\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, store.url, str(large)]) as process:
        while not (faulty_s3.done["stalled"] and faulty_s3.requests["PUT"] >= 3):
            time.sleep(0.05)
        time.sleep(0.3)
        process.kill()
    faulty_s3.heal()
    assert store.list("") == []
    assert not store.exists("shards/x.tar")
    store.publish(large, "shards/x.tar")
    assert store.get("shards/x.tar") == large.read_bytes()


def test_what_an_earlier_boot_staged_for_a_bucket_is_swept_when_it_is_old(store, tmp_path):
    leftover = tmp_path / f".x.tar.{socket.gethostname()}-0123456789ab.12.abc.partial"
    foreign = tmp_path / ".of-another-program.12.abc.partial"
    for path in (leftover, foreign):
        path.write_bytes(b"half")
    assert store.sweep() == 0
    for path in (leftover, foreign):
        os.utime(path, (time.time() - 25 * 3600,) * 2)
    assert store.sweep() == 1
    assert (leftover.exists(), foreign.exists()) == (False, True)


def test_what_a_killed_process_staged_for_a_bucket_is_swept(store, tmp_path):
    script = (
        "import os, sys\nfrom semix.data.store import Store\n"
        "with Store(sys.argv[1]).staging('x.tar') as p:\n    print(p)\n"
        "    sys.stdout.flush()\n    os._exit(9)\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script, store.url],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    leftover = tmp_path / completed.stdout.strip().rpartition("/")[2]
    assert leftover.exists()
    sweep = "import sys\nfrom semix.data.store import Store\nprint(Store(sys.argv[1]).sweep())"
    with store.staging("y.tar") as staged_file:
        swept = subprocess.run(
            [sys.executable, "-c", sweep, store.url],
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert (swept.stdout, leftover.exists(), staged_file.exists()) == ("1\n", False, True)


def test_more_objects_than_a_page_holds_are_listed(store):
    """Pages of the server for tests hold a hundred."""
    client = s3_client(os.environ["AWS_ENDPOINT_URL"])
    bucket = store.url.removeprefix("s3://").partition("/")[0]
    names = [f"shards/0000/{number:07d}.json" for number in range(230)]
    names += [f"shards/{folder:04d}/{folder:04d}000.json" for folder in range(1, 120)]
    for name in names:
        client.put_object(Bucket=bucket, Key=f"root/{name}", Body=b"1")
    assert store.list("shards") == names
    assert list(store.infos("shards")) == names


def test_google_takes_a_large_file_in_chunks(gs_bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("semix.data.store.objects.PART", 4 << 20)
    large = tmp_path / "large"
    large.write_bytes(os.urandom(9 << 20))
    store = Store(f"{gs_bucket}/root")
    for _ in range(2):  # the second finds it there
        store.publish(large, "x.tar")
        assert store.get("x.tar") == large.read_bytes()
    with store.open("x.tar") as file:
        file.seek(5 << 20)
        assert file.read() == large.read_bytes()[5 << 20 :]
    assert (store.partials(), store.sweep()) == ({}, 0)


def test_more_objects_than_a_page_of_google_holds_are_listed(gs_bucket):
    store = Store(f"{gs_bucket}/root")
    names = [f"shards/0000/{number:07d}.json" for number in range(130)]
    for name in names:
        store.put(name, b"1")
    assert store.list("shards") == names
