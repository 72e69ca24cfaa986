"""C3: another CLIP's labels for a root, against one image at a time from a folder of pictures."""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from semix.data.images import decode_image
from semix.data.label_sets import LabelSet
from semix.data.real import load_real
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.splits import RealDataConfig
from semix.data.tar import read_shard
from semix.pipeline.annotate import FEATURES, Annotator
from semix.pipeline.config import BuildConfig
from semix.pipeline.prototype_statistics import PrototypeFile
from semix.pipeline.prototypes import ensure_prototypes
from semix.pipeline.relabel import (
    RelabelJob,
    ensure_set_prototypes,
    label_shard,
    label_stored,
    plan_set,
    relabelled_config,
)
from semix.pipeline.root import create_root
from semix.pipeline.shard_job import finish
from semix.pipeline.standins import Recipe, TrainingStage, train_standins
from torch import Tensor

from benchmarks.measure import Result, interleaved, slope
from benchmarks.models import KEPT, standins
from benchmarks.pictures import fill

ALPHAS, SIZE = 8, 32
IMAGES = (1000, 2000, 4000)
MANY = 100_000


def run() -> Result:
    result = Result("C3", f"a CLIP's weights for {IMAGES} images, process CPU seconds")
    clip = small_clip()
    roots = {count: filled_root(count) for count in IMAGES}
    works = {count: started(root, clip) for count, root in roots.items()}
    largest = roots[IMAGES[-1]]
    pixels, annotator = all_pixels(largest), works[IMAGES[-1]].annotator
    sides: dict[str, Any] = {str(n): lambda work=work: relabel(work) for n, work in works.items()}
    sides["bare"] = lambda: encode(pixels, annotator, works[IMAGES[-1]].labels.record.batch)
    seconds = interleaved(sides, repeats=3)
    with tempfile.TemporaryDirectory() as folder:
        names = export(largest, Path(folder, "pictures"))
        peer_seconds, found = peer(Path(folder, "pictures"), names, works[IMAGES[-1]])
    for name, more in interleaved(sides, repeats=2).items():
        seconds[name] += more
    apart = difference(found, works[IMAGES[-1]].labels)
    result.at_most("difference of a weight", apart, 1e-4)
    report(result, seconds, peer_seconds)
    result.figures["from stored features"] = from_stored_features()
    return result


def report(result: Result, seconds: dict[str, list[float]], peer_seconds: float) -> None:
    last = str(IMAGES[-1])
    median = {name: float(np.median(row)) for name, row in seconds.items()}
    result.at_least("ratio to one at a time", peer_seconds / median[last], 20.0)
    ours = slope(IMAGES, [seconds[str(count)] for count in IMAGES])
    result.at_most("slope in images", ours["slope"], 1.05)
    result.at_most("over the bare batched encode", median[last] / median["bare"], 1.25)
    # It takes minutes, so it runs once.
    result.figures |= {"ours": ours, "peer_seconds": peer_seconds, "cpu_seconds": seconds}


def small_clip() -> Path:
    """A wide CLIP of two layers, hardly trained: all it must do is tell classes apart."""
    recipe = Recipe(
        TrainingStage(2, 16, 1e-3),
        TrainingStage(2, 16, 1e-3),
        TrainingStage(30, 32, 2e-3),
        clip_width=256,
        clip_layers=2,
    )
    return train_standins(load_real(RealDataConfig(name="digits")), KEPT, recipe=recipe).clip


def filled_root(images: int, *, size: int = SIZE, series: int = 64) -> Root:
    """A root of so many images: blends of digits."""
    values: dict[str, Any] = {
        "real": {"name": "digits"},
        "generator": {"model": str(standins().diffusion)},
        "mixing": {
            "pairs": {"kind": "named", "names": PAIRS},
            "groups_per_pair": images // ALPHAS // len(PAIRS),
            "alphas": ALPHAS,
        },
        "annotation": {"model": f"local-dir:{standins().clip}"},
        "shards": {"groups_per_shard": series, "groups_per_batch": 8},
    }
    config = load_settings(BuildConfig, values)
    root = create_root(config, tempfile.mkdtemp(prefix="semix-bench-"))
    ensure_prototypes(root, device="cpu")
    fill(root, size=size)
    return root


# 5 pairs: 1000, 2000, 4000 and 100000 images are all whole numbers of series of each.
PAIRS = [["zero", "one"], ["two", "three"], ["four", "five"], ["six", "seven"], ["eight", "nine"]]


