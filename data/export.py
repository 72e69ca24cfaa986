"""Export of a pinned index for other programs: a folder, parquet, Hugging Face datasets."""

import csv
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from semix.data.croissant import (
    CROISSANT,
    LISTS,
    DatasetCard,
    as_json,
    export_metadata,
    models_of,
)
from semix.data.errors import InputError
from semix.data.files import published, write_json
from semix.data.formats import ShardEntry
from semix.data.images import MAX_PIXELS, check_header, decode_image, encode_image
from semix.data.installation import install_command
from semix.data.licences import licences
from semix.data.marks import is_marked
from semix.data.pinned import PinnedRoot
from semix.data.printable import markdown_text
from semix.data.tar import GroupSample

ImageFormat = Literal["keep", "png"]  # keep copies the stored bytes
Sign = Callable[[bytes, str], bytes]  # of the bytes of a file and its extension
NO_CARD = DatasetCard()
COLUMNS = {  # without `image` and `label`
    **{"group": "int64", "position": "int64"},
    **{"classes": "int64", "names": "string", "mixture": "float64"},
    **{"alpha": "float64", "weight": "float64"},
}
UNSAFE = re.compile(r"[^A-Za-z0-9]+")
MAX_NAME = 200  # characters of the name of a folder, without numbers; file systems allow 255
MAX_ROWS, MAX_BYTES = 1000, 32 * 2**20  # of a row group; one is in memory at a time
FILE_BYTES = 500 * 2**20  # of images in one parquet file, so that files can be read in parallel
CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
tags:
- synthetic
- semix
---
# Images between two classes, with soft labels

All images are synthetic: a generative model made them. {mark}

{images} images in series of {series}: each series starts from one noise, and its images go from
one class to another. `mixture` is the conditioning of the generator, `weight` the position of the
image between the two classes by CLIP (1 is the first, unclipped), `label` the soft label over all
{classes} classes, whose names are the metadata `class_names` of each file and classes.json.

```python
from datasets import load_dataset

images = load_dataset("FOLDER", split="train")
```

## Licences

Of the models that made images and labels, as their own cards state; they may bind what is made
with them.

{licences}

