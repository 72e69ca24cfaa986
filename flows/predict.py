"""Predict the classes of pictures with a trained run: one row per picture, in constant memory."""

import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semix.data.errors import InputError
from semix.data.files import published
from semix.data.images import load_square
from semix.data.installation import install_command
from semix.data.picture_files import EXTENSIONS
from semix.data.printable import spreadsheet_text
from semix.flows.failures import RunFailed
from semix.flows.paths import output_file
from semix.flows.progress import running_count
from semix.flows.terminal import say

if TYPE_CHECKING:
    import numpy as np

    from semix.calib.classifier import CalibratedClassifier

BATCH = 256  # pictures in memory at a time, besides those that are decoded ahead
STDIN = STDOUT = "-"
MARKS = "*?["  # of a pattern
SEPARATOR = "|"  # of the classes of a set

Row = dict[str, str | float | bool | None]
Write = Callable[[Sequence[Row]], None]


@dataclass(frozen=True)
class Columns:
    """What is predicted of each picture besides its class and the probability of that.

    Attributes:
        top: number of most likely classes with their probabilities.
        coverage: of conformal sets; None writes none.
        least: probability below which the classifier abstains; None never does.
        ood: whether to write the entropy of the probabilities, in nats, as an OOD score.
    """

    top: int = 1
    coverage: float | None = None
    least: float | None = None
    ood: bool = False

    def types(self) -> dict[str, type]:
        """The types of the columns by name, in order."""
        types: dict[str, type] = {"path": str, "class": str, "probability": float}
        for rank in range(2, self.top + 1):
            types |= {f"class_{rank}": str, f"probability_{rank}": float}
        types |= {"set": str} if self.coverage is not None else {}
        types |= {"abstain": bool} if self.least is not None else {}
        types |= {"ood_score": float} if self.ood else {}
        return types | {"reason": str}


