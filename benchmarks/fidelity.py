"""What approximate options do to the dataset and to a classifier trained on it, at equal count.

    python -m benchmarks.fidelity [OPTION ...] [--seeds 5] [--groups-per-pair 3]

Runs on the stand-ins, or with real weights on `--config CONFIG`. For each option it builds the
mixed dataset, reads the gate's verdict, trains the quickstart's CSM on it, and compares accuracy
and ECE with the exact recipe's over the same seeds, and with the exact recipe from other noises.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

OPTIONS: dict[str, tuple[str, ...]] = {
    "unipc 10 steps": ("approximate.scheduler=unipc", "approximate.steps=10"),
    "dpmpp_2m 10 steps": ("approximate.scheduler=dpmpp_2m", "approximate.steps=10"),
    "guidance in the first 60 %": ("approximate.guidance_interval=[0, 0.6]",),
    "deep features every 2nd step": ("approximate.cache_steps=2",),
    "4 anchors of 8 alphas": ("approximate.cache_anchors=4",),
}
RECIPES = {"exact": (), "exact, other noises": (), **OPTIONS}
TRAINING = Path(__file__).parents[1] / "configs" / "quickstart" / "csm-chosen-noise.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity")
    parser.add_argument("options", nargs="*", help=f"of {', '.join(OPTIONS)}; all by default")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--groups-per-pair", type=int, default=3)
    parser.add_argument("--config", type=Path, help="a BuildConfig; the stand-ins by default")
    options = parser.parse_args()
    wanted = options.options or list(OPTIONS)
    unknown = set(wanted) - set(OPTIONS)
    if unknown:
        parser.error(f"no such option: {', '.join(sorted(unknown))}")
    from benchmarks.measure import Result, write
    from flows.server.run_server import prefect_server

    result = Result("fidelity", "approximate options: the gate, and a classifier trained on each")
    with prefect_server(), tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        for name in ["exact", "exact, other noises", *wanted]:
            place = Path(folder) / name.replace(" ", "-").replace(",", "")
            found = measure(name, place, options)
            result.figures[name] = found
            print(f"{name}: {json.dumps(found)}", flush=True)
    exact = result.figures["exact"]
    for name in wanted:
        for measure_name in ("accuracy", "ece"):
            gap = abs(result.figures[name][measure_name]["mean"] - exact[measure_name]["mean"])
            spread = exact[measure_name]["sd"]
            result.at_most(f"{name}: {measure_name} gap over the seeds' sd", gap / spread, 1.0)
    config = {"seeds": options.seeds, "groups_per_pair": options.groups_per_pair}
    print(write([result], kind="fidelity", device="cpu", config=config))


def measure(name: str, place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Build, train, evaluate one recipe."""
    from data.files import read_json
    from flows.build import build
    from flows.train import train

    config = recipe(name, options)
    root = build(config, str(place / "mixed"))
    seeds = list(range(options.seeds))
    overrides = [f"mixed.url={root.url}", f"seeds={seeds}", "name=CSM"]
    run = train(TRAINING, place / "run", overrides=overrides)
    rows = read_json(run / "evaluation.json")["rows"]
    progress = root.progress()
    found: dict[str, Any] = {"images_per_second": progress.images_done / progress.seconds}
    for key in ("accuracy", "ece", "nll"):
        values = [row["plain"][key] for row in rows]
        found[key] = {"mean": statistics.mean(values), "sd": statistics.stdev(values)}
    if root.store.exists("fidelity.json"):
        found["gate"] = json.loads(root.store.get("fidelity.json"))
    return found


def recipe(name: str, options: argparse.Namespace) -> Any:
    from benchmarks.models import build_config
    from data.settings import load_settings
    from pipeline.config import BuildConfig

    changes = [f"generator.{change}" for change in RECIPES[name]]
    if changes:
        changes.append("generator.approximate.accept_failure=true")
    if name == "exact, other noises":
        changes.append("mixing.seed=1")
    changes.append(f"mixing.groups_per_pair={options.groups_per_pair}")
    if options.config is not None:
        return load_settings(BuildConfig, options.config, changes)
    return build_config("generator.steps=20", "annotation.scale=2.3", *changes)


if __name__ == "__main__":
    main()
