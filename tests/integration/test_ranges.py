"""Two hosts on one root, a part each; one of them dies for good."""

import os
import signal
import socket
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from semix.data import leases
from semix.data.ranges import Partition
from semix.data.root import Root
from semix.pipeline.shard_job import BuildJob
from semix.pipeline.worker import Worker

from tests.integration.conftest import Tiny, contents, tiny_plan
from tests.integration.crashes import start_child, wait

SHARDS = 24


@pytest.fixture(scope="module")
def many(make_config, hasty_standins, tmp_path_factory) -> Tiny:
    """A plan of many quick shards."""
    changes = ("generator.steps=1", f"mixing.pairs={{kind: sampled, count: {SHARDS}}}")
    config = make_config(hasty_standins, *changes, "shards.groups_per_shard=1")
    return tiny_plan(config, tmp_path_factory)


def host(
    name: str, tiny: Tiny, url: str, log: Path, *, part: Partition, dies_at: int | None
) -> None:
    """One worker's whole life on a host of that name, its lines into `log`.

    Args:
        dies_at: killed as it makes its shard of this number, counted from 0.
    """
    socket.gethostname = lambda: name
    leases.TIME_TO_LIVE = 3.0  # seconds; nobody here renews so seldom
    work = BuildJob(Root(url))
    work.models, work.load = tiny.models, lambda **_: None  # they came with the fork
    make, made = work.make, []

    def make_or_die(shard: int, *, heartbeat) -> str:
        if len(made) == dies_at:
            while len(log.read_text().splitlines()) < dies_at:  # the one before is published
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        made.append(shard)
        return make(shard, heartbeat=heartbeat)

    work.make = make_or_die  # type: ignore[method-assign]
    with log.open("a", buffering=1) as lines, redirect_stdout(lines):
        assert Worker(work, 0, 1, device="cpu", part=part).run() == 0


def made(log: Path) -> list[int]:
    return [int(line.split()[1].rstrip(":")) for line in log.read_text().splitlines()]


@pytest.mark.process
@pytest.mark.parametrize("dies_at", [None, 4])
def test_parts_are_shared_and_a_dead_hosts_is_taken_up(many, tmp_path, dies_at):
    quiet = contents(many.finish(many.start(str(tmp_path / "quiet"))))
    root = many.start(str(tmp_path / "mixed"))
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    children = [
        start_child(
            lambda part=part, log=log, dies=dies: host(
                f"host-{part.index}", many, root.url, log, part=part, dies_at=dies
            )
        )
        for part, log, dies in [
            (Partition(0, 2), logs[0], None),
            (Partition(1, 2), logs[1], dies_at),
        ]
    ]
    ends = [wait(child) for child in children]
    assert ends == [0, 0 if dies_at is None else -signal.SIGKILL]
    assert contents(Root(root.url)) == quiet
    first, second = (made(log) for log in logs)
    assert Counter(first + second) == Counter(range(SHARDS))  # each once
    assert min(first) < SHARDS // 2 <= min(second[:4])
    if dies_at:
        assert len(second) == dies_at
        # Of the dead host's part, its unmade rest; the shard it held came last.
        assert set(range(SHARDS // 2, SHARDS)) - set(second) <= set(first)
        assert first[-1] == SHARDS // 2 + dies_at
    assert Root(root.url).store.list("leases") == []
