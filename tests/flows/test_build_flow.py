"""Real flows on a real server; workers are real processes."""

import json
import sys
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.task_runners import ThreadPoolTaskRunner

from flows.build import BuildFailed, build, resume
from flows.slot import RETRIES, WorkerFailed, WorkerLost, generate
from pipeline.root import create_root

# Each appends to a file when it starts; the first life ends as named, the next ones well.
LIVES = """
import os, pathlib, sys, time
file = pathlib.Path({path!r})
with file.open("a") as out: out.write("x")
if len(file.read_text()) > {bad}: sys.exit(0)
print("last words")
{end}
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
    quick = generate.with_options(retry_delay_seconds=0)

    def submit(name: str, end: str, *, bad: int = 1):
        code = LIVES.format(path=str(folder / name), end=end, bad=bad)
        command = [sys.executable, "-c", code]
        stop = threading.Event()
        return quick.submit(name, command, environment={}, stop=stop, silence_s=2.0)

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=4))
    def all_of_them():
        futures = {name: submit(name, end) for name, end in ENDS.items()}
        futures["always killed"] = submit("always killed", ENDS["killed"], bad=99)
        results = {name: f.result(raise_on_failure=False) for name, f in futures.items()}
        return {
            name: (result, len((folder / name).read_text())) for name, result in results.items()
        }

    return all_of_them()


@pytest.mark.parametrize("end", ["killed", "device", "hung"])
def test_a_lost_worker_is_started_again(lives, end):
    assert lives[end] == ({"slot": end, "status": 0}, 2)


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
    assert lives["some shards"] == ({"slot": "some shards", "status": 1}, 1)


@pytest.fixture(scope="module")
def broken(hasty_config, prefect_api, tmp_path_factory):
    """A root where one shard cannot be written, and what building it said."""
    root = create_root(hasty_config, str(tmp_path_factory.mktemp("broken") / "mixed"))
    obstacle = Path(root.url) / "shards/0000/0000003.json"  # where its commit record goes
    obstacle.mkdir(parents=True)
    with pytest.raises(BuildFailed) as caught:
        build(hasty_config, root.url, slots=1)
    obstacle.rmdir()
    return root, str(caught.value)


def test_one_failing_shard_stops_no_other_and_is_named(broken):
    root, message = broken
    assert root.missing() == [3]
    assert list(root.failures()) == [3]
    first, reason, *rest = message.splitlines()
    assert first == "1 of 8 shards not made: 3"
    assert reason.startswith("shard 3: ")
    assert rest == [
        f"all reasons: semix failures {root.url}",
        f"the rest is safe; go on with: semix resume {root.url}",
    ]


def test_prefect_shows_the_run_its_log_and_its_end(broken, prefect_api, until):
    with get_client(sync_client=True) as client:
        run = client.read_flow_runs(limit=1, sort="START_TIME_DESC")[0]
        assert run.name == "mixed, 8 of 8 shards"
        assert run.state.is_failed()
        assert "1 of 8 shards not made: 3" in run.state.message
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
        tasks = client.read_task_runs(flow_run_filter=chosen, limit=9, sort="NAME_ASC")
        assert [task.name for task in tasks] == ["generate slot 0", "plan", "prototypes"]
        mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
        until(
            lambda: any(
                log.message.startswith("shard 7: ") for log in client.read_logs(mine, 200, 0)
            )
        )
        artifact = json.load(urlopen(f"{prefect_api}/artifacts/semix-build/latest"))
        assert artifact["description"] == "7 of 8 shards, 1 failed"


def test_resume_makes_what_is_missing_and_pins_it(broken):
    root, _ = broken
    before = root.committed()
    assert resume(root, slots=1).missing() == []
    assert {k: v for k, v in root.committed().items() if k != 3} == before
    assert root.indices() == ["index/0.json"]
    assert root.verify(full=True) == []
