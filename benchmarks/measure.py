"""Interleaved repeats of several sides, ratios with bootstrap intervals, the result file."""

import datetime
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from semix.pipeline.provenance import library_versions

RESULTS = Path(__file__).parent / "results"
Sides = Mapping[str, Callable[[], object]]


@dataclass
class Result:
    """The result of one benchmark.

    Attributes:
        bars: name -> {"value", "bar", "holds"}; a bar is what performance must reach.
        figures: all other results, timings included.
    """

    name: str
    what: str
    bars: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def at_least(self, name: str, value: float, bar: float) -> None:
        self.bars[name] = {"value": value, "bar": f">= {bar:g}", "holds": value >= bar}

    def at_most(self, name: str, value: float, bar: float) -> None:
        self.bars[name] = {"value": value, "bar": f"<= {bar:g}", "holds": value <= bar}

    def equal(self, name: str, value: object, expected: object) -> None:
        self.bars[name] = {"value": value, "bar": f"= {expected}", "holds": value == expected}


def interleaved(
    sides: Sides, *, repeats: int = 5, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of each side, in turns A B A B, after one turn that warms up.

    Args:
        clock: process CPU time for work, `time.perf_counter` for overlap.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            gc.collect()
            start = clock()
            side()
            if turn:
                seconds[name].append(clock() - start)
    return seconds


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    """Ratio of the medians, with a 95 % interval by resampling the repeats of both sides."""
    rng = np.random.default_rng(0)
    ratios = [
        np.median(rng.choice(slow, len(slow))) / np.median(rng.choice(fast, len(fast)))
        for _ in range(2000)
    ]
    low, high = np.quantile(ratios, [0.025, 0.975])
    value = statistics.median(slow) / statistics.median(fast)
    return {"ratio": value, "interval": [float(low), float(high)]}


def slope(x: Sequence[float], seconds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Slope of log seconds over log x, with a 95 % interval by resampling the repeats."""
    rng = np.random.default_rng(0)

    def fit(values: Sequence[float]) -> float:
        return float(np.polyfit(np.log(x), np.log(values), 1)[0])

    slopes = [
        fit([float(np.median(rng.choice(row, len(row)))) for row in seconds]) for _ in range(2000)
    ]
    low, high = np.quantile(slopes, [0.025, 0.975])
    return {
        "x": list(x),
        "median_seconds": [statistics.median(row) for row in seconds],
        "slope": fit([statistics.median(row) for row in seconds]),
        "interval": [float(low), float(high)],
    }


def line(x: Sequence[float], seconds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Least squares seconds = a + b x over the medians, and the fraction of variance explained."""
    y = [statistics.median(row) for row in seconds]
    b, a = np.polyfit(x, y, 1)
    residual = np.square(np.asarray(y) - a - b * np.asarray(x)).sum()
    explained = 1 - residual / np.square(np.asarray(y) - np.mean(y)).sum()
    return {"x": list(x), "median_seconds": y, "a": float(a), "b": float(b), "r2": float(explained)}


def write(results: Sequence[Result], *, kind: str, device: str, config: dict[str, Any]) -> Path:
    """Write `results/DATE-KIND.json`; results of other benchmarks in that file stay."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = RESULTS / f"{today}-{kind}.json"
    earlier_results = json.loads(path.read_text())["results"] if path.is_file() else {}
    content = contents(results, device=device, config=config)
    content["results"] = dict(sorted((earlier_results | content["results"]).items()))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def contents(results: Sequence[Result], *, device: str, config: dict[str, Any]) -> dict[str, Any]:
    """The content of a result file: the results, their date, machine, versions and settings."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device,
        "machine": {"cores": os.cpu_count(), "cpu": cpu_name(), "system": platform.system()},
        "versions": library_versions(),
        "config": config,
        "results": {result.name: asdict(result) for result in results},
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")]
    return names[0] if names else platform.processor()


def show(result: Result) -> None:
    print(f"{result.name}: {result.what}", flush=True)
    for name, bar in result.bars.items():
        mark = "holds" if bar["holds"] else "MISSED"
        value = f"{bar['value']:.3f}" if isinstance(bar["value"], float) else bar["value"]
        print(f"  {name}: {value} (bar {bar['bar']}) {mark}", flush=True)
