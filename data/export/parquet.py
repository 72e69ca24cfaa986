"""Parquet: one row an image, its bytes inside, as Hugging Face datasets expects them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import InputError
from data.export.rows import ImageRow, Source
from data.export.target import new_target

if TYPE_CHECKING:
    import pyarrow

MOST_ROWS, MOST_BYTES = 1000, 32 * 2**20  # of a row group, which is what is in memory


def write_parquet(source: Source, target: Path) -> int:
    """One file of all images; returns how many.

    Raises:
        InputError: pyarrow is not installed, or the target exists.
    """
    require_pyarrow()
    with new_target(target) as partial:
        return write_rows(partial, source.rows(source.shards), source.class_names)


def require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        remedy = "needs pyarrow; run pip install 'semix[export]'"
        raise InputError("--format", "parquet or huggingface", remedy) from None


def write_rows(path: Path, rows: Iterable[ImageRow], class_names: list[str]) -> int:
    """Write one parquet file, a row group at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, schema = 0, image_schema(class_names)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in _parts(rows):
            values = [_value(row, len(class_names)) for row in part]
            writer.write_table(pa.Table.from_pylist(values, schema))
            count += len(part)
    return count


def image_schema(class_names: list[str]) -> "pyarrow.Schema":
    """Columns, and beside them what Hugging Face datasets wants to know of them."""
    import pyarrow as pa

    features = {
        "image": {"_type": "Image"},
        **{name: _value_feature("int64") for name in ("group", "position")},
        "classes": _list_feature("int64"),
        "names": _list_feature("string"),
        "mixture": _list_feature("float64"),
        **{name: _value_feature("float64") for name in ("alpha", "weight")},
        "label": _list_feature("float32") | {"length": len(class_names)},
    }
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {
        **{"image": image, "group": pa.int64(), "position": pa.int64()},
        **{"classes": pa.list_(pa.int64()), "names": pa.list_(pa.string())},
        **{"mixture": pa.list_(pa.float64()), "alpha": pa.float64(), "weight": pa.float64()},
        "label": pa.list_(pa.float32(), len(class_names)),
    }
    notes = {
        "huggingface": json.dumps({"info": {"features": features}}),
        "class_names": json.dumps(class_names),
    }
    return pa.schema(columns.items(), metadata=notes)


def _value_feature(kind: str) -> dict[str, Any]:
    return {"dtype": kind, "_type": "Value"}


def _list_feature(kind: str) -> dict[str, Any]:
    return {"feature": _value_feature(kind), "_type": "List"}


def _parts(rows: Iterable[ImageRow]) -> Iterator[list[ImageRow]]:
    part: list[ImageRow] = []
    size = 0
    for row in rows:
        part.append(row)
        size += len(row.content)
        if len(part) == MOST_ROWS or size >= MOST_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _value(row: ImageRow, num_classes: int) -> dict[str, Any]:
    label = [0.0] * num_classes
    for target, share in row.label:
        label[target] = share
    name = f"{row.group:08d}.{row.position:02d}.{row.extension}"
    columns = ("group", "position", "classes", "names", "mixture", "alpha", "weight")
    values = {column: getattr(row, column) for column in columns}
    return values | {"image": {"bytes": row.content, "path": name}, "label": label}
