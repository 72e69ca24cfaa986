"""A user's own pictures: one folder per class, or folders of classes in train/ and test/."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from semix.data.errors import InputError
from semix.data.images import PICTURES, load_square
from semix.data.machine import cores
from semix.data.picture_files import EXTENSIONS, MAX_THREADS, PictureFiles
from semix.data.printable import printable_line
from semix.data.splits import (
    SPLITS,
    RealDataConfig,
    RealDataset,
    draw_validation,
    split_sizes,
    stratified_split,
)
from semix.data.threads import mapped

SPLIT_NAMES = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}
MAX_LINES = 20  # bad images, or classes without images, that a message lists

Listener = Callable[[int, int], None]  # called with the number of inspected images and of all

log = logging.getLogger("semix.data")


def find_classes(config: RealDataConfig) -> tuple[str, ...]:
    """Class names, sorted: the folder names.

    Raises:
        InputError: fewer than two classes, or only one of train/ and test/.
    """
    root = _root(config)
    split_folders = _split_folders(root)
    names = tuple(path.name for path in _folders(split_folders.get("train", root)))
    if len(names) < 2:
        remedy = (
            f"holds {len(names)} class folder(s); give at least 2, with {PICTURES} files in each"
        )
        raise InputError("real.path", root, remedy)
    return names


def check_outside_images(pictures: str | None, path: str | Path, *, field: str = "out") -> None:
    """Raises InputError for a path in the folder of pictures, which would become a class there.

    Links are followed: to the folder, out of it, and within the path.

    Args:
        pictures: `real.folder` of the settings; None where they are not the user's own.
        field: the setting or argument that gives the path, for the message.
    """
    if pictures is None or not (root := Path(pictures)).is_dir():
        return
    folders = [root, *filter(Path.is_symlink, _folders(root))]
    paths = Path(os.path.normpath(Path(path).absolute())), Path(os.path.realpath(path))
    candidates = (c for resolved in paths for c in (resolved, *resolved.parents) if c.is_dir())
    if any(candidate.samefile(folder) for candidate in candidates for folder in folders):
        remedy = f"lies in {root}, the folder of your pictures, which it would change (a folder "
        raise InputError(field, path, f"{remedy}there is a class); choose a place outside of it")


def load_imagefolder(
    config: RealDataConfig, *, heartbeat: Callable[[], None] = lambda: None
) -> RealDataset:
    """Open the folder; images are decoded on access.

    With `skip_bad` all images are decoded now, and bad ones are left out before the split, so that
    the splits depend only on the files, and are the same in every process.

    Args:
        heartbeat: called after each image that is decoded now.
    """
    root, names = _root(config), find_classes(config)
    folders = _split_folders(root)
    bad: Mapping[Path, str] = {}
    if config.skip_bad:
        report = inspect_folder(config, lambda done, total: heartbeat())
        if bad := report.bad:
            log.warning("%s", report.left_out())
    if folders:
        splits = _splits_from_folders(config, folders, names, bad)
    else:
        splits = _split_at_random(config, root, names, bad)
    for split, (paths, targets) in zip(SPLITS, splits, strict=True):
        _check_nonempty(root, split, names, targets, folder=folders.get(split))
        assert len(paths) == len(targets)
    return RealDataset(
        names,
        *(
            PictureFiles(paths, config.image_size, may_skip=True).split(targets)
            for paths, targets in splits
        ),
    )


@dataclass(frozen=True)
class FolderReport:
    """The result of inspecting a folder of pictures.

    Attributes:
        images: number of images that were inspected.
        bad: why an image cannot be decoded, by its path; at most as many as the settings allow.
        ignored: number of files and folders that are not images of a class, by kind.
        alike: groups of class names that differ only in upper and lower case.
    """

    images: int
    bad: Mapping[Path, str]
    ignored: Mapping[str, int]
    alike: Sequence[Sequence[str]]

    def notes(self) -> list[str]:
        """Findings that a user may not expect, as sentences."""
        sentences = [self.left_out()] if self.bad else []
        for names in self.alike:
            sentences.append(f"classes {' and '.join(names)} differ in case alone; are they one?")
        if self.ignored:
            kinds = ", ".join(f"{count:,} {what}" for what, count in self.ignored.items())
            remedy = f"images are {PICTURES} files directly in the folder of a class"
            sentences.append(f"ignored beside {self.images:,} images: {kinds}; {remedy}")
        return sentences

    def left_out(self) -> str:
        """A sentence with the number of bad images and the first of them."""
        first = [f"{path}: {reason}" for path, reason in list(self.bad.items())[:3]]
        more = [f"and {len(self.bad) - 3:,} more"] if len(self.bad) > 3 else []
        count = f"{len(self.bad):,} of {self.images:,} images"
        return f"left out {count} that cannot be decoded: {'; '.join([*first, *more])}"


def inspect_folder(
    config: RealDataConfig, listener: Listener = lambda done, total: None
) -> FolderReport:
    """Decode every image, and count the files and folders that are ignored.

    Raises:
        InputError: more images cannot be decoded than `skip_bad` allows, with the reason for each;
            an image cannot be read from disk; or the layout cannot be used.
    """
    root, names = _root(config), find_classes(config)
    folders = _split_folders(root)
    split_folders = [folders[split] for split in SPLITS if split in folders] or [root]
    paths = [path for folder in split_folders for path in _list(folder, names)[0]]
    threads = min(MAX_THREADS, cores())
    bad, unread = dict[Path, str](), dict[Path, str]()
    faults = mapped(lambda path: _fault(path, config.image_size), paths, threads=threads)
    for done, (path, fault) in enumerate(zip(paths, faults, strict=True), start=1):
        if fault is not None:
            # An image with a disk error is not left out: the next process may be able to read it.
            (bad if fault.errno is None else unread)[path] = str(fault)
        listener(done, len(paths))
    if unread:
        count = f"{len(unread):,} of {len(paths):,} images cannot be read; allow or repair them"
        raise InputError("real.path", root, "\n  ".join([count, *_lines(root, unread)]))
    _check_bad_images(config, root, bad, images=len(paths))
    keys = dict.fromkeys(name.casefold() for name in names)
    alike = [[name for name in names if name.casefold() == key] for key in keys]
    alike = [group for group in alike if len(group) > 1]
    return FolderReport(len(paths), bad, _ignored(root, split_folders, names), alike)


def _check_bad_images(
    config: RealDataConfig, root: Path, bad: Mapping[Path, str], *, images: int
) -> None:
    """Raises InputError, with the reason for each, if more images are bad than are allowed."""
    limit = config.skip_bad
    if isinstance(limit, float):
        limit = round(limit * images, 6)  # 0.29 of 100 are 29
    if len(bad) > limit:
        remedy = f"{len(bad):,} of {images:,} images in {root} cannot be decoded; replace or remove"
        remedy += " them, or allow as many to be left out"
        shown = [remedy, *_lines(root, bad)]
        raise InputError("real.skip_bad", config.skip_bad, "\n  ".join(shown))


def _lines(root: Path, faults: Mapping[Path, str]) -> list[str]:
    lines = [f"{path.relative_to(root)}: {reason}" for path, reason in faults.items()]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"and {len(lines) - MAX_LINES:,} more"]
    return [printable_line(line) for line in lines]


def _ignored(root: Path, split_folders: Sequence[Path], names: Sequence[str]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for folder in {root, *split_folders}:
        counts["loose files"] += sum(_is_shown(p) and p.is_file() for p in folder.iterdir())
    if split_folders != [root]:
        counts["folders beside train and test"] = len(_folders(root)) - len(split_folders)
    for folder in (parent / name for parent in split_folders for name in names):
        counts += _no_pictures(folder)
    return {what: count for what, count in sorted(counts.items()) if count}


def _no_pictures(folder: Path) -> Counter[str]:
    """Number of files that are no images in the folder of a class, by extension."""
    kinds: Counter[str] = Counter()
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.suffix.lower() not in EXTENSIONS and _is_shown(path):
            kind = "folders in class folders" if path.is_dir() else path.suffix.lower()
            kinds[kind or "files without extension"] += 1
    return kinds


def _is_shown(path: Path) -> bool:
    return not path.name.startswith(".")


def _root(config: RealDataConfig) -> Path:
    if config.path is None:
        raise InputError("real.path", "nothing", "imagefolder needs the folder of your pictures")
    root = Path(config.path).absolute()
    if not root.is_dir():
        raise InputError("real.path", root, "there is no such folder")
    return root


def _folders(parent: Path) -> list[Path]:
    return sorted(p for p in parent.iterdir() if p.is_dir() and _is_shown(p))


def _split_folders(root: Path) -> dict[str, Path]:
    """Folders by split if the layout is train/CLASS and test/CLASS, else an empty dictionary.

    Raises:
        InputError: folders are named like splits, but train or test is missing.
    """
    folders = _folders(root)
    split_folders = {SPLIT_NAMES[p.name]: p for p in folders if p.name in SPLIT_NAMES}
    if {"train", "test"} <= set(split_folders):
        return split_folders
    splits = [p.name for p in folders if p.name.lower() in SPLIT_NAMES]
    if len(splits) > 1 or 0 < len(splits) == len(folders):
        missing = " and no ".join(name for name in ("train", "test") if name not in split_folders)
        remedy = f"holds {' and '.join(splits)}, but no {missing}; add or rename it, or give a "
        remedy += "folder that holds the classes themselves, which is then split"
        raise InputError("real.path", root, remedy)
    return {}


PathsAndTargets = tuple[list[Path], np.ndarray]


def _list(folder: Path, names: Sequence[str], bad: Mapping[Path, str] = {}) -> PathsAndTargets:
    """Paths and targets of the images of all classes except bad ones, sorted by class and name."""
    unknown = sorted(p.name for p in _folders(folder) if p.name not in names)
    if unknown:
        raise InputError("real.path", folder / unknown[0], "this class is missing in train/")
    paths, targets = [], []
    for target, name in enumerate(names):
        files = (folder / name).glob("*") if (folder / name).is_dir() else ()
        images = (path for path in files if path.suffix.lower() in EXTENSIONS)
        files_of_class = sorted(path for path in images if _is_shown(path) and path not in bad)
        paths += files_of_class
        targets += [target] * len(files_of_class)
    return paths, np.array(targets, dtype=np.int64)


def _take(images: PathsAndTargets, indices: np.ndarray) -> PathsAndTargets:
    return [images[0][index] for index in indices], images[1][indices]


def _split_at_random(
    config: RealDataConfig, root: Path, names: Sequence[str], bad: Mapping[Path, str]
) -> list[PathsAndTargets]:
    images = _list(root, names, bad)
    _check_nonempty(root, "train", names, images[1], folder=root)
    sizes = (config.train_per_class, config.validation_per_class)
    _check_test_images_remain(names, images[1], sizes)
    splits = stratified_split(images[1], sizes, seed=config.split_seed)
    return [_take(images, indices) for indices in splits]


def _check_test_images_remain(
    names: Sequence[str], targets: np.ndarray, sizes: tuple[int | None, int | None]
) -> None:
    """Raises InputError naming the configured size that leaves a class without test images."""
    counts = np.bincount(targets)
    rarest, count = names[int(counts.argmin())], int(counts.min())
    train, validation = split_sizes(count, sizes)
    has = f"class {rarest!r} has {count} images"
    if sizes[0] is not None and train + validation >= count:
        remedy = f"{has}, {validation} of them for validation; choose fewer, so that some are left"
        raise InputError("real.train_per_class", train, f"{remedy} to test on")
    if sizes[1] is not None and train + validation >= count:
        remedy = f"{has}, {train} of them to train on; choose fewer, so that some are left"
        raise InputError("real.validation_per_class", validation, f"{remedy} to test on")


def _splits_from_folders(
    config: RealDataConfig,
    folders: dict[str, Path],
    names: Sequence[str],
    bad: Mapping[Path, str],
) -> list[PathsAndTargets]:
    """The splits in the folders; without validation/ it is split off the training images."""
    train, test = (_list(folders[split], names, bad) for split in ("train", "test"))
    _check_nonempty(folders["train"].parent, "train", names, train[1], folder=folders["train"])
    supplied = _list(folders["validation"], names, bad) if "validation" in folders else None
    training, validation = draw_validation(train[1], config, none=supplied is not None)
    return [_take(train, training), supplied or _take(train, validation), test]


def _check_nonempty(
    root: Path, split: str, names: Sequence[str], targets: np.ndarray, *, folder: Path | None
) -> None:
    """Raises InputError naming the classes without images and other files in their folders."""
    counts = np.bincount(targets, minlength=len(names))
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    if empty:
        shown = [_describe_empty_class(name, folder) for name in empty[:MAX_LINES]]
        more = f" and {len(empty) - MAX_LINES:,} more" if len(empty) > MAX_LINES else ""
        classes = "class" if len(empty) == 1 else "classes"
        remedy = f"{classes} {', '.join(shown)}{more} {'has' if len(empty) == 1 else 'have'} no"
        remedy += f" {split} images; add some, {PICTURES}, or remove it"
        raise InputError("real.path", root, remedy)


def _describe_empty_class(name: str, folder: Path | None) -> str:
    """The name of a class, with other files in its folder: `'cat' (12 .heic)`."""
    kinds = _no_pictures(folder / name) if folder else {}
    contents = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    return f"{name!r} ({contents})" if contents else repr(name)


def _fault(path: Path, size: int) -> OSError | None:
    """Why an image cannot be read or decoded; None if it can."""
    try:
        load_square(path, size)
    except OSError as error:
        return error
    return None
