"""C10: a flow of shards that cost nothing, against the same workers without Prefect."""

import subprocess
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

from benchmarks.idle import call_in_new_process, copy_plan, idle_root, idle_workers
from benchmarks.measure import Result
from semix.data.root import Root

SLOTS = 2
# Number of turns of each side, per seconds that a shard sleeps and per number of shards.
TURNS = {0.0: {1: 3, 10: 3, 100: 2, 1000: 1}, 1.0: {1: 1, 10: 1, 100: 1}}
SETTLE_S = 2.0  # the server has events left to write when a flow ends
SHARD_S, MANY = 30.0, 100  # the run for which BAR holds
BAR = 0.01

Sides = dict[str, list[float]]


def run() -> Result:
    result = Result("C10", f"shards of 0 s and 1 s in {SLOTS} slots: flow over workers alone")
    report(result, *call_in_new_process(measure))
    return result


def measure() -> tuple[float, dict[float, dict[int, Sides]]]:
    """Seconds of a server's start; those of both sides per seconds a shard sleeps and shards."""
    start = time.perf_counter()
    from semix.flows.run_server import prefect_server

    with prefect_server():
        server_s = time.perf_counter() - start
        plans = {count: idle_root(count) for count in {*TURNS[0.0], *TURNS[1.0]}}
        return server_s, {
            seconds: {count: time_sides(plans[count], seconds, n) for count, n in turns.items()}
            for seconds, turns in TURNS.items()
        }


def report(result: Result, server_s: float, turns: dict[float, dict[int, Sides]]) -> None:
    overhead = {
        seconds: {
            count: median(side["flow"]) - median(side["plain"]) for count, side in row.items()
        }
        for seconds, row in turns.items()
    }
    counts = sorted(overhead[0.0])
    line = np.polyfit(counts, [overhead[0.0][count] for count in counts], 1)
    per_shard_s, fixed = (float(value) for value in line)
    work_s = MANY * SHARD_S / SLOTS
    fraction = (server_s + max(overhead[1.0][MANY], fixed + MANY * per_shard_s)) / work_s
    result.at_most(f"overhead of {MANY} shards of {SHARD_S:g} s, all of it", fraction, BAR)
    per_shard = max(per_shard_s, overhead[1.0][MANY] / MANY) * SLOTS / SHARD_S
    result.at_most(f"overhead a shard of {SHARD_S:g} s, a running server", per_shard, BAR)
    result.figures |= {
        "server_start_seconds": server_s,
        "flow_fixed_seconds": fixed,
        "flow_seconds_a_shard": per_shard_s,
        "overhead_seconds_a_shard": {
            f"{seconds:g} s": {count: value / count for count, value in row.items()}
            for seconds, row in overhead.items()
        },
        "prefect_cpu_seconds_a_run": {
            f"{seconds:g} s": {count: median(side["prefect_cpu"]) for count, side in row.items()}
            for seconds, row in turns.items()
        },
        "plain_seconds_a_shard": marginal(turns[0.0], "plain"),
        "with_flow_seconds_a_shard": marginal(turns[0.0], "flow"),
        "wall_seconds": {f"{seconds:g} s": row for seconds, row in turns.items()},
    }


def marginal(turns: dict[int, Sides], side: str) -> float:
    """Wall seconds of one more shard, between the two longest runs."""
    few, many = sorted(turns)[-2:]
    return (median(turns[many][side]) - median(turns[few][side])) / (many - few)


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def time_sides(plan: Root, seconds: float, turns: int) -> Sides:
    """Wall seconds of a flow and of its workers alone, in turns; and CPU seconds of Prefect."""
    times: Sides = {"flow": [], "plain": [], "prefect_cpu": []}
    with idle_workers(seconds):
        for _ in range(turns):
            before = prefect_cpu()
            times["flow"].append(time_side(by_flow, copy_plan(plan)))
            time.sleep(SETTLE_S)
            times["prefect_cpu"].append(prefect_cpu() - before)
            times["plain"].append(time_side(by_workers, copy_plan(plan)))
    return times


def time_side(side: Any, root: Root) -> float:
    start = time.perf_counter()
    side(root)
    seconds = time.perf_counter() - start
    assert not root.missing(), "not all shards were made"
    return seconds


def by_flow(root: Root) -> None:
    from semix.flows.build import resume

    resume(root, slots=SLOTS)


def by_workers(root: Root) -> None:
    """The commands that a flow's slots run, without supervision."""
    from semix.flows import child
    from semix.flows.slots import SlotSettings, slot

    settings = SlotSettings(SLOTS)
    workers = []
    for number in range(SLOTS):
        arguments = slot.worker_arguments(root.url, number, SLOTS, settings=settings)
        command = child.python_module(slot.WORKER, *arguments)
        workers.append(child.start(command, stdout=subprocess.DEVNULL))
    for worker in workers:
        assert worker.wait() == 0
        child.end(worker)


def prefect_cpu() -> float:
    """CPU seconds so far of this process, where the flow runs, and of Prefect's server."""
    servers = [c for c in psutil.Process().children() if "semix.flows.run_server" in c.cmdline()]
    times = [process.cpu_times() for process in (psutil.Process(), *servers)]
    return sum(cpu.user + cpu.system for cpu in times)
