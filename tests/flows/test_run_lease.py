"""The note by which slots elsewhere know that their flow lives."""

import pickle
import time

import pytest

from data.errors import InputError
from data.leases import claim
from data.store import Store
from flows.slots import run_lease as module
from flows.slots.run_lease import FlowEnded, run_lease

pytestmark = pytest.mark.process

NAME = "leases/run.json"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(module, "RENEW_EVERY_S", 0.02)
    monkeypatch.setattr(module, "FORGOTTEN_AFTER_S", 2.0)


def test_slots_end_with_their_flow(quick, tmp_path):
    with run_lease(str(tmp_path)) as lease:
        stop = pickle.loads(pickle.dumps(lease.stop))  # as it comes to another machine
        deadline = time.monotonic() + 4.0  # twice as long as a note counts that nobody renews
        while time.monotonic() < deadline:
            assert not stop.is_set()
            time.sleep(0.01)
        assert len(Store(str(tmp_path)).list("leases")) == 1
    assert stop.is_set()
    assert pickle.loads(pickle.dumps(lease.stop)).is_set()  # a slot that starts late
    assert Store(str(tmp_path)).list("leases") == []


def test_a_flow_that_was_killed_is_noticed_by_its_silence(quick, tmp_path, until):
    store = Store(str(tmp_path))
    claim(store, "run")
    stop = FlowEnded(store, NAME)
    assert not stop.is_set()
    until(stop.is_set, timeout_s=20)


@pytest.mark.parametrize(
    "error", [ConnectionError("no answer"), InputError("url", "s3://b", "refused: log in again")]
)
def test_a_store_that_does_not_answer_says_nothing_about_the_flow(
    quick, tmp_path, monkeypatch, error
):
    store = Store(str(tmp_path))
    claim(store, "run")
    stop = FlowEnded(store, NAME)
    assert not stop.is_set()
    with monkeypatch.context() as patch:

        def silent(self, folder):
            raise error

        patch.setattr(Store, "facts", silent)
        deadline = time.monotonic() + 4.0
        while time.monotonic() < deadline:
            assert not stop.is_set()
            time.sleep(0.01)
    assert not stop.is_set()  # it was silent no longer than the store


def test_the_store_is_asked_now_and_then_only(tmp_path, monkeypatch):
    store, asked = Store(str(tmp_path)), []
    claim(store, "run")
    facts = Store.facts
    monkeypatch.setattr(Store, "facts", lambda self, folder: asked.append(1) or facts(self, folder))
    stop = FlowEnded(store, NAME)
    for _ in range(1000):
        assert not stop.is_set()
    assert len(asked) == 1
