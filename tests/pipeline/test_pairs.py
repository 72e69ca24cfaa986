import itertools
import math

import pytest
import torch

from data.errors import InputError
from pipeline.config import MixingConfig
from pipeline.plan.pairs import class_sets, combination, permuted
from pipeline.plan.similar import similar_pairs

NAMES = ("ant", "bee", "cat", "dog", "elk")


def mixing(**settings) -> MixingConfig:
    return MixingConfig.model_validate({"groups_per_pair": 1, **settings})


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
    chosen = [
        class_sets(mixing(pairs={"kind": "sampled", "count": 6}, seed=s), NAMES) for s in (0, 1)
    ]
    first, second = ([sets[i] for i in range(6)] for sets in chosen)
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


def test_similar_pairs_without_prototypes_know_their_number_only():
    sets = class_sets(mixing(pairs={"kind": "similar", "count": 4}), NAMES)
    assert len(sets) == 4
    with pytest.raises(ValueError, match="not measured yet"):
        sets[0]


def test_similar_pairs_follow_the_cosine():
    angles = torch.tensor([0.0, 0.1, 1.5, 1.6, 3.0])
    prototypes = torch.stack([angles.cos(), angles.sin()], 1)
    closest = similar_pairs(prototypes, 2, temperature=1e-3, seed=0)
    assert closest == [(0, 1), (2, 3)]
    anything = {tuple(similar_pairs(prototypes, 1, temperature=1e3, seed=s)) for s in range(60)}
    assert len(anything) > 6  # of ten, nearly uniform
    assert similar_pairs(prototypes, 10, temperature=0.1, seed=3) == list(
        itertools.combinations(range(5), 2)
    )


def test_odds_of_similar_pairs_are_those_of_the_softmax():
    prototypes = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])  # cosines 0.8, 0, 0.6
    draws = [similar_pairs(prototypes, 1, temperature=0.5, seed=s)[0] for s in range(2000)]
    odds = [math.exp(c / 0.5) for c in (0.8, 0.0, 0.6)]
    for pair, weight in zip([(0, 1), (0, 2), (1, 2)], odds, strict=True):
        assert draws.count(pair) / 2000 == pytest.approx(weight / sum(odds), abs=0.04)
