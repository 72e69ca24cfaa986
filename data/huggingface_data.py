"""Datasets for Hugging Face's `datasets`: folders, and those on the Hub at one commit."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semix.data.errors import InputError
from semix.data.fingerprint import fingerprint
from semix.data.images import decode_square, load_square
from semix.data.installation import install_command
from semix.data.splits import ImageSplit, RealDataConfig, RealDataset, official_splits

COMMIT = re.compile(r"[0-9a-f]{40}")
SAVED = "dataset_dict.json"  # of a folder that `save_to_disk` has written
TESTS = ("test", "validation", "val")  # the first of these is tested on


def hub_names(config: RealDataConfig) -> tuple[str, ...]:
    """The names of the classes. Raises InputError as `load_hub_dataset`."""
    return _parts(config).names


def load_hub_dataset(config: RealDataConfig) -> RealDataset:
    """Open a dataset with `train` and a part to test on; validation images are drawn from `train`.

    Images are decoded on access, as pictures of a folder.

    Raises:
        InputError: `datasets` is not installed or cannot read the dataset; no commit is named; a
            part or column is missing; the labels are no classes; or see `official_splits`.
    """
    parts = _parts(config)
    splits = [
        _split(part, parts.image, parts.label, config.image_size)
        for part in (parts.train, parts.test)
    ]
    return official_splits(parts.names, *splits, config=config)


@dataclass(frozen=True)
class _Parts:
    train: Any
    test: Any
    image: str
    label: str
    names: tuple[str, ...]


def _parts(config: RealDataConfig) -> _Parts:
    parts = _open(config)
    held = next((name for name in TESTS if name in parts), None)
    if "train" not in parts or held is None:
        remedy = f"has {', '.join(parts)}; train and one of {', '.join(TESTS)} are needed"
        raise InputError("real.path", config.path, remedy)
    train, test = parts["train"], parts[held]
    image = _column(train, "image", config.image, "Image")
    label = _column(train, "label", config.label, "ClassLabel")
    if test.features != train.features:
        raise InputError(
            "real.path", config.path, f"{held} has other columns or classes than train"
        )
    return _Parts(train, test, image, label, tuple(train.features[label].names))


def _column(part: Any, field: str, name: str | None, kind: str) -> str:
    """The column of a setting, which must be of this type of `datasets`."""
    types = {column: type(feature).__name__ for column, feature in part.features.items()}
    columns = [column for column, type_name in types.items() if type_name == kind]
    if name is None and len(columns) == 1:
        return columns[0]
    if name is not None and name in columns:
        return name
    if name in types:
        remedy = f"is of type {types[name]}, not {kind}; cast_column makes it one"
    else:
        known = ", ".join(f"{column} ({type_name})" for column, type_name in types.items())
        remedy = f"name a column of type {kind}; there are {known}"
    raise InputError(f"real.{field}", name, remedy)


def _open(config: RealDataConfig) -> Any:
    try:
        import datasets  # takes a second
    except ImportError as error:
        remedy = f"needs the package datasets; run {install_command('export')}"
        raise InputError("real.name", config.name, remedy) from error
    if config.path is None:
        raise InputError("real.path", "nothing", "name a folder, or OWNER/NAME on the Hub")
    folder = Path(config.path).absolute()
    if not folder.is_dir() and not COMMIT.fullmatch(config.revision or ""):
        remedy = f"{config.path} is no folder here; of a dataset on the Hub name the commit, 40 hex"
        raise InputError("real.revision", config.revision, f"{remedy} digits: others may change")
    try:
        if (folder / SAVED).is_file():
            return datasets.load_from_disk(str(folder))
        if folder.is_dir():
            return datasets.load_dataset(str(folder))
        return datasets.load_dataset(config.path, revision=config.revision)
    except Exception as error:  # its readers raise any type
        reason = (str(error).strip().splitlines() or [""])[0]
        text = f"`datasets` cannot read it ({type(error).__name__}: {reason})"
        raise InputError("real.path", config.path, text) from None


def _split(part: Any, image: str, label: str, size: int) -> ImageSplit:
    import datasets

    targets = np.asarray(part[label], dtype=np.int64)
    stored = part.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    files = _Stored(stored, image, size)
    return ImageSplit(targets, files.load, files.content, files.name)


@dataclass(frozen=True)
class _Stored:
    """Images of a column, as bytes or as paths of files, decoded as squares of `size` pixels."""

    rows: Any
    column: str
    size: int

    def load(self, indices: np.ndarray) -> np.ndarray:
        stored = self.rows[indices.tolist()][self.column]  # one access for all
        return np.stack([self._square(*each) for each in zip(indices, stored, strict=True)])

    def _square(self, index: int, image: Mapping[str, Any]) -> np.ndarray:
        try:
            if image["bytes"] is None:
                return load_square(Path(image["path"]), self.size)
            return decode_square(image["bytes"], self.size)
        except OSError as error:
            raise InputError("image", self.name(index), f"cannot be read ({error})") from None

    def content(self, heartbeat: Callable[[], None]) -> str:
        digests = []
        for row in self.rows:
            content = row[self.column]["bytes"]
            content = Path(row[self.column]["path"]).read_bytes() if content is None else content
            digests.append(hashlib.sha256(content).hexdigest())
            heartbeat()
        return fingerprint([self.size, *digests])

    def name(self, index: int) -> str:
        return f"row {index} of {self.column}"
