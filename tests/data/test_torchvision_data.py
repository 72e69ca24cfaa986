"""Benchmarks by name: each in its own format, read by torchvision's class."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from semix.calib.check import check_evaluation
from semix.calib.config import EvaluationConfig, OODDataConfig
from semix.data.errors import InputError
from semix.data.real import class_names, load_real, may_be_mirrored
from semix.data.splits import RealDataConfig, shared_images
from semix.data.torchvision_data import BENCHMARKS
from tests.data.benchmark_files import CLASSES, PER_CLASS, TARGETS, pixels, write_idx, writers

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
NAMES = {
    "MNIST": "0 - zero",
    "FashionMNIST": "T-shirt/top",
    "KMNIST": "o",
    "EMNIST": "0",
    "CIFAR10": "airplane",
    "CIFAR100": "airplane",
    "SVHN": "0",
    "Flowers102": "rose",
    "Food101": "a_pie",
    "OxfordIIITPet": "A Cat",
    "FGVCAircraft": "707-320",
    "DTD": "aed",
}


def config(name: str, root: Path, **settings) -> RealDataConfig:
    return RealDataConfig(name="torchvision", dataset=name, path=str(root), **settings)


@pytest.fixture(params=sorted(BENCHMARKS))
def benchmark(request, tmp_path, monkeypatch) -> RealDataConfig:
    """A small benchmark of three classes, all of which its class of torchvision has."""
    name = request.param
    writers(monkeypatch)[name](tmp_path)
    return config(name, tmp_path)


def test_every_benchmark_is_read_with_its_official_parts(benchmark):
    assert sorted(NAMES) == sorted(BENCHMARKS)
    real = load_real(benchmark)
    assert class_names(benchmark) == real.class_names
    assert len(real.class_names) == CLASSES and real.class_names[0] == NAMES[benchmark.dataset]
    parts = len(BENCHMARKS[benchmark.dataset].train)
    counts = [np.bincount(split.targets).tolist() for split in (real.train, real.validation)]
    assert counts == [[parts * PER_CLASS - 1] * CLASSES, [1] * CLASSES]
    assert np.array_equal(real.test.targets, TARGETS)
    splits = {"train": real.train, "validation": real.validation, "test": real.test}
    images = {name: split.images() for name, split in splits.items()}
    assert all(each.shape[1:] == (32, 32, 3) for each in images.values())
    assert not shared_images({name: [each] for name, each in images.items()})
    assert len({split.digest for split in splits.values()}) == 3
    assert load_real(benchmark).train.digest == real.train.digest


@pytest.mark.parametrize(
    ("name", "part", "axes"),
    [("MNIST", "t10k", (0, 1, 2)), ("EMNIST", "emnist-balanced-test", (0, 2, 1))],
)
def test_grey_images_are_scaled_upright_and_in_three_equal_channels(
    tmp_path, monkeypatch, name, part, axes
):
    writers(monkeypatch)[name](tmp_path)
    stored = load_benchmark_images(config(name, tmp_path, image_size=28))
    assert np.array_equal(stored, np.repeat(pixels(part, 28, 28).transpose(axes)[..., None], 3, 3))
    larger = load_benchmark_images(config(name, tmp_path, image_size=40))
    grey = Image.fromarray(stored[0, ..., 0]).resize((40, 40), Image.Resampling.BICUBIC)
    assert np.array_equal(larger[0, ..., 1], np.asarray(grey))


def load_benchmark_images(settings: RealDataConfig) -> np.ndarray:
    return load_real(settings).test.images()


def test_colours_keep_their_order(tmp_path, monkeypatch):
    writers(monkeypatch)["CIFAR10"](tmp_path)
    planes = pixels("test", 3072).reshape(-1, 3, 32, 32)  # red, green, blue
    shown = load_benchmark_images(config("CIFAR10", tmp_path))
    assert np.array_equal(shown, planes.transpose(0, 2, 3, 1))


def test_splits_take_the_settings_of_all_real_data(tmp_path, monkeypatch):
    writers(monkeypatch)["Food101"](tmp_path)
    settings = {"validation_per_class": 2, "train_per_class": 1, "test_per_class": 3}
    real = load_real(config("Food101", tmp_path, **settings))
    assert [len(split) for split in (real.train, real.validation, real.test)] == [3, 6, 9]
    assert Path(real.test.name(0)).name.startswith("test")
    other = load_real(config("Food101", tmp_path, split_seed=1))
    assert load_real(config("Food101", tmp_path)).validation.digest != other.validation.digest


def test_what_is_mirrored_without_loss():
    cases = {"FashionMNIST": True, "MNIST": False, "SVHN": False, "CIFAR100": True}
    assert {name: may_be_mirrored(config(name, Path())) for name in cases} == cases


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def swap(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


IMAGES = "MNIST/raw/train-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("MNIST", lambda root: (root / IMAGES).unlink(), "not found.*real.download=true downloads"),
        ("MNIST", lambda root: cut(root / IMAGES), r"cannot read MNIST there \(\w+"),
        ("MNIST", lambda root: (root / IMAGES).write_bytes(b""), "cannot read MNIST there"),
        ("MNIST", lambda root: write_idx(root / IMAGES, TARGETS), "cannot read MNIST there"),
        (
            "MNIST",
            lambda root: write_idx(root / IMAGES, pixels("train", 28, 28)[1:]),
            "11 images and 12 labels",
        ),
        (
            "MNIST",
            lambda root: write_idx(
                root / "MNIST/raw/train-labels-idx1-ubyte", TARGETS.astype(np.uint8) + 9
            ),
            "the 3 classes are 0 to 2",
        ),
        ("CIFAR10", lambda root: cut(root / "cifar-10-batches-py" / "train"), "corrupted"),
        ("CIFAR10", lambda root: swap(root / "cifar-10-batches-py" / "batches.meta"), "corrupted"),
        ("SVHN", lambda root: swap(root / "test_32x32.mat"), "corrupted"),
        ("Food101", lambda root: (root / "food-101/meta/test.json").unlink(), "No such file"),
    ],
)
def test_files_that_are_missing_cut_or_changed_are_named(tmp_path, monkeypatch, name, damage, text):
    writers(monkeypatch)[name](tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=text):
        load_real(config(name, tmp_path))


def test_a_download_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])  # nobody listens
    with pytest.raises(InputError, match="can neither read nor download MNIST"):
        load_real(config("MNIST", tmp_path / "new", download=True))


def test_what_is_there_is_not_downloaded_again(tmp_path, monkeypatch):
    writers(monkeypatch)["MNIST"](tmp_path)
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    assert len(load_real(config("MNIST", tmp_path, download=True)).test) == len(TARGETS)


def test_a_hostile_batch_of_cifar_is_not_unpickled(tmp_path, monkeypatch):
    writers(monkeypatch)["CIFAR10"](tmp_path)
    flag = tmp_path / "flag"
    attack = f"cposix\nsystem\n(S'touch {flag}'\ntR.".encode()
    (tmp_path / "cifar-10-batches-py" / "train").write_bytes(attack)
    with pytest.raises(InputError, match="corrupted"):
        load_real(config("CIFAR10", tmp_path))
    assert not flag.exists()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dataset": "CIFAR11"}, "real.dataset = CIFAR11: did you mean CIFAR10"),
        ({}, "real.dataset = None: choose one of CIFAR10"),
        ({"dataset": "MNIST"}, "real.path = nothing: give the folder"),
    ],
)
def test_settings_that_name_no_files_are_refused(settings, text):
    with pytest.raises(InputError, match=text):
        load_real(RealDataConfig(name="torchvision", **settings))


def test_a_picture_that_cannot_be_decoded_is_named_when_it_is_read(tmp_path, monkeypatch):
    writers(monkeypatch)["Food101"](tmp_path)
    (tmp_path / "food-101/images/a_pie/test0.jpg").write_bytes(b"no picture")
    with pytest.raises(
        InputError, match=r"test0.jpg: cannot be read \(.*\); replace or remove it$"
    ):
        load_real(config("Food101", tmp_path)).test.images([0])


@pytest.mark.slow
@pytest.mark.skipif(not DEBIAN.is_dir(), reason="apt-get install dataset-fashion-mnist")
def test_the_whole_of_fashion_mnist_from_debians_files(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for packed in DEBIAN.glob("*.gz"):
        (raw / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    real = load_real(config("FashionMNIST", tmp_path, validation_per_class=500))
    assert [len(split) for split in (real.train, real.validation, real.test)] == [
        55_000,
        5_000,
        10_000,
    ]
    assert np.bincount(real.test.targets).tolist() == [1000] * 10
    assert real.class_names[-1] == "Ankle boot" and real.test.targets[0] == 9
    splits = {"train": real.train, "validation": real.validation, "test": real.test}
    assert not shared_images({name: [split.images()] for name, split in splits.items()})


def test_one_can_be_an_ood_set(tmp_path, monkeypatch):
    writers(monkeypatch)["SVHN"](tmp_path)
    ood = OODDataConfig(name="torchvision", dataset="SVHN", path=str(tmp_path), test_per_class=2)
    evaluation = EvaluationConfig(ood={"svhn": ood})
    check_evaluation(evaluation, ("cat", "dog"), image_size=32)
    assert len(load_real(evaluation.ood["svhn"]).test) == 2 * CLASSES
    with pytest.raises(InputError, match=r"evaluation\.ood"):
        check_evaluation(evaluation, ("cat", "2"), image_size=32)
