import pytest
import torch

from pipeline.conditioning import interpolate, prompts


def test_alpha_is_the_weight_of_the_first():
    first, second = torch.full((2, 3), 4.0), torch.full((2, 3), 1.0)
    mixed = interpolate(first, second, torch.tensor([0.0, 0.25, 1.0]))
    expected = torch.tensor([1.0, 1.75, 4.0]).view(3, 1, 1).expand(3, 2, 3)
    torch.testing.assert_close(mixed, expected)


def test_end_points_are_exactly_the_classes():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(7, 5, generator=generator) for _ in range(2))
    mixed = interpolate(first, second, torch.tensor([1.0, 0.0]))
    assert torch.equal(mixed[0], first)
    assert torch.equal(mixed[1], second)


def test_unusable_arguments_are_errors():
    with pytest.raises(ValueError, match="mode = cubic: use linear"):
        interpolate(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1), mode="cubic")
    with pytest.raises(ValueError, match=r"shapes \(2, 1\) and \(1, 1\) must be equal"):
        interpolate(torch.ones(2, 1), torch.ones(1, 1), torch.ones(1))


def test_prompts_put_the_name_in_and_nothing_else():
    names = ["tabby_cat", "{0.__class__}", "Cafe\u0301"]
    assert prompts("a photo of a {class}", names) == [
        "a photo of a tabby cat",
        "a photo of a {0.  class  }",
        "a photo of a Caf\u00e9",
    ]
