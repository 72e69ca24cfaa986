"""A folder that `datasets.load_dataset` opens, offline too: parquet files and a card."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.export.parquet import require_pyarrow, write_rows
from data.export.rows import Source
from data.export.target import new_target

FILE_BYTES = 500 * 2**20  # of images in one parquet file; more parallel reading, fewer restarts
CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
---
# Images between two classes, with soft labels

{images} images in series of {series}: each series starts from one noise, and its images go from
one class to another. `mixture` is what the generator was asked for, `weight` where CLIP sees the
image between the two classes (1 is the first, unclipped), `label` the soft label over all
{classes} classes, whose names are the metadata `class_names` of each file and classes.json.

```python
from datasets import load_dataset

images = load_dataset("FOLDER", split="train")
```

Made by semix. Plan {plan}, {index}{labels}.
"""


def write_hugging_face(source: Source, target: Path) -> int:
    """Write data/train-00000-of-00012.parquet and so on, and README.md; returns the images.

    Raises:
        InputError: pyarrow is not installed, or the target exists.
    """
    from data.files import write_json

    require_pyarrow()
    count, files = 0, list(_files(source.shards))
    with new_target(target) as partial:
        (partial / "data").mkdir(parents=True)
        for number, shards in enumerate(files):
            path = partial / "data" / f"train-{number:05d}-of-{len(files):05d}.parquet"
            count += write_rows(path, source.rows(shards), source.class_names)
        write_json(partial / "classes.json", source.class_names)
        (partial / "README.md").write_text(_card(source))
    return count


def _files(shards: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Shards that go into one file each."""
    part: list[dict[str, Any]] = []
    for shard in shards:
        part.append(shard)
        if sum(s["bytes"] for s in part) >= FILE_BYTES:
            yield part
            part = []
    if part:
        yield part


def _card(source: Source) -> str:
    plan, labels = source.root.plan, source.label_set
    return CARD.format(
        images=f"{source.num_images:,}",
        series=plan["images_per_group"],
        classes=len(source.class_names),
        plan=plan["digest"][:12],
        index=source.index,
        labels=f", label set {labels.digest[:12]}" if labels else "",
    )
