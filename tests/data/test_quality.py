"""Labels and measures of a mixed dataset, against values worked out by hand."""

import pytest
import torch
from scipy.stats import spearmanr

from semix.data.labels import sharpen, soft_labels
from semix.data.quality import (
    diversity,
    end_points,
    endpoint_agreement,
    label_gap,
    mixture_labels,
    read_end_points,
    series_quality,
    spearman,
    weight_curve,
)
from tests import handmade

PROTOTYPES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.6]])
FOUR = torch.tensor([0.0, 0.3, 0.7, 1.0])


def test_spearman_by_hand():
    weights = torch.tensor(
        [
            [-0.2, 0.1, 0.8, 1.3],  # in order
            [1.0, 0.9, 0.1, 0.0],  # in reverse
            [0.0, 0.6, 0.5, 1.0],  # one neighbouring swap: 1 - 6 * 2 / (4 * 15)
            [0.5, 0.5, 0.5, 0.5],  # follows nothing
        ]
    )
    result = spearman(FOUR.expand(4, 4), weights)
    torch.testing.assert_close(result, torch.tensor([1.0, -1.0, 0.8, 0.0], dtype=torch.float64))


def test_spearman_equals_scipy_with_ties():
    generator = torch.Generator().manual_seed(3)
    alphas = torch.rand(20, 8, generator=generator)
    weights = torch.randint(0, 4, (20, 8), generator=generator).float()
    expected = [spearmanr(a, w).statistic for a, w in zip(alphas, weights, strict=True)]
    torch.testing.assert_close(
        spearman(alphas, weights), torch.tensor(expected, dtype=torch.float64)
    )


def test_series_quality_by_hand():
    weights = torch.tensor([[0.0, 0.2, 0.6, 1.0], [0.0, 0.6, 0.5, 1.0], [1.0, 0.9, 0.1, 0.0]])
    result = series_quality(FOUR.expand(3, 4), weights)
    assert result.series == 3
    assert result.median == pytest.approx(0.8)
    assert result.mean == pytest.approx((1 + 0.8 - 1) / 3)
    assert result.not_monotone == pytest.approx(2 / 3)
    assert result.negative == pytest.approx(1 / 3)


def test_series_quality_does_not_depend_on_the_order_of_images():
    shuffled = torch.tensor([2, 0, 3, 1])
    weights = torch.tensor([[0.0, 0.2, 0.6, 1.0]])
    result = series_quality(FOUR[shuffled][None], weights[:, shuffled])
    assert (result.median, result.not_monotone) == (1.0, 0.0)


