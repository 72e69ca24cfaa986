"""Flow transformers: packing, sampling and inversion, and errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, ZImagePipeline

from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.checks import check_generator, check_prompts
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import BuildConfig, GeneratorConfig
from semix.pipeline.generators import flow_models, load_generator, prompt_encoder
from semix.pipeline.generators.flow_models import packed, unpacked
from semix.pipeline.generators.loading import load_pipeline
from semix.pipeline.generators.schedulers import inversion_pair, network_rows
from semix.pipeline.noise import initial_noise, inversion_stability
from semix.pipeline.noise.source import noise_source
from semix.pipeline.plan import BuildPlan
from tests.pipeline.roots import made, samples, tars

SD3 = {"family": "sd3", "prompt_length": 12, "steps": 4, "guidance_scale": 3.0}
FLUX = {"family": "flux", "prompt_length": 12, "steps": 4, "image_size": 16}
FLUX2 = {"family": "flux2", "prompt_length": 20, "steps": 4, "image_size": 16}
Z_IMAGE = {"family": "z_image", "steps": 4, "image_size": 16, "pad_names": True}
EACH = [("tiny_sd3", SD3), ("tiny_flux", FLUX), ("tiny_flux2", FLUX2), ("tiny_z_image", Z_IMAGE)]
each_model = pytest.mark.parametrize(("model", "values"), EACH)


def settings(model: Path, values: dict[str, Any], **changes: Any) -> GeneratorConfig:
    return load_settings(GeneratorConfig, {"model": str(model)} | values | changes)


@pytest.fixture
def copy_model(tmp_path):
    """copy_model(model, part, **values): a copy of a model, one of whose configs is changed."""

    def copy(model: Path, part: str, **values: Any) -> Path:
        folder = Path(shutil.copytree(model, tmp_path / "model"))
        (file,) = (folder / part).glob("*config.json" if part else "model_index.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
        return folder

    return copy


def test_tokens_are_packed_as_flux_packs_them():
    latents = torch.arange(2 * 4 * 6 * 8.0).view(2, 4, 6, 8)
    assert torch.equal(packed(latents), FluxPipeline._pack_latents(latents, 2, 4, 6, 8))
    assert torch.equal(unpacked(packed(latents), 6, 8), latents)


@pytest.mark.parametrize("steps", [3, 5])
@each_model
def test_a_constant_velocity_leads_back_to_the_noise(request, model, values, steps):
    generator = load_generator(settings(request.getfixturevalue(model), values), device="cpu")
    noise = initial_noise([0, 1], generator.latent_shape)
    calls = []

    def predict(latents, timestep, condition, guidance_scale):
        calls.append(float(timestep))
        return torch.ones_like(latents)

    condition = Conditioning(torch.zeros(2, 1))
    pair = inversion_pair(generator.denoiser.scheduler)
    scores = inversion_stability(noise, condition, predict=predict, schedulers=pair, steps=steps)
    torch.testing.assert_close(scores, torch.ones(2))
    assert calls == [*calls[:steps], *reversed(calls[:steps])] and calls[0] == 1000


@each_model
def test_stability_tells_the_noises_of_a_flow_model_apart(request, model, values):
    values = values | {"model": str(request.getfixturevalue(model))}
    generator = load_generator(load_settings(GeneratorConfig, values), device="cpu")
    embeddings = generator.encode(["dog", "crane"])
    noise = initial_noise(range(6), generator.latent_shape)
    pair = inversion_pair(generator.denoiser.scheduler)
    scores = inversion_stability(
        noise,
        embeddings[[0] * 6],
        predict=generator.predict,
        schedulers=pair,
        steps=4,
    )
    assert scores.std() > 1e-4 and (scores < 1).all()


def test_a_flow_model_whose_stability_says_nothing_is_refused(
    tiny_sd3, make_config, hasty_standins, monkeypatch
):
    base = make_config(hasty_standins, "noise.strategy=select", "noise.candidates=2")
    config = load_settings(
        BuildConfig, base.model_dump() | {"generator": {"model": str(tiny_sd3)} | SD3}
    )
    generator = load_generator(config.generator, device="cpu")
    embeddings = generator.encode(["dog", "crane"])
    monkeypatch.setattr(generator, "predict", lambda latents, *_: torch.zeros_like(latents))
    with pytest.raises(InputError, match=r"^noise\.strategy = select: the stability of this model"):
        noise_source(BuildPlan(config), generator=generator, embeddings=embeddings)


@each_model
def test_a_shard_is_made_again_byte_for_byte(
    request, model, values, make_config, hasty_standins, tmp_path
):
    base = make_config(
        hasty_standins,
        "mixing.pairs.kind=sampled",
        "mixing.pairs.count=8",
        "noise.strategy=select",
        "noise.candidates=2",
        "noise.steps=2",
        "noise.max_cost=1000",
    )
    generator = {"model": str(request.getfixturevalue(model))} | values
    config = load_settings(BuildConfig, base.model_dump() | {"generator": generator})
    root, again = (made(config, tmp_path / name) for name in ("first", "again"))
    assert len(tars(root)) == 2 and tars(root) == tars(again)
    series = next(iter(samples(root).values()))
    assert series.record.alphas[0] == 0 and series.record.alphas[-1] == 1
    assert len(set(series.record.noise["scores"])) == 2


@pytest.mark.parametrize(
    ("model", "values", "part", "changed", "message"),
    [
        (
            "tiny_sd3",
            SD3,
            "scheduler",
            {"stochastic_sampling": True},
            r"generator\.scheduler = nothing: .* draws noise at each step; set stochastic_sampling",
        ),
        (
            "tiny_sd3",
            SD3,
            "scheduler",
            {"_class_name": "FlowMatchHeunDiscreteScheduler"},
            r"FlowMatchHeunDiscreteScheduler is no sampler of flow models here; let its config",
        ),
        (
            "tiny_flux",
            FLUX,
            "transformer",
            {"guidance_embeds": False},
            r"generator\.guidance_scale = 7\.5: this FLUX \(schnell\) takes no guidance; set it to",
        ),
        (
            "tiny_flux2",
            FLUX2,
            "",
            {"is_distilled": True},
            r"guidance_scale = 7\.5: this FLUX\.2 klein \(distilled\) takes no guidance; set it",
        ),
    ],
)
def test_a_model_that_will_not_do_is_refused(
    request, copy_model, model, values, part, changed, message
):
    folder = copy_model(request.getfixturevalue(model), part, **changed)
    with pytest.raises(InputError, match=message):
        check_generator(settings(folder, values))


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (SD3, {"scheduler": "ddim"}, r"scheduler = ddim: a flow model keeps its own sampler"),
        (SD3, {"timestep_spacing": "trailing"}, r"timestep_spacing = trailing: a flow model's"),
        (SD3, {"family": "sdxl"}, r"`prompt_length` is of families sd3, flux"),
        (SD3, {"lora": [{"path": "x"}]}, r"family sd3 has no U-Net to change"),
    ],
)
def test_settings_that_a_flow_model_does_not_have_are_refused(tiny_sd3, values, changes, message):
    with pytest.raises(InputError, match=message):
        check_generator(settings(tiny_sd3, values, **changes))


def test_an_image_size_that_cannot_be_made_is_refused(tiny_flux):
    with pytest.raises(InputError, match=r"image_size = 18: this model makes images of multiples"):
        load_generator(settings(tiny_flux, FLUX, image_size=18), device="cpu")


@each_model
def test_a_prompt_longer_than_the_encoder_is_told_to_read_is_refused(request, model, values):
    config = settings(request.getfixturevalue(model), values, prompt_length=5)
    message = r"generator\.prompt = 'a photo of a dog': has \d+ tokens, the model reads 5"
    with pytest.raises(InputError, match=message):
        check_prompts(config, ["dog"])
    with pytest.raises(InputError, match=message):
        load_generator(config, device="cpu").encode(["dog"])


def test_z_image_mixes_prompts_of_one_length_alone(tiny_z_image):
    config = settings(tiny_z_image, Z_IMAGE, pad_names=False)
    message = r"'a photo of a great white shark': has \d+ tokens and 'a photo of a dog' \d+, and"
    with pytest.raises(
        InputError, match=message + r" Z-Image .*; set generator\.pad_names to true"
    ):
        check_prompts(config, ["dog", "great_white_shark"])
    check_prompts(config, ["dog"])
    padded = settings(tiny_z_image, Z_IMAGE)
    check_prompts(padded, ["dog", "great_white_shark"])


def test_prompts_are_encoded_as_z_images_own_pipeline_does(tiny_z_image):
    denoiser = load_generator(settings(tiny_z_image, Z_IMAGE), device="cpu").denoiser
    pipeline = ZImagePipeline.from_pretrained(tiny_z_image, use_safetensors=True)
    (expected,), (empty,) = pipeline.encode_prompt("a photo of a dog")
    torch.testing.assert_close(
        denoiser.prompt_encoder.rows(["a photo of a dog"]).tokens[0], expected
    )
    torch.testing.assert_close(denoiser.unconditional.tokens[0], empty)
    assert len(empty) < len(expected)


def test_a_model_saved_without_t5_is_told_zeros(tiny_sd3, tmp_path):
    from diffusers import StableDiffusion3Pipeline

    without_t5 = {"text_encoder_3": None, "tokenizer_3": None}
    StableDiffusion3Pipeline.from_pretrained(tiny_sd3, **without_t5).save_pretrained(tmp_path)
    config = settings(tmp_path, SD3)
    check_prompts(config, ["dog"])
    tokens = load_generator(config, device="cpu").encode(["dog"]).tokens
    assert tokens[:, -12:].abs().max() == 0 < tokens.abs().max()


@each_model
def test_prompts_are_encoded_once_on_a_machine_and_before_the_transformer_comes(
    request, model, values, tmp_path, monkeypatch
):
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "cache"))
    loaded = []

    def watch(config, *, device, **parts):
        loaded.append({*prompt_encoder.ENCODERS, *prompt_encoder.IMAGES} - set(parts))
        return load_pipeline(config, device=device, **parts)

    for module in (prompt_encoder, flow_models):
        monkeypatch.setattr(module, "load_pipeline", watch)
    config, names = settings(request.getfixturevalue(model), values), ["dog", "crane"]
    first = load_generator(config, device="cpu", names=names).encode(names)
    encoders, image = loaded[1], loaded[2]
    assert "text_encoder" in encoders and "transformer" not in encoders
    assert "transformer" in image and "text_encoder" not in image
    again = load_generator(config, device="cpu", names=names)
    assert torch.equal(again.encode(names).tokens, first.tokens)
    if first.pooled is not None:
        assert torch.equal(again.encode(names).pooled, first.pooled)
    assert len(loaded) == 5 and not any("text_encoder" in parts for parts in loaded[3:])
    (cached, *_) = (tmp_path / "cache").iterdir()
    cached.write_bytes(b"nothing")
    assert torch.equal(load_generator(config, device="cpu").encode(names).tokens, first.tokens)


@each_model
def test_guidance_costs_a_second_row_but_flux_1_none(request, model, values):
    rows = network_rows(settings(request.getfixturevalue(model), values), 2)
    assert rows == 2 * 4 * (1 if model == "tiny_flux" else 2)


def test_a_tiny_decoder_is_refused_of_flux_2(tiny_flux2):
    with pytest.raises(InputError, match=r"`tiny_decoder` does not know the batch norm of FLUX\.2"):
        settings(tiny_flux2, FLUX2, tiny_decoder="x")
