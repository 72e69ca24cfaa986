import pytest

from data.errors import InputError
from data.extension import next_extension, write_extension
from data.root import Root
from data.settings import load_settings
from pipeline.config import BuildConfig
from pipeline.plan import BuildPlan
from pipeline.root import create_root, extend_root, plan_of


def with_series(config: BuildConfig, count: int, *overrides: str) -> BuildConfig:
    changes = (f"mixing.groups_per_pair={count}", *overrides)
    return load_settings(BuildConfig, config.model_dump(), changes)


@pytest.fixture
def root(hasty_config, tmp_path) -> Root:
    return create_root(hasty_config, str(tmp_path / "root"))


def test_the_groups_that_come_are_those_of_a_larger_plan(root, hasty_config):
    before = plan_of(root)
    again = extend_root(root, 3)
    plan, larger = plan_of(again), BuildPlan(with_series(hasty_config, 3))
    assert plan.digest == before.digest == again.plan["digest"]
    assert plan.num_groups == larger.num_groups == 135
    assert [plan.group(i) for i in range(135)] == [larger.group(i) for i in range(135)]
    assert [plan.shard(i) for i in range(8)] == [before.shard(i) for i in range(8)]
    assert (plan.shard(7).start, plan.shard(7).stop) == (42, 45)  # stays short
    assert (plan.shard(8).start, plan.shard(8).stop) == (45, 51)
    covered = [
        g for i in range(plan.num_shards) for g in range(plan.shard(i).start, plan.shard(i).stop)
    ]
    assert covered == list(range(135))
    added = again.extensions[0].stretch
    assert (added.first_group, added.last_group) == (45, 134)
    assert (added.first_shard, added.last_shard) == (8, 22)


def test_extensions_follow_each_other(root):
    twice = extend_root(extend_root(root, 2), 4)
    assert [e.groups_per_pair for e in twice.extensions] == [2, 4]
    assert plan_of(twice).num_groups == twice.plan["num_groups"] == 180


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_root_is_never_made_smaller(root, count):
    extend_root(root, 2)
    with pytest.raises(InputError, match=rf"groups_per_pair = {count}: .* has 2 already"):
        extend_root(Root(root.url), count)


def test_who_extends_second_is_told(root):
    late = Root(root.url)
    extend_root(root, 2)
    with pytest.raises(InputError, match=r"= 3: someone else extended .* to 2 meanwhile"):
        extend_root(late, 3)
    assert Root(root.url).plan["num_groups"] == 90


def test_more_series_than_keys_can_count_are_refused(root):
    with pytest.raises(InputError, match=r"at most 100,000,000 series"):
        extend_root(root, 10_000_000)


def test_the_first_config_goes_on_with_an_extended_root(root, hasty_config):
    with pytest.raises(InputError, match=r"groups_per_pair = 2: .*has 1; add .*`semix extend`"):
        create_root(with_series(hasty_config, 2), root.url)
    extend_root(root, 2)
    assert create_root(hasty_config, root.url).plan["num_shards"] == 16
    with pytest.raises(InputError, match=r"= 2: was extended from 1 to that; go on with"):
        create_root(with_series(hasty_config, 2), root.url)
    with pytest.raises(InputError, match=r"= 3: .*has 2; add series"):
        create_root(with_series(hasty_config, 3), root.url)
    with pytest.raises(InputError, match=r"holds another plan .*groups_per_pair.*mixing\.seed"):
        create_root(with_series(hasty_config, 3, "mixing.seed=9"), root.url)


def test_an_extension_file_alone_is_enough(root):
    """What is written is what is read: no settings, no plan.json, no clock."""
    values = next_extension(root.plan["digest"], root.layout, 2, pairs=45)
    assert write_extension(root.store, 1, values)
    assert plan_of(Root(root.url)).num_groups == 90
