"""Ten thousand shards that cost nothing through the build flow: memory, requests, files left."""

import multiprocessing
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from benchmarks.idle import idle_root, idle_workers, own_prefect
from benchmarks.measure import Result
from semix.data.root import Root

SHARDS, SLOTS = 10_000, 2
LOOK_EVERY_S = 1.0
WARM_FRACTION = 0.1  # fraction of the shards after which a process has loaded what it needs
MAX_TASK_RUNS = 200
TABLES = ("flow_run", "task_run", "log", "events", "artifact", "artifact_collection")


@dataclass
class Watch:
    """Shards done and megabytes of each process, every second.

    Attributes:
        memory: per role (flow, server, slot 0 ..) rows of shards done, resident and unique MB.
    """

    root: Root
    flow: psutil.Process
    memory: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)

    def record_memory(self) -> None:
        done = sum(1 for _ in Path(self.root.url).glob("shards/*/*.json"))
        for process in [self.flow, *self.flow.children(recursive=True)]:
            try:
                used = process.memory_full_info()
                row = (done, used.rss / 2**20, used.uss / 2**20)
                self.memory.setdefault(role(process.cmdline()), []).append(row)
            except psutil.Error:
                continue  # the process ended meanwhile

    def growth(self) -> dict[str, dict[str, float]]:
        """Per process, between warm-up and last shard: its unique MB, and their slope."""
        fits, last = {}, self.root.plan.num_shards
        for name, rows in self.memory.items():
            warm = np.array([row for row in rows if WARM_FRACTION * last <= row[0] < last])
            if len(warm) > 2:
                done, _, megabytes = warm.T
                fits[name] = {
                    "first_mb": float(np.median(megabytes[: len(megabytes) // 10 + 1])),
                    "last_mb": float(np.median(megabytes[-(len(megabytes) // 10 + 1) :])),
                    "peak_resident_mb": max(row[1] for row in rows),  # with start and end
                    "mb_a_thousand_shards": float(np.polyfit(done / 1000, megabytes, 1)[0]),
                }
        return fits


def run() -> Result:
    result = Result("shards", f"{SHARDS:,} shards that cost nothing, {SLOTS} slots, one flow")
    with own_prefect() as home:
        root = idle_root(SHARDS)
        process = multiprocessing.get_context("spawn").Process(target=flow, args=(root.url,))
        start = time.perf_counter()
        process.start()
        watch = Watch(root, psutil.Process(process.pid))
        while process.is_alive():
            watch.record_memory()
            process.join(LOOK_EVERY_S)
        seconds = time.perf_counter() - start
        assert process.exitcode == 0, "the flow failed"
        check_store(result, Root(root.url))
        check_database(result, home)
    growth = watch.growth()
    flat = growth["flow"]["last_mb"] / growth["flow"]["first_mb"]
    result.at_most(f"memory of the flow, last over first after {WARM_FRACTION:.0%}", flat, 1.1)
    result.figures |= {
        "seconds": seconds,
        "shards_a_second": SHARDS / seconds,
        "memory": growth,
        "flow_samples": watch.memory["flow"][:: max(1, len(watch.memory["flow"]) // 20)],
    }
    return result


def flow(url: str) -> None:
    """Run the flow in a separate process, as `semix resume` does."""
    from semix.flows.build import resume

    with idle_workers():
        resume(Root(url), slots=SLOTS)


def role(command: list[str]) -> str:
    if "semix.flows.run_server" in command:
        return "server"
    slots = [word.removeprefix("--slot=") for word in command if word.startswith("--slot=")]
    if slots:
        return f"slot {slots[0]}"
    return "flow" if any("spawn_main" in word for word in command) else "other"


def check_store(result: Result, root: Root) -> None:
    """Check that the store holds every shard once and nothing else."""
    result.equal("shards missing", len(root.missing()), 0)
    result.equal("shards committed", root.progress().done, SHARDS)
    names = root.store.list("shards")
    for kind, ending in (("records", ".json"), ("tars", ".tar"), ("features", ".safetensors")):
        result.equal(f"{kind} in the store", sum(name.endswith(ending) for name in names), SHARDS)
    result.equal("leases left", len(root.store.list("leases")), 0)
    result.equal("failures", len(root.failures()), 0)
    result.equal("indices", len(root.indices()), 1)


def check_database(result: Result, home: Path) -> None:
    """Check the number of task runs in Prefect's database, and add its size to the result."""
    sizes = {path.name: path.stat().st_size for path in home.glob("prefect.db*")}
    with sqlite3.connect(f"file:{home / 'prefect.db'}?mode=ro", uri=True) as database:
        counts = {table: database.execute(f"select count(*) from {table}") for table in TABLES}
        rows = {table: cursor.fetchone()[0] for table, cursor in counts.items()}
    result.at_most("task runs", rows["task_run"], MAX_TASK_RUNS)
    result.figures |= {"rows": rows, "database_bytes": sum(sizes.values())}
