"""Leases: which process holds a shard, and for how long by the store's clock."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from threading import Thread

import pytest

from semix.data.leases import TIME_TO_LIVE, LeaseHeartbeat, claim, forgotten, living, release, renew
from semix.data.store import Store

NAME = "leases/0000001.json"
ELSEWHERE = json.dumps({"host": "another-machine", "pid": 1}).encode()


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


@pytest.fixture
def other_process(store):
    """Another process that holds shard 1."""
    script = (
        "import sys\nfrom semix.data.leases import claim\nfrom semix.data.store import Store\n"
        "print(claim(Store(sys.argv[1]), 1), flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, store.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


def make_old(store, seconds: float, *, name: str = NAME) -> None:
    """Make a lease's last renewal `seconds` old, by the store's clock."""
    when = time.time() - seconds
    os.utime(f"{store.url}/{name}", (when, when))


@pytest.mark.process
def test_a_lease_holds_while_its_process_lives(store, other_process):
    assert not claim(store, 1)
    assert claim(store, 2)
    assert claim(store, 2)  # our own
    assert living(store) == {NAME, "leases/0000002.json"}
    other_process.kill()
    other_process.wait()
    assert list(forgotten(store)) == [NAME]
    assert claim(store, 1)
    release(store, 1)
    assert store.list("leases") == ["leases/0000002.json"]


def test_work_by_name(store):
    assert claim(store, "prototypes")
    assert store.list("leases") == ["leases/prototypes.json"]


def test_a_lease_of_another_machine_is_believed_until_its_worker_counts_as_hung(store):
    store.create(NAME, ELSEWHERE)
    assert not claim(store, 1)
    make_old(store, TIME_TO_LIVE - 60)
    assert not claim(store, 1)
    make_old(store, TIME_TO_LIVE + 60)
    assert claim(store, 1)


@pytest.mark.parametrize("days", [-3, 3])
def test_a_wrong_clock_of_this_machine_neither_steals_nor_blocks(store, monkeypatch, days):
    store.create(NAME, ELSEWHERE)
    monkeypatch.setattr(time, "time", lambda: time.monotonic() + days * 86400)
    assert not claim(store, 1)
    when = store.now() - TIME_TO_LIVE - 60
    os.utime(f"{store.url}/{NAME}", (when, when))
    assert claim(store, 1)


def test_a_store_whose_clock_was_set_back_blocks_no_longer_than_others(store):
    store.create(NAME, ELSEWHERE)
    make_old(store, -TIME_TO_LIVE - 60)  # from the future
    assert claim(store, 1)


def test_renewing_keeps_a_lease_alive(store):
    assert claim(store, 1)
    make_old(store, TIME_TO_LIVE + 60)
    assert list(forgotten(store)) == [NAME]
    renew(store, 1)
    assert living(store) == {NAME}


def test_beats_renew_what_is_held_and_that_of_the_work_around_it(store, monkeypatch):
    monkeypatch.setattr("semix.data.leases.RENEW_EVERY_S", 0.0)
    outer_beats = []
    outer = LeaseHeartbeat(store, lambda: outer_beats.append(1))
    inner = LeaseHeartbeat(store, outer)
    names = {"leases/part.json", "leases/shard.json"}
    for name_of_lease in ("part", "shard"):
        assert claim(store, name_of_lease)

    def renewed() -> set[str]:
        for name in names:
            make_old(store, TIME_TO_LIVE + 60, name=name)
        inner()
        return living(store)

    with outer.holding("shard"):
        with inner.holding("part"):
            assert renewed() == names
        assert renewed() == {"leases/shard.json"}
    assert renewed() == set()
    assert len(outer_beats) == 3


def test_what_another_thread_let_go_meanwhile_is_not_renewed_after_that(store, monkeypatch):
    monkeypatch.setattr("semix.data.leases.RENEW_EVERY_S", 0.0)
    heartbeat, original_put, stack = LeaseHeartbeat(store), Store.put, ExitStack()
    threads = []

    def let_go() -> None:
        stack.close()
        release(store, 1)

    def put_while_it_is_let_go(self, name, content):
        threads.append(Thread(target=let_go))
        threads[0].start()
        threads[0].join(0.2)  # it must wait for the renewal
        original_put(self, name, content)

    assert claim(store, 1)
    stack.enter_context(heartbeat.holding(1))
    monkeypatch.setattr(Store, "put", put_while_it_is_let_go)
    heartbeat()
    threads[0].join()
    assert store.list("leases") == []


def test_leases_are_renewed_now_and_then_only(store):
    heartbeat = LeaseHeartbeat(store)
    assert claim(store, 1)
    with heartbeat.holding(1):
        make_old(store, TIME_TO_LIVE + 60)
        heartbeat()
    assert list(forgotten(store)) == [NAME]  # a heartbeat does not always write


@pytest.mark.process
def test_a_number_that_went_to_another_process_does_not_hold_for_ever(store, other_process):
    make_old(store, TIME_TO_LIVE + 60)
    assert claim(store, 1)


def test_a_lease_that_was_taken_over_is_neither_renewed_nor_released(store):
    assert claim(store, 1)
    store.put(NAME, ELSEWHERE)
    renew(store, 1)
    release(store, 1)
    assert store.get(NAME) == ELSEWHERE
    release(store, 5)  # nothing there


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"host": "h"}', b'{"host": 1, "pid": "x"}']
)
def test_a_note_that_cannot_be_read_holds_nothing(store, content):
    store.create(NAME, content)
    assert claim(store, 1)
    assert socket.gethostname() in store.get(NAME).decode()


@pytest.mark.process
def test_a_process_whose_number_means_nothing_to_us_is_believed(store, in_a_container):
    """A container with our host's name has process numbers of its own."""
    assert claim(store, 1)
    script = (
        "import sys\nfrom semix.data.leases import claim, forgotten\n"
        "from semix.data.store import Store\nstore = Store(sys.argv[1])\n"
        "print(claim(store, 1), list(forgotten(store)))"
    )
    assert in_a_container(script, store.url) == "False []\n"
    make_old(store, TIME_TO_LIVE + 60)
    assert in_a_container(script, store.url) == "True []\n"


def test_a_note_from_before_this_machine_started_anew_is_believed_for_a_while(store):
    for host in (socket.gethostname(), f"{socket.gethostname()}-0123456789ab"):
        store.put(NAME, json.dumps({"host": host, "pid": 2**22 + 1}).encode())
        assert not claim(store, 1)
        make_old(store, TIME_TO_LIVE + 60)
        assert claim(store, 1)
