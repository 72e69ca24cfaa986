"""Two slots on two cores against one, and a command's first shard: the quickstart's own models."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from semix.data.root import Root
from semix.pipeline.config import BuildConfig

from benchmarks.idle import apart, copied, planned_root
from benchmarks.measure import Result, ratio

SHARDS, TURNS = 60, 3
SERIES, PAIRS = 6, 45  # of a shard, in one batch; of the digits
SETTINGS = (
    f"mixing.groups_per_pair={SHARDS * SERIES // PAIRS}",
    f"shards.groups_per_shard={SERIES}",
    f"shards.groups_per_batch={SERIES}",
)
BAR = 1.7
FIRST_S = 12.0  # from a command to its first shard, on a machine that Prefect knows


def run() -> Result:
    cores = os.cpu_count()
    result = Result("slots", f"{SHARDS} shards of {SERIES} series through the flow, {cores} cores")
    found, first = apart(measured)
    working = {slots: [turn["working"] for turn in turns] for slots, turns in found.items()}
    speedup = ratio(working[1], working[2])
    result.at_least("shards a second, two slots over one", speedup["ratio"], BAR)
    result.at_most("seconds from a command to its first shard", max(first[1:]), FIRST_S)
    result.figures |= {"speedup": speedup, "wall_seconds": found, "first_shard_seconds": first}
    return result


def measured() -> tuple[dict[int, list[dict[str, float]]], list[float]]:
    """Seconds of builds by their number of slots, in turns; and of commands to their first shard.

    The first command makes Prefect's database, too.
    """
    from semix.flows.run_server import prefect_server

    from benchmarks.models import build_config

    plan = planned_root(*SETTINGS)
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    with prefect_server():
        for _ in range(TURNS):
            for slots, turns in found.items():
                turns.append(built(copied(plan), slots))
    with tempfile.TemporaryDirectory() as home:
        first = [to_first_shard(build_config(*SETTINGS), home) for _ in range(1 + TURNS)]
    return found, first


def to_first_shard(config: BuildConfig, home: str) -> float:
    """Seconds of `semix build` of a new root, until a shard is committed."""
    folder = Path(tempfile.mkdtemp(prefix="semix-bench-"))
    (folder / "build.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "semix.flows.cli", "build", str(folder / "build.yaml")]
    command += ["--out", str(folder / "mixed"), "--shards", "0-1"]
    environment = {**os.environ, "PREFECT_API_URL": "", "PREFECT_HOME": home}
    start = time.time()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return min(commit_times(Root(str(folder / "mixed")))) - start


def built(root: Root, slots: int) -> dict[str, float]:
    """Seconds a shard from the first commit to the last, when models are loaded, and of all.

    Each worker has one thread (OMP_NUM_THREADS=1), so one slot uses one core.
    """
    from semix.flows.build import resume

    start = time.perf_counter()
    resume(root, slots=slots)
    whole = time.perf_counter() - start
    times = sorted(commit_times(root))
    return {"working": (times[-1] - times[0]) / (len(times) - 1), "whole": whole}


def commit_times(root: Root) -> list[float]:
    facts: dict[str, Any] = root.store.infos("shards")
    return [fact.modified for name, fact in facts.items() if name.endswith(".json")]
