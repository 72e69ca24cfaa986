"""Each family on a tiny genuine pipeline of its own architecture, against diffusers itself."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, DiTPipeline
from diffusers.models.embeddings import LabelEmbedding
from torch import Tensor

from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.conditioning import Conditioning, concatenate, mix
from semix.pipeline.config import FLOW_FAMILIES, GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.dit import WeightedLabels, label_numbers
from semix.pipeline.generators.flow_models import packed, unpacked
from semix.pipeline.generators.latent_diffusion import denormalise
from semix.pipeline.noise import initial_noise
from semix.pipeline.prompts import checked_prompts, prompts

FAMILIES = {
    "tiny_sd_epsilon": {"family": "stable_diffusion", "guidance_scale": 3.0},
    "tiny_sd": {"family": "stable_diffusion", "guidance_scale": 3.0},
    "tiny_sd_turbo": {"family": "stable_diffusion", "guidance_scale": 0.0, "steps": 2},
    "tiny_sdxl": {"family": "sdxl", "guidance_scale": 3.0},
    "tiny_sdxl_turbo": {
        "family": "sdxl",
        "guidance_scale": 0.0,
        "steps": 2,
        "scheduler": "euler",
        "timestep_spacing": "trailing",
    },
    "tiny_dit": {"family": "dit", "guidance_scale": 3.0},
    "tiny_sd3": {"family": "sd3", "guidance_scale": 3.0, "prompt_length": 12},
    "tiny_flux": {
        "family": "flux",
        "guidance_scale": 3.5,
        "prompt_length": 12,
        "image_size": 16,
    },
    "tiny_flux_schnell": {
        "family": "flux",
        "guidance_scale": 0.0,
        "prompt_length": 12,
        "image_size": 16,
    },
    "tiny_flux2": {
        "family": "flux2",
        "guidance_scale": 3.0,
        "prompt_length": 20,
        "image_size": 16,
    },
    "tiny_z_image": {
        "family": "z_image",
        "guidance_scale": 3.0,
        "image_size": 16,
        "pad_names": True,
    },
}
each_family = pytest.mark.parametrize("family", FAMILIES)
ALPHAS = torch.tensor([0.0, 0.25, 0.75, 1.0])
MIXTURE = torch.stack([ALPHAS, 1 - ALPHAS], dim=1)


def settings_of(family: str, model: Path, **changes: Any) -> GeneratorConfig:
    return load_settings(
        GeneratorConfig, {"model": str(model), "steps": 4} | FAMILIES[family] | changes
    )


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """load(family, **changes): the generator, loaded once for the same settings."""
    loaded: dict[str, Any] = {}

    def load(family: str, **changes: Any) -> Any:
        config = settings_of(family, request.getfixturevalue(family), **changes)
        key = repr(config)
        if key not in loaded:
            loaded[key] = load_generator(config, device="cpu")
        return loaded[key]

    return load


def noise_of(generator: Any, seed: int = 0, rows: int = 1) -> Tensor:
    return initial_noise([seed], generator.latent_shape).expand(rows, -1, -1, -1)


def reference(generator: Any, names: list[str], noise: Tensor, output: str) -> np.ndarray | Tensor:
    """Images or latents from names and this noise, made as diffusers documents it."""
    config, pipeline = generator.config, generator.denoiser.pipeline
    if config.family == "dit":
        raise AssertionError("DiTPipeline takes no latents")
    options = {}
    if config.family in FLOW_FAMILIES:
        pipeline = DiffusionPipeline.from_pretrained(config.model, use_safetensors=True)
        options = {"height": 16, "width": 16, "max_sequence_length": config.prompt_length}
    else:
        pipeline.scheduler = generator.scheduler
    texts = prompts(config.prompt, names)
    if config.pad_names:
        texts = checked_prompts(config, names, generator.denoiser.prompt_encoder.tokenizers)[0]
    flux = config.family == "flux"
    images = pipeline(
        prompt=texts,
        latents=packed(noise) if flux else noise,
        num_inference_steps=config.steps,
        guidance_scale=config.guidance_scale - (config.family == "z_image"),
        output_type=output,
        **options,
    ).images
    return unpacked(images, 8, 8) if flux and output == "latent" else images


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "tiny_dit"])
def test_images_and_latents_are_those_of_the_pipeline_itself(load, family):
    generator = load(family)
    names, noise = ["dog", "crane"], noise_of(generator, rows=2)
    latents = generator.sample(noise, generator.encode(names))
    expected = reference(generator, names, noise, "latent")
    tolerance = 1e-5 if generator.config.family in FLOW_FAMILIES else 1e-3
    # FLUX.2's pipeline gives them as the VAE reads them.
    actual = denormalise(latents, generator.vae) if family == "tiny_flux2" else latents
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=1e-4)
    images = generator.decode(latents).numpy().astype(int)
    difference = np.abs(images - np.round(reference(generator, names, noise, "np") * 255))
    assert images.shape == (2, 16, 16, 3)
    assert difference.max() <= 1
    assert np.abs(images[0] - images[1]).max() > 3  # two classes, two images


def test_dit_makes_the_images_of_the_pipeline_itself(load, tiny_dit, monkeypatch):
    generator = load("tiny_dit")
    noise = noise_of(generator, rows=2)
    images = generator.decode(generator.sample(noise, generator.encode(["Dog two", "crane"])))
    pipeline = DiffusionPipeline.from_pretrained(tiny_dit, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    module = "diffusers.pipelines.dit.pipeline_dit.randn_tensor"
    monkeypatch.setattr(module, lambda *_, **__: noise.clone())  # its call takes no latents
    expected = pipeline(
        pipeline.get_label_ids(["dog two", "crane"]),
        guidance_scale=3.0,
        num_inference_steps=4,
        output_type="np",
    ).images
    difference = np.abs(images.numpy().astype(int) - np.round(expected * 255))
    assert difference.max() <= 1
    assert (images[0] != images[1]).any()


@each_family
def test_the_ends_of_a_series_are_the_classes_themselves(load, family):
    generator = load(family)
    embeddings = generator.encode(["dog", "crane", "great_white_shark"])
    series = mix(embeddings, (0, 2), MIXTURE)
    noise = noise_of(generator, seed=3, rows=4)
    images = generator.decode(generator.sample(noise, series))
    pure = mix(embeddings, (0, 2), MIXTURE[[0, 3, 0, 3]])
    assert torch.equal(pure.tokens[0], embeddings.tokens[2])
    assert torch.equal(pure.tokens[1], embeddings.tokens[0])
    ends = generator.decode(generator.sample(noise, embeddings[[2, 0, 2, 0]]))
    assert (images[[0, 3]].int() - ends[[0, 1]].int()).abs().max() <= 1
    inner = images[1:3].float()
    assert (inner[0] - inner[1]).abs().max() > 0
    assert (inner - images[[0, 3]].float()).abs().amax(dim=(1, 2, 3)).min() > 0


@each_family
def test_equal_noise_and_condition_give_equal_images_whatever_stands_beside(load, family):
    generator = load(family)
    embeddings = generator.encode(["dog", "crane"])
    both = concatenate([embeddings, embeddings])
    noise = torch.cat([noise_of(generator, seed, 2) for seed in (1, 2)])
    images = generator.decode(generator.sample(noise, both))
    swapped = generator.decode(generator.sample(noise[[2, 3, 0, 1]], both))
    assert (images[[2, 3, 0, 1]].int() - swapped.int()).abs().max() <= 1
    assert (images[0] != images[2]).any()


@each_family
def test_saved_and_loaded_again_it_makes_the_same_images(load, family, tmp_path):
    generator = load(family)
    source = Path(generator.config.model)
    pipeline = DiffusionPipeline.from_pretrained(source, use_safetensors=True)
    pipeline.save_pretrained(tmp_path, safe_serialization=True)
    if family == "tiny_dit":  # diffusers reads its labels but does not write them
        shutil.copy(source / "model_index.json", tmp_path)
    again = load_generator(settings_of(family, tmp_path), device="cpu")
    noise = noise_of(generator, rows=2)
    first, second = (
        g.decode(g.sample(noise, g.encode(["dog", "crane"]))) for g in (generator, again)
    )
    assert torch.equal(first, second)


@each_family
def test_a_spherical_series_has_the_same_ends_and_another_middle(load, family):
    generator = load(family)
    embeddings = generator.encode(["dog", "crane"])
    straight = mix(embeddings, (0, 1), MIXTURE)
    round_ = mix(embeddings, (0, 1), MIXTURE, "spherical")
    assert torch.equal(straight.tokens[[0, 3]], round_.tokens[[0, 3]])
    latents = [generator.sample(noise_of(generator, rows=4), path) for path in (straight, round_)]
    torch.testing.assert_close(latents[0][[0, 3]], latents[1][[0, 3]], atol=1e-4, rtol=1e-4)
    assert (latents[0][1] - latents[1][1]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["tiny_sd", "tiny_sdxl"])
def test_several_templates_give_the_mean_of_their_embeddings(load, family):
    templates = ("a photo of a {class}", "a picture of a {class}")
    several = load(family, prompt=templates).encode(["dog", "crane"])
    single = [load(family, prompt=template).encode(["dog", "crane"]) for template in templates]
    torch.testing.assert_close(several.tokens, (single[0].tokens + single[1].tokens) / 2)
    assert (single[0].tokens - single[1].tokens).abs().max() > 0.01
    if family == "tiny_sdxl":
        torch.testing.assert_close(several.pooled, (single[0].pooled + single[1].pooled) / 2)


@pytest.mark.parametrize("family", ["tiny_sd", "tiny_sdxl"])
def test_padded_names_end_at_one_token(load, family):
    generator = load(family, pad_names=True)
    tokenizer = generator.denoiser.pipeline.tokenizer
    texts = ["a photo of a dog , ,", "a photo of a great white shark"]
    ends = [tokenizer(text).input_ids.index(tokenizer.eos_token_id) for text in texts]
    assert ends[0] == ends[1]
    padded = generator.encode(["dog", "great_white_shark"])
    as_written = load(family).encode(["dog , ,", "great_white_shark"])
    assert torch.equal(padded.tokens, as_written.tokens)
    assert not torch.equal(padded.tokens[0], load(family).encode(["dog"]).tokens[0])


@pytest.mark.parametrize("family", ["tiny_sd", "tiny_sdxl"])
def test_a_prompt_that_is_too_long_is_refused_by_name(load, family):
    name = "great_white_shark_" * 8
    message = r"generator\.prompt = 'a photo of a great white shark .*: has \d+ tokens, .* reads 16"
    with pytest.raises(InputError, match=message):
        load(family).encode(["dog", name.strip("_")])


def test_both_tokenizers_of_sdxl_must_hold_the_prompt(load, monkeypatch):
    generator = load("tiny_sdxl")
    monkeypatch.setattr(generator.denoiser.pipeline.tokenizer_2, "model_max_length", 6)
    with pytest.raises(InputError, match=r"'a photo of a dog': has 7 tokens, the model reads 6"):
        generator.encode(["dog"])


def test_sdxl_is_told_the_pooled_mixture(load):
    generator = load("tiny_sdxl")
    embeddings = generator.encode(["dog", "crane"])
    assert embeddings.pooled is not None
    assert embeddings.pooled.shape == (2, 16)
    series = mix(embeddings, (0, 1), MIXTURE)
    expected = 0.25 * embeddings.pooled[0] + 0.75 * embeddings.pooled[1]
    torch.testing.assert_close(series.pooled[1], expected)
    stuck = Conditioning(series.tokens, embeddings.pooled[[1, 1, 1, 1]])
    noise = noise_of(generator, rows=4)
    mixed, unmixed = generator.sample(noise, series), generator.sample(noise, stuck)
    torch.testing.assert_close(mixed[0], unmixed[0], atol=1e-5, rtol=1e-5)
    assert (mixed[1:] - unmixed[1:]).abs().amax(dim=(1, 2, 3)).min() > 1e-3


def test_sdxl_zeroes_the_unconditional_row_where_the_model_says_so(load, tiny_sdxl, tmp_path):
    zeroed = load("tiny_sdxl").denoiser.unconditional
    assert zeroed.tokens.abs().max() == 0
    assert zeroed.pooled.abs().max() == 0
    pipeline = DiffusionPipeline.from_pretrained(tiny_sdxl, use_safetensors=True)
    pipeline.register_to_config(force_zeros_for_empty_prompt=False)
    pipeline.save_pretrained(tmp_path)
    generator = load_generator(settings_of("tiny_sdxl", tmp_path), device="cpu")
    empty = generator.denoiser.unconditional
    assert empty.pooled.abs().max() > 0
    noise = noise_of(generator)
    latents = generator.sample(noise, generator.encode(["dog"]))
    expected = reference(generator, ["dog"], noise, "latent")
    torch.testing.assert_close(latents, expected, atol=1e-3, rtol=1e-4)


@each_family
def test_bfloat16_stays_close_to_float32(load, family):
    exact, half = load(family), load(family, dtype="bfloat16")
    noise = noise_of(exact, rows=2)
    images = [g.decode(g.sample(noise, g.encode(["dog", "crane"]))) for g in (exact, half)]
    assert next(half.denoiser.network.parameters()).dtype == torch.bfloat16
    assert half.sample(noise, half.encode(["dog", "crane"])).dtype == torch.float32
    # 8 bits of mantissa over a few steps of untrained networks.
    assert (images[0].float() - images[1].float()).abs().mean() < 4
    assert not torch.equal(images[0], images[1])


def test_float16_on_a_cpu_is_refused(tiny_sd):
    with pytest.raises(InputError, match=r"generator\.dtype = float16: needs a GPU"):
        load_generator(settings_of("tiny_sd", tiny_sd, dtype="float16"), device="cpu")


@each_family
def test_gradients_of_the_noise_pass_the_prediction(load, family):
    generator = load(family)
    noise = noise_of(generator).clone().requires_grad_()
    output = generator.predict(noise, torch.tensor(500), generator.encode(["dog"]), 2.0)
    output.square().sum().backward()
    assert noise.grad.abs().max() > 0
    assert all(not p.requires_grad for p in generator.denoiser.network.parameters())


LABELS = {0: "tench, Tinca tinca", 1: "crane", 2: "great white shark", 3: "crane", 4: "Eskimo dog"}


def test_one_label_alone_is_its_embedding_and_a_mixture_the_mixed_embeddings():
    embedding = LabelEmbedding(5, 8, 0.1).eval()
    layer = WeightedLabels(embedding.embedding_table)
    alone = embedding(torch.tensor([3, 5]))
    torch.testing.assert_close(layer(torch.eye(6)[[3, 5]]), alone, rtol=0, atol=0)
    mixed = layer(torch.tensor([[0.0, 0, 0, 0.25, 0, 0.75]]))
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
    names = {"my cat": "Dog", "x": "900"}
    generator = load_generator(settings_of("tiny_dit", tiny_dit, names=names), device="cpu")
    tokens = generator.encode(["Dog", "900", "great_white_shark"]).tokens
    assert tokens.shape == (3, 1001)
    assert tokens.argmax(dim=1).tolist() == [0, 900, 2]
    assert tokens.sum(dim=1).tolist() == [1, 1, 1]
    assert generator.denoiser.unconditional.tokens.argmax(dim=1).tolist() == [1000]


def test_a_dit_without_names_of_its_labels_takes_their_numbers(tiny_dit, tmp_path):
    pipeline = DiTPipeline.from_pretrained(tiny_dit, use_safetensors=True)
    pipeline.save_pretrained(tmp_path)  # writes no labels
    config = settings_of("tiny_dit", tmp_path, names={"cat": "281"})
    generator = load_generator(config, device="cpu")
    assert generator.encode(["281"]).tokens.argmax(dim=1).tolist() == [281]
    with pytest.raises(InputError, match="'dog': is no label of the model"):
        generator.encode(["dog"])


def test_the_network_still_takes_plain_labels_for_what_they_are(load, tiny_dit):
    """Against the transformer as diffusers loads it, every block and the output layer."""
    plain = DiTPipeline.from_pretrained(tiny_dit, use_safetensors=True).transformer.eval()
    generator = load("tiny_dit")
    latents, timestep = torch.randn(2, 4, 8, 8, generator=torch.manual_seed(0)), torch.tensor(300)
    with torch.no_grad():
        expected = plain(latents, timestep.expand(2), class_labels=torch.tensor([1, 1000])).sample
        condition = generator.encode(["crane"])
        rows = torch.cat([condition.tokens, generator.denoiser.unconditional.tokens])
        actual = generator.denoiser(latents, timestep, type(condition)(rows))
    assert expected.shape == (2, 8, 8, 8)
    torch.testing.assert_close(actual, expected[:, :4])
