"""The worker's loop, over shards that are one small file each."""

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from threading import Event

import pytest
import torch

from semix.data.errors import InputError
from semix.data.formats import Failure, shard_stem
from semix.data.leases import claim
from semix.data.ranges import Partition, parse_partition
from semix.data.store import Store
from semix.data.verify import verify
from semix.pipeline.pending_shards import LeaseBackoff, PendingShards, ShardOrder
from semix.pipeline.shard import make_batch
from semix.pipeline.shard_job import Publish
from semix.pipeline.worker import (
    SOME_FAILED,
    DeviceError,
    TooManyFailures,
    Worker,
    _is_transient,
    _parse,
    _requested_shards,
)
from semix.pipeline.worker import main as worker
from tests.pipeline.roots import begun
from tests.pipeline.roots import work as work_on

CHECKOUT = Path(__file__).parents[2]


class Numbers:
    """Writes the number of each shard into a file of its own.

    Args:
        errors: by shard, raised whenever it is tried.
        late: by shard, raised when it is published.
    """

    def __init__(
        self,
        url: Path,
        count: int = 6,
        errors: dict[int, Exception] | None = None,
        late: dict[int, Exception] | None = None,
    ):
        self.store = Store(str(url))
        self.count, self.errors, self.late = count, errors or {}, late or {}
        self.tried: list[int] = []
        self.loads = 0

    @property
    def num_shards(self) -> int:
        return self.count

    def missing(self) -> list[int]:
        return [shard for shard in range(self.count) if not self.is_done(shard)]

    def is_done(self, shard: int) -> bool:
        return self.store.exists(f"done/{shard}")

    def failures(self) -> dict[int, list[Failure]]:
        result: dict[int, list[Failure]] = {}
        for name in self.store.list("failed"):
            if not self.is_done(shard := int(name.split("/")[1])):
                result.setdefault(shard, []).append(Failure.read(self.store.get(name)))
        return result

    def failed_attempts(self, missing: Sequence[int]) -> dict[int, int]:
        failures = self.failures()
        return {shard: len(failures[shard]) for shard in missing if shard in failures}

    def lease(self, shard: int) -> str:
        return f"numbers-{shard}"

    def load(self, *, device: str, heartbeat) -> None:
        self.loads += 1

    def make(self, shard: int, *, heartbeat) -> Publish:
        self.tried.append(shard)
        heartbeat()
        if shard in self.errors:
            raise self.errors[shard]

        def publish() -> str:
            if shard in self.late:
                raise self.late[shard]
            self.store.create(f"done/{shard}", b"")
            return "written"

        return publish

    def record_failure(self, failure: Failure) -> None:
        attempt = 1 + len(self.store.list(f"failed/{failure.shard}"))
        self.store.create(f"failed/{failure.shard}/{attempt}", failure.written())


def run(work: Numbers, *, slot: int = 0, slots: int = 1, **options) -> int:
    return Worker(work, slot, slots, device="cpu", **options).run()


def test_all_missing_shards_are_made_and_no_lease_is_left(tmp_path, capsys):
    work = Numbers(tmp_path)
    work.store.create("done/2", b"")
    assert run(work) == 0
    assert work.tried == [0, 1, 3, 4, 5]
    assert work.store.list("leases") == []
    assert "shard 5: written" in capsys.readouterr().out


def test_a_worker_makes_its_share_first_and_then_the_others_backwards(tmp_path):
    work = Numbers(tmp_path)
    assert run(work, slot=1, slots=2) == 0
    assert work.tried == [1, 3, 5, 4, 2, 0]


def test_nothing_is_loaded_where_nothing_is_missing(tmp_path):
    work = Numbers(tmp_path, count=0)
    assert run(work) == 0
    assert work.loads == 0


