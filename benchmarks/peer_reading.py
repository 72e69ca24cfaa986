"""Epochs of one reader, in a process of its own: `python peer_reading.py READER FOLDER ...`.

It runs in the environment of its reader, so it imports semix and each peer only where they are
used. All readers decode the same WebP bytes by Pillow, shuffle as their documentation recommends,
and give batches of images, uint8 [B, H, W, 3], and labels, float32 [B, K].
"""

import argparse
import functools
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

BUFFER = 1000  # encoded images that a stream shuffles
Batches = Iterable[tuple[Tensor, Tensor]]
Reader = Callable[[Path, int, int], Callable[[int], Batches]]


def from_memory(folder: Path, batch: int, workers: int) -> Callable[[int], Batches]:
    return _mixed_dataset(folder, batch, workers)


def from_shards(folder: Path, batch: int, workers: int) -> Callable[[int], Batches]:
    return _mixed_dataset(folder, batch, workers, memory_limit=0)


def stream(folder: Path, batch: int, workers: int) -> Callable[[int], Batches]:
    import webdataset as wds

    from semix.data.stream import mixed_pipeline

    images = mixed_pipeline(str(folder / "root"), shuffle=BUFFER)
    loader = wds.WebLoader(images.to_tuple("image", "label"), **_loading(batch, workers))

    def epoch(number: int) -> Batches:
        images.set_epoch(number)
        return loader

    return epoch


def webdataset(folder: Path, batch: int, workers: int) -> Callable[[int], Batches]:
    import webdataset as wds

    tars = sorted(str(path) for path in (folder / "root").glob("shards/*/*.tar"))
    images = (
        wds.WebDataset(tars, shardshuffle=len(tars))
        .compose(functools.partial(_series_images, num_classes=_num_classes(folder)))
        .shuffle(BUFFER)
        .map(_decoded_pair)
    )
    loader = wds.WebLoader(images, **_loading(batch, workers))
    return lambda number: loader


def datasets_parquet(folder: Path, batch: int, workers: int) -> Callable[[int], Batches]:
    images = _load_dataset(folder, "parquet", folder.glob("huggingface/data/*.parquet"))
    images = images.select_columns(["image", "label"]).with_transform(_decoded_rows)
    return lambda number: DataLoader(
        images, shuffle=True, collate_fn=_stacked, **_loading(batch, workers)
    )


def datasets_webdataset(folder: Path, batch: int, workers: int) -> Callable[[int], Batches]:
    tars = (folder / "root").glob("shards/*/*.tar")
    images = _load_dataset(folder, "webdataset", tars, streaming=True).decode(False)
    rows = functools.partial(_row_images, num_classes=_num_classes(folder))
    images = images.map(rows, batched=True, batch_size=1, remove_columns=images.column_names)
    images = images.shuffle(seed=0, buffer_size=BUFFER).map(_decoded_row)
    loader: DataLoader[Any] = DataLoader(images, collate_fn=_stacked, **_loading(batch, workers))

    def epoch(number: int) -> Batches:
        images.set_epoch(number)
        return loader

    return epoch


def litdata(folder: Path, batch: int, workers: int) -> Callable[[int], Batches]:
    from litdata import StreamingDataLoader, StreamingDataset

    images = StreamingDataset(str(folder / "litdata"), shuffle=True, transform=_decoded_sample)
    loader = StreamingDataLoader(images, **_loading(batch, workers))
    return lambda number: loader


