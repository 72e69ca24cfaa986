import pytest

from data.errors import InputError
from data.settings import load_settings
from pipeline.config import BuildConfig
from pipeline.plan import BuildPlan, MixGroup, group_seed

SETTINGS = {
    "real": {"name": "digits"},
    "generator": {"model": "some/model"},
    "mixing": {"groups_per_pair": 3},
    "annotation": {"model": "ViT-B-32", "pretrained": "openai"},
    "shards": {"groups_per_shard": 32},
}


def plan(*overrides: str) -> BuildPlan:
    return BuildPlan(load_settings(BuildConfig, SETTINGS, overrides))


def test_groups_are_a_pure_function_of_their_index_and_wrap_around():
    first, again = plan(), plan()
    assert (first.num_groups, first.num_shards) == (135, 5)
    assert [first.group(i) for i in range(135)] == [again.group(i) for i in reversed(range(135))][
        ::-1
    ]
    mixture = tuple((alpha / 7, 1 - alpha / 7) for alpha in range(8))
    assert first.group(45) == MixGroup(45, (0, 1), group_seed(0, 45), mixture, round=1)
    assert first.group(44).second == 9
    assert len({first.group(i).seed for i in range(135)}) == 135
    assert group_seed(0, 1) != group_seed(1, 0)


def test_shards_cover_every_group_once():
    specs = [plan().shard(i) for i in range(5)]
    covered = [group for spec in specs for group in range(spec.start, spec.stop)]
    assert covered == list(range(135))
    assert len({spec.digest for spec in specs}) == 5


def test_the_digest_follows_every_setting():
    assert plan().digest == plan().digest
    changed = ["mixing.seed=1", "generator.steps=21", "real.split_seed=1", "annotation.scale=4"]
    assert len({plan().digest, *(plan(change).digest for change in changed)}) == 5


def test_out_of_range_indices_are_errors():
    with pytest.raises(IndexError, match="group 135: the plan has 135"):
        plan().group(135)
    with pytest.raises(IndexError, match="shard -1: the plan has 5"):
        plan().shard(-1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mixing.alphas=[0, 1.5]", r"mixing\.alphas = .*1\.5 must lie in \[0, 1\]; 1 is the first"),
        ("mixing.alphas=1", "give 2 to 100 images a series"),
        ("generator.prompt=a photo", r"must contain \{class\} exactly once"),
        ("annotation.scale=-1", "must be positive, or auto"),
        ("generator.guidance=3", r"did you mean generator\.guidance_scale"),
        ("real.name=cifar", r"real\.name = 'cifar': input should be 'digits' or 'imagefolder'"),
    ],
)
def test_bad_settings_are_named(override, message):
    with pytest.raises(InputError, match=message):
        plan(override)


def sized(groups_per_pair: int, *overrides: str) -> BuildPlan:
    changes = (
        f"mixing.groups_per_pair={groups_per_pair}",
        "mixing.pairs={kind: sampled, count: 20}",
    )
    return plan("shards={}", *changes, *overrides)


@pytest.mark.parametrize(
    ("groups_per_pair", "size", "shards"),
    [
        (1, 8, 3),  # of 20 groups; less than a batch would be filled up
        (3, 8, 8),
        (6, 8, 15),
        (7, 16, 9),
        (51, 64, 16),
        (1000, 64, 313),
    ],
)
def test_a_size_that_is_not_set_follows_the_plan(groups_per_pair: int, size: int, shards: int):
    found = sized(groups_per_pair)
    assert (found.config.shards.groups_per_shard, found.num_shards) == (size, shards)
    written = sized(groups_per_pair, f"shards.groups_per_shard={size}")
    assert written.digest == found.digest  # plan.json has the number


@pytest.mark.parametrize(("batch", "size"), [(3, 63), (24, 48), (100, 100)])
def test_a_derived_shard_is_of_whole_batches(batch: int, size: int):
    assert sized(1000, f"shards.groups_per_batch={batch}").layout.size == size


def test_plans_made_with_the_old_size_keep_their_digest():
    old = plan("shards={groups_per_shard: 64}")
    assert old.digest == "52ef1f19406ebbab8b74f27de9b4713fcfcc7c770caebdddb6a1f1f7f2bb8ac8"
