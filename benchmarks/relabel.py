"""C3: another CLIP's labels for a root, against one image at a time from a folder of pictures."""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.measure import Result, interleaved, slope
from benchmarks.models import STANDINS, standins
from benchmarks.pictures import fill
from semix.data.features import FEATURES
from semix.data.images import decode_image
from semix.data.label_sets import LabelSet
from semix.data.real import load_real
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.splits import RealDataConfig
from semix.data.tar import read_shard
from semix.pipeline.annotate import Annotator
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import build_of
from semix.pipeline.prototype_statistics import PrototypeFile
from semix.pipeline.prototypes import prepare
from semix.pipeline.relabel import (
    RelabelJob,
    ensure_set_prototypes,
    label_shard,
    label_stored,
    plan_set,
    relabelled_config,
)
from semix.pipeline.root import create_build
from semix.pipeline.standins import Recipe, TrainingStage, train_standins

ALPHAS, SIZE = 8, 32
IMAGES = (1000, 2000, 4000)
MANY = 100_000


def run() -> Result:
    result = Result("C3", f"a CLIP's weights for {IMAGES} images, process CPU seconds")
    clip = small_clip()
    roots = {count: filled_root(count) for count in IMAGES}
    jobs = {count: start_job(root, clip) for count, root in roots.items()}
    largest = roots[IMAGES[-1]]
    pixels, annotator = all_pixels(largest), jobs[IMAGES[-1]].annotator
    sides: dict[str, Any] = {str(n): lambda job=job: relabel(job) for n, job in jobs.items()}
    sides["bare"] = lambda: encode(pixels, annotator, jobs[IMAGES[-1]].labels.record.batch)
    seconds = interleaved(sides, repeats=3)
    with tempfile.TemporaryDirectory() as folder:
        names = export(largest, Path(folder, "pictures"))
        peer_seconds, peer_weights = peer(Path(folder, "pictures"), names, jobs[IMAGES[-1]])
    for name, further_turns in interleaved(sides, repeats=2).items():
        seconds[name] += further_turns
    largest_difference = difference(peer_weights, jobs[IMAGES[-1]].labels)
    result.at_most("difference of a weight", largest_difference, 1e-4)
    report(result, seconds, peer_seconds)
    result.figures["from stored features"] = from_stored_features()
    return result


def report(result: Result, seconds: dict[str, list[float]], peer_seconds: float) -> None:
    last = str(IMAGES[-1])
    median = {name: float(np.median(row)) for name, row in seconds.items()}
    result.at_least("ratio to one at a time", peer_seconds / median[last], 20.0)
    our_slope = slope(IMAGES, [seconds[str(count)] for count in IMAGES])
    result.at_most("slope in images", our_slope["slope"], 1.05)
    result.at_most("over the bare batched encode", median[last] / median["bare"], 1.25)
    # The peer takes minutes, so it runs once.
    result.figures |= {"ours": our_slope, "peer_seconds": peer_seconds, "cpu_seconds": seconds}


def small_clip() -> Path:
    """A wide CLIP of two layers, hardly trained: it only has to separate the classes."""
    recipe = Recipe(
        TrainingStage(2, 16, 1e-3),
        TrainingStage(2, 16, 1e-3),
        TrainingStage(30, 32, 2e-3),
        clip_width=256,
        clip_layers=2,
    )
    return train_standins(load_real(RealDataConfig(name="digits")), STANDINS, recipe=recipe).clip


def filled_root(images: int, *, size: int = SIZE, series: int = 64) -> Root:
    """A root of `images` blends of digits."""
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
    build = create_build(config, tempfile.mkdtemp(prefix="semix-bench-"))
    prepare(build, device="cpu")
    fill(build.root, size=size)
    return build.root


# 5 pairs: 1000, 2000, 4000 and 100000 images are whole numbers of series per pair.
PAIRS = [["zero", "one"], ["two", "three"], ["four", "five"], ["six", "seven"], ["eight", "nine"]]