def test_a_failing_shard_is_tried_once_a_run_and_stops_no_other(tmp_path):
    errors = {1: ValueError("group 7: image 0 is one flat value (0)"), 3: OSError("disk full")}
    work = Numbers(tmp_path, errors=errors)
    assert run(work) == SOME_FAILED
    assert sorted(work.tried) == [0, 1, 2, 3, 4, 5]
    assert work.failures()[1][0].group == 7
    assert work.failures()[3][0].group is None
    assert work.failures()[3][0].error == "OSError"
    again = Numbers(tmp_path, errors={3: OSError("disk full")})
    assert run(again) == SOME_FAILED
    assert again.tried == [1, 3]
    assert len(again.failures()[3]) == 2
    assert run(Numbers(tmp_path)) == 0


def failure(shard: int) -> Failure:
    return Failure(shard=shard, attempt=1, error="ValueError", message="no", time=0.0)


def test_what_never_failed_comes_first_then_what_failed_least(tmp_path):
    work = Numbers(tmp_path)
    for shard in (0, 0, 2, 3):
        work.record_failure(failure(shard))
    assert run(work, slot=1, slots=2) == 0
    assert work.tried == [1, 5, 4, 3, 2, 0]


def test_what_one_other_failed_at_is_tried_again_and_what_several_failed_at_is_not(tmp_path):
    work = Numbers(tmp_path, count=3)
    work.record_failure(failure(0))
    pending = PendingShards(work, ShardOrder(0, 1))
    assert pending.refresh()
    for shard in (0, 1, 2, 2):
        work.record_failure(failure(shard))
    assert pending.refresh()
    assert list(pending) == [1, 0]
    assert pending.given_up == {2}
    pending.give_up(1)
    work.record_failure(failure(1))
    assert pending.refresh()
    assert list(pending) == [0]
    assert pending.given_up == {1, 2}


def disk_full(count: int) -> dict[int, Exception]:
    return {shard: OSError(28, "No space left on device") for shard in range(count)}


def test_where_shard_after_shard_fails_a_new_process_is_asked_for(tmp_path):
    for tried in ([0, 1, 2], [3, 4, 5]):
        work = Numbers(tmp_path, count=7, errors=disk_full(7))
        with pytest.raises(
            TooManyFailures, match=r"^3 shards in a row failed, the last one by disk full at "
        ):
            run(work)
        assert work.tried == tried
    work = Numbers(tmp_path, count=7, errors=disk_full(7))
    assert run(work) == SOME_FAILED  # only the first of these had not failed before
    assert work.tried == [6, 0, 1, 2, 3, 4, 5]


def test_a_shard_that_cannot_be_published_fails_as_one_that_cannot_be_made(tmp_path, capsys):
    work = Numbers(tmp_path, late={1: OSError("disk full"), 5: ValueError("no")})
    assert run(work) == SOME_FAILED
    assert work.tried == [0, 1, 2, 3, 4, 5]
    failures = work.failures()
    assert {shard: notes[0].error for shard, notes in failures.items()} == {
        1: "OSError",
        5: "ValueError",
    }
    assert "raise self.late[shard]" in "".join(failures[1][0].traceback)
    assert work.store.list("leases") == []
    assert "shard 1 failed: OSError: disk full\n" in capsys.readouterr().err


def test_where_shard_after_shard_cannot_be_published_a_new_process_is_asked_for(tmp_path):
    late = {shard: OSError(28, "No space left on device") for shard in range(3)}
    work = Numbers(tmp_path, count=9, late=late)
    with pytest.raises(
        TooManyFailures, match=r"^3 shards in a row failed, the last one by disk full at "
    ):
        run(work)
    assert work.tried == [0, 1, 2, 3]
    assert work.is_done(3), "what was made by then is published"
    assert list(work.failures()) == [0, 1, 2]
    assert work.store.list("leases") == []


def test_what_fails_in_a_row_is_counted_in_the_order_of_the_shards(tmp_path):
    errors = {shard: ValueError("no") for shard in (1, 3, 4)}
    work = Numbers(tmp_path, count=9, errors=errors, late={0: OSError("disk full")})
    assert run(work) == SOME_FAILED  # 2 was made between
    assert sorted(work.failures()) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("error", "raised", "failed"),
    [
        (InputError("url", "s3://b", "refused: log in"), InputError, []),
        (torch.OutOfMemoryError("no memory left"), DeviceError, [2]),
    ],
)
def test_an_error_in_publishing_that_ends_the_worker_ends_it(tmp_path, error, raised, failed):
    work = Numbers(tmp_path, late={2: error})
    with pytest.raises(raised):
        run(work)
    assert work.tried == [0, 1, 2, 3]
    assert work.missing() == [2, 4, 5]
    assert list(work.failures()) == failed
    assert work.store.list("leases") == []


