"""One index opened: what is pinned, under which labels, with which features; lines of the docs."""

import json
import pickle
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.index import index_text
from semix.data.pinned import PinnedRoot, shard_urls
from semix.data.root import Root
from semix.data.store import Store
from tests import featured, handmade

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.fixture
def root(tmp_path) -> Root:
    """A root that was extended once: `index/0.json` lacks the second shard."""
    source_root = handmade.make_root(tmp_path / "whole", 2, 3, count=4)
    tars = [source_root.store.get(source_root.record(shard).tar) for shard in range(2)]
    store = Store(str(tmp_path / "root"))
    store.put("plan.json", source_root.store.get("plan.json"))
    for shard, tar in enumerate(tars):
        handmade.put_shard(store, shard, tar, first=3 * shard, groups=3, count=4)
        Root(store.url).write_index()
    return Root(store.url)


def block_with(text: str, root: str) -> str:
    """The code block of the page that contains `text`, with the URL of `root` in it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if text in block]
    return code.replace("/data/birds-mixed", root)


def test_plain_webdataset_reads_what_we_read(root):
    code = block_with("wds.WebDataset", root.url)
    append_line = textwrap.indent("seen.append((record, images, labels))", " " * 4)
    seen: list[Any] = []
    exec(f"{code}{append_line}\n", {"seen": seen})
    mixed = MixedDataset(root.url)
    assert len(seen) == len(mixed) == 6
    records = mixed.records(range(6))
    for group, (record, images, labels) in enumerate(seen):
        fields = json.loads(records[group].written())
        assert record == {**fields, "labels": labels}
        stored = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        assert torch.equal(stored, mixed.images[group])


def test_the_pages_stream_has_every_image(root):
    names: dict[str, Any] = {}
    exec(block_with("mixed_pipeline(", root.url), names)
    images = MixedDataset(root.url).images.flatten(0, 1)
    pictures = {image.numpy().tobytes() for image in names["images"]}
    assert pictures == {image.numpy().tobytes() for image in images} and len(pictures) == 24
    assert names["labels"].shape == (24, 3)


def test_the_newest_shards_are_found_with_and_without_us(root):
    names: dict[str, Any] = {}
    exec(block_with("newest = ", root.url), names)  # and reads them
    assert names["tars"] == shard_urls(root.url)
    assert len(names["tars"]) == 2 and all(Path(tar).is_file() for tar in names["tars"])
    assert shard_urls(root.url, index="index/0.json") == names["tars"][:1]


def test_an_index_that_is_not_there_of_another_plan_or_empty(root):
    with pytest.raises(InputError, match=r"index = index/7\.json: is not in"):
        shard_urls(root.url, index="index/7.json")
    entries = [record.entry.written() for record in root.records()]
    root.store.put("index/2.json", index_text("e" * 64, entries))
    with pytest.raises(InputError, match=r"index = index/2\.json: is of another plan"):
        PinnedRoot(root)
    root.store.put("index/3.json", index_text(root.plan.digest, []))
    with pytest.raises(InputError, match=r"index = index/3\.json: lists no shard"):
        PinnedRoot(root)


def test_a_copy_is_of_the_same_index_while_the_root_grows(root):
    before = PinnedRoot(root, index="index/0.json", scale=3.0)
    copy = pickle.loads(pickle.dumps(PinnedRoot(Root(root.url), index=before.index, scale=3.0)))
    assert (copy.index, copy.digest, copy.scale) == (before.index, before.digest, 3.0)
    assert copy.shards == before.shards
    records = [[s.record for s in pinned.samples(pinned.shards[0])] for pinned in (before, copy)]
    assert records[0] == records[1]
    probability = 1 / (1 + np.exp(-3 * (records[0][0].weights[1] - 0.5)))
    assert records[0][0].labels[1] == [
        (0, pytest.approx(probability)),
        (1, pytest.approx(1 - probability)),
    ]


def test_features_are_those_that_the_labels_in_use_come_from(tmp_path):
    samples = [handmade.sample(group, 3) for group in range(4)]
    root = featured.root_of(tmp_path, [samples[:2], samples[2:]])
    with_features = featured.label_set(
        root, {0: 2 * featured.VECTORS[[1, 1, 0]]}, prototype_length=2.0
    )
    without_features = featured.label_set(root, {}, source=with_features, prototype_length=2.0)
    pinned = PinnedRoot(root)
    np.testing.assert_array_equal(pinned.prototypes, featured.VECTORS)
    first, second = pinned.shards
    np.testing.assert_allclose(pinned.features(first)[0], featured.features_of(samples[0].record))
    for digest in (with_features, without_features):
        relabelled = PinnedRoot(root, labels=digest)
        np.testing.assert_array_equal(relabelled.prototypes, 2 * featured.VECTORS)
        np.testing.assert_array_equal(
            relabelled.features(first)[0], 2 * featured.VECTORS[[1, 1, 0]]
        )
        expected = featured.features_of(samples[3].record)
        np.testing.assert_allclose(relabelled.features(second)[1], expected)
    for shard in (first, second):
        root.store.delete(f"labels/{with_features}/0000/{shard.shard:07d}.json")
    with pytest.raises(
        ValueError, match=rf"labels/{with_features}/0000/0000000\.json: has no features of"
    ):
        PinnedRoot(root, labels=without_features).features(first)


def test_an_index_is_of_the_bytes_that_are_pinned_not_of_when_they_were_made(tmp_path):
    def pin(name: str, *samples, **changes) -> PinnedRoot:
        root = handmade.make_root(tmp_path / name, 2, 3)
        tar = handmade.tar_of(*samples)
        handmade.put_shard(root.store, 1, tar, first=3, groups=3, count=2, **changes)
        for index in root.indices():
            root.store.delete(index)
        Root(root.url).write_index()
        return PinnedRoot(Root(root.url))

    samples = [handmade.sample(group) for group in (3, 4, 5)]
    later = {"wall_seconds": 99.0, "seconds": {"write": 3.0}, "attempt": 4, "worker": "other"}
    pinned, same = pin("one", *samples), pin("same", *samples, **later)
    assert pinned.store.get(pinned.index) == same.store.get(same.index)
    assert pinned.digest == same.digest == MixedDataset(same.root.url).digest
    picture = handmade.sample(4, side=8)
    picture.images[0] = handmade.sample(7).images[0]
    for changed in ((samples[0], picture, samples[2]), (*samples[:2], handmade.sample(5, seed=1))):
        assert pin(f"other {hash(str(changed))}", *changed).digest != pinned.digest
