"""Run GPU benchmarks: `python -m benchmarks.gpu [NAME ...] [--device cuda] [--size sd15]`.

`python -m benchmarks.gpu study --images FOLDER --out DIR` runs a whole study; see its `--help`.
"""

import argparse
import importlib
import sys
import time
import traceback

GPU = {
    "G1": "sampling:g1_sampler",
    "G2": "sampling:g2_batch_curve",
    "G3": "sampling:g3_compile",
    "G4": "parts:g4_decode",
    "G5": "parts:g5_clip",
    "G6": "end_to_end:g6_end_to_end",
    "G7": "parts:g7_noise",
    "G8": "sampling:g8_fast_paths",
    "G9": "training:g9_training",
    "G10": "head:g10_head_stage",
    "G11": "sampling:g11_sdxl",
    "G12": "end_to_end:g12_determinism",
    "G13": "flow:g13_flow",
}


def main() -> int:
    if sys.argv[1:2] == ["study"]:
        from benchmarks.gpu.study import main as study

        return study(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(GPU)}; all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="sd15", help="sd15, or tiny to try it without a GPU")
    parser.add_argument(
        "--cap", type=float, default=240, help="seconds after which no benchmark starts"
    )
    options = parser.parse_args()
    unknown = set(options.names) - set(GPU)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    from benchmarks.gpu.bench import Bench
    from benchmarks.measure import show, write

    bench = Bench(options.device, options.size)
    start = time.perf_counter()
    failed = 0
    for name in options.names or GPU:
        if time.perf_counter() - start > options.cap:
            print(f"{name}: not started, {options.cap:.0f} s are over", flush=True)
            continue
        module, function = GPU[name].split(":")
        try:
            result = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(bench)
        except Exception:  # after a failure the other benchmarks still run
            traceback.print_exc()
            failed += 1
            continue
        show(result)
        config = {"size": options.size, "dtype": bench.dtype, "gemm_tflops": bench.gemm_tflops}
        # Written after each benchmark, so that an interrupted run keeps its results.
        write([result], kind=f"gpu-{options.size}", device=bench.device_name, config=config)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