def test_failures_with_a_shard_between_ask_for_nothing(tmp_path):
    errors = {shard: ValueError("no") for shard in (0, 1, 3, 4)}
    assert run(Numbers(tmp_path, errors=errors)) == SOME_FAILED


def test_what_a_sick_worker_failed_at_a_healthy_one_makes(tmp_path):
    sick = Numbers(tmp_path, count=30, errors=disk_full(30))
    healthy = Numbers(tmp_path, count=30)
    make = healthy.make

    def make_while_another_fails(shard: int, *, heartbeat) -> Publish:
        while not healthy.tried and len(sick.tried) < 12:  # its slot gives up after four processes
            with pytest.raises(TooManyFailures):
                run(sick, slot=1, slots=2)
        return make(shard, heartbeat=heartbeat)

    healthy.make = make_while_another_fails  # type: ignore[method-assign]
    assert run(healthy, slot=0, slots=2) == 0
    assert sorted(set(sick.tried)) == list(range(1, 25, 2))
    assert healthy.missing() == []


def test_a_shard_that_we_failed_at_and_another_made_is_no_failure_in_the_end(tmp_path):
    work = Numbers(tmp_path, count=2, errors={0: ValueError("no")})
    make = work.make

    def make_what_failed(shard: int, *, heartbeat) -> Publish:
        if shard == 1:
            work.store.create("done/0", b"")
        return make(shard, heartbeat=heartbeat)

    work.make = make_what_failed  # type: ignore[method-assign]
    assert run(work) == 0


def test_the_exit_status_asks_for_a_new_process_where_shard_after_shard_fails(capsys, root):
    for shard in (3, 4, 5):
        root.discard(shard)
        (Path(root.url) / f"{shard_stem(shard)}.json").mkdir()  # its record cannot be written
    assert work_on(root) == 75
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: 3 shards in a row failed, the last one by ")
    assert last.endswith("; asking for a new process")
    assert list(root.failures()) == [3, 4, 5]


def test_a_clock_that_is_set_back_does_not_make_a_failing_shard_come_again(tmp_path, monkeypatch):
    now = [1e9]

    def earlier_each_time() -> float:
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", earlier_each_time)
    work = Numbers(tmp_path, errors={0: ValueError("no")})
    assert run(work) == SOME_FAILED
    assert work.tried.count(0) == 1


