"""Benchmarks by name: torchvision's own classes read their own files, from official parts."""

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from semix.data.errors import InputError, choices
from semix.data.fingerprint import fingerprint
from semix.data.images import fit_square
from semix.data.picture_files import PictureFiles
from semix.data.splits import ImageSplit, RealDataConfig, RealDataset, official_splits


@dataclass(frozen=True)
class Benchmark:
    """How a class of torchvision gives its official parts.

    Attributes:
        train, test: arguments of the class for each part; parts to train on are joined.
        images: its attribute with uint8 pixels, or with the paths of picture files.
        targets: its attribute with class indices.
        axes: order that makes its pixels [N, H, W, 3], or [N, H, W].
        names: of the classes, where it has none itself.
        mirrored: whether a mirrored image still shows its class.
    """

    train: tuple[Mapping[str, Any], ...] = ({"train": True},)
    test: Mapping[str, Any] = field(default_factory=lambda: {"train": False})
    images: str = "data"
    targets: str = "targets"
    axes: tuple[int, ...] = (0, 1, 2, 3)
    names: tuple[str, ...] = ()
    mirrored: bool = True


def _by_split(*train: str, images: str, targets: str, **further: Any) -> Benchmark:
    parts = tuple({"split": name} for name in train)
    return Benchmark(parts, {"split": "test"}, images=images, targets=targets, **further)


GREY = (0, 1, 2)  # axes
BALANCED = {"split": "balanced"}
BENCHMARKS = {
    "CIFAR10": Benchmark(),
    "CIFAR100": Benchmark(),
    "MNIST": Benchmark(axes=GREY, mirrored=False),
    "FashionMNIST": Benchmark(axes=GREY),
    "KMNIST": Benchmark(axes=GREY, mirrored=False),
    "EMNIST": Benchmark(
        ({"train": True, **BALANCED},),
        {"train": False, **BALANCED},
        axes=(0, 2, 1),  # its files hold them transposed
        mirrored=False,
    ),
    "SVHN": _by_split(
        "train",
        images="data",
        targets="labels",
        axes=(0, 2, 3, 1),
        names=tuple(map(str, range(10))),
        mirrored=False,
    ),
    "DTD": _by_split("train", "val", images="_image_files", targets="_labels"),
    "FGVCAircraft": _by_split("trainval", images="_image_files", targets="_labels"),
    "Flowers102": _by_split("train", "val", images="_image_files", targets="_labels"),
    "Food101": _by_split("train", images="_image_files", targets="_labels"),
    "OxfordIIITPet": _by_split("trainval", images="_images", targets="_labels"),
}


def benchmark_names(config: RealDataConfig) -> tuple[str, ...]:
    """The names of the classes. Raises InputError as `load_benchmark`."""
    benchmark = benchmark_of(config)
    return _names(benchmark, _open(config, benchmark, (benchmark.test,))[0])


def load_benchmark(config: RealDataConfig) -> RealDataset:
    """Open a benchmark: its official test images, and validation images drawn from the others.

    Grey images get three equal channels; all are scaled to `image_size` as pictures of a folder.
    torchvision reads the files. It unpickles those of CIFAR only after it has compared their
    checksums with the official ones.

    Raises:
        InputError: torchvision has no such data set, its files are missing, cut or changed, or
            cannot be downloaded; or see `official_splits`.
    """
    benchmark = benchmark_of(config)
    *train, test = _open(config, benchmark, (*benchmark.train, benchmark.test))
    splits = [_split(config, benchmark, parts) for parts in (train, [test])]
    return official_splits(_names(benchmark, test), *splits, config=config)


def benchmark_of(config: RealDataConfig) -> Benchmark:
    """How to read it. Raises InputError for a name that is not listed."""
    if config.dataset not in BENCHMARKS:
        raise InputError("real.dataset", config.dataset, choices(config.dataset, BENCHMARKS))
    return BENCHMARKS[config.dataset]


def _names(benchmark: Benchmark, part: Any) -> tuple[str, ...]:
    return benchmark.names or tuple(part.classes)


def _open(
    config: RealDataConfig, benchmark: Benchmark, parts: Sequence[Mapping[str, Any]]
) -> list[Any]:
    from torchvision import datasets  # torch takes seconds

    if config.path is None:
        remedy = f"give the folder that holds, or gets, torchvision's files of {config.dataset}"
        raise InputError("real.path", "nothing", remedy)
    root = Path(config.path).absolute()
    kind = getattr(datasets, str(config.dataset))
    try:
        with _one_process(root, active=config.download):
            opened = [kind(str(root), **part, download=config.download) for part in parts]
        for part in opened:
            images, targets = getattr(part, benchmark.images), getattr(part, benchmark.targets)
            if len(images) != len(targets):
                raise ValueError(f"{len(images)} images and {len(targets)} labels")
        if len({_names(benchmark, part) for part in opened}) > 1:
            raise ValueError("its parts have other classes")
    except Exception as error:  # torchvision's readers raise any type
        text = str(error).strip().partition("\n")[0].partition(". You can use download")[0]
        reason = f"{type(error).__name__}: {text}".removesuffix(": ")
        if config.download:
            text = f"torchvision can neither read nor download {config.dataset} ({reason})"
        else:
            text = f"torchvision cannot read {config.dataset} there ({reason}); "
            text += "real.download=true downloads it"
        raise InputError("real.path", root, text) from None
    return opened


@contextmanager
def _one_process(root: Path, *, active: bool) -> Iterator[None]:
    """Let the processes of a machine download one after the other: the first does the work."""
    if not active:
        yield
        return
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".download.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _split(config: RealDataConfig, benchmark: Benchmark, parts: Sequence[Any]) -> ImageSplit:
    targets = np.concatenate(
        [np.asarray(getattr(part, benchmark.targets), dtype=np.int64) for part in parts]
    )
    images = [getattr(part, benchmark.images) for part in parts]
    if benchmark.images != "data":
        paths = [Path(path) for part in images for path in part]
        return PictureFiles(paths, config.image_size).split(targets)
    pixels = np.concatenate([np.asarray(part).transpose(benchmark.axes) for part in images])
    stored = _Pixels(pixels, config.image_size)
    return ImageSplit(targets, stored.load, stored.content)


@dataclass(frozen=True)
class _Pixels:
    """Stored images, uint8 [N, H, W, 3] or [N, H, W], scaled to squares of `size` pixels."""

    pixels: np.ndarray
    size: int

    def load(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self._square(index) for index in indices])

    def _square(self, index: int) -> np.ndarray:
        return fit_square(Image.fromarray(np.ascontiguousarray(self.pixels[index])), self.size)

    def content(self, heartbeat: Callable[[], None]) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self.pixels).data).hexdigest()
        return fingerprint([self.size, list(self.pixels.shape), digest])
