"""C5: epochs from memory against ImageFolder; the stream and the shards against webdataset."""

import io
import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import PILToTensor

from benchmarks.encoding import crops
from benchmarks.measure import Result, interleaved, ratio
from semix.data.dataset import MixedDataset
from semix.data.images import encode_image
from semix.data.root import Root
from semix.data.store import Store
from semix.data.stream import mixed_pipeline
from semix.data.tar import GroupSample
from tests import handmade

ALPHAS, BATCH, EPOCHS = 8, 128, 2
SMALL, SMALL_SERIES, STREAMED_SERIES = 32, 2500, 500
LARGE, LARGE_SERIES, LARGE_BATCH = 512, 24, 16
SERIES_A_SHARD = {SMALL: 125, LARGE: 8}


def run() -> Result:
    count = SMALL_SERIES * ALPHAS
    result = Result("C5", f"{count:,} images of {SMALL} px and {LARGE_SERIES * ALPHAS} of {LARGE}")
    with tempfile.TemporaryDirectory(prefix="semix-bench-") as folder:
        small = small_crops(count).reshape(SMALL_SERIES, ALPHAS, SMALL, SMALL, 3)
        root = write_root(Path(folder, "small"), small)
        from_memory(result, root, loose_files(Path(folder, "loose"), small))
        root = write_root(Path(folder, "streamed"), small[:STREAMED_SERIES])
        streaming(result, root, size=SMALL, batch=BATCH, bar=0.5)
        large = crops(LARGE_SERIES * ALPHAS).reshape(LARGE_SERIES, ALPHAS, LARGE, LARGE, 3)
        root = write_root(Path(folder, "large"), large)
        streaming(result, root, size=LARGE, batch=LARGE_BATCH, bar=0.9)
    return result


def from_memory(result: Result, root: Root, folder: Path) -> None:
    """Epochs of shuffled batches of uint8, each side on one thread."""
    start = time.process_time()
    mixed = MixedDataset(root.url, threads=1)
    opening_s = time.process_time() - start
    files = ImageFolder(str(folder), transform=PILToTensor())
    images = mixed.by_image()
    loader = DataLoader(images, batch_size=BATCH, shuffle=True)
    batches = BatchSampler(RandomSampler(images), BATCH, drop_last=False)
    batch_loader = DataLoader(images, batch_size=None, sampler=batches)
    expected = torch.stack([image for image, _ in files]).permute(0, 2, 3, 1)
    assert isinstance(mixed.images, Tensor)  # in memory
    pixels = mixed.images.flatten(0, 1)
    result.equal("pixels are ImageFolder's", torch.equal(pixels, expected), True)
    for name, tested_loader in (("samples", loader), ("batches", batch_loader)):
        numbers = torch.cat([number_of(batch) for batch in tested_loader]).sort().values
        equal = torch.equal(numbers, torch.arange(len(expected)))
        result.equal(f"every image once, by {name}", equal, True)
    target = torch.empty_like(expected)

    def epochs(loader: DataLoader[Any]) -> None:
        for _ in range(EPOCHS):
            drain(batch["image"] for batch in loader)

    def ours() -> None:
        epochs(loader)

    def image_folder(workers: int) -> None:
        for _ in range(EPOCHS):
            batches = DataLoader(files, batch_size=BATCH, shuffle=True, num_workers=workers)
            drain(images for images, _ in batches)

    sides = {
        "ours": ours,
        "in batches": lambda: epochs(batch_loader),
        "ImageFolder": lambda: image_folder(0),
        "memcpy": lambda: [target.copy_(expected) for _ in range(EPOCHS)],
    }
    seconds = interleaved(sides, repeats=5)
    on_two_cores = {"ours": ours, "ImageFolder": lambda: image_folder(2)}
    wall = interleaved(on_two_cores, repeats=1, clock=time.perf_counter)
    speedup = ratio(seconds["ImageFolder"], seconds["ours"])
    in_batches = ratio(seconds["ImageFolder"], seconds["in batches"])
    with_opening = [s + opening_s for s in seconds["ours"]]
    result.at_least("decoded epochs, ratio to ImageFolder", speedup["ratio"], 10.0)
    result.at_least("the same in whole batches", in_batches["ratio"], 20.0)
    result.figures |= {
        "from_memory": speedup,
        "from_memory_in_batches": in_batches,
        "from_memory_with_decoding": ratio(seconds["ImageFolder"], with_opening),
        "against_two_workers_wall": ratio(wall["ImageFolder"], wall["ours"]),
        "over_memcpy": ratio(seconds["ours"], seconds["memcpy"]),
        "decode_once_seconds": opening_s,
        "cpu_seconds": seconds,
        "wall_seconds": wall,
    }


