"""C15: calibrators on known truth at the size of ImageNet: NLL, time and memory of each.

Structured matrix scaling also beside that of probmetrics, by its authors, on the same logits.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.environments import make_environment
from benchmarks.measure import Result
from semix.calib.calibrators import CALIBRATORS
from semix.calib.temperature import fit_temperature

SAMPLES, CLASSES = 50_000, 1_000
PARTS = {"held_out": slice(0, SAMPLES), "test": slice(SAMPLES, None)}
GB = 1e9
PEER = ("probmetrics[extra]==1.3.0", "numba")
SCRIPT = Path(__file__).with_name("peer_calibrator.py")
NAMES = {"temperature": "scaled", "ets": "ets", "svs": "svs", "sms": "sms"}


def run() -> Result:
    """Fit each calibrator in a separate process, to measure its peak memory."""
    result = Result("C15", f"fitting calibrators to {SAMPLES:,} x {CLASSES:,} logits")
    runs: dict[str, dict[str, float]] = {}
    for name in NAMES:
        command = [sys.executable, "-m", "benchmarks.calibrators", name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        nll, truth, seconds, peak = map(float, output.split())
        runs[name] = {"nll": nll, "truth_nll": truth, "seconds": seconds, "peak_GB": peak}
    runs["sms of probmetrics"] = fit_by_peer()
    result.figures |= runs
    result.at_most("sms: NLL over that of svs", runs["sms"]["nll"] / runs["svs"]["nll"], 1.0)
    result.at_most(
        "svs: NLL over temperature's", runs["svs"]["nll"] / runs["temperature"]["nll"], 1.0
    )
    result.at_most("sms: GB of memory", runs["sms"]["peak_GB"], 8.0)
    peer = runs["sms of probmetrics"]
    result.at_most("sms: NLL over probmetrics'", runs["sms"]["nll"] / peer["nll"], 1.001)
    result.at_most("sms: seconds over probmetrics'", runs["sms"]["seconds"] / peer["seconds"], 1.0)
    return result


def fit_by_peer() -> dict[str, float]:
    """What probmetrics' structured matrix scaling needs and gives, in its own environment."""
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as name:
        folder = Path(name)
        python = make_environment(folder / "peer", PEER, shared=["torch"])
        logits, targets, _ = random_logits(2 * SAMPLES, CLASSES, seed=1)
        for part, rows in PARTS.items():
            np.save(folder / f"{part}_logits.npy", logits[rows].numpy())
            np.save(folder / f"{part}_targets.npy", targets[rows].numpy())
        command = [python, "-W", "ignore", str(SCRIPT), name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    return measured


def random_logits(samples: int, classes: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets, and the true logits of the targets: scaled per class, shifted, confused."""
    rng = torch.Generator().manual_seed(seed)
    class_rng = torch.Generator().manual_seed(0)
    scale = 0.4 + 0.2 * torch.rand(classes, generator=class_rng)
    shift = 0.5 * torch.randn(classes, generator=class_rng)
    confused_with = torch.randperm(classes, generator=class_rng)
    logits = torch.randn(samples, classes, generator=rng)
    peaks = torch.randint(classes, (samples,), generator=rng)
    logits[torch.arange(samples), peaks] += 10
    truth = logits * scale + shift + 0.15 * logits[:, confused_with]
    return logits, torch.multinomial(truth.softmax(1), 1, generator=rng)[:, 0], truth


def fit_and_measure(name: str) -> str:
    logits, targets, truth = random_logits(2 * SAMPLES, CLASSES, seed=1)
    held_out, test = PARTS["held_out"], PARTS["test"]
    start = time.perf_counter()
    temperature = fit_temperature(logits[held_out], targets[held_out])
    calibrator = CALIBRATORS[NAMES[name]].fit(logits[held_out], targets[held_out], temperature)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
    nll = functional.cross_entropy(calibrator(logits[test]), targets[test]).item()
    truth_nll = functional.cross_entropy(truth[test], targets[test]).item()
    return f"{nll} {truth_nll} {seconds} {peak}"


if __name__ == "__main__":
    print(fit_and_measure(sys.argv[1]))
