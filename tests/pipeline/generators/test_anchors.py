"""Anchors along alpha, on numbers worked out by hand."""

import torch

from pipeline.generators.approximate.anchors import Anchors


def test_features_between_anchors_are_linear_in_alpha():
    anchors = Anchors(torch.tensor([[0.0, 0.1, 0.6, 0.7, 1.0]]), 3)
    assert anchors.rows.tolist() == [0, 2, 4]
    assert anchors.others.tolist() == [1, 3]
    features = torch.tensor([[10.0], [16.0], [20.0]])
    # 0.1 is a sixth of the way from 0 to 0.6; 0.7 a quarter of the way from 0.6 to 1.
    torch.testing.assert_close(anchors.to_others(features), torch.tensor([[11.0], [17.0]]))


def test_each_series_has_its_own_alphas_in_any_order():
    anchors = Anchors(torch.tensor([[0.0, 0.25, 1.0], [1.0, 0.0, 0.5]]), 2)
    # Anchors come by alpha: rows 0 and 2 of the first series, 1 and 0 of the second.
    assert anchors.rows.tolist() == [0, 2, 4, 3]
    assert anchors.others.tolist() == [1, 5]
    features = torch.tensor([[0.0], [4.0], [100.0], [200.0]])
    torch.testing.assert_close(anchors.to_others(features), torch.tensor([[1.0], [150.0]]))


def test_merging_puts_every_row_in_its_place():
    anchors = Anchors(torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]]), 2)
    values = torch.arange(6.0)[:, None]
    merged = anchors.merge(values[anchors.rows], values[anchors.others])
    torch.testing.assert_close(merged, values)


def test_equal_alphas_take_the_anchor_itself():
    anchors = Anchors(torch.tensor([[0.5, 0.5, 0.5]]), 2)
    torch.testing.assert_close(
        anchors.to_others(torch.tensor([[3.0], [5.0]])), torch.tensor([[3.0]])
    )