def start(script: str, folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.process
def test_what_another_worker_holds_is_waited_for_and_taken_over(tmp_path):
    work = Numbers(tmp_path, count=2)
    holder = start(HOLD, tmp_path)
    assert holder.stdout.readline() == "held\n"
    beats = []

    def heartbeat() -> None:
        beats.append(list(work.tried))
        if len(beats) == 3:  # it waited: the holder dies without releasing
            holder.kill()
            holder.wait()

    assert run(work, heartbeat=heartbeat) == 0
    assert work.tried == [1, 0]
    assert beats[2] == [1]


HOLD = """
import sys, time
from semix.data.leases import claim
from semix.data.store import Store
assert claim(Store(sys.argv[1]), "numbers-0")
print("held", flush=True)
time.sleep(600)
"""


def test_leases_are_renewed_while_a_shard_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("semix.data.leases.RENEW_EVERY_S", 0.0)
    work = Numbers(tmp_path, count=1)
    name = "leases/numbers-0.json"
    mtimes = []

    def heartbeat() -> None:
        with suppress(FileNotFoundError):  # published by now
            mtimes.append((tmp_path / name).stat().st_mtime_ns)

    make = work.make

    def slow(shard: int, *, heartbeat) -> Publish:
        for _ in range(3):
            time.sleep(0.02)
            heartbeat()
        return make(shard, heartbeat=heartbeat)

    work.make = slow  # type: ignore[method-assign]
    assert run(work, heartbeat=heartbeat) == 0
    assert len(set(mtimes)) > 2


def test_the_lease_of_a_shard_is_renewed_until_it_is_published(tmp_path, monkeypatch):
    monkeypatch.setattr("semix.data.leases.RENEW_EVERY_S", 0.0)
    work = Numbers(tmp_path, count=2)
    leases = [tmp_path / f"leases/numbers-{shard}.json" for shard in range(2)]
    make, mtimes, checked = work.make, [], Event()

    def overlapping(shard: int, *, heartbeat) -> Publish:
        if shard == 1:
            for _ in range(3):
                time.sleep(0.02)
                heartbeat()
                mtimes.append([lease.stat().st_mtime_ns for lease in leases])
            checked.set()
        publish = make(shard, heartbeat=heartbeat)

        def publish_later() -> str:
            assert checked.wait(30)
            assert leases[shard].exists()
            return publish()

        return publish_later

    work.make = overlapping  # type: ignore[method-assign]
    assert run(work) == 0
    assert [len(set(times)) for times in zip(*mtimes, strict=True)] == [3, 3]
    assert work.store.list("leases") == []


def make_unreadable(lease: Path) -> None:
    """Put a folder in its path: a reader gets an OSError, as from a store that is away."""
    lease.unlink()
    lease.mkdir()


@pytest.mark.parametrize("broken_at", ["renewal", "release"])
def test_a_lease_that_cannot_be_read_costs_no_shard(tmp_path, monkeypatch, broken_at):
    monkeypatch.setattr("semix.data.leases.RENEW_EVERY_S", 0.0)
    work = Numbers(tmp_path, count=3)
    make = work.make

    def make_and_break(shard: int, *, heartbeat) -> Publish:
        lease = tmp_path / f"leases/numbers-{shard}.json"
        if shard == 1 and broken_at == "renewal":
            make_unreadable(lease)
        publish = make(shard, heartbeat=heartbeat)

        def publish_and_break() -> str:
            message = publish()
            if shard == 1 and broken_at == "release":
                make_unreadable(lease)
            return message

        return publish_and_break

    work.make = make_and_break  # type: ignore[method-assign]
    assert run(work) == 0
    assert work.tried == [0, 1, 2]
    assert work.failures() == {}


def test_a_store_that_fails_asks_for_a_new_process(capsys, root):
    root.discard(3)
    (Path(root.url) / "leases").rmdir()
    (Path(root.url) / "leases").write_text("")  # nothing can be claimed
    assert work_on(root) == 75
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: the store or a file fails, asking for a new process: ")
    assert root.failures() == {}


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionError("reset by peer"), True),
        (OSError(116, "Stale file handle"), True),
        (FileNotFoundError(2, "No such file or directory", "model"), False),
        (PermissionError(13, "Permission denied", "noise"), False),
        (ValueError("no store's"), False),
    ],
)
def test_only_what_may_pass_asks_for_a_new_process(error, passes):
    assert _is_transient(error) is passes


def test_a_lease_that_cannot_be_renewed_is_no_shards_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("semix.data.leases.RENEW_EVERY_S", 0.0)
    work, put = Numbers(tmp_path, count=2), Store.put
    faults = [OSError(116, "Stale file handle"), InputError("url", "s3://b", "refused: log in")]
    raised = []

    def faulty(self, name, content):
        if name.startswith("leases/") and faults:
            raised.append(faults.pop())
            raise raised[-1]
        put(self, name, content)

    monkeypatch.setattr(Store, "put", faulty)
    assert run(work) == 0
    assert (work.tried, len(raised)) == ([0, 1], 2)


def test_a_device_error_asks_for_a_new_process_after_writing_it_down(tmp_path):
    work = Numbers(tmp_path, errors={2: torch.OutOfMemoryError("no memory left")})
    with pytest.raises(DeviceError, match="no memory left"):
        run(work)
    assert work.failures()[2][0].error == "OutOfMemoryError"
    assert work.store.list("leases") == []


