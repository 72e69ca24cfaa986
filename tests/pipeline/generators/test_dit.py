"""How DiT finds and mixes its labels."""

import pytest
import torch
from diffusers import DiTPipeline
from diffusers.models.embeddings import LabelEmbedding

from data.errors import InputError
from data.settings import load_settings
from pipeline.config import GeneratorConfig
from pipeline.generators import load_generator
from pipeline.generators.dit import WeightedLabels, label_numbers

LABELS = {0: "tench, Tinca tinca", 1: "crane", 2: "great white shark", 3: "crane", 4: "Eskimo dog"}


def test_one_label_alone_is_its_embedding_and_a_mixture_the_mixed_embeddings():
    embedding = LabelEmbedding(5, 8, 0.1).eval()
    ours = WeightedLabels(embedding.embedding_table)
    alone = embedding(torch.tensor([3, 5]))
    torch.testing.assert_close(ours(torch.eye(6)[[3, 5]]), alone, rtol=0, atol=0)
    mixed = ours(torch.tensor([[0.0, 0, 0, 0.25, 0, 0.75]]))
    torch.testing.assert_close(mixed[0], 0.25 * alone[0] + 0.75 * alone[1])


def test_half_precision_does_not_round_the_weights_of_a_mixture():
    table = torch.nn.Embedding(2, 1).bfloat16()
    table.weight.data = torch.tensor([[7.0], [-3.0]]).bfloat16()
    mixed = WeightedLabels(table)(torch.tensor([[0.3, 0.7]]))
    assert mixed.dtype == torch.bfloat16
    assert mixed.abs() < 1e-3  # 0.0078 with weights of 8 bits


def test_names_are_labels_whatever_their_case_and_underscores():
    names = ["Tinca_tinca", "TENCH", "great_white_shark", "tench, tinca tinca", "3", "eskimo  dog"]
    assert label_numbers(names, LABELS, 5, numbers={"3"}) == [0, 0, 2, 0, 3, 4]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("crane", r"generator\.names = 'crane': is what labels 1, 3 are called; give the number"),
        ("white_shark", r"is no label of the model; map it to one such as great white shark"),
        ("n01440764", r"is no label of the model; map it to one or to a label's number"),
        ("7", r"'7': the model's labels are 0 to 4"),
        ("2", r"'2': is no label of the model"),  # a class that is called 2, not a number given
    ],
)
def test_a_name_that_is_not_clearly_a_label_is_refused(name, message):
    with pytest.raises(InputError, match=message):
        label_numbers([name], LABELS, 5, numbers={"7"})


def test_classes_are_rows_of_weights_and_the_empty_label_the_last(tiny_dit):
    values = {"model": str(tiny_dit), "family": "dit", "names": {"my cat": "Dog", "x": "900"}}
    generator = load_generator(load_settings(GeneratorConfig, values), device="cpu")
    tokens = generator.encode(["Dog", "900", "great_white_shark"]).tokens
    assert tokens.shape == (3, 1001)
    assert tokens.argmax(dim=1).tolist() == [0, 900, 2]
    assert tokens.sum(dim=1).tolist() == [1, 1, 1]
    assert generator.denoiser.unconditional.tokens.argmax(dim=1).tolist() == [1000]


def test_a_dit_without_names_of_its_labels_takes_their_numbers(tiny_dit, tmp_path):
    pipeline = DiTPipeline.from_pretrained(tiny_dit, use_safetensors=True)
    pipeline.save_pretrained(tmp_path)  # writes no labels
    values = {"model": str(tmp_path), "family": "dit", "names": {"cat": "281"}}
    generator = load_generator(load_settings(GeneratorConfig, values), device="cpu")
    assert generator.encode(["281"]).tokens.argmax(dim=1).tolist() == [281]
    with pytest.raises(InputError, match="'dog': is no label of the model"):
        generator.encode(["dog"])


def test_the_network_still_takes_plain_labels_for_what_they_are(tiny_dit):
    """Against the transformer as diffusers loads it, every block and the output layer."""
    plain = DiTPipeline.from_pretrained(tiny_dit, use_safetensors=True).transformer.eval()
    values = {"model": str(tiny_dit), "family": "dit"}
    generator = load_generator(load_settings(GeneratorConfig, values), device="cpu")
    latents, timestep = torch.randn(2, 4, 8, 8, generator=torch.manual_seed(0)), torch.tensor(300)
    with torch.no_grad():
        theirs = plain(latents, timestep.expand(2), class_labels=torch.tensor([1, 1000])).sample
        condition = generator.encode(["crane"])
        rows = torch.cat([condition.tokens, generator.denoiser.unconditional.tokens])
        ours = generator.denoiser(latents, timestep, type(condition)(rows))
    assert theirs.shape == (2, 8, 8, 8)
    torch.testing.assert_close(ours, theirs[:, :4])
