"""Run benchmarks: `python -m benchmarks [NAME ...]`, or `python -m benchmarks gpu [NAME ...]`."""

import argparse
import importlib
import os
import sys
import time

# The libraries read these once. CPU time is that of one thread; waiting threads must not spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CPU = {
    "C1": "sampler",
    "C2": "rows",
    "C3": "relabel",
    "C4": "encoding",
    "C5": "reading",
    "C6": "draws",
    "C7": "head",
    "C8": "metrics",
    "C9": "planning",
    "C10": "orchestration",
    "C11": "noise_search",
    "C12": "overlap",
    "C13": "training_step",
    "C14": "real_images",
    "C15": "calibrators",
    "C16": "peers",
    "C17": "predicting",
    "slots": "slots",
    "shards": "many_shards",
    "million": "million",
    "slopes": "slopes",
    "memory": "memory",
    "clip": "clip_precision",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CPU)}; all by default")
    options = parser.parse_args()
    unknown = set(options.names) - set(CPU)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    from benchmarks.measure import show, write

    missed = 0
    for name in options.names or CPU:
        start = time.perf_counter()
        result = importlib.import_module(f"benchmarks.{CPU[name]}").run()
        result.figures["benchmark_seconds"] = round(time.perf_counter() - start, 1)
        show(result)
        missed += sum(not bar["holds"] for bar in result.bars.values())
        # Written after each benchmark, so that an interrupted run keeps its results.
        path = write([result], kind="cpu", device="cpu", config={"threads": 1})
    print(f"{missed} bars missed; {path}")
    return 0  # a missed bar is a finding, not a crash


if __name__ == "__main__":
    sys.exit(main())
