import pytest

from data.errors import InputError
from pipeline.config import GeneratorConfig
from pipeline.prompts import padded_names, prompts, spoken_names


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
    spoken = spoken_names(config(names={"crane": "crane bird"}), ("crane", "dog"))
    assert spoken == ["crane bird", "dog"]


def test_renaming_a_class_that_is_not_there_is_an_error():
    with pytest.raises(InputError, match=r"generator\.names = cranes: is no class .*crane, dog"):
        spoken_names(config(names={"cranes": "crane bird"}), ("crane", "dog"))


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
