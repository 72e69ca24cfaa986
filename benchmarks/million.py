"""A million shards: memory, seconds and requests of reading them, on a simulated store."""

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Result

SIZES = (1_000, 1_000_000)
MISSING = 300  # the last folder is not full
NEW_SHARDS = 50  # made between two status calls
MAX_MB, MAX_SECONDS = 1000, 120  # to read all records, or the index that has them
READING = {"no index": "without an index", "status": "from an index"}
Figures = dict[str, dict[str, Any]]


def run() -> Result:
    result = Result("million", f"looks at {SIZES[0]:,} to {SIZES[-1]:,} simulated shards")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        for shards in SIZES:
            index = str(Path(folder, f"{shards}.json"))
            _in_new_process(context, write_index, shards, index)
            for operation in (without_index, from_index, resuming):
                for name, figures in _in_new_process(context, operation, shards, index).items():
                    result.figures.setdefault(name, {})[str(shards)] = figures
    million = str(SIZES[-1])
    for name, description in READING.items():
        cost = result.figures[name][million]
        result.at_most(f"MB of a status {description}", cost["peak_mb"], MAX_MB)
        result.at_most(f"seconds of a status {description}", cost["seconds"], MAX_SECONDS)
    requests = {name: cost["requests"] for name, cost in result.figures["second look"].items()}
    result.equal("requests of a second look", requests[million], requests[str(SIZES[0])])
    result.figures["seconds of 1000 lookups in a plan"] = lookups()
    return result


def write_index(shards: int, index: str) -> None:
    from tests.simulated import index_of

    Path(index).write_bytes(index_of(shards - MISSING))


def without_index(shards: int, index: str) -> Figures:
    """Opening and status if every record must be read."""
    with _open_simulated(shards, None) as (root, store):
        return {"no index": _time(root.status, store)}


def from_index(shards: int, index: str) -> Figures:
    """Status from an index; again, unchanged; again, after a folder grew; then what is missing."""
    with _open_simulated(shards, index) as (root, store):
        costs = {"status": _time(root.status, store)}
        costs["second look"] = _time(root.status, store)
        store.done += NEW_SHARDS
        costs["one folder grew"] = _time(root.status, store)
        costs["missing"] = _time(root.missing, store)
        assert root.missing() == list(range(store.done, shards))
        return costs


def resuming(shards: int, index: str) -> Figures:
    """What `semix resume` reads before it starts a flow: sizes of all files, missing shards."""
    from semix.data.verify import damage
    from semix.flows.build_steps import ShardSelection

    def operation(root: Any) -> None:
        assert [problem.kind for problem in damage(root)] == ["prototypes"]  # there are none
        assert len(ShardSelection(skip_failed="1%").shards_to_make(root)) == MISSING

    with _open_simulated(shards, index) as (root, store):
        return {"resume": _time(lambda: operation(root), store)}


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
def _open_simulated(shards: int, index: str | None) -> Iterator[tuple[Any, Any]]:
    """A simulated root and its store; the index is read from a file, so its bytes count."""
    import semix.flows.build_steps  # noqa: F401 - not measured
    from tests.simulated import SimulatedShards, simulated

    class Shards(SimulatedShards):
        def get(self, name: str, max_bytes: int) -> bytes:
            if index and name == "index/0.json":
                self.requests.add("get")
                return Path(index).read_bytes()
            return super().get(name, max_bytes)

    store = Shards(shards, shards - MISSING, index=b"a file" if index else None)
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
