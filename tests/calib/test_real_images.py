"""Real images that do not fit in memory are read by workers, with the same results."""

import json
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from semix.calib import real_images
from semix.calib.real_data import open_data
from semix.calib.real_images import InMemoryImages, StreamedImages, decode, open_images, ranges
from semix.calib.train import train_run
from semix.calib.training_data import TrainingData, check_overlap
from semix.data.errors import InputError
from semix.data.real import RealDataConfig, load_real
from semix.data.splits import ImageSplit
from tests.calib.runs import assert_same_results, run_two

STREAMED = "real_memory_gib=0"
WORKERS = [0, pytest.param(2, marks=pytest.mark.process)]
SIDE = 12


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of two classes with forty pictures each, all different."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(40):
            pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{number:02d}.png")
    return tmp_path / "pictures"


@pytest.fixture
def split(pictures: Path) -> ImageSplit:
    config = RealDataConfig(name="imagefolder", path=str(pictures), image_size=SIDE)
    return load_real(config).train


@pytest.fixture
def limited_files() -> Iterator[Callable[[int], None]]:
    """limited_files(size): no file may be larger, bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "settings",
    [
        ("select=nll", "head.augment=true", "head.views=2", "ema=0.9"),
        ("mixed=null", "method={name: plp}", "loss={name: ce}", "head=null", "epochs=2"),
        ("head={method: tst, epochs: 2, batch_size: 40}", "augment={shift: 0}"),
    ],
    ids=["all", "plp", "tst"],
)
def test_a_dataset_above_the_limit_trains_as_one_in_memory(make_run, settings, workers):
    in_memory = make_run("held", *settings)
    streamed = make_run("read", *settings, STREAMED, f"real_workers={workers}")
    for run in (in_memory, streamed):
        train_run(run)
    weights = ["model.safetensors", "logits-base.safetensors"]
    assert_same_results(in_memory, streamed, weights=weights)
    rows = [
        json.loads((run / "evaluation.json").read_text())["rows"] for run in (in_memory, streamed)
    ]
    assert rows[0] == rows[1]
    assert (in_memory / "data.json").read_text() == (streamed / "data.json").read_text()


def test_training_images_are_read_once_before_the_first_epoch(make_config, monkeypatch):
    data = open_data(make_config(STREAMED), compare_splits=False)
    expected = open_data(make_config(), compare_splits=False).train_histogram
    lengths: list[int] = []
    original = StreamedImages.chunks

    def chunks(self, indices):
        lengths.append(len(self))
        return original(self, indices)

    monkeypatch.setattr(StreamedImages, "chunks", chunks)
    check_overlap(data)
    assert torch.equal(data.train_histogram, expected)
    assert lengths.count(len(data.real.train)) == 1


@pytest.mark.parametrize("workers", WORKERS)
def test_parts_come_in_the_order_that_was_asked_for(split, workers):
    expected, images = decode(split), StreamedImages(split, SIDE, workers=workers)
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0)).split(7)
    state = torch.get_rng_state()
    chunks = list(images.chunks(order))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(part, expected[rows]) for part, rows in zip(chunks, order, strict=True))


def test_a_split_goes_to_workers_that_are_not_forked(split):
    part = pickle.loads(pickle.dumps(split.subset(np.array([3, 1]))))
    assert (part.images() == split.images([3, 1])).all()
    assert (part.digest, part.name(1)) == (split.subset(np.array([3, 1])).digest, split.name(1))


# Prefect registers such a hook for the threads of its process.
EXIT_HOOK = """
import os, sys, threading
from semix.calib.real_images import StreamedImages, ranges
from semix.data.real import RealDataConfig, load_real

threading._register_atexit(lambda: os._exit(1))
split = load_real(RealDataConfig(name="imagefolder", path=sys.argv[1], image_size=12)).train
for _ in range(3):
    chunks = StreamedImages(split, 12, workers=2).chunks(ranges(0, len(split), 8))
    assert sum(map(len, chunks)) == len(split)
os._exit(0)
"""


@pytest.mark.process
def test_what_a_trainer_would_do_at_its_end_is_not_done_by_its_workers(pictures):
    command = [sys.executable, "-c", EXIT_HOOK, str(pictures)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert process.returncode == 0, process.stderr


@pytest.mark.process
def test_a_picture_that_a_worker_cannot_read_is_refused_by_name(split):
    broken = Path(split.name(5))
    broken.write_bytes(b"not a picture")
    images = StreamedImages(split, SIDE, workers=2)
    with pytest.raises(InputError, match=rf"^image = {broken}: cannot be read"):
        list(images.chunks(ranges(0, len(split), 4)))


def test_what_fits_is_held_and_training_comes_first(pictures):
    real = load_real(RealDataConfig(name="imagefolder", path=str(pictures), image_size=SIDE))
    train_bytes = len(real.train) * SIDE * SIDE * 3

    def kinds(memory: int) -> list[type]:
        data = TrainingData(real, None, SIDE, memory_limit=memory)
        return [type(data.images(name)) for name in ("validation", "train")]

    assert kinds(10 * train_bytes) == [InMemoryImages, InMemoryImages]
    assert kinds(train_bytes) == [StreamedImages, InMemoryImages]
    assert kinds(train_bytes - 1) == [InMemoryImages, StreamedImages]
    assert kinds(0) == [StreamedImages, StreamedImages]


SHARED = """
import sys
from pathlib import Path
import torch
from accelerate import Accelerator
from semix.calib.real_images import decode, open_images
from semix.data.real import RealDataConfig, load_real

real = load_real(RealDataConfig(name="imagefolder", path=sys.argv[1], image_size=12))
images = open_images(real.train, 12, limit=2**30, accelerator=Accelerator(cpu=True))
assert torch.equal(images.tensor, decode(real.train))
[copy] = {
    " ".join(line.split()[4:6]) for line in Path("/proc/self/maps").read_text().splitlines()
    if "semix-images-" in line
}
print("copy", copy)
"""


@pytest.mark.process
def test_processes_of_a_machine_share_one_copy(pictures, tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))  # of no other test that trains at the same time
    output = run_two(SHARED, tmp_path, pictures)
    copies = [line for line in output.splitlines() if line.startswith("copy")]
    assert len(copies) == 2
    assert len(set(copies)) == 1 and str(folder) in copies[0]
    assert not list(folder.glob("semix-images-*"))


def test_no_room_for_the_shared_copy_is_refused_by_name(split, limited_files):
    limited_files(1000)
    error = real_images._decode_to_file(split)
    assert isinstance(error, InputError)
    assert str(error).startswith("TMPDIR = ")
    assert "real_memory_gib" in str(error)


def test_workers_share_the_cores_of_a_machine(split, monkeypatch):
    monkeypatch.setattr("semix.data.workers.cores", lambda: 12)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    images = open_images(split, SIDE, limit=0)
    assert isinstance(images, StreamedImages)
    many, few = ([part.numpy() for part in ranges(0, stop, 64)] for stop in (4096, 100))
    assert (images._num_workers(many), images._num_workers(few)) == (3, 0)
