"""The lines of docs/format.md read a root with plain webdataset."""

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.mixed import MixedDataset
from tests import handmade

PAGE = Path(__file__).parents[3] / "docs" / "format.md"


def lines_of_the_readme() -> str:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if "wds.WebDataset" in block]
    return found


def test_plain_webdataset_reads_what_we_read(tmp_path):
    root = handmade.make_root(tmp_path, 2, 3, count=4)
    code = lines_of_the_readme()
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    (place,) = re.findall(r'^root = "(.*)"$', code, re.MULTILINE)
    noting = textwrap.indent("seen.append((record, images, labels))", " " * 4)
    seen: list[Any] = []
    exec(f"{code.replace(place, f'{root.url}/')}{noting}\n", {"seen": seen})
    mixed = MixedDataset(root.url)
    assert len(seen) == len(mixed) == 6
    for group, (record, images, labels) in enumerate(seen):
        assert record == {**mixed.groups[group], "labels": labels}
        stored = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        assert torch.equal(stored, mixed.images[group])
        dense = torch.zeros(4, 3)
        for position, label in enumerate(labels):
            for target, probability in label:
                dense[position, target] = probability
        assert torch.equal(dense, mixed.labels[group])
