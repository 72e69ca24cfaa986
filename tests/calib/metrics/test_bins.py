"""Which bin a value is in."""

import pytest
import torch

from calib.metrics.one_pass import bin_of, inner_edges


@pytest.mark.parametrize("bins", [1, 15, 33, 34, 100])
def test_a_value_on_an_edge_is_in_the_bin_below(bins):
    edges = inner_edges(bins, torch.float32)
    values = torch.cat([torch.tensor([0.0, 1.0]), edges, torch.rand(500)])
    expected = [sum(value > edge for edge in edges.tolist()) for value in values.tolist()]
    assert bin_of(values, edges).tolist() == expected
