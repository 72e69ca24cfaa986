"""Two hosts on one root, one range each; one of them dies for good."""

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
from semix.pipeline.plan import build_of
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
    """Run one worker to its end on a host of that name; its lines go into `log`.

    Args:
        dies_at: kill it while it makes its shard of this number, counted from 0.
    """
    socket.gethostname = lambda: name
    leases.TIME_TO_LIVE = 3.0  # seconds; living hosts renew more often
    job = BuildJob(build_of(Root(url)))
    job.models, job.load = tiny.models, lambda **_: None  # they came with the fork
    make, shards_made = job.make, []

    def make_or_die(shard: int, *, heartbeat) -> str:
        if len(shards_made) == dies_at:
            while len(log.read_text().splitlines()) < dies_at:  # the one before is published
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        shards_made.append(shard)
        return make(shard, heartbeat=heartbeat)

    job.make = make_or_die  # type: ignore[method-assign]
    with log.open("a", buffering=1) as lines, redirect_stdout(lines):
        assert Worker(job, 0, 1, device="cpu", part=part).run() == 0


def shards_in(log: Path) -> list[int]:
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
    first_shards, second_shards = (shards_in(log) for log in logs)
    assert Counter(first_shards + second_shards) == Counter(range(SHARDS))  # each once
    assert min(first_shards) < SHARDS // 2 <= min(second_shards[:4])
    if dies_at:
        assert len(second_shards) == dies_at
        # The other host makes the rest of the dead host's range; the shard it held comes last.
        assert set(range(SHARDS // 2, SHARDS)) - set(second_shards) <= set(first_shards)
        assert first_shards[-1] == SHARDS // 2 + dies_at
    assert Root(root.url).store.list("leases") == []