def streaming(result: Result, root: Root, *, size: int, batch: int, bar: float) -> None:
    """One epoch of batches read from the tars, each side on one thread."""
    images = MixedDataset(root.url, memory_limit=0, threads=1).by_image()
    stream = mixed_pipeline(root.url)
    tars = [f"{root.url}/{entry.tar}" for entry in root.records()]
    theirs = {}
    for number, (image, label) in enumerate(plain_webdataset(tars)):
        theirs[number] = (int(image.long().sum()), max(label, key=lambda pair: pair[1])[0])
    one_by_one = {"stream": stream, "dataset": map(images.__getitem__, theirs)}
    for name, samples in one_by_one.items():
        ours = {}
        for sample in samples:
            pixels = int(np.asarray(sample["image"]).astype(int).sum())
            ours[int(number_of(sample))] = (pixels, int(sample["label"].argmax()))
        check = f"{size} px: images and labels of the {name} are webdataset's"
        result.equal(check, ours == theirs, True)

    def webdataset() -> None:
        samples = (image for image, _ in plain_webdataset(tars))
        while image_batch := list(itertools.islice(samples, batch)):
            torch.stack(image_batch)

    sides = {
        "stream": lambda: drain(DataLoader(stream, batch_size=batch)),
        "dataset": lambda: drain(DataLoader(images, batch_size=batch, shuffle=True)),
        "webdataset": webdataset,
    }
    seconds = interleaved(sides, repeats=5)
    for name in one_by_one:
        speedup = ratio(seconds["webdataset"], seconds[name])
        result.at_least(f"{size} px, {name}, ratio to plain webdataset", speedup["ratio"], bar)
        result.figures[f"{name}_{size}"] = speedup
    result.figures[f"streaming_{size}_cpu_seconds"] = seconds


def number_of(sample: dict[str, Any]) -> Any:
    """Number of an image in the dataset, or of each image of a batch."""
    return sample["group"] * ALPHAS + sample["position"]


def plain_webdataset(tars: list[str]) -> Iterator[tuple[Tensor, list[list[float]]]]:
    """As docs/format.md reads a root without semix: every image with its sparse label."""
    for group in wds.WebDataset(tars, shardshuffle=False):
        record = json.loads(group["json"])
        for position, label in enumerate(record["labels"]):
            image = Image.open(io.BytesIO(group[f"{position:02d}.webp"]))
            yield torch.from_numpy(np.array(image)), label


def drain(batches: Iterable[object]) -> None:
    for _ in batches:
        pass


def small_crops(count: int) -> np.ndarray:
    """Squares of scikit-learn's two photographs, made smaller, uint8 [N, 32, 32, 3]."""
    rng = np.random.default_rng(0)
    squares = []
    photographs = [
        np.asarray(Image.fromarray(image).resize((160, 107), Image.Resampling.BICUBIC))
        for image in load_sample_images().images
    ]
    for index in range(count):
        photograph = photographs[index % 2]
        top, left = (int(rng.integers(0, side - SMALL)) for side in photograph.shape[:2])
        square = photograph[top : top + SMALL, left : left + SMALL].astype(np.int16)
        squares.append(np.clip(square + rng.integers(-3, 4, square.shape), 0, 255).astype(np.uint8))
    return np.stack(squares)


def write_root(folder: Path, series: np.ndarray) -> Root:
    """A root of these series, uint8 [G, A, S, S, 3], in lossless WebP."""
    store, (groups, count, size) = Store(str(folder)), series.shape[:3]
    per_shard = SERIES_A_SHARD[size]
    plan = handmade.make_plan(groups // per_shard, groups, count)
    store.put("plan.json", json.dumps(plan).encode())
    for shard, first in enumerate(range(0, groups, per_shard)):
        samples = [
            GroupSample(
                handmade.series_of(handmade.record(group, count)),
                [encode_image(image, "webp") for image in series[group]],
                "webp",
            )
            for group in range(first, first + per_shard)
        ]
        tar = handmade.tar_of(*samples)
        handmade.put_shard(store, shard, tar, first=first, groups=per_shard, count=count)
    root = Root(store.url)
    root.write_index()
    return root


def loose_files(folder: Path, series: np.ndarray) -> Path:
    """The images of `series` as PNG files in one folder, in their order."""
    (folder / "class").mkdir(parents=True)
    for number, image in enumerate(series.reshape(-1, *series.shape[2:])):
        Image.fromarray(image).save(folder / "class" / f"{number:06d}.png")
    return folder
