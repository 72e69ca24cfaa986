"""A folder of image files, and labels.csv with one line for each."""

import csv
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from data.export.rows import ImageRow, Source, label_json
from data.export.target import new_target
from data.files import write_json

COLUMNS = ("file", "group", "position", "classes", "names", "mixture", "alpha", "weight", "label")
UNSAFE = re.compile(r"[^A-Za-z0-9]+")
LONGEST = 200  # characters of a folder's name, without numbers; file systems take 255


def write_image_folder(source: Source, target: Path) -> int:
    """Write `CLASSES/GROUP.POSITION.webp`, labels.csv and classes.json; returns the images.

    Folders are named by their classes, as cat_great-dane; see `folder_names`. In the table lists
    are JSON in plain ASCII, so that no cell starts as a formula of a spreadsheet does.
    """
    count = 0
    folders: list[str] = []
    with new_target(target) as partial:
        partial.mkdir()
        with (partial / "labels.csv").open("w", newline="", encoding="ascii") as file:
            table = csv.writer(file)
            table.writerow(COLUMNS)
            for row in source.rows(source.shards):
                folders = folders or folder_names(source.class_names, together=len(row.classes))
                folder = "_".join(folders[k] for k in row.classes)
                name = f"{folder}/{row.group:08d}.{row.position:02d}.{row.extension}"
                (partial / folder).mkdir(exist_ok=True)
                (partial / name).write_bytes(row.content)
                table.writerow(_cells(name, row))
                count += 1
        write_json(partial / "classes.json", source.class_names)
    return count


def folder_names(class_names: Sequence[str], *, together: int) -> list[str]:
    """A name for each class that any file system takes and no other class has.

    ASCII letters, digits and dashes; where nothing else of a name is left, or it is left of two,
    the class number stands behind a dot, which no name has.

    Args:
        together: so many of them are joined to one name, by underscores.
    """
    safe = [UNSAFE.sub("-", _ascii(name)).strip("-") for name in class_names]
    safe = [name[: LONGEST // together] for name in safe]
    times = Counter(name.lower() for name in safe)  # one name, where case is not told apart
    digits = len(str(len(safe) - 1))
    return [
        name if name and times[name.lower()] == 1 else f"{name or 'class'}.{k:0{digits}d}"
        for k, name in enumerate(safe)
    ]


def _ascii(name: str) -> str:
    return unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()


def _cells(name: str, row: ImageRow) -> list[object]:
    lists = (json.dumps(part) for part in (row.classes, row.names, row.mixture))
    return [name, row.group, row.position, *lists, row.alpha, row.weight, label_json(row)]
