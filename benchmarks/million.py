"""A million shards: memory, seconds and requests of reading them, on a simulated store."""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Result

SIZES = (1_000, 1_000_000)
MISSING = 300  # the last folder is not full
MAX_MB, MAX_SECONDS = 1000, 64  # to read all records
MAX_RESUME_MB, MAX_RESUME_SECONDS, MAX_STATUS_SECONDS = 500, 20, 10
Figures = dict[str, dict[str, Any]]


def run() -> Result:
    result = Result("million", f"looks at {SIZES[0]:,} to {SIZES[-1]:,} simulated shards")
    context = multiprocessing.get_context("spawn")
    for shards in SIZES:
        for operation in (listing, reading, indexing):
            for name, figures in _in_new_process(context, operation, shards).items():
                result.figures.setdefault(name, {})[str(shards)] = figures
    million = str(SIZES[-1])
    costs = {name: figures[million] for name, figures in result.figures.items()}
    result.at_most("MB of a resume", costs["resume"]["peak_mb"], MAX_RESUME_MB)
    result.at_most("seconds of a resume", costs["resume"]["seconds"], MAX_RESUME_SECONDS)
    result.at_most("seconds of a status", costs["status"]["seconds"], MAX_STATUS_SECONDS)
    result.at_most("MB of a full status", costs["full status"]["peak_mb"], MAX_MB)
    result.at_most("seconds of a full status", costs["full status"]["seconds"], MAX_SECONDS)
    result.figures["seconds of 1000 lookups in a plan"] = lookups()
    return result


def listing(shards: int) -> Figures:
    """Status, and what `semix resume` reads before it starts a flow."""
    from semix.flows.build_steps import ShardSelection

    def resume(root: Any) -> None:
        assert len(ShardSelection(skip_failed="1%").shards_to_make(root)) == MISSING

    with _open_simulated(shards) as (root, store):
        costs = {"status": _time(root.status, store)}
        costs["resume"] = _time(lambda: resume(root), store)
        return costs


def reading(shards: int) -> Figures:
    """What `semix status --full` reads."""
    with _open_simulated(shards) as (root, store):
        return {"full status": _time(lambda: (root.status(), root.totals()), store)}


def indexing(shards: int) -> Figures:
    with _open_simulated(shards) as (root, store):
        return {"index": _time(root.write_index, store)}


def lookups() -> dict[str, float]:
    """CPU seconds of the last 1000 shards of each plan: computed, so equal for all sizes."""
    from semix.data.settings import load_settings
    from semix.pipeline.config import BuildConfig
    from semix.pipeline.plan import BuildPlan

    seconds = {}
    for shards in SIZES:
        values: dict[str, Any] = {
            "real": {"name": "digits"},
            "generator": {"model": "a-model"},
            "mixing": {"groups_per_pair": shards},
            "annotation": {"model": "local-dir:a-clip"},
            "shards": {"groups_per_shard": 1, "groups_per_batch": 1},
        }
        plan = BuildPlan(load_settings(BuildConfig, values), ("cat", "dog"))
        assert plan.num_shards == shards
        start = time.process_time()
        for shard in range(shards - 1000, shards):
            plan.shard(shard)
        seconds[str(shards)] = time.process_time() - start
    return seconds


@contextmanager
def _open_simulated(shards: int) -> Iterator[tuple[Any, Any]]:
    """A simulated root and its store."""
    import semix.flows.build_steps  # noqa: F401 - not measured
    from tests.simulated import SimulatedShards, simulated

    store = SimulatedShards(shards, shards - MISSING)
    with simulated(store) as root:
        yield root, store


def _time(operation: Callable[[], object], store: Any) -> dict[str, Any]:
    """Cost of one operation; `peak_mb` is its peak above the memory before it."""
    store.requests.clear()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory of now
    before_mb = _peak_mb()
    start, cpu_start = time.perf_counter(), time.process_time()
    operation()
    return {
        "cpu_seconds": round(time.process_time() - cpu_start, 3),
        "seconds": round(time.perf_counter() - start, 3),
        "peak_mb": round(_peak_mb() - before_mb, 2),
        "requests": sum(store.requests.values()),
    }


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _in_new_process(context: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a separate process, so that memory of other measurements is not counted."""
    with context.Pool(1) as pool:
        return pool.apply(function, arguments)


if __name__ == "__main__":
    print(json.dumps(run().figures, indent=1))
