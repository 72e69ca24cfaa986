"""Plans: groups, shards and digests; sets of classes and points of mixing."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from semix.data.errors import InputError
from semix.data.formats import SeriesByRun
from semix.data.layout import next_extension
from semix.data.settings import load_settings
from semix.pipeline.class_sets import class_sets, combination, permuted
from semix.pipeline.config import BuildConfig, GeneratorConfig, MixingConfig
from semix.pipeline.plan import BuildPlan, MixGroup, alpha_grid, group_seed, mixture_points
from semix.pipeline.provenance import identity, model_identities
from tests.pipeline.roots import altered

NAMES = ("ant", "bee", "cat", "dog", "elk")
SETTINGS = {
    "real": {"name": "digits"},
    "generator": {"model": "some/model"},
    "mixing": {"groups_per_pair": 3},
    "annotation": {"model": "ViT-B-32", "pretrained": "openai"},
    "shards": {"groups_per_shard": 32},
}


def plan(*overrides: str) -> BuildPlan:
    return BuildPlan(load_settings(BuildConfig, SETTINGS, overrides))


def mixing(**settings) -> MixingConfig:
    return MixingConfig.model_validate({"groups_per_pair": 1, **settings})


def test_groups_are_a_pure_function_of_their_index_and_wrap_around():
    first, again = plan(), plan()
    assert (first.num_groups, first.num_shards) == (135, 5)
    assert [first.group(i) for i in range(135)] == [again.group(i) for i in reversed(range(135))][
        ::-1
    ]
    mixture = tuple((alpha / 7, 1 - alpha / 7) for alpha in range(8))
    assert first.group(45) == MixGroup(45, (0, 1), group_seed(0, 45), mixture)
    assert first.group(44).second == 9
    assert len({first.group(i).seed for i in range(135)}) == 135
    assert group_seed(0, 1) != group_seed(1, 0)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["mixing.pairs={kind: sampled, count: 7}"],
        ["mixing.pairs={kind: named, names: [[nine, two], [zero, one]]}"],
        ["mixing.classes=3", "mixing.grid=random", "mixing.alphas=8", "annotation.rule=simplex"],
    ],
)
def test_the_classes_of_all_groups_at_once_are_those_of_each(settings):
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    config = load_settings(BuildConfig, SETTINGS, settings)
    counted = SeriesByRun(
        run="r", digest="d", by="confusion", images=1, series=[(0, 3, 2), (1, 2, 5)]
    )
    before = BuildPlan(config, names)
    extension = next_extension("d", before.layout, 7, groups_per_pair=3, by_run=counted)
    extended = BuildPlan(
        config, names, extensions=[extension] if config.mixing.classes == 2 else []
    )
    each = [extended.group(index).classes for index in range(extended.num_groups)]
    assert extended.classes().tolist() == [list(classes) for classes in each]


def test_shards_cover_every_group_once():
    specs = [plan().shard(i) for i in range(5)]
    covered = [group for spec in specs for group in range(spec.start, spec.stop)]
    assert covered == list(range(135))
    assert len({spec.digest for spec in specs}) == 5


def test_the_digest_follows_what_decides_bytes():
    changed = ["mixing.seed=1", "generator.steps=21", "real.split_seed=1", "annotation.scale=4"]
    changed += ["generator.prompt=one {class}", "generator.revision=abc", "generator.model=other"]
    changed += ["annotation.pretrained=other", "noise.strategy=select", "shards.store_size=16"]
    digests = {plan().digest, *(plan(change).digest for change in changed)}
    names = ("one", *NAMES[1:], *"fghij")
    digests |= {BuildPlan(plan().config, names, models=plan().models).digest}
    assert len(digests) == len(changed) + 2
    assert plan().digest == plan().digest


@pytest.mark.parametrize(
    "override", ["real.path=/elsewhere", "noise.max_cost=9", "shards.max_left_out=0.2"]
)
def test_the_digest_does_not_follow_what_decides_no_byte(override):
    digests = {
        BuildPlan(load_settings(BuildConfig, SETTINGS, changes), NAMES).digest
        for changes in ((), (override,))
    }
    assert len(digests) == 1


def test_a_model_is_known_by_its_files_wherever_they_lie(hasty_config, hasty_standins, tmp_path):
    lora = tmp_path / "lora.safetensors"
    lora.write_bytes(b"weights")

    def digest(folder: Path) -> str:
        changes = {"model": f"{folder}/sd", "unet": f"{folder}/sd/unet"}
        changes["tiny_decoder"] = f"{folder}/sd/vae"
        config = altered(
            hasty_config,
            *(f"generator.{name}={path}" for name, path in changes.items()),
            f"generator.lora=[{{path: {folder}/lora.safetensors}}]",
            f"annotation.model=local-dir:{folder}/clip",
            f"annotation.second={{model: 'local-dir:{folder}/other'}}",
        )
        return BuildPlan(config).digest

    for path in (tmp_path / "one", tmp_path / "two"):
        shutil.copytree(hasty_standins.diffusion, path / "sd")
        for name in ("clip", "other"):
            shutil.copytree(hasty_standins.clip, path / name)
        shutil.copy(lora, path)
    moved, digests = tmp_path / "two", [digest(tmp_path / "one"), digest(tmp_path / "two")]
    assert digests[0] == digests[1]
    files = ["sd/unet/config.json", "sd/vae/config.json", "lora.safetensors"]
    files += ["clip/open_clip_config.json", "other/open_clip_config.json"]
    for name in files:
        content = (moved / name).read_bytes()
        (moved / name).write_bytes(content + b" ")
        digests.append(digest(moved))
        (moved / name).write_bytes(content)
    assert len(set(digests)) == 1 + len(files)


def test_a_setting_that_comes_later_changes_no_digest_at_its_default():
    class LaterGenerator(GeneratorConfig):
        sharpness: float = 0.5

    class Later(BuildConfig):
        generator: LaterGenerator

    config = load_settings(Later, SETTINGS)
    models = model_identities(config)
    assert (
        BuildPlan(config, NAMES, models=models).digest
        == BuildPlan(load_settings(BuildConfig, SETTINGS), NAMES, models=models).digest
    )
    sharper = load_settings(Later, SETTINGS, ["generator.sharpness=0.7"])
    assert identity(sharper, NAMES, models) != identity(config, NAMES, models)


def test_out_of_range_indices_are_errors():
    with pytest.raises(IndexError, match="group 135: the plan has 135"):
        plan().group(135)
    with pytest.raises(IndexError, match="shard -1: the plan has 5"):
        plan().shard(-1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mixing.alphas=[0, 1.5]", r"mixing\.alphas = .*1\.5 must lie in \[0, 1\]; 1 is the first"),
        ("mixing.alphas=1", "give 2 to 100 images per series"),
        ("generator.prompt=a photo", r"must contain \{class\} exactly once"),
        ("annotation.scale=-1", "must be positive, or auto"),
        ("generator.guidance=3", r"did you mean generator\.guidance_scale"),
        ("real.name=cifar", r"real\.name = 'cifar': choose one of digits, imagefolder"),
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
    result = sized(groups_per_pair)
    assert (result.config.shards.groups_per_shard, result.num_shards) == (size, shards)
    written = sized(groups_per_pair, f"shards.groups_per_shard={size}")
    assert written.digest == result.digest  # plan.json has the number


@pytest.mark.parametrize(("batch", "size"), [(3, 63), (24, 48), (100, 100)])
def test_a_derived_shard_is_of_whole_batches(batch: int, size: int):
    assert sized(1000, f"shards.groups_per_batch={batch}").layout.size == size


def test_a_plan_keeps_its_digest_from_version_to_version():
    """Existing roots store the digest; those from before there was a mark have none."""
    result = plan("shards={groups_per_shard: 64, mark: false}")
    assert result.digest == "abb20a78a46106fc552094b8503c7737bef1e0e7c3c647896fd99fc17b92a6d8"
    marked = plan("shards={groups_per_shard: 64}")
    assert marked.digest == "074960dd8082d78167085ac110339cdf2779f1f633af14cf92bb6b21785a7ae1"


@pytest.mark.parametrize(("classes", "size"), [(2, 2), (10, 2), (57, 2), (7, 3), (8, 5)])
def test_all_sets_come_in_lexicographic_order(classes, size):
    expected = list(itertools.combinations(range(classes), size))
    assert [combination(rank, classes, size) for rank in range(len(expected))] == expected


def test_pairs_of_a_thousand_classes_need_no_list():
    assert combination(499_499, 1000, 2) == (998, 999)
    assert combination(999, 1000, 2) == (1, 2)


@pytest.mark.parametrize("count", [1, 2, 45, 1000])
def test_the_permutation_hits_every_number_once(count):
    assert sorted(permuted(i, count, 7) for i in range(count)) == list(range(count))


def test_sampled_pairs_depend_on_the_seed_and_never_repeat():
    samples = [
        class_sets(mixing(pairs={"kind": "sampled", "count": 6}, seed=s), NAMES) for s in (0, 1)
    ]
    first, second = ([sets[i] for i in range(6)] for sets in samples)
    assert len(set(first)) == 6
    assert set(first) != set(second)
    assert all(a < b for a, b in first)


def test_sampled_pairs_are_uniform():
    counts = torch.zeros(5)
    for seed in range(400):
        sets = class_sets(mixing(pairs={"kind": "sampled", "count": 2}, seed=seed), NAMES)
        for rank in range(2):
            counts[list(sets[rank])] += 1
    # 320 expected for each class; the standard deviation is about 14
    assert (counts - 320).abs().max() < 60


def test_named_pairs_come_in_their_order_with_the_smaller_class_first():
    sets = class_sets(
        mixing(pairs={"kind": "named", "names": [["dog", "bee"], ["ant", "cat"]]}), NAMES
    )
    assert [sets[rank] for rank in range(len(sets))] == [(1, 3), (0, 2)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": {"kind": "named", "names": [["cat", "fox"]]}}, "'fox' is no class of the data"),
        ({"pairs": {"kind": "named", "names": [["cat", "cat"]]}}, "name 2 different classes"),
        (
            {"pairs": {"kind": "named", "names": [["cat", "dog"], ["dog", "cat"]]}},
            "is named more than once; raise mixing.groups_per_pair",
        ),
        ({"pairs": {"kind": "sampled", "count": 11}}, r"count = 11: there are only 10"),
        ({"classes": 6, "alphas": 8, "grid": "random"}, "mixing.classes = 6: the data has 5"),
    ],
)
def test_sets_that_cannot_be_are_named(settings, message):
    with pytest.raises(InputError, match=message):
        class_sets(mixing(**settings), NAMES)


def test_sets_of_more_classes_than_can_be_counted_are_refused_or_sampled():
    names = [str(number) for number in range(21_841)]  # comb(21841, 6) is above 2^63
    six = {"classes": 6, "alphas": 8, "grid": "random"}
    with pytest.raises(InputError, match=r"mixing\.pairs\.kind = all: is all 150,\d{3},"):
        class_sets(mixing(**six), names)
    sets = class_sets(mixing(**six, pairs={"kind": "sampled", "count": 100}), names)
    drawn = {sets[rank] for rank in range(100)}
    assert len(drawn) == 100 and all(len(set(classes)) == 6 for classes in drawn)


@pytest.mark.parametrize(
    ("pairs", "count", "series"),
    [("{kind: sampled, count: 10}", 10, "100,000,010"), ("{kind: all}", 45, "450,000,045")],
)
def test_more_series_than_a_root_holds_are_refused_with_their_number(pairs, count, series):
    changes = [f"mixing.pairs={pairs}", "mixing.groups_per_pair=10000001"]
    config = load_settings(BuildConfig, SETTINGS, changes)
    problem = f"groups_per_pair = 10000001: with {count} pairs these are {series} series; "
    with pytest.raises(InputError, match=rf"{problem}.* 100,000,000"):
        BuildPlan(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": {"kind": "sampled"}}, "`count` belongs to kind sampled or similar"),
        ({"pairs": {"names": [["a", "b"]]}}, "`names` belongs to kind named"),
        ({"alphas": [0, 1], "grid": "random"}, "wants a count of alphas"),
        ({"classes": 3}, "wants a count of alphas and `grid: random`"),
        ({"classes": 4, "alphas": 3, "grid": "random"}, "must be at least 4"),
        (
            {"classes": 3, "grid": "random", "interpolation": "spherical"},
            "defined for 2 classes only",
        ),
    ],
)
def test_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        mixing(**settings)


def test_similar_pairs_that_are_not_drawn_know_their_number_only():
    sets = class_sets(mixing(pairs={"kind": "similar", "count": 4}), NAMES)
    assert len(sets) == 4
    with pytest.raises(LookupError, match="drawn when a build begins"):
        sets[0]


def test_even_alphas():
    assert alpha_grid(3) == (0.0, 0.5, 1.0)
    assert mixture_points(mixing(alphas=3), 5) == ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0))
    assert mixture_points(mixing(alphas=(0.7, 0.2)), 5)[0] == (0.7, pytest.approx(0.3))


def test_interior_alphas_keep_the_ends_and_crowd_the_middle():
    even, dense = alpha_grid(8), alpha_grid(8, dense=True)
    assert (dense[0], dense[-1]) == (0.0, 1.0)
    assert list(dense) == sorted(dense)
    assert all(abs(d - 0.5) <= abs(e - 0.5) for d, e in zip(dense, even, strict=True))
    assert dense[3] == pytest.approx(0.5 - 0.5 * (1 / 7) ** 1.5)
    assert alpha_grid(3, dense=True) == (0.0, 0.5, 1.0)


def test_random_alphas_are_a_function_of_seed_and_group():
    points = mixture_points(mixing(grid="random", alphas=6), 3)
    alphas = [first for first, _ in points]
    assert alphas == sorted(alphas)
    assert (alphas[0], alphas[-1]) == (0.0, 1.0)
    assert points == mixture_points(mixing(grid="random", alphas=6), 3)
    assert points != mixture_points(mixing(grid="random", alphas=6), 4)
    assert points != mixture_points(mixing(grid="random", alphas=6, seed=1), 3)


def test_a_simplex_has_its_corners_first_then_uniform_points():
    settings = mixing(classes=3, alphas=5, grid="random")
    points = mixture_points(settings, 0)
    assert points[:3] == ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    inside = [point for group in range(1000) for point in mixture_points(settings, group)[3:]]
    assert all(sum(point) == pytest.approx(1) and min(point) > 0 for point in inside)
    # Each coordinate of a uniform point of the triangle has mean 1/3 and variance 1/18.
    for k in range(3):
        values = [point[k] for point in inside]
        mean = sum(values) / len(values)
        assert mean == pytest.approx(1 / 3, abs=0.03)
        assert sum((v - mean) ** 2 for v in values) / len(values) == pytest.approx(1 / 18, abs=0.01)
