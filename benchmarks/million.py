"""A million shards: memory, seconds and requests of every look, on a simulated store."""

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
LACKING = 300  # the last folder is not full
GROWN = 50  # shards that are made between two status calls
MAX_MB, MAX_SECONDS = 1000, 120  # to read all records, or the index that has them
READING = {"no index": "without an index", "status": "from an index"}
Figures = dict[str, dict[str, Any]]


def run() -> Result:
    result = Result("million", f"looks at {SIZES[0]:,} to {SIZES[-1]:,} simulated shards")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        for shards in SIZES:
            index = str(Path(folder, f"{shards}.json"))
            _alone(context, write_index, shards, index)
            for look in (without_index, from_index, resuming):
                for name, figures in _alone(context, look, shards, index).items():
                    result.figures.setdefault(name, {})[str(shards)] = figures
    million = str(SIZES[-1])
    for name, how in READING.items():
        cost = result.figures[name][million]
        result.at_most(f"MB of a status {how}", cost["peak_mb"], MAX_MB)
        result.at_most(f"seconds of a status {how}", cost["seconds"], MAX_SECONDS)
    requests = {name: cost["requests"] for name, cost in result.figures["second look"].items()}
    result.equal("requests of a second look", requests[million], requests[str(SIZES[0])])
    result.figures["seconds of 1000 lookups in a plan"] = lookups()
    return result


def write_index(shards: int, index: str) -> None:
    from tests.simulated import index_of

    Path(index).write_bytes(index_of(shards - LACKING))


def without_index(shards: int, index: str) -> Figures:
    """Opening and status if every record must be read."""
    with _opened(shards, None) as (root, store):
        return {"no index": _timed(root.status, store)}


def from_index(shards: int, index: str) -> Figures:
    """Opening and status from an index; again: nothing changed, a folder grew; what is missing."""
    with _opened(shards, index) as (root, store):
        costs = {"status": _timed(root.status, store)}
        costs["second look"] = _timed(root.status, store)
        store.done += GROWN
        costs["one folder grew"] = _timed(root.status, store)
        costs["missing"] = _timed(root.missing, store)
        assert root.missing() == list(range(store.done, shards))
        return costs


def resuming(shards: int, index: str) -> Figures:
    """What `semix resume` looks at before it starts a flow: sizes of all files, what lacks."""
    from semix.data.verify import damage
    from semix.flows.build_steps import ShardSelection

    def look(root: Any) -> None:
        assert [problem.kind for problem in damage(root)] == ["prototypes"]  # there are none
        assert len(ShardSelection(skip_failed="1%").shards_to_make(root)) == LACKING

    with _opened(shards, index) as (root, store):
        return {"resume": _timed(lambda: look(root), store)}


def lookups() -> dict[str, float]:
    """A plan's shards are arithmetic: the last of a thousand costs what that of a million does."""
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
def _opened(shards: int, index: str | None) -> Iterator[tuple[Any, Any]]:
    """A simulated root and its store, whose index is a file: who reads it holds its bytes."""
    import semix.flows.build_steps  # noqa: F401 - imports are not what is measured

    from tests.simulated import SimulatedShards, simulated

    class Shards(SimulatedShards):
        def get(self, name: str, max_bytes: int) -> bytes:
            if index and name == "index/0.json":
                self.requests.add("get")
                return Path(index).read_bytes()
            return super().get(name, max_bytes)

    store = Shards(shards, shards - LACKING, index=b"a file" if index else None)
    with simulated(store) as root:
        yield root, store


def _timed(look: Callable[[], object], store: Any) -> dict[str, Any]:
    """Of one look; memory above that of now at its highest."""
    store.requests.clear()
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is that of now
    above = _highest_mb()
    start, work = time.perf_counter(), time.process_time()
    look()
    return {
        "cpu_seconds": round(time.process_time() - work, 3),
        "seconds": round(time.perf_counter() - start, 3),
        "peak_mb": round(_highest_mb() - above, 2),
        "requests": sum(store.requests.values()),
    }


def _highest_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _alone(context: Any, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a separate process, so that memory of other measurements is not counted."""
    with context.Pool(1) as pool:
        return pool.apply(work, arguments)


if __name__ == "__main__":
    print(json.dumps(run().figures, indent=1))
