"""Model folders as they are published: variants, shards, earlier names, missing weights."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, TorchAoConfig, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import (
    BitsAndBytesConfig,
    CLIPTextModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5EncoderModel,
)

from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.checks import check_generator
from semix.pipeline.config import BuildConfig, GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.loading import check_networks, load_pipeline
from semix.pipeline.memory import memory_needed
from semix.pipeline.noise import initial_noise
from tests.pipeline.test_memory import FAMILIES

each_family = pytest.mark.parametrize("model", FAMILIES)


@pytest.fixture
def copy_model(request, tmp_path) -> Callable[..., GeneratorConfig]:
    """copy_model(model, **settings): a config of a copy of the model, which a test may spoil."""

    def copy(model: str, **settings: Any) -> GeneratorConfig:
        folder = tmp_path / "model"
        if not folder.exists():
            shutil.copytree(request.getfixturevalue(model), folder)
        return load_settings(GeneratorConfig, {"model": str(folder), **FAMILIES[model], **settings})

    return copy


def networks(config: GeneratorConfig) -> list[Path]:
    return sorted(file.parent for file in Path(config.model).glob("*/*.safetensors"))


def weights_of(network: Path) -> Path:
    (file,) = network.glob("*.safetensors")
    return file


def assert_refused(config: GeneratorConfig, match: str, *, check: Any = check_networks) -> None:
    """Both the early check and the loader refuse the config."""
    for call in (check, lambda config: load_pipeline(config, device="cpu")):
        with pytest.raises(InputError, match=match):
            call(config)


@each_family
def test_a_network_that_lacks_a_weight_is_refused_by_its_name(copy_model, model):
    config = copy_model(model)
    check_networks(config)
    for network in networks(config):
        file = weights_of(network)
        tensors = load_file(file)
        missing = sorted(tensors)[len(tensors) // 2]
        remaining = {name: tensor for name, tensor in tensors.items() if name != missing}
        save_file(remaining, file, {"format": "pt"})
        assert_refused(
            config,
            rf"^generator\.model = .*/{network.name}: lacks 1 of the weights of a \w+ "
            rf"\({missing}\); fetch or convert it again$",
        )
        save_file(tensors, file, {"format": "pt"})
    load_pipeline(config, device="cpu")


def test_weights_that_lack_are_listed_up_to_three(copy_model):
    config = copy_model("tiny_sd")
    save_file({}, weights_of(Path(config.model) / "vae"), {"format": "pt"})
    assert_refused(
        config, r"vae: lacks \d\d+ of the weights of a AutoencoderKL \(\S+, \S+, \S+, \.\.\.\)"
    )


def test_a_fine_tuned_unet_that_lacks_a_weight_is_refused(copy_model, tiny_sd, tmp_path):
    shutil.copytree(tiny_sd / "unet", tmp_path / "tuned")
    file = weights_of(tmp_path / "tuned")
    tensors = load_file(file)
    del tensors["conv_in.bias"]
    save_file(tensors, file, {"format": "pt"})
    config = copy_model("tiny_sd", unet=str(tmp_path / "tuned"))
    assert_refused(config, r"^generator\.unet = .*tuned: lacks 1 of .* \(conv_in\.bias\)")


def test_weights_that_a_network_has_twice_need_not_be_there_twice(copy_model, tiny_flux2):
    tied = Qwen3Config.from_pretrained(tiny_flux2 / "text_encoder", tie_word_embeddings=True)
    config = copy_model("tiny_flux2")
    folder = Path(config.model) / "text_encoder"
    Qwen3ForCausalLM(tied).save_pretrained(folder)
    assert "lm_head.weight" not in load_file(weights_of(folder))
    check_networks(config)
    load_pipeline(config, device="cpu")


@pytest.mark.parametrize("name", ["shared.weight", "encoder.embed_tokens.weight"])
def test_t5_has_its_embeddings_under_either_name(copy_model, name):
    config = copy_model("tiny_sd3")
    folder = Path(config.model) / "text_encoder_3"
    expected = T5EncoderModel.from_pretrained(folder).shared.weight
    tensors = load_file(weights_of(folder))
    table = next(
        tensors.pop(n) for n in ("shared.weight", "encoder.embed_tokens.weight") if n in tensors
    )
    save_file({**tensors, name: table}, weights_of(folder), {"format": "pt"})
    check_networks(config)
    loaded = load_pipeline(config, device="cpu").text_encoder_3
    assert torch.equal(loaded.encoder.embed_tokens.weight, expected)


def test_clip_as_stable_diffusion_1_5_has_it_is_whole(copy_model):
    """With the names and the buffer of earlier releases of transformers."""
    config = copy_model("tiny_sd")
    folder = Path(config.model) / "text_encoder"
    tensors = load_file(weights_of(folder))
    early = {f"text_model.{name.removeprefix('text_model.')}": t for name, t in tensors.items()}
    early["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(early, weights_of(folder), {"format": "pt"})
    check_networks(config)
    loaded = load_pipeline(config, device="cpu").text_encoder.state_dict()
    expected = CLIPTextModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    del early["text_model.encoder.layers.1.self_attn.v_proj.weight"]
    save_file(early, weights_of(folder), {"format": "pt"})
    assert_refused(config, r"text_encoder: lacks 1 of .*self_attn\.v_proj\.weight\)")


@each_family
def test_weights_of_a_variant_alone_are_refused_until_it_is_named(copy_model, model):
    config = copy_model(model)
    for network in networks(config):
        file = weights_of(network)
        file.rename(file.with_suffix(".fp16.safetensors"))
    message = r"^generator\.variant = nothing: .* has weights of the variant fp16 alone; set it to"
    assert_refused(config, message + " fp16$", check=check_generator)
    fp16 = copy_model(model, variant="fp16")
    check_networks(fp16)
    assert len(load_pipeline(fp16, device="cpu").components) > 2


def test_a_variant_may_come_in_shards_and_of_some_networks_alone(copy_model, tiny_sd):
    config = copy_model("tiny_sd", variant="fp16")
    pipeline = DiffusionPipeline.from_pretrained(tiny_sd)
    for network in ("unet", "text_encoder"):
        folder = Path(config.model) / network
        weights_of(folder).unlink()
        getattr(pipeline, network).save_pretrained(folder, variant="fp16", max_shard_size="20KB")
        assert len(list(folder.glob("*.fp16-0000*.safetensors"))) > 1
    check_networks(config)
    loaded = load_pipeline(config, device="cpu")
    for network in ("unet", "text_encoder", "vae"):
        expected = getattr(pipeline, network).state_dict()
        actual = getattr(loaded, network).state_dict()
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_a_fine_tuned_unet_comes_in_its_variant(copy_model, tiny_sd, tmp_path):
    unet = UNet2DConditionModel.from_pretrained(tiny_sd / "unet")
    unet.save_pretrained(tmp_path / "tuned", variant="fp16")
    assert_refused(
        copy_model("tiny_sd", unet=str(tmp_path / "tuned")),
        r"^generator\.variant = nothing: .*tuned has weights of the variant fp16 alone",
        check=check_generator,
    )


def test_a_variant_that_no_network_has_is_refused(copy_model):
    message = r"^generator\.variant = ema: no weights of .*model are of this variant; leave it out$"
    assert_refused(copy_model("tiny_sdxl", variant="ema"), message, check=check_generator)


def mark_quantised(network: Path, method: str) -> None:
    """Make the config say that the weights are quantised, which they are not."""
    file = network / "config.json"
    settings = {"quantization_config": {"quant_method": method}}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("method", ["quanto", "gguf", "awq"])
@each_family
def test_a_quantised_network_of_a_method_that_does_not_load_is_refused(copy_model, model, method):
    config = copy_model(model)
    network = networks(config)[-1 if method == "awq" else 0]
    mark_quantised(network, method)
    message = rf"/{network.name}: its weights were quantised by {method}; semix takes those of "
    assert_refused(
        config, rf"^generator\.model = .*{message}bitsandbytes and torchao, or weights that"
    )


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao"])
@each_family
def test_a_quantised_network_whose_package_is_not_there_is_refused(copy_model, model, method):
    if find_spec(method):
        pytest.skip(f"{method} is there")
    config = copy_model(model)
    network = networks(config)[0]
    mark_quantised(network, method)
    assert_refused(
        config, rf"{network.name}: its weights were quantised by {method}: pip install {method}"
    )


def test_a_gguf_file_in_place_of_weights_is_refused(copy_model):
    config = copy_model("tiny_flux")
    file = weights_of(Path(config.model) / "transformer")
    file.rename(file.with_name("flux1-dev-Q4_K_S.gguf"))
    message = r"transformer: has no safetensors; convert it"
    assert_refused(config, message, check=check_generator)


def images_of(config: GeneratorConfig) -> torch.Tensor:
    generator = load_generator(config, device="cpu", names=["dog"])
    noise = initial_noise([0], generator.latent_shape)
    return generator.decode(generator.sample(noise, generator.encode(["dog"])))


FLOW = [
    model for model in FAMILIES if FAMILIES[model]["family"] in ("sd3", "flux", "flux2", "z_image")
]


@pytest.mark.parametrize("offload", ["none", "model"])
@pytest.mark.parametrize("model", FLOW)
def test_a_transformer_of_torchao_makes_images_and_is_counted_as_it_is_stored(
    copy_model, make_config, hasty_standins, model, offload
):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    config = copy_model(model, dtype="bfloat16", steps=2, guidance_scale=1.0, offload=offload)
    plain = images_of(config)
    folder = Path(config.model) / "transformer"
    kind = type(load_pipeline(config, device="meta").transformer)
    method = TorchAoConfig(Int8WeightOnlyConfig())
    network = kind.from_pretrained(folder, quantization_config=method, dtype=torch.bfloat16)
    network.save_pretrained(folder)
    check_networks(config, device="cpu")
    coarse = images_of(config)
    assert not torch.equal(coarse, plain) and (coarse.float() - plain.float()).abs().mean() < 30
    base = make_config(hasty_standins).model_dump()
    build_config = load_settings(BuildConfig, base | {"generator": config.model_dump()})
    size = weights_of(folder).stat().st_size
    assert memory_needed(build_config).network == size


@pytest.mark.parametrize("part", ["text_encoder_2", "transformer"])
def test_a_network_of_bitsandbytes_loads_where_its_library_can(copy_model, part):
    pytest.importorskip("bitsandbytes")
    config = copy_model("tiny_flux", steps=2, guidance_scale=1.0)
    if part == "transformer":  # diffusers would want a GPU to make one
        mark_quantised(Path(config.model) / part, "bitsandbytes")
        message = r"transformer: its weights were quantised by bitsandbytes, which diffusers loads"
        with pytest.raises(InputError, match=message):
            check_networks(config, device="cpu")
        return
    folder, plain = Path(config.model) / part, images_of(config)
    method = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    T5EncoderModel.from_pretrained(folder, quantization_config=method).save_pretrained(folder)
    check_networks(config, device="cpu")
    assert not torch.equal(images_of(config), plain)