def predict(
    classifier: "CalibratedClassifier",
    pictures: Iterable[str],
    columns: Columns,
    write: Write,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[int, int]:
    """Write a row per picture, in order; those that cannot be decoded have a reason.

    Args:
        progress: called with the number of pictures that are done.
    Returns:
        The number of pictures, and of those that could not be decoded.
    """
    from semix.data.workers import by_workers, default_workers  # torch takes seconds

    chunks = _chunks(pictures, BATCH)
    first = next(chunks, [])
    workers = default_workers() if len(first) == BATCH else 0  # which take longer to start
    keys, chunks = tee(chain([first], chunks) if first else chunks)
    squares = by_workers(Squares(classifier.image_size), keys, workers=workers)
    done = bad = 0
    for paths, (images, reasons) in zip(chunks, squares, strict=True):
        write(_rows(classifier, paths, images, reasons, columns))
        done, bad = done + len(paths), bad + sum(reason is not None for reason in reasons)
        progress(done)
    return done, bad


def _chunks(pictures: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(pictures)
    while chunk := list(islice(rest, size)):
        yield chunk


@dataclass(frozen=True)
class Squares:
    """Of several pictures those that can be decoded, and a reason for each one that cannot."""

    side: int

    def __getitem__(self, paths: Sequence[str]) -> "tuple[np.ndarray, list[str | None]]":
        import numpy as np

        images = np.empty((len(paths), self.side, self.side, 3), np.uint8)
        reasons: list[str | None] = []
        decoded = 0
        for path in paths:
            try:
                images[decoded] = load_square(Path(path), self.side)
            except OSError as error:
                reasons.append(str(error.strerror or error))
            else:
                reasons.append(None)
                decoded += 1
        return images[:decoded], reasons


def _rows(
    classifier: "CalibratedClassifier",
    paths: Sequence[str],
    images: Any,
    reasons: Sequence[str | None],
    columns: Columns,
) -> list[Row]:
    predicted: Iterator[Row] = iter(())
    if len(images):
        probabilities = classifier.logits_of_squares(images).softmax(1)
        predicted = iter(_predictions(classifier, probabilities, columns))
    empty = dict.fromkeys(columns.types())
    rows = []
    for path, reason in zip(paths, reasons, strict=True):
        row: Row = empty | {"path": path, "reason": reason}
        rows.append(row if reason is not None else row | next(predicted))
    return rows


def _predictions(
    classifier: "CalibratedClassifier", probabilities: Any, columns: Columns
) -> list[Row]:
    names = classifier.class_names
    best = probabilities.topk(min(columns.top, len(names)), dim=1)
    rows: list[Row] = []
    for values, classes in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        row: Row = {"class": names[classes[0]], "probability": values[0]}
        for rank in range(1, len(classes)):
            row |= {f"class_{rank + 1}": names[classes[rank]]}
            row |= {f"probability_{rank + 1}": values[rank]}
        if columns.least is not None:
            row["abstain"] = values[0] < columns.least
        rows.append(row)
    if columns.coverage is not None:
        sets = classifier.sets_of(probabilities, columns.coverage).tolist()
        for row, held in zip(rows, sets, strict=True):
            row["set"] = SEPARATOR.join(n for n, holds in zip(names, held, strict=True) if holds)
    if columns.ood:
        entropies = -(probabilities * probabilities.clamp(min=1e-12).log()).sum(1)
        for row, entropy in zip(rows, entropies.tolist(), strict=True):
            row["ood_score"] = entropy
    return rows


# Pictures


def find_pictures(sources: Sequence[str]) -> Iterator[str]:
    """Find picture files, in order: a folder's with all below it, by name.

    Args:
        sources: files, folders, patterns such as `*.jpg`; `-` reads paths from standard input.
    Returns:
        Their paths, which are found as they are taken.
    Raises:
        InputError: at once: there is no such file, or no picture in a folder or for a pattern.
    """
    return chain.from_iterable([_found(source) for source in sources])


def _found(source: str) -> Iterator[str]:
    if source == STDIN:
        return (line.rstrip("\n") for line in sys.stdin if line.strip())
    path = Path(source)
    if path.is_dir():
        files = _below(path)
    elif path.is_file():
        files = iter([source])
    elif any(mark in source for mark in MARKS):
        files = iter(sorted(str(path) for path in _matching(path) if path.is_file()))
    else:
        raise InputError("PICTURES", source, "there is no such file or folder")
    first = next(files, None)
    if first is None:
        kinds = ", ".join(sorted(EXTENSIONS))
        raise InputError("PICTURES", source, f"holds no picture ({kinds})")
    return chain([first], files)


def _matching(pattern: Path) -> Iterator[Path]:
    """The paths that match a pattern, which may be absolute."""
    plain = next(n for n, part in enumerate(pattern.parts) if any(mark in part for mark in MARKS))
    return Path(*pattern.parts[:plain]).glob(str(Path(*pattern.parts[plain:])))


def _below(folder: Path) -> Iterator[str]:
    for name, folders, files in os.walk(folder):
        folders.sort()
        paths = (Path(name, file) for file in sorted(files))
        yield from (str(path) for path in paths if path.suffix.lower() in EXTENSIONS)


# Rows


@contextmanager
def open_rows(to: str, types: Mapping[str, type]) -> Iterator[Write]:
    """Yield a function that writes rows; the file appears whole at the end of the block.

    Args:
        to: a .csv or .parquet file; `-` writes CSV to standard output.
    Raises:
        InputError: another kind of file, or pyarrow is not installed.
    """
    if to == STDOUT:
        yield _csv_writer(sys.stdout, types)
        return
    path = output_file("--to", to)
    if path.suffix == ".csv":
        with published(path) as partial, partial.open("w", newline="") as file:
            yield _csv_writer(file, types)
    elif path.suffix == ".parquet":
        with published(path) as partial, _parquet_writer(partial, types) as write:
            yield write
    else:
        raise InputError("--to", to, "name a .csv or .parquet file, or - for standard output")


def _csv_writer(file: Any, types: Mapping[str, type]) -> Write:
    table = csv.writer(file, lineterminator="\n")
    table.writerow(types)

    def cell(value: str | float | bool | None) -> object:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"{value:.7g}"
        return spreadsheet_text(value) if isinstance(value, str) else ""

    def write(rows: Sequence[Row]) -> None:
        table.writerows([cell(row[name]) for name in types] for row in rows)

    return write


@contextmanager
def _parquet_writer(path: Path, types: Mapping[str, type]) -> Iterator[Write]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        remedy = f"needs pyarrow; run {install_command('export')}, or write a .csv file"
        raise InputError("--to", path.suffix, remedy) from error
    kinds = {str: pyarrow.string(), float: pyarrow.float32(), bool: pyarrow.bool_()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in types.items()])
    with parquet.ParquetWriter(path, schema) as file:
        yield lambda rows: file.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema))


# The command


def predict_files(
    run: str,
    sources: Sequence[str],
    columns: Columns,
    *,
    to: str,
    seed: int | None,
    stage: str | None,
    calibrator: str | None,
    skip_bad: int,
    device: str,
) -> None:
    """The work of `semix predict`.

    Raises:
        InputError: see `load_classifier`, `find_pictures` and `open_rows`.
        RunFailed: more than `skip_bad` pictures could not be decoded; their rows say why.
    """
    pictures = find_pictures(sources)
    first = next(pictures, None)
    if first is None:
        raise InputError("PICTURES", STDIN, "no path was given on standard input")
    from semix.calib.classifier import load_classifier  # torch takes seconds

    classifier = load_classifier(run, seed, stage, calibrator, device=device)  # type: ignore[arg-type]
    if columns.coverage is not None:
        classifier.limit_of(columns.coverage)  # refuses it before the first picture
    say(classifier.label)
    with open_rows(to, columns.types()) as write, running_count("predict") as progress:
        done, bad = predict(classifier, chain([first], pictures), columns, write, progress=progress)
    say(f"{done:,} pictures" + (f", of which {bad:,} cannot be decoded" if bad else ""))
    if bad > skip_bad:
        remedy = f"their rows say why; --skip-bad {bad} accepts them"
        raise RunFailed(f"{bad} of {done} pictures cannot be decoded; {remedy}")
