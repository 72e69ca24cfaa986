"""C14: real images that do not fit into memory, against torchvision's ImageFolder."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import CenterCrop, Compose, InterpolationMode, PILToTensor, Resize

from benchmarks.encoding import crops
from benchmarks.measure import Result, interleaved, ratio
from semix.calib.real_images import StreamedImages
from semix.data.machine import cores
from semix.data.real import RealDataConfig, load_real

BATCH, REPEATS, PICTURES = 128, 3, 100
FILES = {32: (32, 12_000), 224: (288, 1_500)}  # side of training images -> side and number of files


def run() -> Result:
    result = Result("C14", "an epoch of real images read by workers, beside ImageFolder's")
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        for side, (pixels, count) in FILES.items():
            files = Path(folder, str(side))
            write(files, pixels=pixels, count=count)
            compare_with_image_folder(result, files, side)
    return result


def write(folder: Path, *, pixels: int, count: int) -> None:
    """JPEG files of two classes, in the layout of train/ and test/."""
    pictures = [Image.fromarray(picture).resize((pixels, pixels)) for picture in crops(PICTURES)]
    for number in range(count):
        for split in ("train", "test") if number < 4 else ("train",):
            path = folder / split / "ab"[number % 2] / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pictures[number % PICTURES].save(path, quality=90)


def compare_with_image_folder(result: Result, folder: Path, side: int) -> None:
    """Seconds of an epoch of shuffled uint8 batches, with the same number of workers per side."""
    workers = cores()
    real = load_real(
        RealDataConfig(
            name="imagefolder", path=str(folder), image_size=side, validation_per_class=1
        )
    )
    images = StreamedImages(real.train, side, workers=workers)
    size = Resize(side, interpolation=InterpolationMode.BICUBIC)
    peer = ImageFolder(str(folder / "train"), Compose([size, CenterCrop(side), PILToTensor()]))
    memory: list[float] = []

    def ours() -> None:
        with closing(images.chunks(torch.randperm(len(images)).split(BATCH))) as batches:
            drain(batches, memory)

    def theirs() -> None:
        loader = DataLoader(peer, batch_size=BATCH, shuffle=True, num_workers=workers)
        drain((batch for batch, _ in loader), [])

    sides = {"ours": ours, "ImageFolder": theirs}
    wall = interleaved(sides, repeats=REPEATS, clock=time.perf_counter)
    speedup = ratio(wall["ImageFolder"], wall["ours"])
    result.at_least(f"{side} px, ratio to ImageFolder", speedup["ratio"], 1.0)
    growth = max(memory[1:]) / memory[0]
    result.at_most(f"{side} px, memory of later epochs over the first's", growth, 1.05)
    result.figures[f"{side} px"] = {
        "ratio": speedup,
        "wall_seconds": wall,
        "images_a_second": len(images) / min(wall["ours"]),
        "mib_with_workers_by_epoch": memory,
        "workers": workers,
    }


def drain(batches: Iterator[Tensor], memory: list[float]) -> None:
    """Take every batch; append the peak memory of this process and its workers, MiB."""
    peak, parent = 0.0, psutil.Process()
    for number, _ in enumerate(batches):
        if number % 8 == 0:
            family = [parent, *parent.children(recursive=True)]
            peak = max(peak, sum(process.memory_full_info().pss for process in family) / 2**20)
    memory.append(peak)
