"""Your own pictures: one folder a class, split by us or already split into train/ and test/."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.errors import InputError
from data.fingerprint import file_digest, fingerprint
from data.images import load_square
from data.real import SPLITS, ImageSplit, RealDataConfig, RealDataset
from data.splits import stratified_split

EXTENSIONS = {".png", ".jpg", ".jpeg", ".webp"}
SPLIT_NAMES = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}


def find_classes(config: RealDataConfig) -> tuple[str, ...]:
    """Class names, sorted: the folder names. Raises InputError below two classes."""
    root = _root(config)
    split_folders = _split_folders(root)
    names = tuple(path.name for path in _folders(split_folders.get("train", root)))
    if len(names) < 2:
        raise InputError("real.path", root, f"holds {len(names)} class folder(s); give at least 2")
    return names


def load_imagefolder(config: RealDataConfig) -> RealDataset:
    """Open the folder; images are decoded when asked for."""
    root, names = _root(config), find_classes(config)
    folders = _split_folders(root)
    parts = _given_splits(config, folders, names) if folders else _made_splits(config, root, names)
    for split, (paths, targets) in zip(SPLITS, parts, strict=True):
        _refuse_empty(root, split, names, targets)
        assert len(paths) == len(targets)
    return RealDataset(names, *(_split(*part, config.image_size) for part in parts))


def _root(config: RealDataConfig) -> Path:
    if config.path is None:
        raise InputError("real.path", "nothing", "imagefolder needs the folder of your pictures")
    root = Path(config.path)
    if not root.is_dir():
        raise InputError("real.path", root, "there is no such folder")
    return root


def _folders(parent: Path) -> list[Path]:
    return sorted(p for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))


def _split_folders(root: Path) -> dict[str, Path]:
    """Split name to folder if the layout is train/CLASS and test/CLASS, else nothing."""
    found = {SPLIT_NAMES[p.name]: p for p in _folders(root) if p.name in SPLIT_NAMES}
    return found if {"train", "test"} <= set(found) else {}


Part = tuple[list[Path], np.ndarray]


def _list(folder: Path, names: Sequence[str]) -> Part:
    unknown = sorted(p.name for p in _folders(folder) if p.name not in names)
    if unknown:
        raise InputError("real.path", folder / unknown[0], "this class is missing in train/")
    paths, targets = [], []
    for target, name in enumerate(names):
        files = (folder / name).glob("*") if (folder / name).is_dir() else ()
        found = sorted(path for path in files if path.suffix.lower() in EXTENSIONS)
        paths += found
        targets += [target] * len(found)
    return paths, np.array(targets, dtype=np.int64)


def _take(part: Part, indices: np.ndarray) -> Part:
    return [part[0][index] for index in indices], part[1][indices]


def _made_splits(config: RealDataConfig, root: Path, names: Sequence[str]) -> list[Part]:
    everything = _list(root, names)
    _refuse_empty(root, "train", names, everything[1])
    sizes = (config.train_per_class, config.validation_per_class)
    return [
        _take(everything, p) for p in stratified_split(everything[1], sizes, seed=config.split_seed)
    ]


def _given_splits(
    config: RealDataConfig, folders: dict[str, Path], names: Sequence[str]
) -> list[Part]:
    """As the folders say; without validation/ some training images become it."""
    train, test = (_list(folders[split], names) for split in ("train", "test"))
    _refuse_empty(folders["train"].parent, "train", names, train[1])
    given = _list(folders["validation"], names) if "validation" in folders else None
    rarest = int(np.bincount(train[1]).min())
    held_out = 0 if given else config.validation_per_class or max(1, rarest // 10)
    kept = config.train_per_class or len(train[1])
    # The held-out part comes first, so that a smaller training set keeps the same validation.
    validation, chosen, _ = stratified_split(train[1], (held_out, kept), seed=config.split_seed)
    return [_take(train, chosen), given or _take(train, validation), test]


def _refuse_empty(root: Path, split: str, names: Sequence[str], targets: np.ndarray) -> None:
    counts = np.bincount(targets, minlength=len(names))
    if not counts.all():
        name = names[int(np.argmin(counts))]
        raise InputError(
            "real.path", root, f"class {name!r} has no {split} images; add some, or remove it"
        )


def _split(paths: list[Path], targets: np.ndarray, size: int) -> ImageSplit:
    def load(indices: np.ndarray) -> np.ndarray:
        return np.stack([_load(paths[index], size) for index in indices])

    def content() -> str:
        return fingerprint([size, *(file_digest(path) for path in paths)])

    return ImageSplit(targets, load=load, content=content, name=lambda index: str(paths[index]))


def _load(path: Path, size: int) -> np.ndarray:
    try:
        return load_square(path, size)
    except OSError as error:
        raise InputError("image", path, f"cannot be read ({error}); replace or remove it") from None
