"""The whole command killed at random moments, and started again; once in test_smokes.py."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from semix.data.root import Root
from semix.data.verify import damage
from tests.family import below

SEMIX = [sys.executable, "-m", "semix.flows.cli"]


def files_of(root: Root) -> dict[str, bytes]:
    names = [name for name in root.store.list("") if not name.startswith(("index", "leases"))]
    tars = {name: root.store.get(name) for name in names if name.endswith(".tar")}
    assert len(tars) == root.plan.num_shards == len(root.done())
    return tars


def start(config, out, api: str, *, slots: int = 2) -> subprocess.Popen:
    command = [*SEMIX, "build", str(config), "--out", str(out), "--slots", str(slots)]
    return subprocess.Popen(
        command, env={**os.environ, "PREFECT_API_URL": api}, stderr=subprocess.PIPE, text=True
    )


def write_config(config, tmp_path) -> Path:
    file = tmp_path / "build.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return file


def survive(
    kills: int, file: Path, unbroken: Root, api: str, *, longest_s: float, slots: int = 2
) -> None:
    """Kill the build `kills` times, let it finish, and compare it with an unbroken one.

    Args:
        longest_s: at most so many seconds pass from a sign of life to the kill.
    """
    out = file.parent / "killed"
    rng, committed = random.Random(kills), []
    for _ in range(kills):
        process = start(file, out, api, slots=slots)
        wait_for_life(out, done_before=committed[-1] if committed else 0, process=process)
        time.sleep(rng.uniform(0, longest_s))
        process.send_signal(signal.SIGKILL)
        process.wait()
        committed.append(len(Root(str(out)).done()))
    process = start(file, out, api, slots=slots)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert committed == sorted(committed), "a committed shard was lost"
    root = Root(str(out))
    assert committed[-1] < root.plan.num_shards, "killed too late"
    assert files_of(root) == files_of(unbroken)
    assert damage(root, full=True) == []
    assert root.failures() == {}
    assert not list(out.rglob("*.partial"))


def wait_for_life(out, *, done_before: int, process: subprocess.Popen) -> None:
    """Wait until workers make shards: one more is committed, or a file is staged."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        records = len(list(out.rglob("shards/**/*[0-9].json")))
        if records > done_before or list(out.rglob("*.tar.*.partial")):
            return
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # twelve starts of the whole command
def test_ten_kills(make_config, hasty_standins, tmp_path, prefect_api):
    config = make_config(hasty_standins, "generator.steps=30", "shards.groups_per_shard=1")
    file, unbroken = write_config(config, tmp_path), tmp_path / "unbroken"
    assert start(file, unbroken, prefect_api).wait(240) == 0
    survive(10, file, Root(str(unbroken)), prefect_api, longest_s=1.5)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # twenty-one starts of the whole command
def test_twenty_preemptions_lose_at_most_a_shard_each(
    make_config, hasty_standins, tmp_path, prefect_api
):
    """Driver and worker are killed at once; the same command goes on on another machine."""
    config = make_config(hasty_standins, "generator.steps=30", "shards.groups_per_shard=1")
    file, out, rng = write_config(config, tmp_path), tmp_path / "spot", random.Random(20)
    committed, shards_lost = [0], []
    for _ in range(20):
        process = start(file, out, prefect_api, slots=1)
        wait_for_life(out, done_before=committed[-1], process=process)
        time.sleep(rng.uniform(0, 0.6))
        for victim in [*below(process.pid), psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait()
        root = Root(str(out))
        committed.append(len(root.done()))
        staged = {path.name.split(".")[0] for path in out.rglob("*.partial")}
        shards_lost.append(len(staged - {f"{shard:07d}" for shard in root.done()}))
    assert committed == sorted(committed) and committed[-1] < root.plan.num_shards, (
        "killed too late"
    )
    assert max(shards_lost) == 1, shards_lost
    process = start(file, out, prefect_api, slots=1)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    unbroken = tmp_path / "unbroken"
    assert start(file, unbroken, prefect_api).wait(240) == 0
    assert files_of(Root(str(out))) == files_of(Root(str(unbroken)))
