"""A folder of image files, and labels.csv with one line for each."""

import csv
import json
from pathlib import Path

from data.export.rows import ImageRow, Source, label_json
from data.export.target import new_target
from data.files import write_json

COLUMNS = ("file", "group", "position", "classes", "names", "mixture", "alpha", "weight", "label")


def write_image_folder(source: Source, target: Path) -> int:
    """Write `CLASSES/GROUP.POSITION.webp`, labels.csv and classes.json; returns the images.

    No name comes from a class name: folders are class numbers, as 003_007. In the table lists
    are JSON in plain ASCII, so that no cell starts as a formula of a spreadsheet does.
    """
    digits = len(str(len(source.class_names) - 1))
    count = 0
    with new_target(target) as partial:
        partial.mkdir()
        with (partial / "labels.csv").open("w", newline="", encoding="ascii") as file:
            table = csv.writer(file)
            table.writerow(COLUMNS)
            for row in source.rows(source.shards):
                folder = "_".join(f"{k:0{digits}d}" for k in row.classes)
                name = f"{folder}/{row.group:08d}.{row.position:02d}.{row.extension}"
                (partial / folder).mkdir(exist_ok=True)
                (partial / name).write_bytes(row.content)
                table.writerow(_cells(name, row))
                count += 1
        write_json(partial / "classes.json", source.class_names)
    return count


def _cells(name: str, row: ImageRow) -> list[object]:
    lists = (json.dumps(part) for part in (row.classes, row.names, row.mixture))
    return [name, row.group, row.position, *lists, row.alpha, row.weight, label_json(row)]
