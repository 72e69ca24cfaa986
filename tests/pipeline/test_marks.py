"""Marked and unmarked roots: the same pixels, features and labels; older roots stay as they are."""

import json

import numpy as np
import pytest
import torch

from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.formats import PLAN
from semix.data.marks import is_marked
from semix.data.root import Root
from semix.data.store import Store
from semix.pipeline.bake import open_baked
from semix.pipeline.config import BuildConfig
from semix.pipeline.relabel import relabelled_config
from semix.pipeline.root import create_build
from tests.pipeline.roots import altered, begun, contents, features, made, samples, tars, work


@pytest.fixture
def small(make_config, hasty_standins) -> BuildConfig:
    """Four series of three images; it does not mention the mark."""
    pairs = "mixing.pairs={kind: sampled, count: 4}"
    return make_config(hasty_standins, "mixing.alphas=3", pairs)


def older(config: BuildConfig, folder) -> Root:
    """A root as a version that knew no mark began it."""
    root = begun(altered(config, "shards.mark=false"), folder)
    plan = json.loads(root.store.get(PLAN))
    del plan["config"]["shards"]["mark"]
    root.store.put(PLAN, json.dumps(plan, indent=1, ensure_ascii=False).encode())
    return Root(root.url)


@pytest.mark.parametrize("image_format", ["webp", "jpg"])
def test_pixels_features_and_labels_are_equal_with_and_without(small, tmp_path, image_format):
    config = altered(small, f"shards.image_format={image_format}")
    marked = made(config, tmp_path / "marked")
    plain = made(altered(config, "shards.mark=false"), tmp_path / "plain")
    assert (marked.plan.marked, plain.plan.marked) == (True, False)
    assert marked.plan.digest != plain.plan.digest
    for (_, one), (_, other) in zip(samples(marked).items(), samples(plain).items(), strict=True):
        assert (one.record.synthetic, other.record.synthetic) == (True, False)
        assert one.record.model_copy(update={"synthetic": False}) == other.record
        assert all(map(is_marked, one.images)) and not any(map(is_marked, other.images))
        np.testing.assert_array_equal(one.pixels(), other.pixels())
    for shard in marked.done():
        ours, theirs = features(marked, shard), features(plain, shard)
        torch.testing.assert_close(ours["features"], theirs["features"], rtol=0, atol=0)
    marked.write_index()
    assert len(MixedDataset(marked.url)) == 4  # the strict readers take it


def test_an_older_root_goes_on_to_the_same_bytes(small, tmp_path):
    root = older(small, tmp_path / "older")
    expected = tars(made(altered(small, "shards.mark=false"), tmp_path / "plain"))
    assert not root.plan.marked
    build = create_build(small, root.url)  # the same command again
    assert work(build.root) == 0
    assert tars(root) == expected

    config = relabelled_config(root, ["annotation.scale=2"])
    baked = open_baked(root, config, None, str(tmp_path / "baked"))
    assert not baked.plan.marked


def test_who_sets_the_mark_gets_it_or_is_told(small, tmp_path):
    root = older(small, tmp_path / "older")
    Store(root.url).create("shards/0000/0000000.json", b"{}")  # else its plan is replaced
    before = contents(root)
    with pytest.raises(InputError, match=r"holds another plan \(shards.mark is not set there\)"):
        create_build(altered(small, "shards.mark=true"), root.url)
    assert contents(root) == before
