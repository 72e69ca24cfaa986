"""One slot: how workers end, its log, a lost worker's shard, slots on other machines."""

import logging
import os
import pickle
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from semix.data.errors import InputError
from semix.data.formats import LabelSetRecord, SeriesLabels
from semix.data.label_sets import LabelSet, create_set
from semix.data.leases import TIME_TO_LIVE, claim, held_by
from semix.data.root import Root
from semix.data.store import Store
from semix.data.tar import read_shard
from semix.flows import child
from semix.flows.build import resume
from semix.flows.build_steps import ShardSelection
from semix.flows.child import ChildExit, supervise
from semix.flows.slots import SlotSettings, slot
from semix.flows.slots.slot import (
    RETRIES,
    SILENCE_S,
    FlowEnded,
    SlotLog,
    WorkerFailed,
    WorkerLost,
    generate,
    pause_after,
    record_lost,
    run_lease,
    worker_arguments,
)
from semix.pipeline.plan import Build
from semix.pipeline.relabel import RelabelJob
from semix.pipeline.shard_job import BuildJob, ShardJob
from tests.handmade import committed, make_root

CHECKOUT = Path(__file__).parents[2]


def test_a_workers_arguments_say_what_is_not_the_default():
    default = worker_arguments("/root", 1, 2, settings=SlotSettings())
    assert default == ["/root", "--slot=1", "--slots=2"]
    settings, moved = SlotSettings(range="1/4"), ["real.path=/data"]
    more = worker_arguments("/root", 0, 2, settings=settings, labels="abc", overrides=moved)
    assert more[-3:] == ["--range=1/4", "--labels=abc", "--set=real.path=/data"]


def test_a_worker_counts_as_hung_when_its_lease_counts_as_forgotten():
    assert SILENCE_S == TIME_TO_LIVE == 900


# Its workers' ends