Made by semix. Plan {plan}, {index}{labels}.
"""
MARKED = """Each file says so in its XMP metadata (IPTC digital source
type `trainedAlgorithmicMedia`)."""
UNMARKED = "The files themselves do not say so."


@dataclass(frozen=True)
class ImageRow:
    """One image of an export.

    Attributes:
        classes, names, mixture: the mixed classes and their conditioning weights.
        weight: raw CLIP weight of the first class.
        label: (class, probability) of each class with a probability above 0.
    """

    group: int
    position: int
    classes: list[int]
    names: list[str]
    mixture: list[float]
    alpha: float
    weight: float
    label: list[tuple[int, float]]
    content: bytes
    extension: str


def image_rows(
    source: PinnedRoot,
    shards: Sequence[ShardEntry] | None = None,
    *,
    image_format: ImageFormat = "keep",
    sign: Sign | None = None,
) -> Iterator[ImageRow]:
    """One row per image of these shards, by default of all; one series is in memory at a time.

    Args:
        sign: adds signed provenance to each file, as `semix.data.signing.ImageSigner.sign`.
    Raises:
        ValueError: a shard or its labels are damaged, or not as in the index; names the tar.
    """
    for shard in source.shards if shards is None else shards:
        for sample in source.samples(shard):
            try:
                yield from _series_rows(sample, source.class_names, image_format, sign)
            except ValueError as error:
                group = sample.record.group
                raise ValueError(f"{shard.tar}: group {group}: {error}") from None


def write_image_folder(
    source: PinnedRoot,
    target: Path,
    *,
    image_format: ImageFormat = "keep",
    sign: Sign | None = None,
    card: DatasetCard = NO_CARD,
) -> int:
    """Write `CLASSES/GROUP.POSITION.webp`, labels.csv, classes.json and croissant.json.

    Folders are named after their classes, as cat_great-dane; see `folder_names`. Lists in the
    table are JSON in plain ASCII, so that no cell looks like a formula to a spreadsheet.

    Args:
        card: what a person states, for croissant.json; also of the other exports.
    Returns:
        The image count.
    Raises:
        InputError: the target exists.
    """
    count = 0
    folders: list[str] = []
    with new_target(target) as partial:
        partial.mkdir()
        with (partial / "labels.csv").open("w", newline="", encoding="ascii") as file:
            table = csv.writer(file)
            table.writerow(["file", *COLUMNS, "label"])
            for row in image_rows(source, image_format=image_format, sign=sign):
                folders = folders or folder_names(source.class_names, together=len(row.classes))
                folder = "_".join(folders[k] for k in row.classes)
                (partial / folder).mkdir(exist_ok=True)
                name = f"{folder}/{_file_name(row)}"
                (partial / name).write_bytes(row.content)
                table.writerow(_cells(name, row))
                count += 1
        write_json(partial / "classes.json", source.class_names)
        metadata = export_metadata(source, partial, card, layout="folder")
        (partial / CROISSANT).write_bytes(as_json(metadata))
    return count


def folder_names(class_names: Sequence[str], *, together: int) -> list[str]:
    """A unique name for each class that every file system accepts.

    It has ASCII letters, digits and dashes; if nothing remains of a name, or two names become
    equal, the class number follows after a dot.

    Args:
        together: number of names that are joined by underscores to one folder name.
    """
    decomposed = (unicodedata.normalize("NFKD", name) for name in class_names)
    ascii_names = (name.encode("ascii", "ignore").decode() for name in decomposed)
    safe_names = [UNSAFE.sub("-", name).strip("-")[: MAX_NAME // together] for name in ascii_names]
    counts = Counter(name.lower() for name in safe_names)  # some file systems ignore case
    digits = len(str(len(safe_names) - 1))
    return [
        name if name and counts[name.lower()] == 1 else f"{name or 'class'}.{k:0{digits}d}"
        for k, name in enumerate(safe_names)
    ]


def write_parquet(
    source: PinnedRoot,
    target: Path,
    *,
    image_format: ImageFormat = "keep",
    sign: Sign | None = None,
    card: DatasetCard = NO_CARD,
) -> int:
    """Write a folder of files with a row per image, including its bytes; returns the image count.

    They are called train-00000-of-00012.parquet and so on. `TARGET.croissant.json` lies beside the
    folder, because pyarrow reads every file in it as parquet.

    Raises:
        InputError: pyarrow is not installed, or a target exists.
    """
    _pyarrow()
    with new_target(metadata_of(target)) as description, new_target(target) as partial:
        count = _write_files(partial, source, image_format, sign)
        metadata = export_metadata(source, partial, card, layout="parquet", within=target.name)
        description.write_bytes(as_json(metadata))
    return count


def metadata_of(target: Path) -> Path:
    """The Croissant file beside a folder of parquet files."""
    return target.with_name(f"{target.name}.{CROISSANT}")


def write_hugging_face(
    source: PinnedRoot,
    target: Path,
    *,
    image_format: ImageFormat = "keep",
    sign: Sign | None = None,
    card: DatasetCard = NO_CARD,
) -> int:
    """Write a folder that `datasets.load_dataset` opens, also offline; returns the image count.

    It holds the files of `write_parquet` in data/, classes.json, croissant.json, and README.md as a
    card.

    Raises:
        InputError: pyarrow is not installed, or the target exists.
    """
    _pyarrow()
    with new_target(target) as partial:
        count = _write_files(partial / "data", source, image_format, sign)
        write_json(partial / "classes.json", source.class_names)
        (partial / "README.md").write_text(_card(source, images=count))
        metadata = export_metadata(source, partial, card, layout="huggingface")
        (partial / CROISSANT).write_bytes(as_json(metadata))
    return count


@contextmanager
def new_target(target: Path) -> Iterator[Path]:
    """A temporary path for a file or a folder, which becomes `target` at the end.

    Raises:
        InputError: the target exists.
    """
    _require_free_target(target)
    with published(target) as partial:
        yield partial
        _require_free_target(target)


def _require_free_target(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise InputError("--to", target, "is there already; choose another name, or remove it")


def _series_rows(
    sample: GroupSample, class_names: Sequence[str], image_format: ImageFormat, sign: Sign | None
) -> Iterator[ImageRow]:
    record, mixture = sample.record, sample.record.mixtures
    for position, alpha in enumerate(record.alphas):
        extension, content = _image(sample, position, image_format)
        yield ImageRow(
            group=record.group,
            position=position,
            classes=record.classes,
            names=[class_names[k] for k in record.classes],
            mixture=mixture[position],
            alpha=alpha,
            weight=record.weights[position],
            label=[(target, p) for target, p in record.labels[position] if p > 0],
            content=content if sign is None else sign(content, extension),
            extension=extension,
        )


def _image(sample: GroupSample, position: int, image_format: ImageFormat) -> tuple[str, bytes]:
    content = sample.images[position]
    try:
        if image_format == "keep":
            check_header(content, max_pixels=MAX_PIXELS)
            return sample.extension, content
        return "png", encode_image(decode_image(content), "png", mark=is_marked(content))
    except ValueError as error:
        raise ValueError(f"image {position}: {error}") from None


def _file_name(row: ImageRow) -> str:
    return f"{row.group:08d}.{row.position:02d}.{row.extension}"


def _cells(name: str, row: ImageRow) -> list[object]:
    values = {column: getattr(row, column) for column in COLUMNS}
    cells = [json.dumps(value) if column in LISTS else value for column, value in values.items()]
    return [name, *cells, json.dumps(row.label)]


def _pyarrow() -> ModuleType:
    """Import pyarrow with parquet. Raises InputError: the extra is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        remedy = f"needs pyarrow; run {install_command('export')}"
        raise InputError("--format", "parquet or huggingface", remedy) from None
    return pyarrow


