"""Services that fail: S3 through a proxy, with a real server behind it; refusals by name."""

import hashlib
import logging
import os
import pickle
import time
import traceback

import pytest

from semix.data.errors import InputError
from semix.data.store import Store, services
from semix.data.store.services import RetryPolicy, retrying
from tests.s3 import KEY_ID, SECRET, s3_client

CONTENT = bytes(range(256)) * 3000


@pytest.fixture
def store(bucket, faulty_s3, quick_pauses):
    return Store(f"{bucket}/root")


@pytest.mark.parametrize(
    "faults",
    [
        {"errors": 0.2},
        {"errors": 0.2, "statuses": [503, 429]},
        {"lost": 0.2},
        {"cut_answers": 0.2, "methods": ["GET"]},
        {"cut_requests": 0.2, "methods": ["PUT"]},
        {"slow": 0.2, "slow_s": 0.3},
        {"errors": 0.05, "lost": 0.05, "cut_answers": 0.05, "cut_requests": 0.05},
    ],
    ids=lambda faults: "-".join(faults),
)
def test_a_fifth_of_the_requests_may_fail(store, faulty_s3, faults):
    faulty_s3.fail(**faults, seed=3)
    for number in range(8):
        assert store.create(f"a/{number}", CONTENT)
        assert not store.create(f"a/{number}", b"")
    store.put("a/0", b"0")
    names = [f"a/{number}" for number in range(8)]
    assert store.list("a") == names
    assert [fact.bytes for fact in store.infos("a").values()] == [1] + 7 * [len(CONTENT)]
    assert store.get_many(names) == {"a/0": b"0"} | dict.fromkeys(names[1:], CONTENT)
    with store.open("a/3") as file:
        assert hashlib.file_digest(file, "sha256").digest() == hashlib.sha256(CONTENT).digest()
    with store.staging("shards/x.tar") as partial:
        partial.write_bytes(CONTENT)
        store.publish(partial, "shards/x.tar")
    assert store.get("shards/x.tar") == CONTENT
    store.delete("a/7")
    assert not store.exists("a/7")
    assert sum(faulty_s3.done.values()) > 0


def test_a_create_whose_answer_was_lost_was_ours(store, faulty_s3):
    faulty_s3.fail(lost=1.0, methods=["PUT"], max_faults=1)
    assert store.create("lease", b"mine")
    faulty_s3.fail(lost=1.0, methods=["PUT"], max_faults=1)
    assert not store.create("lease", b"mine")  # the same content, but it was there before
    faulty_s3.fail(errors=1.0, methods=["PUT"], max_faults=1)
    assert not store.create("lease", b"another's")
    assert store.get("lease") == b"mine"


def test_an_open_file_goes_on_where_it_was_cut(store, faulty_s3):
    content = os.urandom(3 << 20)
    store.put("shard.tar", content)
    faulty_s3.fail(cut_answers=1.0, methods=["GET"], max_faults=3)
    with store.open("shard.tar") as file:
        assert file.read() == content
    assert faulty_s3.done["cut_answers"] == 3


def test_an_open_file_never_ends_short(store, faulty_s3, monkeypatch):
    monkeypatch.setattr(
        "semix.data.store.services.DEFAULT_RETRIES",
        RetryPolicy(seconds=0.5, attempts=1, connect_s=1, answer_s=1),
    )
    store = Store(store.url)
    store.put("shard.tar", CONTENT)
    with store.open("shard.tar") as file:
        faulty_s3.fail(cut_answers=1.0, methods=["GET"])
        with pytest.raises(OSError, match="transfer failed: ClientPayloadError"):
            file.read()
        faulty_s3.heal()
        store.put("shard.tar", CONTENT[:1000])  # another one, shorter than was told
        with pytest.raises(OSError, match="transfer failed: ConnectionError"):
            file.read()


def test_a_silent_server_is_not_waited_for_without_end(store, faulty_s3, monkeypatch):
    monkeypatch.setattr(
        "semix.data.store.services.DEFAULT_RETRIES",
        RetryPolicy(seconds=1.0, attempts=1, connect_s=1, answer_s=0.5),
    )
    store = Store(store.url)
    store.put("a", b"1")
    faulty_s3.fail(stalled=1.0, max_faults=1)
    assert store.get("a") == b"1"
    faulty_s3.fail(stalled=1.0)
    with pytest.raises(ConnectionError, match=r"transfer failed: ReadTimeoutError.*/root/a"):
        store.get("a")


@pytest.mark.parametrize("status", [403, 404, 501])
def test_what_does_not_heal_is_not_tried_again(store, faulty_s3, status):
    store.put("a", b"1")
    faulty_s3.fail(errors=1.0, statuses=[status], methods=["GET"])
    with pytest.raises(OSError):
        store.get("a")
    assert faulty_s3.done["errors"] == 1