@pytest.mark.parametrize(
    ("error", "is_the_devices"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublas`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), True),
        (RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid engine"), True),
        (RuntimeError("expected a CUDA error"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_errors_of_the_devices_libraries_are_the_devices(tmp_path, error, is_the_devices):
    work = Numbers(tmp_path, count=1, errors={0: error})
    if is_the_devices:
        with pytest.raises(DeviceError):
            run(work)
    else:
        assert run(work) == SOME_FAILED
    assert len(work.failures()[0]) == 1


def test_wrong_settings_are_no_shards_failure(tmp_path):
    work = Numbers(tmp_path, errors={0: InputError("noise/run", "damaged", "remove it")})
    with pytest.raises(InputError, match="noise/run = damaged"):
        run(work)
    assert work.failures() == {}
    assert claim(work.store, "numbers-0")


def test_a_place_without_a_root_is_told_by_the_exit_status(tmp_path, capsys):
    assert worker([str(tmp_path)]) == 78
    assert "holds no plan.json" in capsys.readouterr().err


def test_an_unknown_label_set_is_told_by_the_exit_status(root, capsys):
    assert worker([root.url, "--labels", "abcdef"]) == 78
    assert "labels = abcdef: is no label set here" in capsys.readouterr().err


@pytest.mark.process
def test_a_worker_that_is_asked_to_stop_lets_go(tmp_path):
    process = start(STOPPED, tmp_path)
    assert process.stdout.readline() == "making\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert Store(str(tmp_path)).list("leases") == []


STOPPED = """
import signal, sys, time
from pathlib import Path
from semix.pipeline.worker import Worker, _stop
from tests.pipeline.test_worker import Numbers

class Slow(Numbers):
    def make(self, shard, *, heartbeat):
        print("making", flush=True)
        time.sleep(600)

signal.signal(signal.SIGTERM, _stop)
Worker(Slow(Path(sys.argv[1])), 0, 1, device="cpu").run()
"""


@pytest.mark.process
def test_a_worker_that_is_asked_to_stop_publishes_what_it_has_made(tmp_path):
    process = start(PUBLISHING, tmp_path)
    assert process.stdout.readline() == "making shard 1\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "dropped shard 1\n"
    (tmp_path / "go").touch()
    assert process.stdout.readline() == "shard 0: written\n"
    assert process.wait(60) == 143
    assert Numbers(tmp_path, count=2).missing() == [1]
    assert Store(str(tmp_path)).list("leases") == []


PUBLISHING = """
import signal, sys, time
from pathlib import Path
from semix.pipeline.worker import Worker, _stop
from tests.pipeline.test_worker import Numbers

class Slow(Numbers):
    def make(self, shard, *, heartbeat):
        if shard == 1:
            try:
                print("making shard 1", flush=True)
                time.sleep(600)
            finally:
                print("dropped shard 1", flush=True)
        publish = super().make(shard, heartbeat=heartbeat)

        def publish_later():
            while not self.store.exists("go"):
                time.sleep(0.01)
            return publish()

        return publish_later

signal.signal(signal.SIGTERM, _stop)
Worker(Slow(Path(sys.argv[1]), count=2), 0, 1, device="cpu").run()
"""


def test_a_part_comes_first_then_the_next_ones_backwards(tmp_path):
    work = Numbers(tmp_path, count=9)
    assert run(work, slot=1, slots=2, part=Partition(1, 3)) == 0
    assert work.tried == [3, 5, 4, 8, 7, 6, 2, 1, 0]


def test_shards_and_part_may_be_named_on_the_command_line(tmp_path):
    file = tmp_path / "shards"
    file.write_text("0,2-3")
    options = _parse(["/root", "--range", "1/4", "--shards-file", str(file)])
    assert parse_partition(options.range) == Partition(1, 4)
    assert list(_requested_shards(options)) == [0, 2, 3]
    assert _requested_shards(_parse(["/root"])) is None


def test_a_part_that_is_none_is_told_by_the_exit_status(tmp_path, capsys, root):
    assert worker([root.url, "--range", "4/4"]) == 78
    assert "range = 4/4: write i/n" in capsys.readouterr().err


def test_a_device_that_is_not_here_is_told_by_the_exit_status(capsys, root):
    root.discard(3)
    assert worker([root.url, "--device", "cuda"]) == 78
    assert "device = cuda: torch sees no GPU here" in capsys.readouterr().err


def test_the_heartbeat_is_heard_from_the_first_look_on(tmp_path, root):
    heartbeat = tmp_path / "heartbeat"
    assert worker([root.url, "--heartbeat", str(heartbeat)]) == 0  # nothing to make
    assert heartbeat.exists()


def test_work_that_others_have_done_meanwhile_is_not_tried_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr("semix.pipeline.pending_shards.REFRESH_S", 0.0)
    monkeypatch.setattr("semix.pipeline.pending_shards.REFRESH_INTERVAL_RATIO", 0)
    work = Numbers(tmp_path, count=100)
    queries = []
    make, is_done = work.make, work.is_done

    def make_one_while_others_finish(shard: int, *, heartbeat) -> Publish:
        for other in range(1, work.count):
            work.store.create(f"done/{other}", b"")
        return make(shard, heartbeat=heartbeat)

    work.make = make_one_while_others_finish  # type: ignore[method-assign]
    work.missing = lambda: [s for s in range(work.count) if not is_done(s)]  # type: ignore
    work.is_done = lambda shard: queries.append(shard) or is_done(shard)  # type: ignore
    assert run(work) == 0
    assert work.tried == [0]
    assert queries == [0, 1]  # one shard that was done made it refresh


def test_a_million_shards_are_walked_without_a_copy_of_them():
    share = ShardOrder(1, 8, Partition(3, 10))
    total = 10**6
    tracemalloc.start()
    try:
        count = sum(1 for _ in share.in_order(range(total), total))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == total
    assert peak < 10**6  # bytes: a copy takes 8e6; other threads of this process allocate too
    first = list(islice(share.in_order(range(total), total), 3))
    assert first == [300_001, 300_009, 300_017]


def test_the_longer_a_shard_is_held_the_less_often_it_is_asked_for(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    backoff, times = LeaseBackoff(), []
    for _ in range(20_000):
        if backoff.due(7):
            times.append(now[0] - 100)
            backoff.add(7)
        now[0] += 0.05
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps[0] < 0.3
    assert 29.9 < gaps[-1] < 30.1
    assert len(times) < 50
    backoff.remove(7)
    assert backoff.due(7)


# A worker of a root.


def test_it_makes_only_the_shards_named(root):
    for shard in range(8):
        root.discard(shard)
    assert work_on(root, "--shards", "1,6-7", "--slot", "1", "--slots", "2") == 0
    assert root.done() == [1, 6, 7]


def test_a_shard_is_published_while_the_next_one_is_generated(hasty_config, bucket, monkeypatch):
    """The bucket takes the first tar no sooner than the second shard has been generated."""
    root = begun(hasty_config, f"{bucket}/mixed")
    events, generated = [], Event()
    publish, create = Store.publish, Store.create

    def generate(groups, plan, **options):
        shard = plan.layout.shard_of(groups[0].index)
        events.append(f"generate {shard}")
        batch = make_batch(groups, plan, **options)
        if shard == 1 and groups[-1].index + 1 == plan.shard(1).stop:
            generated.set()
        return batch

    def slow(self, partial, name):
        assert generated.wait(30), "nothing was generated meanwhile"
        publish(self, partial, name)

    def create_and_note(self, name, content):
        if name.startswith("shards/"):
            events.append(f"record {int(name[-12:-5])}")
        return create(self, name, content)

    monkeypatch.setattr("semix.pipeline.shard.make_batch", generate)
    monkeypatch.setattr(Store, "publish", slow)
    monkeypatch.setattr(Store, "create", create_and_note)
    assert work_on(root, "--shards", "0-3") == 0
    assert [event for event in events if "record" in event] == [f"record {n}" for n in range(4)]
    assert events.index("generate 1") < events.index("record 0") < events.index("generate 2")
    assert events.index("record 1") < events.index("generate 3")
    assert list(verify(root, full=True)) == [] and root.store.list("leases") == []
