"""Prompts of the classes, and how their embeddings are mixed."""

import pytest
import torch

from semix.data.errors import InputError
from semix.pipeline.conditioning import Conditioning, concatenate, interpolate, mix
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.prompts import padded_names, prompt_names, prompts


def config(**settings) -> GeneratorConfig:
    return GeneratorConfig.model_validate({"model": "some/model", **settings})


def test_prompts_put_the_name_in_and_nothing_else():
    names = ["tabby_cat", "{0.__class__}", "Cafe\u0301"]
    assert prompts("a photo of a {class}", names) == [
        "a photo of a tabby cat",
        "a photo of a {0.  class  }",
        "a photo of a Caf\u00e9",
    ]


def test_a_class_can_be_called_something_else():
    names = prompt_names(config(names={"crane": "crane bird"}), ("crane", "dog"))
    assert names == ["crane bird", "dog"]


def test_renaming_a_class_that_is_not_there_is_an_error():
    with pytest.raises(InputError, match=r"generator\.names = cranes: is no class .*crane, dog"):
        prompt_names(config(names={"cranes": "crane bird"}), ("crane", "dog"))


def words(text: str) -> int:
    return len(text.split())


def test_names_are_filled_to_the_longest():
    assert padded_names(["dog", "red panda", "owl"], words) == ["dog ,", "red panda", "owl ,"]


def test_a_tokenizer_that_counts_commas_otherwise_is_refused():
    with pytest.raises(InputError, match=r"generator\.pad_names = 'a , ,': .*cannot fill names"):
        padded_names(["a", "b c d"], lambda text: len(text.replace(",", ", ,").split()))


def test_one_template_or_several():
    assert config().templates == ("a photo of a {class}",)
    assert config(prompt=["a {class}", "the {class}"]).templates == ("a {class}", "the {class}")
    with pytest.raises(ValueError, match=r"must contain \{class\} exactly once"):
        config(prompt=["a {class}", "the"])


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
    with pytest.raises(ValueError, match="mode = cubic: use linear or spherical"):
        interpolate(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1), mode="cubic")
    with pytest.raises(ValueError, match=r"shapes \(2, 1\) and \(1, 1\) must be equal"):
        interpolate(torch.ones(2, 1), torch.ones(1, 1), torch.ones(1))


def test_the_arc_by_hand():
    first, second = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    middle = interpolate(first, second, torch.tensor([0.5, 1 / 3]), mode="spherical")
    half = 3 / 2**0.5
    torch.testing.assert_close(middle[0], torch.tensor([[half, half]]))
    torch.testing.assert_close(middle[1], torch.tensor([[1.5, 3 * 3**0.5 / 2]]))


def test_the_arc_goes_token_by_token_and_keeps_equal_tokens():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(4, 6, generator=generator) for _ in range(2))
    second[2] = first[2]
    mixed = interpolate(first, second, torch.tensor([1.0, 0.3, 0.0]), mode="spherical")
    assert torch.equal(mixed[0], first)
    assert torch.equal(mixed[2], second)
    torch.testing.assert_close(mixed[1, 2], first[2])
    alone = interpolate(first[:1], second[:1], torch.tensor([0.3]), mode="spherical")
    torch.testing.assert_close(mixed[1, :1], alone[0])
    line = interpolate(first, second, torch.tensor([0.3]))
    assert (mixed[1] - line[0]).abs().max() > 0.01


def test_mixtures_of_three_classes():
    embeddings = Conditioning(torch.eye(4)[:, None], torch.arange(4.0)[:, None])
    mixed = mix(embeddings, (0, 1, 3), torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]]))
    expected = torch.tensor([[[1.0, 0, 0, 0]], [[0.5, 0.25, 0, 0.25]]])
    torch.testing.assert_close(mixed.tokens, expected)
    assert mixed.pooled is not None
    torch.testing.assert_close(mixed.pooled, torch.tensor([[0.0], [1.0]]))


@pytest.mark.parametrize("mode", ["linear", "spherical"])
def test_pairs_mix_tokens_and_pooled_alike(mode):
    generator = torch.Generator().manual_seed(0)
    tokens, pooled = (torch.randn(shape, generator=generator) for shape in ((3, 5, 4), (3, 4)))
    mixture = torch.tensor([[0.0, 1.0], [0.6, 0.4]])
    mixed = mix(Conditioning(tokens, pooled), (0, 2), mixture, mode)
    assert mixed.pooled is not None
    alphas = mixture[:, 0]
    torch.testing.assert_close(mixed.tokens, interpolate(tokens[0], tokens[2], alphas, mode))
    torch.testing.assert_close(mixed.pooled, interpolate(pooled[0], pooled[2], alphas, mode))


def test_rows_expand_and_concatenate():
    one = Conditioning(torch.ones(1, 2, 3), torch.zeros(1, 4))
    both = concatenate([one.expand(2), one])
    assert (len(both), both.tokens.shape) == (3, (3, 2, 3))
    assert both.pooled is not None
    assert both.pooled.shape == (3, 4)
    assert both[[0, 1]].pooled is not None