def _write_files(
    folder: Path, source: PinnedRoot, image_format: ImageFormat, sign: Sign | None
) -> int:
    """Write parquet files into a new folder; returns the image count."""
    count, files = 0, list(_files(source.shards))
    folder.mkdir(parents=True)
    for number, shards in enumerate(files):
        path = folder / f"train-{number:05d}-of-{len(files):05d}.parquet"
        rows = image_rows(source, shards, image_format=image_format, sign=sign)
        count += _write_rows(path, rows, source)
    return count


def _write_rows(path: Path, rows: Iterable[ImageRow], source: PinnedRoot) -> int:
    """Write one parquet file, a row group at a time."""
    pa, count = _pyarrow(), 0
    schema = _schema(source.class_names)
    with pa.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in _row_groups(rows):
            values = [_value(row, len(source.class_names)) for row in batch]
            writer.write_table(pa.Table.from_pylist(values, schema))
            count += len(batch)
    return count


def _schema(class_names: Sequence[str]) -> Any:
    """The pyarrow.Schema, with the column types of Hugging Face datasets as metadata."""
    pa = _pyarrow()
    columns = {"image": pa.struct([("bytes", pa.binary()), ("path", pa.string())])}
    features: dict[str, object] = {"image": {"_type": "Image"}}
    for name, kind in COLUMNS.items():
        value, feature = pa.type_for_alias(kind), {"dtype": kind, "_type": "Value"}
        many = name in LISTS
        columns[name] = pa.list_(value) if many else value
        features[name] = {"feature": feature, "_type": "List"} if many else feature
    classes, element = len(class_names), {"dtype": "float32", "_type": "Value"}
    columns["label"] = pa.list_(pa.float32(), classes)
    features["label"] = {"feature": element, "_type": "List", "length": classes}
    metadata = {
        "huggingface": json.dumps({"info": {"features": features}}),
        "class_names": json.dumps(class_names),
    }
    return pa.schema(columns.items(), metadata=metadata)


def _row_groups(rows: Iterable[ImageRow]) -> Iterator[list[ImageRow]]:
    row_group: list[ImageRow] = []
    size = 0
    for row in rows:
        row_group.append(row)
        size += len(row.content)
        if len(row_group) == MAX_ROWS or size >= MAX_BYTES:
            yield row_group
            row_group, size = [], 0
    if row_group:
        yield row_group


def _value(row: ImageRow, num_classes: int) -> dict[str, object]:
    label = [0.0] * num_classes
    for target, probability in row.label:
        label[target] = probability
    values = {column: getattr(row, column) for column in COLUMNS}
    return values | {"image": {"bytes": row.content, "path": _file_name(row)}, "label": label}


def _files(shards: Sequence[ShardEntry]) -> Iterator[list[ShardEntry]]:
    """The shards of each parquet file."""
    file_shards: list[ShardEntry] = []
    for shard in shards:
        file_shards.append(shard)
        if sum(s.bytes for s in file_shards) >= FILE_BYTES:
            yield file_shards
            file_shards = []
    if file_shards:
        yield file_shards


def _card(source: PinnedRoot, *, images: int) -> str:
    plan, labels = source.root.plan, source.label_set
    return CARD.format(
        images=f"{images:,}",
        licences="\n".join(
            f"- {role}: {markdown_text(licence)}"
            for role, licence in licences(models_of(source)).items()
        ),
        mark=MARKED if plan.marked else UNMARKED,
        series=plan.images_per_group,
        classes=len(source.class_names),
        plan=plan.digest[:12],
        index=source.index,
        labels=f", label set {labels.digest[:12]}" if labels else "",
    )
