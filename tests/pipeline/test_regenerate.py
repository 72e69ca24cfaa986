import json
import shutil

import pytest

from data.errors import InputError
from data.root import Root
from data.series import read_series
from data.settings import load_settings
from pipeline.config import BuildConfig
from pipeline.prototypes import ensure_prototypes
from pipeline.regenerate import batch_of, regenerate, same_pixels
from pipeline.root import create_root, extend_root, plan_of
from pipeline.worker import main as worker


def made(config: BuildConfig, folder, *, shards: str) -> Root:
    root = create_root(config, str(folder))
    ensure_prototypes(root, device="cpu")
    assert worker([root.url, "--device", "cpu", "--shards", shards]) == 0
    return root


@pytest.fixture(scope="module")
def root(hasty_config, tmp_path_factory):
    """The first and the last, short shard."""
    return made(hasty_config, tmp_path_factory.mktemp("some") / "root", shards="0,7")


def contents(root: Root) -> dict[str, bytes]:
    return root.store.get_many(root.store.list(""))


@pytest.mark.parametrize("group", [0, 3, 5, 44])
def test_a_series_made_anew_is_the_one_that_is_stored(root, group):
    before = contents(root)
    again = regenerate(root, group, device="cpu")
    (stored,) = read_series(root, [group])
    assert same_pixels(again, stored)
    assert again.images == stored.images
    assert json.loads(json.dumps(again.record)) == stored.record
    assert contents(root) == before


def test_other_series_have_other_pixels(root):
    first, second = read_series(root, [0, 44])
    assert not same_pixels(first, second)


def test_a_series_of_a_missing_shard_can_be_looked_at(root):
    assert [group.index for group in batch_of(plan_of(root), 11)] == [10, 11]
    assert regenerate(root, 11, device="cpu").record["group"] == 11
    assert root.missing() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InputError, match=r"group = 11: is not made yet; run .* --shards 1`"):
        read_series(root, [0, 11])


def test_batches_start_anew_with_every_shard_even_behind_a_short_one(root, tmp_path):
    shutil.copytree(root.url, tmp_path / "root")
    plan = plan_of(extend_root(Root(str(tmp_path / "root")), 2))
    assert [group.index for group in batch_of(plan, 44)] == [42, 43, 44]
    assert [group.index for group in batch_of(plan, 45)] == [45, 46, 47, 48]
    assert [group.index for group in batch_of(plan, 50)] == [49, 50]


def test_lossy_images_are_compared_as_stored(hasty_config, tmp_path):
    config = load_settings(BuildConfig, hasty_config.model_dump(), ["shards.image_format=jpg"])
    root = made(config, tmp_path / "root", shards="7")
    (stored,) = read_series(root, [43])
    assert same_pixels(regenerate(root, 43, device="cpu"), stored)


def test_what_a_build_would_store_is_not_written_by_a_look(hasty_config, tmp_path):
    root = create_root(hasty_config, str(tmp_path / "root"))
    with pytest.raises(InputError, match=r"group = 43: needs prototypes.* `semix resume .*rds 7`"):
        regenerate(root, 43)
    assert root.store.list("") == ["plan.json"]
