"""Two slots on two cores against one, and time to the first shard, with the quickstart's models."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.idle import call_in_new_process, copy_plan, planned_root
from benchmarks.measure import Result, ratio
from semix.data.root import Root
from semix.pipeline.config import BuildConfig

SHARDS, TURNS = 60, 3
SERIES, PAIRS = 6, 45  # series per shard, in one batch; pairs of digits
SETTINGS = (
    f"mixing.groups_per_pair={SHARDS * SERIES // PAIRS}",
    f"shards.groups_per_shard={SERIES}",
    f"shards.groups_per_batch={SERIES}",
)
BAR = 1.7
FIRST_S = 12.0  # from a command to its first shard, if Prefect's database exists


def run() -> Result:
    cores = os.cpu_count()
    result = Result("slots", f"{SHARDS} shards of {SERIES} series through the flow, {cores} cores")
    walls, first = call_in_new_process(measure_builds)
    working = {slots: [turn["working"] for turn in turns] for slots, turns in walls.items()}
    speedup = ratio(working[1], working[2])
    result.at_least("shards a second, two slots over one", speedup["ratio"], BAR)
    result.at_most("seconds from a command to its first shard", max(first[1:]), FIRST_S)
    result.figures |= {"speedup": speedup, "wall_seconds": walls, "first_shard_seconds": first}
    return result


def measure_builds() -> tuple[dict[int, list[dict[str, float]]], list[float]]:
    """Seconds of builds per number of slots, in turns, and of commands until their first shard.

    The first command also creates Prefect's database.
    """
    from benchmarks.models import build_config
    from semix.flows.run_server import prefect_server

    plan = planned_root(*SETTINGS)
    walls: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    with prefect_server():
        for _ in range(TURNS):
            for slots, turns in walls.items():
                turns.append(time_build(copy_plan(plan), slots))
    with tempfile.TemporaryDirectory() as home:
        first = [time_to_first_shard(build_config(*SETTINGS), home) for _ in range(1 + TURNS)]
    return walls, first


def time_to_first_shard(config: BuildConfig, home: str) -> float:
    """Seconds of `semix build` of a new root, until a shard is committed."""
    folder = Path(tempfile.mkdtemp(prefix="semix-bench-"))
    (folder / "build.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "semix.flows.cli", "build", str(folder / "build.yaml")]
    command += ["--out", str(folder / "mixed"), "--shards", "0-1"]
    environment = {**os.environ, "PREFECT_API_URL": "", "PREFECT_HOME": home}
    start = time.time()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return min(commit_times(Root(str(folder / "mixed")))) - start


def time_build(root: Root, slots: int) -> dict[str, float]:
    """Seconds per shard from the first to the last commit, with models loaded, and in total.

    Each worker has one thread (OMP_NUM_THREADS=1), so one slot uses one core.
    """
    from semix.flows.build import resume

    start = time.perf_counter()
    resume(root, slots=slots)
    total = time.perf_counter() - start
    times = sorted(commit_times(root))
    return {"working": (times[-1] - times[0]) / (len(times) - 1), "whole": total}


def commit_times(root: Root) -> list[float]:
    infos: dict[str, Any] = root.store.infos("shards")
    return [info.modified for name, info in infos.items() if name.endswith(".json")]
