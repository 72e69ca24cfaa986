"""A worker whose models cost nothing: leases, shards and commits as usual, no generation.

    python -m benchmarks.idle_worker URL --slot 0 --slots 2

takes the arguments of `semix.pipeline.worker`; each batch takes SEMIX_IDLE_SECONDS, asleep.
"""

import os
import sys
from collections.abc import Callable

from benchmarks.idle import SLEEP_VARIABLE
from benchmarks.pictures import blending_models
from semix.pipeline import shard, worker
from semix.pipeline.plan import BuildPlan

SIZE = 8  # side of an image, pixels


def load_nothing(
    plan: BuildPlan, prototypes: bytes, *, device: str, heartbeat: Callable[[], None] = lambda: None
) -> shard.Models:
    seconds = float(os.environ.get(SLEEP_VARIABLE, "0"))
    return blending_models(plan, prototypes, size=SIZE, seconds=seconds)


if __name__ == "__main__":
    shard.load_models = load_nothing
    sys.exit(worker.main())