def test_weight_curve_by_hand():
    alphas = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    weights = torch.tensor([[0.8, 0.1], [0.9, 0.0], [1.3, -0.4]])
    result = weight_curve(alphas, weights, levels=(0.0, 0.5, 1.0))
    torch.testing.assert_close(result.alphas, torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(result.mean, torch.tensor([-0.1, 1.0]))
    torch.testing.assert_close(
        result.quantiles, torch.tensor([[-0.4, 0.8], [0.0, 0.9], [0.1, 1.3]])
    )


def test_series_with_alphas_of_their_own_are_read_off_at_common_ones():
    alphas = torch.tensor([[1.0, 0.2, 0.0], [0.0, 0.8, 1.0]])
    weights = torch.tensor([[1.0, 0.2, 0.0], [0.0, 0.4, 1.0]])  # the second bends at 0.8
    result = weight_curve(alphas, weights, levels=(0.0, 1.0))
    torch.testing.assert_close(result.alphas, torch.tensor([0.0, 0.5, 1.0]))
    torch.testing.assert_close(result.mean, torch.tensor([0.0, 0.375, 1.0]))


def test_end_points_carry_the_class_they_were_made_for():
    alphas = torch.tensor([[0.0, 0.5, 1.0], [1.0, 0.5, 0.0]])
    mixtures = torch.stack([alphas, 1 - alphas], -1)
    group, position, intended = end_points(mixtures, torch.tensor([[3, 7], [1, 2]]))
    assert group.tolist() == [0, 0, 1, 1]
    assert position.tolist() == [0, 2, 0, 2]
    assert intended.tolist() == [7, 3, 1, 2]


def test_endpoint_agreement_by_hand():
    result = endpoint_agreement(torch.tensor([7, 3, 1, 1]), torch.tensor([7, 3, 1, 2]))
    assert result == {"agreed": 3, "images": 4, "share": 0.75}


def test_diversity_by_hand():
    classes = torch.tensor([[0, 1], [0, 1], [1, 2], [0, 1]])
    features = torch.tensor(
        [
            [[1.0, 0.0], [1.0, 0.0]],
            [[0.0, 3.0], [2.0, 0.0]],
            [[1.0, 1.0], [0.0, 1.0]],  # alone of its classes: compared with nothing
            [[1.0, 0.0], [-1.0, 0.0]],
        ]
    )
    # First position: 1, 0 and 1 between three; second: 0, 2 and 2.
    assert diversity(features, classes) == pytest.approx((2 / 3 + 4 / 3) / 2)
    assert diversity(5 * features, classes) == pytest.approx(1)
    assert diversity(features[2:], classes[2:]) is None


def test_label_gap_by_hand():
    labels = torch.tensor([[0.7, 0.3, 0.0], [0.0, 1.0, 0.0]])
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    assert label_gap(labels, labels) == 0
    assert label_gap(labels, probabilities) == pytest.approx((0.2 + 1.0) / 2)


def test_mixture_labels_by_hand():
    mixtures = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    result = mixture_labels(mixtures, torch.tensor([[2, 0]]), 3)
    torch.testing.assert_close(result, torch.tensor([[[0.75, 0.0, 0.25], [0.0, 0.0, 1.0]]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spearman(torch.zeros(2, 3), torch.zeros(2, 4)), r"\(2, 3\) and \(2, 4\)"),
        (lambda: spearman(torch.zeros(2, 1), torch.zeros(2, 1)), "A >= 2"),
        (lambda: series_quality(torch.zeros(0, 3), torch.zeros(0, 3)), "no committed groups"),
        (lambda: endpoint_agreement(torch.zeros(0), torch.zeros(0)), "M >= 1"),
        (lambda: label_gap(torch.zeros(1, 2), torch.zeros(1, 3)), r"\(1, 2\) and \(1, 3\)"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_unmixed_images_are_compared_with_all_classes_and_with_their_own():
    record = handmade.series_of(handmade.record(0, 3))  # cat and dog, alphas 0, 0.5, 1
    features = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.7, 0.5]])
    end_points_read = read_end_points(record.mixtures, record.classes, features, PROTOTYPES)
    assert end_points_read.intended.tolist() == [1, -1, 0]
    assert end_points_read.nearest.tolist() == [1, -1, 2]
    assert end_points_read.of_series.tolist() == [1, -1, 0]


def test_a_simplex_has_an_end_point_for_each_class():
    mixture = [[1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    record = handmade.series_of(
        handmade.record(0, 4, classes=[2, 0, 1], names=list("abc"), mixture=mixture)
    )
    end_points_read = read_end_points(
        record.mixtures, record.classes, PROTOTYPES[[2, 2, 1, 1]], PROTOTYPES
    )
    assert end_points_read.intended.tolist() == [2, -1, 1, 0]
    assert end_points_read.nearest.tolist() == end_points_read.of_series.tolist() == [2, -1, 1, 1]


def test_features_that_are_no_numbers_are_near_nothing():
    record = handmade.series_of(handmade.record(0, 2))
    features = torch.tensor([[0.0, torch.nan], [torch.inf, 0.0]])
    end_points_read = read_end_points(record.mixtures, record.classes, features, PROTOTYPES)
    assert end_points_read.intended.tolist() == [1, 0]
    assert end_points_read.nearest.tolist() == end_points_read.of_series.tolist() == [-1, -1]


def test_sharpening_by_hand():
    torch.testing.assert_close(
        sharpen(torch.tensor([0.5, 1.0, 0.0]), 4.0), torch.tensor([0.5, 0.880797, 0.119203])
    )


def test_labels_have_two_entries_that_sum_to_one():
    labels = soft_labels(torch.tensor([0.25, 1.0]), torch.tensor([2, 0]), torch.tensor([0, 1]), 4)
    torch.testing.assert_close(labels, torch.tensor([[0.75, 0.0, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]))
