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

SIZES = (1_000, 10_000, 100_000, 1_000_000)
LACKING = 300  # the last folder is not full
GROWN = 50  # shards that are made between two looks
Figures = dict[str, dict[str, Any]]


def run() -> Result:
    result = Result("million", f"looks at {SIZES[0]:,} to {SIZES[-1]:,} simulated shards")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        for shards in SIZES:
            index = str(Path(folder, f"{shards}.json"))
            _alone(context, write_index, shards, index)
            for look in (without_index, first_look, later_looks, resuming):
                for name, figures in _alone(context, look, shards, index).items():
                    result.figures.setdefault(name, {})[str(shards)] = figures
    for name, found in result.figures.items():
        result.at_most(f"bytes a shard, {name}", bytes_a_shard(found), 100.0)
    million = str(SIZES[-1])
    result.at_most("seconds of a status", result.figures["status"][million]["seconds"], 60.0)
    requests = {name: found["requests"] for name, found in result.figures["second look"].items()}
    result.equal("requests of a second look", requests[million], requests[str(SIZES[0])])
    result.figures["seconds of 1000 lookups in a plan"] = lookups()
    return result


def bytes_a_shard(found: dict[str, dict[str, Any]]) -> float:
    """How much the highest memory grows between the two largest sizes.

    Below a hundred folders it grows with the folders that are on their way at once.
    """
    (few, less), (many, more) = sorted((int(n), f["peak_mb"]) for n, f in found.items())[-2:]
    return float((more - less) * 2**20 / (many - few))


def write_index(shards: int, index: str) -> None:
    from tests.simulated import index_of

    Path(index).write_bytes(index_of(shards - LACKING))


def without_index(shards: int, index: str) -> Figures:
    """Opening and status where every record must be read."""
    with _opened(shards, None) as (root, store, start):
        return {"no index": _timed(root.status, store, above=start)}


def first_look(shards: int, index: str) -> Figures:
    """Opening and status from an index."""
    with _opened(shards, index) as (root, store, start):
        return {"status": _timed(root.status, store, above=start)}


def later_looks(shards: int, index: str) -> Figures:
    """Status again: nothing changed, a folder grew; and what is missing, walked through."""
    with _opened(shards, index) as (root, store, start):
        root.status()
        found = {"second look": _timed(root.status, store, above=start)}
        store.done += GROWN
        found["one folder grew"] = _timed(root.status, store, above=start)
        found["missing"] = _timed(lambda: sum(1 for _ in root.missing()), store, above=start)
        assert root.missing() == range(store.done, shards)
        return found


def resuming(shards: int, index: str) -> Figures:
    """What `semix resume` looks at before it starts a flow: sizes of all files, what lacks."""
    from flows.selection import Selection

    def look(root: Any) -> None:
        assert [problem.kind for problem in root.verify()] == ["prototypes"]  # there are none
        assert len(Selection(skip_failed="1%").wanted(root)) == LACKING

    with _opened(shards, index) as (root, store, start):
        return {"resume": _timed(lambda: look(root), store, above=start)}


def lookups() -> dict[str, float]:
    """A plan's shards are arithmetic: the last of a thousand costs what that of a million does."""
    from data.settings import load_settings
    from pipeline.config import BuildConfig
    from pipeline.plan import BuildPlan

    found = {}
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
        found[str(shards)] = time.process_time() - start
    return found


@contextmanager
def _opened(shards: int, index: str | None) -> Iterator[tuple[Any, Any, float]]:
    """A simulated root, its store, and the megabytes that this process has before it."""
    import flows.selection  # noqa: F401 - imports are not what is measured
    from tests.simulated import SimulatedShards, simulated

    content = Path(index).read_bytes() if index else None
    store = SimulatedShards(shards, shards - LACKING, index=content)
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is that of now
    start = _highest_mb()
    with simulated(store) as root:
        yield root, store, start


def _timed(look: Callable[[], object], store: Any, *, above: float) -> dict[str, Any]:
    store.requests.clear()
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
    """In a process of its own, so that no other measurement's memory is in it."""
    with context.Pool(1) as pool:
        return pool.apply(work, arguments)


if __name__ == "__main__":
    print(json.dumps(run().figures, indent=1))
