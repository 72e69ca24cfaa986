"""Settings of slots, their log, and following them; runs of whole builds are elsewhere."""

import importlib.util
import logging
import os
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from socket import create_server, gethostname
from threading import Event

import pytest
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from data.errors import InputError
from data.leases import TIME_TO_LIVE
from data.root import Root
from flows import child
from flows.build import resume
from flows.cgroup import usable_cores
from flows.selection import Selection
from flows.slots.log import SlotLog, slot_log
from flows.slots.runners.local import local_slots
from flows.slots.running import follow, slots_running
from flows.slots.settings import MOST_SLOTS, SlotSettings, check_slots, is_here
from flows.slots.slot import (
    RETRIES,
    SILENCE_S,
    WorkerFailed,
    WorkerLost,
    generate,
    pause_after,
    worker_arguments,
)
from flows.slots.workers_here import IMPORTS
from flows.supervise import supervise
from tests.data.whole_roots import empty_root

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (SlotSettings(MOST_SLOTS + 1), r"slots = 191: 0 to 190; more machines take a part each"),
        (SlotSettings(-1), r"slots = -1: 0 to 190"),
        (SlotSettings(runner="slurm"), r"runner = slurm: is none of local, dask, ray"),
        (SlotSettings(device="tpu"), r"device = tpu: is none of auto, cpu, cuda"),
        (SlotSettings(range="4/4"), r"range = 4/4: write i/n"),
        (SlotSettings(cluster="tcp://h:1"), r"cluster = tcp://h:1: needs --runner dask or ray"),
        (
            SlotSettings(runner="dask", cluster="tcp://10.0.0.1:8786"),
            r"cluster = tcp://10\.0\.0\.1:8786: its machines cannot reach a Prefect server on this "
            r"machine's loopback; set PREFECT_API_URL",
        ),
        (
            SlotSettings(runner="dask", cluster="tcp://127.0.0.1:9"),
            r"cluster = tcp://127\.0\.0\.1:9: nothing answers there .* write tcp://HOST:8786",
        ),
        (
            SlotSettings(runner="ray", cluster="127.0.0.1:9"),
            r"cluster = 127\.0\.0\.1:9: nothing answers there .* write ray://HOST:10001, or auto",
        ),
        (
            SlotSettings(runner="ray", cluster="127.0.0.1:100000"),
            r"cluster = 127\.0\.0\.1:100000: nothing answers there",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(settings, said, prefect_api):
    with pytest.raises(InputError, match=said), slots_running("/nowhere", settings):
        pytest.fail("it started")


def test_what_can_be_is_let_through(prefect_api):
    with create_server(("127.0.0.1", 0)) as listening:
        scheduler = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        for settings in (
            SlotSettings(),
            SlotSettings(MOST_SLOTS, range="3/4", device="cpu"),
            SlotSettings(runner="dask", cluster=scheduler),
            SlotSettings(runner="ray", cluster="auto", device="cuda"),  # its slots look for GPUs
        ):
            check_slots(settings)


@pytest.mark.parametrize(
    ("device", "cluster", "own"),
    [
        ("cpu", "", "cpu"),
        ("auto", "", "cuda"),
        ("cuda", "", "cuda"),
        ("cpu", "auto", "cpu"),
        ("auto", "auto", "auto"),  # whether this machine has a GPU or not
        ("cuda", "auto", "auto"),
    ],
)
def test_the_flow_itself_works_where_the_slots_may_work(device, cluster, own, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert SlotSettings(0, "ray", cluster, device=device).flow_device == own


def test_a_gpu_that_is_asked_for_and_not_there_is_told_at_once(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for runner in ("local", "dask", "ray"):
        with pytest.raises(InputError, match="device = cuda: no GPU is visible on this machine"):
            check_slots(SlotSettings(runner=runner, device="cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    check_slots(SlotSettings(device="cuda"))


def test_local_slots_have_a_gpu_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with local_slots(SlotSettings()) as place:
        found = [place.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(place.count)]
    assert found == ["4", "7"]
    with local_slots(SlotSettings(3)) as place:
        assert place.environment(2)["CUDA_VISIBLE_DEVICES"] == "4"
    with local_slots(SlotSettings(device="cpu")) as place:
        assert place.count == 1
        cores = str(usable_cores())
        assert place.environment(0) == {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": cores}


def test_a_slot_whose_gpu_is_gone_does_not_go_on_without(prefect_api, root, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "63")  # no machine has so many
    root.discard(3)

    @flow
    def one():
        with slots_running(root.url, SlotSettings()) as futures:
            return [future.result(raise_on_failure=False) for future in futures]

    [result] = one()
    assert isinstance(result, WorkerFailed)
    assert "exit status 78\nerror: device = cuda: torch sees no GPU here" in str(result)
    assert root.missing() == [3]


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_an_extra_that_is_not_installed_is_named(runner, monkeypatch):
    missing = f"prefect_{runner}"
    monkeypatch.setattr(
        "flows.slots.settings.find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(InputError, match=rf"not installed; pip install 'semix\[{runner}\]'"):
        check_slots(SlotSettings(runner=runner))


@pytest.mark.parametrize("extra", ["prefect_dask", "prefect_ray"])
def test_the_extras_are_here_to_be_tested(extra):
    assert importlib.util.find_spec(extra)


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("tcp://127.0.0.1:8786", True),
        ("localhost:8786", True),
        ("tls://[::1]:8786", True),
        ("auto", True),
        (gethostname(), True),
        ("127.0.0.1", True),
        ("ray://10.1.2.3:10001", False),
        ("tcp://[fe80::1]:8786", False),
        ("head-node:6379", False),
    ],
)
def test_addresses_of_this_machine_are_known(address, here):
    assert is_here(address) == here


def test_a_workers_arguments_say_what_is_not_the_default():
    plain = worker_arguments("/root", 1, 2, settings=SlotSettings())
    assert plain == ["/root", "--slot=1", "--slots=2"]
    settings, moved = SlotSettings(range="1/4"), ["real.path=/data"]
    more = worker_arguments("/root", 0, 2, settings=settings, labels="abc", overrides=moved)
    assert more[-3:] == ["--range=1/4", "--labels=abc", "--set=real.path=/data"]


def test_a_worker_counts_as_hung_when_its_lease_counts_as_forgotten():
    assert SILENCE_S == TIME_TO_LIVE == 900


def test_the_log_tells_all_news_and_shards_now_and_then():
    said: list[str] = []
    log = SlotLog(said.append)
    for shard in range(100_000):
        log(f"shard {shard}: 6 groups, a.tar")
        if shard % 50_000 == 7:
            log(f"shard {shard} failed: ValueError: no")
            log("UserWarning: something else")
    log.flush()
    assert said == [
        "shard 0: 6 groups, a.tar",
        "shard 7 failed: ValueError: no",
        "UserWarning: something else",
        "UserWarning: something else",
        "shard 99999: 6 groups, a.tar (99998 more made before it)",
        "shard 50007 failed: ValueError: no",
    ]
    assert log.made == 100_000


def test_the_log_speaks_again_after_a_while():
    said: list[str] = []
    log = SlotLog(said.append, every_s=0.05)
    for shard in range(3):
        log(f"shard {shard}: made")
    time.sleep(0.06)
    log("shard 3: made")
    assert said == ["shard 0: made", "shard 3: made (2 more made before it)"]


def test_nothing_is_held_back_when_a_slot_ends_with_an_error():
    said: list[str] = []
    with pytest.raises(OSError), slot_log(said.append) as log:
        log("shard 1: made")
        log("shard 2: made")
        raise OSError
    assert said == ["shard 1: made", "shard 2: made"]


class Ended:
    """A slot's future, which ends when it is told to."""

    def add_done_callback(self, callback) -> None:
        self.end = lambda: callback(self)

    def result(self, *, raise_on_failure: bool) -> None: ...


def test_a_store_that_is_silent_for_a_while_ends_no_slot(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("flows.slots.running.LOOK_EVERY_S", 0.0)
    faults = {
        2: OSError(116, "Stale file handle"),
        3: OSError(116, "Stale file handle"),
        5: InputError("url", "s3://bucket", "refused: log in again"),
    }
    root = empty_root(tmp_path)
    slot, told, looks, progress = Ended(), [], [], root.progress

    def look():
        looks.append(1)
        if len(looks) == 6:
            slot.end()
        if fault := faults.get(len(looks)):
            raise fault
        return progress()

    monkeypatch.setattr(root, "progress", look)
    assert follow([slot], root, listeners=[told.append]) == []
    assert (len(looks), len(told)) == (7, 4)  # the last once the slot had ended
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [
        "progress is not known, the slots go on: [Errno 116] Stale file handle",
        "progress is not known, the slots go on: url = s3://bucket: refused: log in again",
    ]


def make_worker(folder: Path, code: str, patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Workers are this code, in the environment that is returned."""
    (folder / "stand_in.py").write_text(code)
    patch.setattr("flows.slots.slot.WORKER", "stand_in")
    return {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(folder)])}


@pytest.fixture
def as_worker(tmp_path, monkeypatch):
    """as_worker(code): workers are this code; returns the environment that they need."""
    return lambda code: make_worker(tmp_path, code, monkeypatch)


# A worker appends to a file when it starts; its first lives end as told, the next ones well.
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
    "some shards": "sys.exit(1)",
}


@pytest.fixture(scope="module")
def lives(prefect_api, tmp_path_factory):
    """What became of workers with various ends: {end: (result, how often it was started)}."""
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
    assert str(error) == f"slot {end}: its worker ended: exit status {status}\nlast words"


def test_failed_shards_are_a_result_not_an_error(lives):
    assert lives["some shards"] == ({"slot": "some shards", "status": 1, "made": 0}, 1)


# Its first lives end as `ends` says, a digit each: 0 lost at once, 1 lost after a shard.
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
def test_only_losses_in_a_row_count(prefect_api, tmp_path, as_worker, ends, starts):
    file, environment = tmp_path / "starts", as_worker(ROW)

    @flow
    def one():
        options = {"environment": environment, "stop": Event(), "pause_s": 0.0}
        future = generate.submit(0, [str(file), ends], **options)
        return [future.result(raise_on_failure=False)]

    [result] = one()
    assert len(file.read_text()) == starts
    if starts == len(ends):  # given up
        assert isinstance(result, WorkerLost)
    else:
        assert result == {"slot": 0, "status": 0, "made": ends.count("1")}


def test_pauses_outlive_a_store_that_is_away_for_minutes():
    assert [pause_after(losses) for losses in (1, 2, 3, 4)] == [3, 30, 300, 300]
    assert sum(pause_after(losses) for losses in range(1, 1 + RETRIES)) > 300
    assert pause_after(3, 0.0) == 0


def test_a_pause_ends_with_the_flow(prefect_api, as_worker):
    environment = as_worker("import os; os.kill(os.getpid(), 9)")
    stop = Event()

    class StopAtPause(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            stop.set()

    @flow
    def one():
        future = generate.submit(0, [], environment=environment, stop=stop, pause_s=600.0)
        return [future.result(raise_on_failure=False)]

    handler = StopAtPause()
    logging.getLogger("semix.build").addHandler(handler)
    try:
        [result] = one()
    finally:
        logging.getLogger("semix.build").removeHandler(handler)
    assert isinstance(result, WorkerFailed)
    assert str(result) == "slot 0: its worker ended: killed by signal 9 (SIGKILL)"


# A worker of the project, which one shard kills.
POISONED = """
import os, sys
from pipeline import work, worker
make = work.Building.make

def make_or_die(self, shard, *, beat):
    if shard == 3: os.kill(os.getpid(), 9)
    return make(self, shard, beat=beat)

work.Building.make = make_or_die
sys.exit(worker.main())
"""


@pytest.mark.timeout(600)
def test_a_shard_that_kills_its_worker_keeps_it_from_no_other(
    prefect_api, root, built, as_worker, monkeypatch
):
    monkeypatch.setattr("flows.slots.slot.RETRIES", 1)
    for shard in (1, 3, 4, 7):
        root.discard(shard)
    environment = as_worker(POISONED)

    @flow
    def one():
        arguments = worker_arguments(root.url, 0, 1, settings=SlotSettings())
        options = {"environment": environment, "stop": Event(), "url": root.url, "pause_s": 0.0}
        future = generate.submit(0, arguments, **options)
        return [future.result(raise_on_failure=False)]

    [result] = one()
    assert isinstance(result, WorkerLost)
    assert root.missing() == [3]
    tries = root.failures()[3]
    assert len(tries) == 3  # one before others were made, one after them, one restart
    assert {failure.error for failure in tries} == {"WorkerLost"}
    assert tries[0].message == "killed by signal 9 (SIGKILL)"
    assert root.store.list("leases") == []
    assert root.images() == {s: tar for s, tar in built.images().items() if s != 3}
    left = resume(Root(root.url), slots=1, selection=Selection(skip_failed="1"))
    assert left.missing() == [3]


# It hangs in its first life, and would let go of its work if it were asked to end.
HUNG = """
import signal, sys, time
from data.leases import claim, release
from data.store import Store
store = Store(sys.argv[1])
if store.list("failed"): sys.exit(0)
assert claim(store, 3)
signal.signal(signal.SIGTERM, lambda *_: release(store, 3))
while True: time.sleep(600)
"""


def test_a_shard_at_which_a_worker_hangs_is_known(prefect_api, root, as_worker):
    root.discard(3)
    environment = as_worker(HUNG)

    @flow
    def one():
        options = {"environment": environment, "stop": Event(), "pause_s": 0.0, "silence_s": 5.0}
        return generate.submit(0, [root.url], url=root.url, **options).result()

    assert one()["status"] == 0
    assert [failure.message for failure in root.failures()[3]] == [
        "no heartbeat; ended by the watchdog"
    ]


def test_a_root_that_cannot_be_read_ends_no_slot(prefect_api, tmp_path, as_worker):
    environment = as_worker(ROW)

    @flow
    def one():
        options = {"environment": environment, "stop": Event(), "pause_s": 0.0}
        arguments, gone = [str(tmp_path / "starts"), "00"], str(tmp_path / "gone")
        return generate.submit(0, arguments, url=gone, **options).result()

    assert one() == {"slot": 0, "status": 0, "made": 0}


def test_no_worker_is_started_beside_one_that_cannot_be_killed(
    prefect_api, tmp_path, monkeypatch, as_worker, alive, until
):
    monkeypatch.setattr(child, "_signal_group", lambda group, number: True)  # as if in the kernel
    monkeypatch.setattr(child, "KILL_S", 0.1)
    monkeypatch.setattr("flows.slots.slot.supervise", partial(supervise, grace_s=1.0))
    file, environment = tmp_path / "starts", as_worker(LIVES)

    @flow
    def one():
        options = {"environment": environment, "stop": Event(), "pause_s": 0.0, "silence_s": 5.0}
        future = generate.submit(0, [str(file), ENDS["hung"], "99"], **options)
        return [future.result(raise_on_failure=False)]

    [result] = one()
    [pid] = map(int, file.read_text().split())
    until(lambda: not alive(pid))  # its lifeline ends it, which nothing would in the kernel
    assert isinstance(result, WorkerFailed)
    assert str(result).startswith(f"slot 0: its worker ended: process {pid} is stuck in the kernel")


TOLD = """
import sys, pathlib
shards = pathlib.Path(sys.argv[sys.argv.index("--shards-file") + 1]).read_text()
pathlib.Path(sys.argv[1]).write_text(shards)
"""


def test_the_shards_to_make_may_be_more_than_a_command_line_holds(prefect_api, tmp_path, as_worker):
    shards = ",".join(str(2 * number) for number in range(200_000))
    seen, environment = tmp_path / "seen", as_worker(TOLD)

    @flow
    def one():
        options = {"environment": environment, "stop": Event(), "shards": shards}
        return generate.submit(0, [str(seen)], **options).result()

    assert one()["status"] == 0
    assert seen.read_text() == shards


@pytest.mark.process
def test_what_workers_import_ahead_is_all_that_takes_seconds():
    script = "import sys, importlib\n" + "".join(f"import {name}\n" for name in IMPORTS)
    script += "ahead = set(sys.modules)\n"
    script += "import pipeline.worker, pipeline.shard, pipeline.survey, pipeline.relabel\n"
    script += "import pipeline.generators.text_models, pipeline.generators.dit\n"
    script += "print(sorted({m.split('.')[0] for m in set(sys.modules) - ahead}))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.strip() in ("['pipeline']", "['data', 'pipeline']"), found.stderr