def test_a_bucket_that_turns_read_only(store, faulty_s3):
    store.put("a", b"1")
    faulty_s3.fail(read_only=True)
    for write in (store.put, store.create):
        with pytest.raises(PermissionError, match=r"refused: AccessDenied \(403\)"):
            write("b", b"2")
    with (
        store.staging("c.tar") as partial,
        pytest.raises(PermissionError, match="AccessDenied"),
    ):
        store.publish(partial, "c.tar")
    with pytest.raises(PermissionError, match="AccessDenied"):
        store.delete("a")
    assert store.get("a") == b"1"
    assert store.list("") == ["a"]
    with pytest.raises(
        InputError, match=r"out = s3://.*/root: may not be written \(refused: AccessDenied"
    ):
        store.check_writable()


def test_a_missing_bucket_is_named(bucket, faulty_s3):
    store = Store(f"{bucket}-not/root")
    for ask in (
        store.check_writable,
        lambda: store.get("a"),
        lambda: store.list("a"),
        lambda: store.exists("a"),
    ):
        with pytest.raises(InputError, match=r"s3://semix-\w+-not/root: there is no such bucket"):
            ask()


def test_missing_credentials_are_named(bucket, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    store = Store(f"{bucket}/root")
    for ask in (store.check_writable, lambda: store.exists("plan.json")):
        with pytest.raises(InputError, match="no credentials; set AWS_ACCESS_KEY_ID and AWS_SEC"):
            ask()


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
def test_refused_credentials_are_named(store, faulty_s3, code):
    faulty_s3.fail(errors=1.0, statuses=[403], code=code)
    started = time.monotonic()
    for ask in (store.check_writable, lambda: store.exists("plan.json")):
        with pytest.raises(InputError, match=rf"credentials .* were refused; .* \({code}\)"):
            ask()
    assert faulty_s3.done["errors"] < 6
    assert time.monotonic() - started < 30  # far from two minutes, on any machine


@pytest.mark.parametrize("user", ["", "user:hunter2@"])
def test_an_address_without_a_server_is_named_soon(bucket, monkeypatch, user):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{user}127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(InputError) as caught:
        Store(f"{bucket}/root").check_writable()
    assert time.monotonic() - started < 30  # far from two minutes, on any machine
    assert "cannot be used at http://127.0.0.1:9 (transfer failed: " in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_wrong_clock_is_named(store, faulty_s3):
    faulty_s3.fail(errors=1.0, statuses=[403], code="RequestTimeTooSkewed")
    with pytest.raises(InputError, match="the clock of this machine is wrong"):
        store.get("plan.json")


def test_a_server_that_overwrites_is_refused(store, faulty_s3):
    faulty_s3.fail(forgotten=1.0, methods=["PUT"])
    with pytest.raises(InputError, match="overwrites a file on a create-only write"):
        store.check_writable()


def test_no_secret_in_logs_errors_or_pickles(store, faulty_s3, caplog, monkeypatch):
    monkeypatch.setattr(
        "semix.data.store.services.DEFAULT_RETRIES",
        RetryPolicy(seconds=2, attempts=1, connect_s=1, answer_s=1),
    )
    store = Store(store.url)
    assert not store.exists("a")  # connected, which may take a busy machine all the patience
    faulty_s3.fail(errors=1.0, message=f"The key {KEY_ID} with {SECRET} is tired")
    with caplog.at_level(logging.WARNING), pytest.raises(OSError) as caught:
        store.get("a")
    texts = [caplog.text, store.url, repr(store), str(pickle.dumps(store))]
    texts += traceback.format_exception(caught.value)
    texts += [str(pickle.dumps(caught.value))]
    assert "s3://" in caplog.text and "again in" in caplog.text
    for text in texts:
        assert KEY_ID not in text and SECRET not in text


def test_pauses_grow_and_end(monkeypatch):
    slept, now = [], [0.0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(services.time, "sleep", sleep)
    monkeypatch.setattr(services.time, "monotonic", lambda: now[0])

    def fail():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        retrying(
            fail, what="a", transient_reason=lambda error: "slow", policy=services.DEFAULT_RETRIES
        )
    # The last pause is the one that would have ended too late: at most 24 s are left over.
    assert 96 < sum(slept) <= 120
    assert 0.1 <= slept[0] <= 0.3 and max(slept) <= 24
    assert slept[3] > slept[0] and slept[6] > slept[3]
    with pytest.raises(TimeoutError):
        retrying(
            fail, what="a", transient_reason=lambda error: None, policy=services.DEFAULT_RETRIES
        )


def test_the_bytes_are_those_that_another_client_sees(bucket):
    Store(f"{bucket}/root").put("a/b", b"12")
    body = s3_client(os.environ["AWS_ENDPOINT_URL"]).get_object(
        Bucket=bucket.removeprefix("s3://"), Key="root/a/b"
    )["Body"]
    assert body.read() == b"12"


def test_a_missing_bucket_of_google_is_named(gs_bucket):
    with pytest.raises(InputError, match=r"out = gs://none-such/root: there is no such bucket"):
        Store("gs://none-such/root").check_writable()


def test_missing_credentials_of_google_are_named(monkeypatch, tmp_path):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(InputError, match="no valid credentials; set GOOGLE_APPLICATION_CREDEN"):
        Store("gs://none-such/root").exists("plan.json")