def make_worker(folder: Path, code: str, patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace workers by this code; returns the environment that they need."""
    (folder / "stand_in.py").write_text(code)
    patch.setattr(slot, "WORKER", "stand_in")
    return {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(folder)])}


@pytest.fixture
def run_slot(prefect_api, tmp_path, monkeypatch):
    """run_slot(code, arguments): what a slot whose workers are this code returns, or its error."""

    def run(code: str, *arguments: str, **options: object) -> object:
        options = {"stop": Event(), "pause_s": 0.0, **options}

        @flow
        def one():
            environment = make_worker(tmp_path, code, monkeypatch)
            future = generate.submit(0, list(arguments), environment=environment, **options)
            return [future.result(raise_on_failure=False)]

        [result] = one()
        return result

    return run


# A worker appends to a file when it starts; its first `bad` lives end by `end`, later ones well.
LIVES = """
import os, pathlib, sys, time
file, end, bad = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with file.open("a") as out: out.write(f"{os.getpid()} ")
if len(file.read_text().split()) > bad: sys.exit(0)
print("last words", flush=True)
exec(end)
"""
ENDS = {
    "killed": "os.kill(os.getpid(), 9)",
    "device": "sys.exit(75)",
    "hung": "time.sleep(600)",
    "settings": "sys.exit(78)",
    "crash": "sys.exit(70)",
    "some shards": "sys.exit(3)",
    "no module": "import wandered_off",
}


@pytest.fixture(scope="module")
def lives(prefect_api, tmp_path_factory):
    """Results of slots whose workers end in various ways: {end: (result, number of starts)}."""
    folder = tmp_path_factory.mktemp("lives")

    def submit(name: str, end: str, *, bad: int = 1):
        arguments = [str(folder / name), end, str(bad)]
        options = {"environment": environment, "stop": Event(), "silence_s": 5.0, "pause_s": 0.0}
        return generate.submit(name, arguments, **options)

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=4))
    def all_of_them():
        futures = {name: submit(name, end) for name, end in ENDS.items()}
        futures["always killed"] = submit("always killed", ENDS["killed"], bad=99)
        results = {name: f.result(raise_on_failure=False) for name, f in futures.items()}
        return {
            name: (result, len((folder / name).read_text().split()))
            for name, result in results.items()
        }

    with pytest.MonkeyPatch.context() as patch:
        environment = make_worker(folder, LIVES, patch)
        return all_of_them()


@pytest.mark.parametrize("end", ["killed", "device", "hung"])
def test_a_lost_worker_is_started_again(lives, end):
    assert lives[end] == ({"slot": end, "status": 0, "made": 0}, 2)


def test_a_worker_that_is_always_lost_is_given_up(lives):
    error, starts = lives["always killed"]
    assert starts == 1 + RETRIES
    assert isinstance(error, WorkerLost)
    assert "its worker ended: killed by signal 9 (SIGKILL)\nlast words" in str(error)


@pytest.mark.parametrize(("end", "status"), [("settings", 78), ("crash", 70)])
def test_an_error_that_would_come_again_is_not_retried(lives, end, status):
    error, starts = lives[end]
    assert starts == 1
    assert isinstance(error, WorkerFailed)
    assert str(error) == f"slot {end}: its worker ended: exit status {status}: last words"


def test_a_broken_installation_is_an_error_with_its_reason(lives):
    error, starts = lives["no module"]
    assert (starts, type(error)) == (1, WorkerFailed)
    assert "exit status 1: ModuleNotFoundError: No module named 'wandered_off'" in str(error)


def test_failed_shards_are_a_result_not_an_error(lives):
    assert lives["some shards"] == ({"slot": "some shards", "status": 3, "made": 0}, 1)


# Its first lives end as the digits of `ends` say: 0 is lost at once, 1 after a shard.
ROW = """
import os, pathlib, sys
file, ends = pathlib.Path(sys.argv[1]), sys.argv[2]
with file.open("a") as out: out.write("x")
life = len(file.read_text()) - 1
if life >= len(ends): sys.exit(0)
if ends[life] == "1": print(f"shard {life}: made", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("ends", "starts"),
    [("11111", 6), ("000100", 7), ("1000", 4)],
    ids=["each made some", "a shard between", "none after the first"],
)
def test_only_losses_in_a_row_count(run_slot, tmp_path, ends, starts):
    file = tmp_path / "starts"
    result = run_slot(ROW, str(file), ends)
    assert len(file.read_text()) == starts
    if starts == len(ends):  # given up
        assert isinstance(result, WorkerLost)
    else:
        assert result == {"slot": 0, "status": 0, "made": ends.count("1")}


def test_pauses_outlive_a_store_that_is_away_for_minutes():
    assert [pause_after(losses) for losses in (1, 2, 3, 4)] == [3, 30, 300, 300]
    assert sum(pause_after(losses) for losses in range(1, 1 + RETRIES)) > 300
    assert pause_after(3, 0.0) == 0


def test_a_pause_ends_with_the_flow(run_slot, caplog):
    stop = Event()

    class StopAtPause(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            stop.set()

    handler = StopAtPause()
    logging.getLogger("semix.build").addHandler(handler)
    try:
        result = run_slot("import os; os.kill(os.getpid(), 9)", stop=stop, pause_s=600.0)
    finally:
        logging.getLogger("semix.build").removeHandler(handler)
    assert result is None
    assert "Cancelled('slot 0 was stopped; its committed shards stay')" in caplog.text


# A worker of the project, which one shard kills.
POISONED = """
import os, sys
from semix.pipeline import shard_job, worker
make = shard_job.BuildJob.make

def make_or_die(self, shard, *, heartbeat):
    if shard == 3: os.kill(os.getpid(), 9)
    return make(self, shard, heartbeat=heartbeat)

shard_job.BuildJob.make = make_or_die
sys.exit(worker.main())
"""


@pytest.mark.timeout(600)
def test_a_shard_that_kills_its_worker_keeps_it_from_no_other(run_slot, root, built, monkeypatch):
    for shard in (1, 3, 4, 7):
        root.discard(shard)
    arguments = worker_arguments(root.url, 0, 1, settings=SlotSettings())
    with monkeypatch.context() as patch:
        patch.setattr(slot, "RETRIES", 1)
        result = run_slot(POISONED, *arguments, url=root.url)
    assert isinstance(result, WorkerLost)
    assert root.missing() == [3]
    tries = root.failures()[3]
    assert len(tries) == 3  # one before others were made, one after them, one restart
    assert {failure.error for failure in tries} == {"WorkerLost"}
    assert tries[0].message == "killed by signal 9 (SIGKILL)"
    assert root.store.list("leases") == []
    kept = {s: record.sha256 for s, record in committed(built).items() if s != 3}
    assert {s: record.sha256 for s, record in committed(root).items()} == kept
    resumed = resume(Root(root.url), slots=1, selection=ShardSelection(skip_failed="1"))
    assert resumed.missing() == [3]


# It hangs in its first life, and would let go of its work if it were asked to end.
HUNG = """
import signal, sys, time
from semix.data.leases import claim, release
from semix.data.store import Store
store = Store(sys.argv[1])
if store.list("failed"): sys.exit(0)
assert claim(store, 3)
signal.signal(signal.SIGTERM, lambda *_: release(store, 3))
while True: time.sleep(600)
"""


def test_a_shard_at_which_a_worker_hangs_is_known(run_slot, root):
    root.discard(3)
    assert run_slot(HUNG, root.url, url=root.url, silence_s=5.0)["status"] == 0
    assert [failure.message for failure in root.failures()[3]] == [
        "no heartbeat; ended by the watchdog"
    ]


def test_a_root_that_cannot_be_read_ends_no_slot(run_slot, tmp_path):
    result = run_slot(ROW, str(tmp_path / "starts"), "00", url=str(tmp_path / "gone"))
    assert result == {"slot": 0, "status": 0, "made": 0}


def test_no_worker_is_started_beside_one_that_cannot_be_killed(
    run_slot, tmp_path, monkeypatch, alive, until
):
    monkeypatch.setattr(child, "_signal_group", lambda group, number: True)  # as if in the kernel
    monkeypatch.setattr(child, "KILL_S", 0.1)
    monkeypatch.setattr(slot, "supervise", partial(supervise, grace_s=1.0))
    file = tmp_path / "starts"
    result = run_slot(LIVES, str(file), ENDS["hung"], "99", silence_s=5.0)
    [pid] = map(int, file.read_text().split())
    until(lambda: not alive(pid))  # its lifeline ends it, which nothing would in the kernel
    assert isinstance(result, WorkerFailed)
    assert str(result).startswith(f"slot 0: its worker ended: process {pid} is stuck in the kernel")


TOLD = """
import sys, pathlib
shards = pathlib.Path(sys.argv[sys.argv.index("--shards-file") + 1]).read_text()
pathlib.Path(sys.argv[1]).write_text(shards)
"""


def test_the_shards_to_make_may_be_more_than_a_command_line_holds(run_slot, tmp_path):
    shards = ",".join(str(2 * number) for number in range(200_000))
    received = tmp_path / "seen"
    assert run_slot(TOLD, str(received), shards=shards)["status"] == 0
    assert received.read_text() == shards


# Its log


def test_the_log_tells_all_news_and_shards_now_and_then():
    logged: list[str] = []
    log = SlotLog(logged.append)
    for shard in range(100_000):
        log(f"shard {shard}: 6 groups, a.tar")
        if shard % 50_000 == 7:
            log(f"shard {shard} failed: ValueError: no")
            log("UserWarning: something else")
    log.close()
    assert logged == [
        "shard 0: 6 groups, a.tar",
        "shard 7 failed: ValueError: no",
        "UserWarning: something else",
        "UserWarning: something else",
        "shard 99999: 6 groups, a.tar (99998 more made before it)",
        "shard 50007 failed: ValueError: no",
    ]
    assert log.made == 100_000


def test_the_log_speaks_again_after_a_while():
    logged: list[str] = []
    log = SlotLog(logged.append, every_s=0.05)
    for shard in range(3):
        log(f"shard {shard}: made")
    time.sleep(0.06)
    log("shard 3: made")
    assert logged == ["shard 0: made", "shard 3: made (2 more made before it)"]


def test_nothing_is_held_back_when_a_slot_ends_with_an_error():
    logged: list[str] = []
    with pytest.raises(OSError), closing(SlotLog(logged.append)) as log:
        log("shard 1: made")
        log("shard 2: made")
        raise OSError
    assert logged == ["shard 1: made", "shard 2: made"]


# What a lost worker leaves: its shard failed once, and nothing held

HOLD = """
import os, sys
from semix.data.leases import claim
from semix.data.store import Store
for work in sys.argv[2:]:
    assert claim(Store(sys.argv[1]), int(work) if work.isdecimal() else work)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def small(tmp_path) -> Root:
    return make_root(tmp_path / "mixed", shards=3)


def killed(root: Root, *held: int | str) -> ChildExit:
    """The exit of a process that was killed while it held these leases."""
    command = [sys.executable, "-c", HOLD, root.url, *map(str, held)]
    return supervise(command, on_line=print, environment={"PYTHONPATH": str(CHECKOUT)})


@pytest.fixture(params=["images", "labels"])
def work(request, small) -> ShardJob:
    """A job, to make images or labels, whose shard 0 is done and whose shards 1 and 2 are not."""
    plan = SimpleNamespace(num_shards=3)
    if request.param == "images":
        for shard in (1, 2):
            small.discard(shard)
        return BuildJob(Build(small, plan))
    fields = {"annotation": {}, "encoders": {}, "features": "root", "batch": 1}
    labels = create_set(small, LabelSetRecord(digest="ab" * 32, plan=small.plan.digest, **fields))
    records = [sample.record for sample in read_shard(small.store, committed(small)[0])]
    groups = [SeriesLabels(group=r.group, **r.label_fields()) for r in records]
    labels.commit(0, images=small.record(0).sha256, groups=groups)
    return RelabelJob(labels, plan)


@pytest.mark.process
def test_a_shard_that_was_being_made_failed_once_and_is_free(work):
    root, labels = Root(work.store.url), getattr(work, "labels", None)
    outcome = killed(root, *(work.lease(shard) for shard in (0, 1)), "prototypes")
    assert claim(root.store, work.lease(2))  # ours
    assert len(held_by(root.store, outcome.pid)) == 3
    record_lost(root.url, outcome, labels=labels.digest if labels else "")
    failures_of = LabelSet(root, labels.digest) if labels else Root(root.url)
    assert list(failures_of.failures()) == [1]
    [failure] = failures_of.failures()[1]
    assert (failure.error, failure.message) == ("WorkerLost", "killed by signal 9 (SIGKILL)")
    assert held_by(root.store, outcome.pid) == []
    assert len(root.store.list("leases")) == 1


@pytest.mark.process
def test_what_a_worker_wrote_down_itself_is_not_written_down_again(small):
    small.discard(1)
    outcome = killed(small, 1)
    assert record_lost(small.url, outcome, recorded=True) == []
    assert small.failures() == {}
    assert small.store.list("leases") == []


@pytest.mark.process
def test_a_worker_that_held_nothing_leaves_nothing(small):
    small.discard(1)
    assert record_lost(small.url, killed(small)) == []
    assert small.failures() == {}


# What ends it elsewhere: the note by which it knows that its flow lives

NAME = "leases/run.json"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(slot, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(slot, "RENEW_EVERY_S", 0.02)
    monkeypatch.setattr(slot, "LEASE_TIMEOUT_S", 2.0)


@pytest.mark.process
def test_slots_end_with_their_flow(quick, tmp_path, until):
    with run_lease(str(tmp_path)) as (lease, _):
        stop = pickle.loads(pickle.dumps(lease))  # as it comes to another machine
        deadline = time.monotonic() + 4.0  # twice as long as a note counts that nobody renews
        while time.monotonic() < deadline:
            assert not stop.is_set()
            time.sleep(0.01)
        assert len(Store(str(tmp_path)).list("leases")) == 1
    until(stop.is_set, timeout_s=20)  # it does not look at the store every time
    assert pickle.loads(pickle.dumps(lease)).is_set()  # a slot that starts late
    assert Store(str(tmp_path)).list("leases") == []


@pytest.mark.process
def test_a_flow_that_was_killed_is_noticed_by_its_silence(quick, tmp_path, until):
    store = Store(str(tmp_path))
    claim(store, "run")
    stop = FlowEnded(store, NAME)
    assert not stop.is_set()
    until(stop.is_set, timeout_s=20)


@pytest.mark.process
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

        patch.setattr(Store, "infos", silent)
        deadline = time.monotonic() + 4.0
        while time.monotonic() < deadline:
            assert not stop.is_set()
            time.sleep(0.01)
    assert not stop.is_set()  # it was silent no longer than the store


def test_the_store_is_asked_now_and_then_only(tmp_path, monkeypatch):
    store, calls = Store(str(tmp_path)), []
    claim(store, "run")
    infos = Store.infos
    monkeypatch.setattr(Store, "infos", lambda self, folder: calls.append(1) or infos(self, folder))
    stop = FlowEnded(store, NAME)
    for _ in range(1000):
        assert not stop.is_set()
    assert len(calls) == 1
