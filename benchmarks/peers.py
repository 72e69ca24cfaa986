"""C16: reading a mixed dataset, against the libraries that a user would pick instead."""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.encoding import crops
from benchmarks.environments import make_environment
from benchmarks.measure import Result, ratio
from benchmarks.peer_reading import READERS, WITH_SEMIX
from benchmarks.reading import LARGE, SMALL, small_crops, write_root
from semix.data.export import write_hugging_face
from semix.data.pinned import PinnedRoot

PEERS = ("litdata==0.2.76", "mosaicml-streaming==0.13.0")  # need an older numpy than semix
SHARED = ("torch", "pillow", "psutil")  # in the same version on both sides
SCRIPT = Path(__file__).with_name("peer_reading.py")
ALPHAS, ROUNDS, EPOCHS = 8, 3, 3
SERIES, BATCH = {SMALL: 1500, LARGE: 64}, {SMALL: 128, LARGE: 32}
WORKERS = (0, 2)
OWN = tuple(name for name in READERS if name.startswith("semix"))

Cell = tuple[int, int, str]  # pixels, workers, reader


def run() -> Result:
    counts = " and ".join(f"{SERIES[size] * ALPHAS:,} images of {size} px" for size in SERIES)
    result = Result("C16", f"{counts}, {ROUNDS} processes of {EPOCHS} epochs per reader, in turns")
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as name:
        pythons = environments(Path(name, "peers"))
        folders = {size: write_formats(Path(name, str(size)), size, pythons) for size in SERIES}
        same_content(result, folders, pythons)
        result.figures["versions"] = versions(pythons)
        result.figures["load_before"] = psutil.getloadavg()[0]
        compare(result, measurements(folders, pythons))
        result.figures["load_after"] = psutil.getloadavg()[0]
    return result


def environments(folder: Path) -> dict[str, str]:
    """The Python of each reader: this one, or a new one of the peers that do not fit in here."""
    python = make_environment(folder, PEERS, shared=SHARED)
    return {reader: sys.executable if reader in WITH_SEMIX else python for reader in READERS}


def versions(pythons: dict[str, str]) -> dict[str, dict[str, str]]:
    """Versions by environment."""
    names = ["torch", "pillow", "numpy", "webdataset", "datasets", "litdata", "mosaicml-streaming"]
    code = (
        "import importlib.metadata as m, json; have = {d.name: d.version for d in "
        f"m.distributions()}}; print(json.dumps({{n: have[n] for n in {names} if n in have}}))"
    )
    found = {}
    for name, reader in (("with semix", OWN[0]), ("of their own", "litdata")):
        answer = subprocess.run(
            [pythons[reader], "-c", code], check=True, capture_output=True, text=True
        )
        found[name] = json.loads(answer.stdout)
    return found


def write_formats(folder: Path, size: int, pythons: dict[str, str]) -> Path:
    """The same encoded images and labels as a root and in the formats of all peers."""
    pixels = small_crops if size == SMALL else crops
    images = pixels(SERIES[size] * ALPHAS)
    root = write_root(folder / "root", images.reshape(-1, ALPHAS, size, size, 3))
    write_hugging_face(PinnedRoot(root), folder / "huggingface")
    subprocess.run([pythons["litdata"], SCRIPT, "write", folder], check=True)
    return folder


def same_content(result: Result, folders: dict[int, Path], pythons: dict[str, str]) -> None:
    """Every reader gives every image with its label once per epoch."""
    for size, folder in folders.items():
        for workers in WORKERS:
            epochs = {
                reader: epochs_of(pythons[reader], reader, folder, size, workers, "--digest")[0]
                for reader in READERS
            }
            contents = {(e["images"], e["digest"]) for both in epochs.values() for e in both}
            count = {images for images, _ in contents} == {SERIES[size] * ALPHAS}
            check = f"{size} px, {workers} workers: equal images and labels from all readers"
            result.equal(check, count and len(contents) == 1, True)


def measurements(folders: dict[int, Path], pythons: dict[str, str]) -> dict[Cell, list[Any]]:
    """The epochs and the peak memory of each process, by pixels, workers and reader."""
    measured: dict[Cell, list[Any]] = {}
    for _ in range(ROUNDS):
        for size, folder in folders.items():
            for workers in WORKERS:
                for reader, python in pythons.items():
                    one = epochs_of(python, reader, folder, size, workers)
                    measured.setdefault((size, workers, reader), []).append(one)
    return measured


def epochs_of(
    python: str, reader: str, folder: Path, size: int, workers: int, *more: str
) -> tuple[list[dict[str, float]], float]:
    """What each epoch of one process measured, and the process's peak memory, MB."""
    settings = ["--epochs", str(EPOCHS), "--batch", str(BATCH[size]), "--workers", str(workers)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [python, SCRIPT, reader, folder, *settings, *more],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        peak: list[float] = [0.0]
        watch = threading.Thread(target=watch_memory, args=(process, peak))
        watch.start()
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        watch.join()
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{reader} ended with status {process.returncode}: {errors.read()}")
    return [json.loads(line) for line in lines if line.startswith("{")], peak[0]


def watch_memory(process: "subprocess.Popen[str]", peak: list[float]) -> None:
    """Proportional set size of the process and its workers, MB; shared pages count once."""
    while process.poll() is None:
        try:
            parent = psutil.Process(process.pid)
            family = [parent, *parent.children(recursive=True)]
            used = sum(member.memory_full_info().pss for member in family) / 1e6
            peak[0] = max(peak[0], used)
        except psutil.Error:
            pass  # a process ended meanwhile
        time.sleep(0.1)


def compare(result: Result, measured: dict[Cell, list[Any]]) -> None:
    """Figures of each cell; images/s of semix from files against the quickest peer's."""
    for size in SERIES:
        for workers in WORKERS:
            cells = {reader: measured[size, workers, reader] for reader in READERS}
            walls = {reader: later(runs, "wall_s") for reader, runs in cells.items()}
            name = f"{size} px, {workers} workers"
            result.figures[name] = {r: summary(runs) for r, runs in cells.items()}
            peers = {reader: wall for reader, wall in walls.items() if reader not in OWN}
            quickest = min(peers, key=lambda reader: statistics.median(peers[reader]))
            result.figures[name]["quickest peer"] = quickest
            for reader in OWN:
                speedup = ratio(peers[quickest], walls[reader])
                result.figures[name][f"{reader}, ratio to it"] = speedup
                if reader != OWN[0]:  # from files, as the peers
                    result.at_least(f"{name}, {reader}, to {quickest}", speedup["ratio"], 1.0)


def later(runs: list[Any], value: str) -> list[float]:
    """A value of all epochs but the first of each process."""
    return [epoch[value] for epochs, _ in runs for epoch in epochs[1:]]


def summary(runs: list[Any]) -> dict[str, Any]:
    """Medians over the processes, and the range of images/s."""
    images = runs[0][0][1]["images"]
    rates = np.array([images / seconds for seconds in later(runs, "wall_s")])
    return {
        "images_per_s": float(np.median(rates)),
        "range": [float(rates.min()), float(rates.max())],
        "first_epoch_images_per_s": statistics.median(images / e[0]["wall_s"] for e, _ in runs),
        "cpu_ms_per_image": 1000 * statistics.median(later(runs, "cpu_s")) / images,
        "first_batch_s": statistics.median(epochs[0]["ready_s"] for epochs, _ in runs),
        "peak_mb": statistics.median(peak for _, peak in runs),
    }
