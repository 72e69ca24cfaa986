"""C5: epochs from memory against ImageFolder; streaming from shards against plain webdataset."""

import io
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import webdataset as wds
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import PILToTensor

from benchmarks.encoding import crops
from benchmarks.measure import Result, interleaved, ratio
from data.images import encode_image
from data.mixed import MixedDataset, MixedLoader
from data.root import Root
from data.shards import GroupSample
from data.store import Store
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
    opened = time.process_time() - start
    files = ImageFolder(str(folder), transform=PILToTensor())
    loader = MixedLoader(mixed, batch_size=BATCH, kind="images")
    theirs = torch.stack([image for image, _ in files]).permute(0, 2, 3, 1)
    result.equal("pixels are ImageFolder's", torch.equal(mixed.images.flatten(0, 1), theirs), True)
    seen = torch.cat([batch.ids for batch in loader]).sort().values
    result.equal("every image once", torch.equal(seen, torch.arange(len(theirs))), True)
    target = torch.empty_like(theirs)

    def ours() -> None:
        for _ in range(EPOCHS):
            drain(batch.images for batch in loader)

    def image_folder(workers: int) -> None:
        for _ in range(EPOCHS):
            batches = DataLoader(files, batch_size=BATCH, shuffle=True, num_workers=workers)
            drain(images for images, _ in batches)

    sides = {
        "ours": ours,
        "ImageFolder": lambda: image_folder(0),
        "memcpy": lambda: [target.copy_(theirs) for _ in range(EPOCHS)],
    }
    seconds = interleaved(sides, repeats=5)
    on_two_cores = {"ours": ours, "ImageFolder": lambda: image_folder(2)}
    wall = interleaved(on_two_cores, repeats=1, clock=time.perf_counter)
    found = ratio(seconds["ImageFolder"], seconds["ours"])
    with_opening = [s + opened for s in seconds["ours"]]
    result.at_least("decoded epochs, ratio to ImageFolder", found["ratio"], 20.0)
    result.figures |= {
        "from_memory": found,
        "from_memory_with_decoding": ratio(seconds["ImageFolder"], with_opening),
        "against_two_workers_wall": ratio(wall["ImageFolder"], wall["ours"]),
        "over_memcpy": ratio(seconds["ours"], seconds["memcpy"]),
        "decode_once_seconds": opened,
        "cpu_seconds": seconds,
        "wall_seconds": wall,
    }


def streaming(result: Result, root: Root, *, size: int, batch: int, bar: float) -> None:
    """One epoch of batches read from the shards, each side on one thread."""
    mixed = MixedDataset(root.url, memory_limit=0, threads=1)
    loader = MixedLoader(mixed, batch_size=batch, kind="images")
    tars = [f"{root.url}/{record['tar']}" for record in root.committed().values()]
    ours, theirs = {}, {}
    for found in loader:
        for number, image, label in zip(
            found.ids.tolist(), found.images, found.labels, strict=True
        ):
            ours[number] = (int(image.long().sum()), label.argmax().item())
    for number, (image, label) in enumerate(plain_webdataset(tars)):
        theirs[number] = (int(image.long().sum()), max(label, key=lambda pair: pair[1])[0])
    result.equal(f"{size} px: images and labels are webdataset's", ours == theirs, True)

    def webdataset() -> None:
        samples = plain_webdataset(tars)
        while some := list(itertools.islice(samples, batch)):
            torch.stack([image for image, _ in some])

    sides = {"ours": lambda: drain(found.images for found in loader), "webdataset": webdataset}
    seconds = interleaved(sides, repeats=5)
    found = ratio(seconds["webdataset"], seconds["ours"])
    result.at_least(f"{size} px, ratio to plain webdataset", found["ratio"], bar)
    result.figures[f"streaming_{size}"] = found | {"cpu_seconds": seconds}


def plain_webdataset(tars: list[str]) -> Iterator[tuple[Tensor, list[list[float]]]]:
    """As docs/format.md reads a root without us: every image with its sparse label."""
    for group in wds.WebDataset(tars, shardshuffle=False):
        record = json.loads(group["json"])
        for position, label in enumerate(record["labels"]):
            image = Image.open(io.BytesIO(group[f"{position:02d}.webp"]))
            yield torch.from_numpy(np.array(image)), label


def drain(batches: Iterator[Tensor]) -> None:
    for _ in batches:
        pass


def small_crops(count: int) -> np.ndarray:
    """Squares of scikit-learn's two photographs, made smaller, uint8 [N, 32, 32, 3]."""
    rng = np.random.default_rng(0)
    made = []
    photographs = [
        np.asarray(Image.fromarray(image).resize((160, 107), Image.Resampling.BICUBIC))
        for image in load_sample_images().images
    ]
    for index in range(count):
        photograph = photographs[index % 2]
        top, left = (int(rng.integers(0, side - SMALL)) for side in photograph.shape[:2])
        square = photograph[top : top + SMALL, left : left + SMALL].astype(np.int16)
        made.append(np.clip(square + rng.integers(-3, 4, square.shape), 0, 255).astype(np.uint8))
    return np.stack(made)


def write_root(folder: Path, series: np.ndarray) -> Root:
    """A root of these series, uint8 [G, A, S, S, 3], in lossless WebP."""
    store, (groups, count, size) = Store(str(folder)), series.shape[:3]
    per_shard = SERIES_A_SHARD[size]
    plan = handmade.make_plan(groups // per_shard, groups, count)
    store.put("plan.json", json.dumps(plan).encode())
    for shard, first in enumerate(range(0, groups, per_shard)):
        samples = [
            GroupSample(
                handmade.record(group, count),
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
    """The same images as PNG files in one folder, in their order."""
    (folder / "class").mkdir(parents=True)
    for number, image in enumerate(series.reshape(-1, *series.shape[2:])):
        Image.fromarray(image).save(folder / "class" / f"{number:06d}.png")
    return folder
