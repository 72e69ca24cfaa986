"""C17: predicting many small pictures, against a bare DataLoader loop of the same network."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import Result, ratio
from semix.calib.classifier import CalibratedClassifier, load_classifier
from semix.calib.config import TrainConfig
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from semix.data.settings import load_settings
from semix.flows.predict import BATCH, Columns, find_pictures, open_rows, predict

PICTURES, ROUNDS, WORKERS, SIDE = 400 * BATCH, 3, 2, 32  # the last batch is as large as others
OURS = "semix predict"
# Else glibc keeps some of the network's buffers, now more, now fewer, which hides what is measured.
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
CONFIG = {
    "name": "network",
    "real": {"name": "digits", "image_size": SIDE},
    "model": {"name": "resnet20"},
    "epochs": 1,
    "trackers": [],
    "evaluation": {"bootstrap": 0},
}


def run() -> Result:
    result = Result("C17", f"predicting {PICTURES:,} pictures of {SIDE} px, resnet20")
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as name:
        folder = write_pictures(Path(name, "pictures"), PICTURES)
        trained = claim_run(load_settings(TrainConfig, CONFIG), Path(name, "run")).parent
        train_run(trained)
        sides: dict[str, list[float]] = {OURS: [], "bare loop": []}
        for _ in range(ROUNDS):
            for side, seconds in sides.items():
                seconds.append(measured(side, folder, trained)[0])
        _, early, late = measured(OURS, folder, trained, **FREED_AT_ONCE)
        rates = {side: [PICTURES / each for each in seconds] for side, seconds in sides.items()}
        result.figures |= {"pictures per second": rates, "memory, MB": [early, late]}
        speed = ratio(sides["bare loop"], sides["semix predict"])
        result.figures["speed over the bare loop"] = speed
        result.at_least("pictures per second, over the bare loop", speed["ratio"], 0.95)
        result.at_most("memory at the end, over that after a tenth", late / early, 1.05)
    return result


def measured(side: str, folder: Path, trained: Path, **variables: str) -> list[float]:
    """Seconds and memory of a process of its own: see `main`."""
    command = [sys.executable, "-m", "benchmarks.predicting", side, str(folder), str(trained)]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **variables}
    ).stdout
    return [float(figure) for figure in output.splitlines()[-1].split()]


def write_pictures(folder: Path, count: int) -> Path:
    """Noise in folders of a thousand."""
    rng = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number // 1000:03d}" / f"{number:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)).save(path)
    return folder


class Files(Dataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.rglob("*.png"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.asarray(Image.open(self.paths[index]).convert("RGB")))


def bare_loop(classifier: CalibratedClassifier, folder: Path) -> Iterator[int]:
    """Yield the number of pictures after each batch."""
    loader = DataLoader(Files(folder), BATCH, num_workers=WORKERS)
    network, done = classifier.networks[0], 0
    with torch.no_grad():
        for images in loader:
            network(images).softmax(1).max(1)
            done += len(images)
            yield done


def used() -> float:
    """Memory of this process and its workers, which share pages, in MB."""
    this = psutil.Process()
    return sum(each.memory_full_info().pss for each in (this, *this.children())) / 1e6


def main(side: str, folder: Path, trained: Path) -> None:
    """Print seconds, and memory in MB after a tenth of the pictures and with the last ones."""
    classifier = load_classifier(trained, calibrator="scaled")
    memory: list[float] = []

    def note(done: int) -> None:
        if done == PICTURES or (done >= PICTURES // 10 and not memory):
            memory.append(used())

    started = time.perf_counter()
    if side == "bare loop":
        for done in bare_loop(classifier, folder):
            note(done)
    else:
        columns = Columns()
        with open_rows(str(folder.parent / "rows.csv"), columns.types()) as write:
            predict(classifier, find_pictures([str(folder)]), columns, write, progress=note)
    seconds = time.perf_counter() - started
    print(seconds, *memory)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
