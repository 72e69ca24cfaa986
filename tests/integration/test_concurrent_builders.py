"""Several builders on one root at once, and one that is killed two hundred times."""

import os
import random
import signal
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from semix.data.garbage import garbage, remove
from semix.data.root import Root
from semix.data.verify import damage
from semix.pipeline.plan import build_of
from semix.pipeline.shard_job import BuildJob
from semix.pipeline.worker import Worker
from tests.integration.conftest import Tiny, contents, tiny_plan
from tests.integration.crashes import start_child, wait

OVERRIDES = ("mixing.pairs={kind: sampled, count: 24}", "shards.groups_per_shard=1")


@pytest.fixture(scope="module")
def many(make_config, hasty_standins, tmp_path_factory) -> Tiny:
    """A plan of many quick shards."""
    return tiny_plan(make_config(hasty_standins, "generator.steps=1", *OVERRIDES), tmp_path_factory)


@pytest.fixture(scope="module")
def quiet(many, tmp_path_factory) -> dict[str, object]:
    return contents(many.finish(many.start(str(tmp_path_factory.mktemp("quiet")))))


def build(tiny: Tiny, url: str, log: Path) -> None:
    """Run one worker to its end; its lines go into `log`."""
    job = BuildJob(build_of(Root(url)))
    job.models, job.load = tiny.models, lambda **_: None  # they came with the fork
    worker = Worker(job, slot=0, slots=1, device="cpu")
    with log.open("a", buffering=1) as lines, redirect_stdout(lines):
        assert worker.run() == 0


def count_made(logs: list[Path]) -> Counter[int]:
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return Counter(int(line.split()[1].rstrip(":")) for line in lines if line.startswith("shard"))


@pytest.mark.process
@pytest.mark.parametrize("builders", [2, 4])
def test_builders_share_a_folder_without_a_lost_or_doubled_shard(many, quiet, tmp_path, builders):
    build_together(builders, many.start(str(tmp_path / "mixed")), many, quiet, tmp_path)


def test_builders_share_a_bucket_without_a_lost_or_doubled_shard(many, quiet, tmp_path, bucket):
    build_together(3, many.start(f"{bucket}/mixed"), many, quiet, tmp_path)


def build_together(
    builders: int, root: Root, many: Tiny, quiet: dict[str, object], tmp_path: Path
) -> None:
    """Run so many workers on the root at once, and check what they made."""
    logs = [tmp_path / f"{number}.log" for number in range(builders)]
    children = [start_child(lambda log=log: build(many, root.url, log)) for log in logs]
    assert [wait(child) for child in children] == [0] * builders
    assert contents(Root(root.url)) == quiet
    assert count_made(logs) == Counter(range(24))
    assert Root(root.url).store.list("leases") == []


@pytest.mark.process
def test_garbage_is_collected_beside_a_builder_that_loses_nothing(many, quiet, tmp_path):
    root = many.start(str(tmp_path / "mixed"))
    root.store.put("shards/0000/0000003-00000000.tar", b"an orphan")
    child, rounds, removed = (start_child(lambda: build(many, root.url, tmp_path / "log")), 0, [])
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        rounds += 1
        removed += remove(root, garbage(root, older_than_s=0))
    assert wait(child) == 0
    assert rounds > 3
    removed += remove(root, garbage(root, older_than_s=0))
    assert "shards/0000/0000003-00000000.tar" in {item.name for item in removed}
    assert contents(Root(root.url)) == quiet


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills(make_config, hasty_standins, tmp_path, tmp_path_factory):
    changes = ("generator.steps=1", "mixing.groups_per_pair=16", "shards.groups_per_shard=1")
    many = tiny_plan(make_config(hasty_standins, *changes), tmp_path_factory)
    expected = contents(many.finish(many.start(str(tmp_path / "quiet"))))
    url, log = many.start(str(tmp_path / "mixed")).url, tmp_path / "log"
    rng, num_done = random.Random(0), 0
    for _ in range(200):
        child = start_child(lambda: build(many, url, log))
        time.sleep(rng.uniform(0, 0.25))
        os.kill(child, signal.SIGKILL)
        assert wait(child) == -signal.SIGKILL, "finished before it was killed often enough"
        before, num_done = num_done, len(Root(url).done())
        assert num_done >= before, "a committed shard was lost"
    assert wait(start_child(lambda: build(many, url, log))) == 0
    assert contents(Root(url)) == expected
    assert damage(Root(url), full=True) == []
    assert sum(count_made([log]).values()) - many.plan.num_shards <= 200