def mosaic(folder: Path, batch: int, workers: int) -> Callable[[int], Batches]:
    from streaming import StreamingDataset

    class Images(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return _decoded_sample(super().__getitem__(at))

    images = Images(local=str(folder / "mosaic"), shuffle=True, batch_size=batch)
    loader: DataLoader[Any] = DataLoader(images, **_loading(batch, workers))
    return lambda number: loader


READERS: dict[str, Reader] = {
    "semix from memory": from_memory,
    "semix from shards": from_shards,
    "semix stream": stream,
    "webdataset": webdataset,
    "datasets, parquet": datasets_parquet,
    "datasets, webdataset": datasets_webdataset,
    "litdata": litdata,
    "streaming": mosaic,
}
WITH_SEMIX = set(READERS) - {"litdata", "streaming"}  # the readers that fit in beside it


def write_litdata(rows: list[tuple[bytes, np.ndarray]], folder: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for number, (image, label) in enumerate(rows):
        writer[number] = {"image": image, "label": label}
    writer.done()
    writer.merge(num_workers=1)


def write_mosaic(rows: list[tuple[bytes, np.ndarray]], folder: Path) -> None:
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": f"ndarray:float32:{len(rows[0][1])}"}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for image, label in rows:
            writer.write({"image": image, "label": label})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("reader", choices=[*READERS, "write"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--digest", action="store_true", help="hash what each epoch gives")
    options = parser.parse_args()
    if options.reader == "write":
        rows = stored_rows(options.folder)
        write_litdata(rows, options.folder / "litdata")
        write_mosaic(rows, options.folder / "mosaic")
        return
    torch.set_num_threads(1)
    epoch = READERS[options.reader](options.folder, options.batch, options.workers)
    for number in range(options.epochs):
        print(json.dumps(read(epoch(number), digest=options.digest)), flush=True)


def read(batches: Batches, *, digest: bool) -> dict[str, float | int]:
    """Read one epoch.

    Returns:
        images; their digest; wall and CPU seconds, workers' CPU time included; and the seconds from
        the start of the process to the first batch.
    """
    cpu, wall = cpu_seconds(), time.perf_counter()
    images, total, ready_s = 0, 0, 0.0
    for pixels, labels in batches:
        ready_s = ready_s or time.time() - psutil.Process().create_time()
        images += len(pixels)
        if digest:
            total += sum(map(sample_digest, pixels, labels))
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_seconds() - cpu}
    return {"images": images, "digest": total % 2**64, "ready_s": ready_s, **seconds}


def sample_digest(image: Tensor, label: Tensor) -> int:
    """A number of the image and its label; their sum does not depend on the order."""
    assert image.dtype == torch.uint8 and label.dtype == torch.float32
    content = image.contiguous().numpy().tobytes() + label.contiguous().numpy().tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")


def cpu_seconds() -> float:
    """Of this process, its living children and those that have ended."""
    process = psutil.Process()
    own = process.cpu_times()
    living = [child.cpu_times() for child in process.children(recursive=True)]
    ended = own.children_user + own.children_system
    return float(own.user + own.system + ended + sum(t.user + t.system for t in living))


def stored_rows(folder: Path) -> list[tuple[bytes, np.ndarray]]:
    """Encoded images and dense labels, read from the tars without semix."""
    import tarfile

    rows, num_classes = [], _num_classes(folder)
    for path in sorted((folder / "root").glob("shards/*/*.tar")):
        with tarfile.open(path) as tar:
            group: dict[str, bytes] = {}
            for member in tar:
                name = member.name.split(".", 1)[1]
                group[name] = tar.extractfile(member).read()  # type: ignore[union-attr]
                if name == "json":
                    rows += list(_series_images([group], num_classes=num_classes))
                    group = {}
    return rows


def _mixed_dataset(
    folder: Path, batch: int, workers: int, **settings: Any
) -> Callable[[int], Batches]:
    from torch.utils.data import BatchSampler, RandomSampler

    from semix.data.dataset import MixedDataset

    images = MixedDataset(str(folder / "root"), **settings).by_image()
    order = BatchSampler(RandomSampler(images), batch_size=batch, drop_last=False)
    loader: DataLoader[Any] = DataLoader(images, sampler=order, **_loading(None, workers))
    return lambda number: ((batch["image"], batch["label"]) for batch in loader)


def _loading(batch: int | None, workers: int) -> dict[str, Any]:
    """Arguments of a DataLoader."""
    return {"batch_size": batch, "num_workers": workers, "persistent_workers": workers > 0}


def _load_dataset(folder: Path, builder: str, files: Iterable[Path], **settings: Any) -> Any:
    from datasets import load_dataset

    paths = sorted(str(path) for path in files)
    cache = str(folder / "cache")
    return load_dataset(builder, data_files=paths, split="train", cache_dir=cache, **settings)


def _num_classes(folder: Path) -> int:
    return len(json.loads((folder / "root" / "plan.json").read_text())["class_names"])


def _series_images(
    series: Iterable[dict[str, Any]], *, num_classes: int
) -> Iterator[tuple[bytes, np.ndarray]]:
    """Each image of these samples of a tar, still encoded, with its dense label."""
    for group in series:
        for position, sparse in enumerate(json.loads(group["json"])["labels"]):
            yield group[f"{position:02d}.webp"], _dense(sparse, num_classes)


def _row_images(rows: dict[str, list[Any]], *, num_classes: int) -> dict[str, list[Any]]:
    """The images of a batch of series, as the webdataset builder of `datasets` gives them."""
    images, labels = [], []
    for row, record in enumerate(rows["json"]):
        for position, sparse in enumerate(record["labels"]):
            images.append(rows[f"{position:02d}.webp"][row]["bytes"])
            labels.append(_dense([(int(target), p) for target, p in sparse], num_classes))
    return {"image": images, "label": labels}


def _dense(sparse: Iterable[tuple[int, float]], num_classes: int) -> np.ndarray:
    label = np.zeros(num_classes, dtype=np.float32)
    for target, probability in sparse:
        label[target] = probability
    return label


def _decoded(content: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB")))


def _decoded_pair(sample: tuple[bytes, np.ndarray]) -> tuple[Tensor, np.ndarray]:
    return _decoded(sample[0]), sample[1]


def _decoded_sample(sample: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return _decoded(sample["image"]), torch.from_numpy(sample["label"].copy())


def _decoded_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": _decoded(row["image"]), "label": row["label"]}


def _decoded_rows(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"image": [torch.from_numpy(np.array(image)) for image in rows["image"]]} | {
        "label": rows["label"]
    }


def _stacked(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    labels = np.array([row["label"] for row in rows], dtype=np.float32)
    return torch.stack([row["image"] for row in rows]), torch.from_numpy(labels)


if __name__ == "__main__":
    main()
