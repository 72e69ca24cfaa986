"""Small benchmarks in the formats of their authors, which torchvision reads."""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from semix.data.torchvision_data import BENCHMARKS

CLASSES, PER_CLASS = 3, 4  # of each part
TARGETS = np.repeat(np.arange(CLASSES), PER_CLASS)


def pixels(part: str, *shape: int) -> np.ndarray:
    """Random uint8 [N, *shape], other ones for each part."""
    rng = np.random.default_rng(list(part.encode()))
    return rng.integers(256, size=(len(TARGETS), *shape), dtype=np.uint8)


def write_idx(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes())


def write_mnist(
    root: Path, monkeypatch: Any, *, name: str, prefixes: Sequence[str] = ("train", "t10k")
) -> None:
    monkeypatch.setattr(getattr(datasets, name), "classes", getattr(datasets, name).classes[:3])
    for prefix in prefixes:
        images = pixels(prefix, 28, 28)
        write_idx(root / name / "raw" / f"{prefix}-images-idx3-ubyte", images)
        labels = TARGETS.astype(np.uint8)
        write_idx(root / name / "raw" / f"{prefix}-labels-idx1-ubyte", labels)


def write_emnist(root: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(datasets.EMNIST, "classes_split_dict", {"balanced": ["0", "1", "2"]})
    prefixes = ("emnist-balanced-train", "emnist-balanced-test")
    write_mnist(root, monkeypatch, name="EMNIST", prefixes=prefixes)


def write_cifar(root: Path, monkeypatch: Any, *, classes: int) -> None:
    """CIFAR with these files' checksums as the official ones: torchvision unpickles no others."""
    kind = datasets.CIFAR10 if classes == 10 else datasets.CIFAR100
    prefix, labels = ("", "labels") if classes == 10 else ("fine_", "fine_labels")
    folder = root / kind.base_folder
    folder.mkdir(parents=True)

    def dump(name: str, content: object) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, md5((folder / name).read_bytes()).hexdigest()]

    lists = {
        f"{part}_list": [dump(part, {"data": pixels(part, 3072), labels: TARGETS.tolist()})]
        for part in ("train", "test")
    }
    name, checksum = dump("batches.meta", {f"{prefix}label_names": ["airplane", "bird", "cat"]})
    meta = {"filename": name, "key": f"{prefix}label_names", "md5": checksum}
    for attribute, value in {**lists, "meta": meta}.items():
        monkeypatch.setattr(kind, attribute, value)


def write_svhn(root: Path, monkeypatch: Any) -> None:
    digits = replace(BENCHMARKS["SVHN"], names=("0", "1", "2"))
    monkeypatch.setitem(BENCHMARKS, "SVHN", digits)
    root.mkdir(exist_ok=True)
    split_list = {}
    for part in ("train", "test"):
        path = root / f"{part}_32x32.mat"
        labels = np.where(TARGETS == 0, 10, TARGETS)[:, None]  # its zero is a ten
        savemat(path, {"X": pixels(part, 32, 32, 3).transpose(1, 2, 3, 0), "y": labels})
        split_list[part] = ["", path.name, md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(datasets.SVHN, "split_list", split_list)


def write_pictures(folder: Path, names: list[str], part: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in zip(names, pixels(part, 40, 50, 3), strict=True):
        path = folder / f"{name}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)


def write_flowers(root: Path, monkeypatch: Any) -> None:
    folder, count = root / "flowers-102", len(TARGETS)
    numbers = np.arange(1, 3 * count + 1)
    parts = dict(zip(("trnid", "valid", "tstid"), np.split(numbers, 3), strict=True))
    for part, ids in parts.items():
        write_pictures(folder / "jpg", [f"image_{number:05d}" for number in ids], part)
    savemat(folder / "imagelabels.mat", {"labels": np.tile(TARGETS, 3)[None] + 1})
    savemat(folder / "setid.mat", parts)
    names = {"label": "imagelabels.mat", "setid": "setid.mat"}
    checksums = {
        key: (name, md5((folder / name).read_bytes()).hexdigest()) for key, name in names.items()
    }
    monkeypatch.setattr(datasets.Flowers102, "_file_dict", checksums)
    monkeypatch.setattr(datasets.Flowers102, "classes", ["rose", "daisy", "tulip"])


def write_food(root: Path) -> None:
    folder = root / "food-101"
    for part in ("train", "test"):
        names = [f"{'abc'[target]}_pie/{part}{n}" for n, target in enumerate(TARGETS)]
        write_pictures(folder / "images", names, part)
        (folder / "meta").mkdir(exist_ok=True)
        of_class = {f"{c}_pie": [n for n in names if n.startswith(c)] for c in "abc"}
        (folder / "meta" / f"{part}.json").write_text(json.dumps(of_class))


def write_pets(root: Path) -> None:
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    for part in ("trainval", "test"):
        names = [f"{'abc'[target]}_cat_{part}{n}" for n, target in enumerate(TARGETS)]
        write_pictures(folder / "images", names, part)
        lines = [f"{name} {target + 1} 1 1\n" for name, target in zip(names, TARGETS, strict=True)]
        (folder / "annotations" / f"{part}.txt").write_text("".join(lines))


def write_aircraft(root: Path) -> None:
    folder = root / "fgvc-aircraft-2013b" / "data"
    folder.mkdir(parents=True)
    variants = ["707-320", "727-200", "A340 600"]
    (folder / "variants.txt").write_text("\n".join(variants) + "\n")
    for part in ("trainval", "test"):
        names = [f"{part}{n}" for n in range(len(TARGETS))]
        write_pictures(folder / "images", names, part)
        lines = [f"{n} {variants[target]}\n" for n, target in zip(names, TARGETS, strict=True)]
        (folder / f"images_variant_{part}.txt").write_text("".join(lines))


def write_textures(root: Path) -> None:
    folder = root / "dtd" / "dtd"
    (folder / "labels").mkdir(parents=True)
    for part in ("train", "val", "test"):
        names = [f"{'abc'[target]}ed/{part}{n}" for n, target in enumerate(TARGETS)]
        write_pictures(folder / "images", names, part)
        (folder / "labels" / f"{part}1.txt").write_text("".join(f"{n}.jpg\n" for n in names))


def writers(monkeypatch: Any) -> Mapping[str, Callable[[Path], None]]:
    """A function that writes each benchmark into a folder, by name."""
    return {
        "MNIST": lambda root: write_mnist(root, monkeypatch, name="MNIST"),
        "FashionMNIST": lambda root: write_mnist(root, monkeypatch, name="FashionMNIST"),
        "KMNIST": lambda root: write_mnist(root, monkeypatch, name="KMNIST"),
        "EMNIST": lambda root: write_emnist(root, monkeypatch),
        "CIFAR10": lambda root: write_cifar(root, monkeypatch, classes=10),
        "CIFAR100": lambda root: write_cifar(root, monkeypatch, classes=100),
        "SVHN": lambda root: write_svhn(root, monkeypatch),
        "Flowers102": lambda root: write_flowers(root, monkeypatch),
        "Food101": write_food,
        "OxfordIIITPet": write_pets,
        "FGVCAircraft": write_aircraft,
        "DTD": write_textures,
    }
