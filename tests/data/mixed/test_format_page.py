"""The lines of docs/format.md read a root with plain webdataset."""

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.errors import InputError
from data.mixed import MixedDataset, shard_urls
from data.root import Root
from data.store import Store
from tests import handmade

PAGE = Path(__file__).parents[3] / "docs" / "format.md"


def block_with(text: str, root: str) -> str:
    """The block of the page that has this text, for this root."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if text in block]
    return found.replace("/data/birds-mixed", root)


@pytest.fixture
def root(tmp_path) -> Root:
    """Extended once: `index/0.json` lacks the second shard."""
    whole = handmade.make_root(tmp_path / "whole", 2, 3, count=4)
    tars = [whole.store.get(whole.record(shard)["tar"]) for shard in range(2)]
    store = Store(str(tmp_path / "root"))
    store.put("plan.json", whole.store.get("plan.json"))
    for shard, tar in enumerate(tars):
        handmade.put_shard(store, shard, tar, first=3 * shard, groups=3, count=4)
        Root(store.url).write_index()
    return Root(store.url)


def test_plain_webdataset_reads_what_we_read(root):
    code = block_with("wds.WebDataset", root.url)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    noting = textwrap.indent("seen.append((record, images, labels))", " " * 4)
    seen: list[Any] = []
    exec(f"{code}{noting}\n", {"seen": seen})
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


def test_the_newest_shards_are_found_with_and_without_us(root):
    names: dict[str, Any] = {}
    exec(block_with("newest = ", root.url), names)
    assert names["tars"] == shard_urls(root.url)
    assert len(names["tars"]) == 2 and all(Path(tar).is_file() for tar in names["tars"])
    assert shard_urls(root.url, index="index/0.json") == names["tars"][:1]


def test_an_index_that_is_not_there(root):
    with pytest.raises(InputError, match=r"mixed\.index = index/7\.json"):
        shard_urls(root.url, index="index/7.json")