def started(root: Root, clip: Path) -> RelabelJob:
    """A new label set whose encoder is loaded; that is no part of the work."""
    labels = plan_set(root, relabelled_config(root, [f"annotation.model=local-dir:{clip}"]))
    ensure_set_prototypes(labels, device="cpu")
    work = RelabelJob(labels)
    work.load(device="cpu", heartbeat=lambda: None)
    assert work.annotator is not None
    work.annotator.encoders.load()
    return work


def relabel(work: RelabelJob) -> None:
    """All shards from their images, on this thread."""
    assert work.annotator is not None
    for shard, record in work.labels.root.committed().items():
        if work.store.exists(work.labels.name(shard)):
            work.store.delete(work.labels.name(shard))
        finish(label_shard(record, labels=work.labels, plan=work.plan, annotator=work.annotator))


def all_pixels(root: Root) -> Tensor:
    samples = (s for entry in root.entries() for s in read_shard(root.store, entry))
    images = [decode_image(image) for sample in samples for image in sample.images]
    return torch.from_numpy(np.stack(images))


def encode(pixels: Tensor, annotator: Annotator | None, batch: int) -> None:
    assert annotator is not None
    for start in range(0, len(pixels), batch):
        annotator.encode(pixels[start : start + batch])


def export(root: Root, folder: Path) -> list[str]:
    """The pictures as the official code keeps them: SEED_FIRST_SECOND_POSITION.png."""
    folder.mkdir()
    for entry in root.entries():
        for sample in read_shard(root.store, entry):
            first, second = sample.record.classes
            for position, image in enumerate(sample.images):
                name = f"{sample.record.group}_{first}_{second}_{position}.png"
                Image.fromarray(decode_image(image)).save(folder / name)
    return sorted(path.name for path in folder.iterdir())


def peer(
    folder: Path, names: list[str], work: RelabelJob
) -> tuple[float, dict[tuple[int, int], float]]:
    """As the official code goes about it, with its errors repaired.

    For each file its group is looked up among all names by their beginning, and each image of
    the group is opened, encoded and projected by itself: eight times over, and in N^2 comparisons.

    Returns:
        CPU seconds, and the weight of each image by group and position.
    """
    labels, annotator = work.labels, work.annotator
    assert annotator is not None
    parts = PrototypeFile.unpack(labels.store.get(labels.prototypes)).parts
    prototypes = parts[FEATURES].measurement.prototypes
    weights: dict[str, float] = {}
    start = time.process_time()
    for name in names:
        beginning = "_".join(name.split("_")[:3]) + "_"
        group = [other for other in names if other.startswith(beginning)]
        _, first, second = (int(part) for part in beginning.split("_")[:3])
        for member in group:
            with Image.open(folder / member) as image:
                pixels = torch.from_numpy(np.array(image.convert("RGB")))[None]
            feature = annotator.encode(pixels)[FEATURES][0]
            axis = prototypes[first] - prototypes[second]
            offset = feature - prototypes[second]
            weights[member] = float(torch.dot(offset, axis) / torch.dot(axis, axis))
    seconds = time.process_time() - start
    places = {name: [int(part) for part in name.split(".")[0].split("_")] for name in names}
    return seconds, {(places[name][0], places[name][3]): weights[name] for name in names}


def difference(found: dict[tuple[int, int], float], labels: LabelSet) -> float:
    """The largest one between the peer's weights and ours."""
    ours = {
        (group, position): weight
        for shard in labels.done()
        for group, series in labels.labels(shard).items()
        for position, weight in enumerate(series.weights)
    }
    assert ours.keys() == found.keys()
    return max(abs(ours[place] - weight) for place, weight in found.items())


def from_stored_features() -> dict[str, Any]:
    """Wall seconds for another sharpening and another rule over many images."""
    root = filled_root(MANY, size=8, series=250)
    kinds = {
        "sharpening": ["annotation.scale=4"],
        "rule": ["annotation.rule=similarity", "annotation.temperature=0.1"],
    }
    seconds = {}
    for kind, overrides in kinds.items():
        labels = plan_set(root, relabelled_config(root, overrides))
        start = time.perf_counter()
        ensure_set_prototypes(labels, device="cpu")
        label_stored(labels, labels.missing())
        seconds[kind] = time.perf_counter() - start
        assert labels.missing() == []
    return {"images": MANY, "wall_seconds": seconds}
