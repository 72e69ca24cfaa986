"""Memory of one process that makes 100 shards, one after another."""

import multiprocessing
import resource
from pathlib import Path

from benchmarks.measure import Result

SHARDS = 100


def run() -> Result:
    result = Result("memory", f"resident memory after 1 and after {SHARDS} shards of 8 series")
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        first, last, peak = pool.apply(make_shards)
    result.figures |= {"MB after 1": first, f"MB after {SHARDS}": last, "peak MB": peak}
    result.at_most("growth", last / first, 1.05)
    return result


def make_shards() -> tuple[float, float, float]:
    """Resident megabytes after the first shard and after the last, and the peak."""
    from benchmarks.models import build_config, open_root
    from semix.pipeline.shard import generate_shard

    config = build_config("generator.steps=1", "mixing.groups_per_pair=18", "mixing.alphas=4")
    root, plan, models = open_root(config)
    resident = []
    for index in range(SHARDS):
        generate_shard(plan.shard(index), plan, models=models, root=root).publish()
        resident.append(resident_mb())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return resident[0], resident[-1], peak


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
