"""What a worker leaves that is killed: its shard failed once, and nothing held."""

import sys
from pathlib import Path

import pytest

from data.formats import LabelSetRecord, SeriesLabels
from data.label_sets import LabelSet, create_set
from data.leases import claim, held_by
from data.root import Root
from data.tar import read_shard
from flows.slots.lost_shards import record_lost
from flows.supervise import Outcome, supervise
from pipeline.relabel import Relabelling
from pipeline.work import Building, Work
from tests.handmade import make_root

pytestmark = pytest.mark.process

CHECKOUT = Path(__file__).parents[2]
HOLD = """
import os, sys
from data.leases import claim
from data.store import Store
for work in sys.argv[2:]:
    assert claim(Store(sys.argv[1]), int(work) if work.isdecimal() else work)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def root(tmp_path) -> Root:
    return make_root(tmp_path / "mixed", shards=3)


def killed(root: Root, *held: int | str) -> Outcome:
    """How a process ended that held this."""
    command = [sys.executable, "-c", HOLD, root.url, *map(str, held)]
    return supervise(command, on_line=print, environment={"PYTHONPATH": str(CHECKOUT)})


@pytest.fixture(params=["images", "labels"])
def work(request, root) -> Work:
    """Shard 0 is made, 1 and 2 are not."""
    if request.param == "images":
        for shard in (1, 2):
            root.discard(shard)
        return Building(root)
    made = {"annotation": {}, "encoders": {}, "features": "root", "batch": 1}
    labels = create_set(root, LabelSetRecord(digest="ab" * 32, plan=root.plan.digest, **made))
    records = [sample.record for sample in read_shard(root.store, root.committed()[0])]
    groups = [SeriesLabels(group=r.group, **r.parts()) for r in records]
    labels.commit(0, images=root.images()[0], groups=groups)
    return Relabelling(labels)


def test_a_shard_that_was_being_made_failed_once_and_is_free(work):
    root, labels = Root(work.store.url), getattr(work, "labels", None)
    outcome = killed(root, *(work.lease(shard) for shard in (0, 1)), "prototypes")
    assert claim(root.store, work.lease(2))  # ours
    assert len(held_by(root.store, outcome.pid)) == 3
    record_lost(root.url, outcome, labels=labels.digest if labels else "")
    place = LabelSet(root, labels.digest) if labels else Root(root.url)
    assert list(place.failures()) == [1]
    [failure] = place.failures()[1]
    assert (failure.error, failure.message) == ("WorkerLost", "killed by signal 9 (SIGKILL)")
    assert held_by(root.store, outcome.pid) == []
    assert len(root.store.list("leases")) == 1


def test_what_a_worker_wrote_down_itself_is_not_written_down_again(root):
    root.discard(1)
    outcome = killed(root, 1)
    assert record_lost(root.url, outcome, told=True) == []
    assert root.failures() == {}
    assert root.store.list("leases") == []


def test_a_worker_that_held_nothing_leaves_nothing(root):
    root.discard(1)
    assert record_lost(root.url, killed(root)) == []
    assert root.failures() == {}