def start_job(root: Root, clip: Path) -> RelabelJob:
    """A new label set with its encoder loaded, which is not timed."""
    labels = plan_set(root, relabelled_config(root, [f"annotation.model=local-dir:{clip}"]))
    ensure_set_prototypes(labels, device="cpu")
    job = RelabelJob(labels, build_of(root).plan)
    job.load(device="cpu", heartbeat=lambda: None)
    assert job.annotator is not None
    job.annotator.encoders.load()
    return job


def relabel(job: RelabelJob) -> None:
    """All shards from their images, on this thread."""
    assert job.annotator is not None
    for record in job.labels.root.records():
        if job.store.exists(job.labels.name(record.shard)):
            job.store.delete(job.labels.name(record.shard))
        label_shard(record, labels=job.labels, plan=job.plan, annotator=job.annotator).publish()


def all_pixels(root: Root) -> Tensor:
    samples = (s for record in root.records() for s in read_shard(root.store, record))
    images = [decode_image(image) for sample in samples for image in sample.images]
    return torch.from_numpy(np.stack(images))


def encode(pixels: Tensor, annotator: Annotator | None, batch: int) -> None:
    assert annotator is not None
    for start in range(0, len(pixels), batch):
        annotator.encode(pixels[start : start + batch])


def export(root: Root, folder: Path) -> list[str]:
    """The pictures as the official code keeps them: SEED_FIRST_SECOND_POSITION.png."""
    folder.mkdir()
    for shard in root.records():
        for sample in read_shard(root.store, shard):
            first, second = sample.record.classes
            for position, image in enumerate(sample.images):
                name = f"{sample.record.group}_{first}_{second}_{position}.png"
                Image.fromarray(decode_image(image)).save(folder / name)
    return sorted(path.name for path in folder.iterdir())


def peer(
    folder: Path, names: list[str], job: RelabelJob
) -> tuple[float, dict[tuple[int, int], float]]:
    """The method of the official code, with its errors corrected.

    For each file, its group is looked up among all names by their prefix, and each image of the
    group is opened, encoded and projected alone: every image eight times, with N^2 comparisons.

    Returns:
        CPU seconds, and the weight of each image by group and position.
    """
    labels, annotator = job.labels, job.annotator
    assert annotator is not None
    parts = PrototypeFile.unpack(labels.store.get(labels.prototypes)).parts
    prototypes = parts[FEATURES].measurement.prototypes
    weights: dict[str, float] = {}
    start = time.process_time()
    for name in names:
        prefix = "_".join(name.split("_")[:3]) + "_"
        group = [candidate for candidate in names if candidate.startswith(prefix)]
        _, first, second = (int(field) for field in prefix.split("_")[:3])
        for member in group:
            with Image.open(folder / member) as image:
                pixels = torch.from_numpy(np.array(image.convert("RGB")))[None]
            feature = annotator.encode(pixels)[FEATURES][0]
            axis = prototypes[first] - prototypes[second]
            offset = feature - prototypes[second]
            weights[member] = float(torch.dot(offset, axis) / torch.dot(axis, axis))
    seconds = time.process_time() - start
    fields = {name: [int(field) for field in name.split(".")[0].split("_")] for name in names}
    return seconds, {(fields[name][0], fields[name][3]): weights[name] for name in names}


def difference(peer_weights: dict[tuple[int, int], float], labels: LabelSet) -> float:
    """The largest difference between the peer's weights and ours."""
    ours = {
        (group, position): weight
        for shard in labels.done()
        for group, series in labels.labels(shard).items()
        for position, weight in enumerate(series.weights)
    }
    assert ours.keys() == peer_weights.keys()
    return max(abs(ours[key] - weight) for key, weight in peer_weights.items())


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
        label_stored(labels, labels.missing(), plan=build_of(labels.root).plan)
        seconds[kind] = time.perf_counter() - start
        assert labels.missing() == []
    return {"images": MANY, "wall_seconds": seconds}
