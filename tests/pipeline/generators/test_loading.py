"""What is added to a model: LoRA weights, a fine-tuned U-Net, a tiny decoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderTiny,
    DiffusionPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from peft import LoraConfig as PeftConfig
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.noise import initial_noise

WEIGHTS = "pytorch_lora_weights.safetensors"
RANK, ALPHA = 2, 6


def settings_of(model: Path, *overrides: str, **changes: Any) -> GeneratorConfig:
    values = {"model": str(model), "steps": 2, "guidance_scale": 2.0} | changes
    return load_settings(GeneratorConfig, values, overrides)


def latents_of(config: GeneratorConfig) -> Tensor:
    generator = load_generator(config, device="cpu")
    noise = initial_noise([0, 1], generator.latent_shape)
    return generator.sample(noise, generator.encode(["dog", "crane"]))


def with_lora(model: Path, *loras: dict[str, Any], **changes: Any) -> Tensor:
    return latents_of(settings_of(model, lora=loras, **changes))


def make_lora(model: Path, folder: Path, *, seed: int = 0) -> Path:
    """Random low-rank weights of the attention of U-Net and text encoder, as peft makes them."""
    pipeline = DiffusionPipeline.from_pretrained(model, use_safetensors=True)
    torch.manual_seed(seed)
    settings = PeftConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["to_q", "to_k", "to_out.0", "q_proj", "out_proj"],
        init_lora_weights=False,
    )
    pipeline.unet.add_adapter(settings)
    pipeline.text_encoder.add_adapter(settings)
    type(pipeline).save_lora_weights(
        folder,
        unet_lora_layers=get_peft_model_state_dict(pipeline.unet),
        text_encoder_lora_layers=get_peft_model_state_dict(pipeline.text_encoder),
        unet_lora_adapter_metadata=settings.to_dict(),
        text_encoder_lora_adapter_metadata=settings.to_dict(),
    )
    return folder


@pytest.fixture(scope="module")
def lora(tiny_sd, tmp_path_factory) -> Path:
    return make_lora(tiny_sd, tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def plain(tiny_sd) -> Tensor:
    return latents_of(settings_of(tiny_sd))


def test_lora_weights_are_added_in_full_or_by_their_scale(tiny_sd, lora, plain, tmp_path):
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_sd, use_safetensors=True)
    tensors = load_file(lora / WEIGHTS)
    downs = [key for key in tensors if key.endswith("lora_A.weight")]
    assert len(downs) > 10
    for key in downs:
        component, _, layer = key.removesuffix(".lora_A.weight").partition(".")
        network = {"unet": pipeline.unet, "text_encoder": pipeline.text_encoder}[component]
        up = tensors[key.replace("lora_A", "lora_B")]
        weight = network.get_submodule(layer).weight
        weight.data += 0.5 * ALPHA / RANK * up @ tensors[key]
    pipeline.save_pretrained(tmp_path)
    by_hand = latents_of(settings_of(tmp_path))
    actual = with_lora(tiny_sd, {"path": str(lora), "scale": 0.5})
    torch.testing.assert_close(actual, by_hand, atol=1e-3, rtol=1e-3)
    assert (actual - plain).abs().max() > 0.1


def test_weights_named_as_kohya_ss_names_them_are_the_same(tiny_sd, lora, tmp_path):
    tensors = {}
    for key, tensor in load_file(lora / WEIGHTS).items():
        network, _, path = key.partition(".")
        layer, _, end = path.rpartition(".lora_")
        name = f"lora_{'te' if network == 'text_encoder' else network}_{layer.replace('.', '_')}"
        # This format knows the text encoder by the names of earlier releases.
        name = name.replace("lora_te_encoder", "lora_te_text_model_encoder")
        tensors[f"{name}.lora_{'down' if end[0] == 'A' else 'up'}.weight"] = tensor
        tensors[f"{name}.alpha"] = torch.tensor(float(ALPHA))
    save_file(tensors, tmp_path / "kohya.safetensors")
    kohya = with_lora(tiny_sd, {"path": str(tmp_path / "kohya.safetensors")})
    expected = with_lora(tiny_sd, {"path": str(lora)})
    torch.testing.assert_close(kohya, expected, atol=1e-3, rtol=1e-3)


def test_a_scale_of_nothing_changes_nothing(tiny_sd, lora, plain):
    assert torch.equal(with_lora(tiny_sd, {"path": str(lora), "scale": 0.0}), plain)


def test_several_are_all_added(tiny_sd, lora, tmp_path):
    other = make_lora(tiny_sd, tmp_path, seed=1)
    both = with_lora(tiny_sd, {"path": str(lora)}, {"path": str(other / WEIGHTS)})
    swapped = with_lora(tiny_sd, {"path": str(other)}, {"path": str(lora)})
    torch.testing.assert_close(both, swapped, atol=1e-2, rtol=1e-3)
    for single in (lora, other):
        assert (both - with_lora(tiny_sd, {"path": str(single)})).abs().max() > 0.1


def test_sdxl_takes_lora_weights_too(tiny_sdxl, tmp_path):
    pipeline = DiffusionPipeline.from_pretrained(tiny_sdxl, use_safetensors=True)
    torch.manual_seed(0)
    pipeline.unet.add_adapter(PeftConfig(r=RANK, target_modules=["to_k"], init_lora_weights=False))
    layers = get_peft_model_state_dict(pipeline.unet)
    type(pipeline).save_lora_weights(tmp_path, unet_lora_layers=layers)
    changed = with_lora(tiny_sdxl, {"path": str(tmp_path)}, family="sdxl")
    assert (changed - latents_of(settings_of(tiny_sdxl, family="sdxl"))).abs().max() > 0.01


def test_lora_weights_of_another_model_are_refused(tiny_sd, tiny_sdxl, lora, tmp_path):
    with pytest.raises(InputError, match=r"generator\.lora = .*: cannot be added: .*size mismatch"):
        with_lora(tiny_sdxl, {"path": str(lora)}, family="sdxl")
    tensors = load_file(lora / WEIGHTS)
    fitting = len([key for key in tensors if key.endswith("lora_A.weight")])
    for end, shape in (("A", (RANK, 16)), ("B", (16, RANK))):
        tensors[f"unet.nowhere.to_q.lora_{end}.weight"] = torch.zeros(shape)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(InputError, match=f"{fitting} of its {fitting + 1} layers fit this model"):
        with_lora(tiny_sd, {"path": str(tmp_path)})


def test_files_that_hold_no_lora_weights_are_refused(tiny_sd, tmp_path):
    save_file({"unet.weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"generator\.lora = .*a\.safetensors: cannot be added"):
        with_lora(tiny_sd, {"path": str(tmp_path / "a.safetensors")})
    (tmp_path / "a.safetensors").write_bytes(b"no safetensors at all")
    with pytest.raises(InputError, match=r"generator\.lora = .*a\.safetensors: cannot be added"):
        with_lora(tiny_sd, {"path": str(tmp_path / "a.safetensors")})


def test_a_fine_tuned_unet_takes_the_place_of_the_models_own(tiny_sd, plain, tmp_path):
    unet = UNet2DConditionModel.from_pretrained(tiny_sd / "unet")
    for weight in unet.parameters():
        weight.data *= 1.1
    unet.save_pretrained(tmp_path / "tuned")
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_sd, unet=unet)
    pipeline.save_pretrained(tmp_path / "whole")
    tuned = latents_of(settings_of(tiny_sd, unet=str(tmp_path / "tuned")))
    assert torch.equal(tuned, latents_of(settings_of(tmp_path / "whole")))
    assert (tuned - plain).abs().max() > 0.1


def test_a_unet_that_is_none_is_refused(tiny_sd, tmp_path):
    with pytest.raises(InputError, match=r"generator\.unet = .*: is not a U-Net directory"):
        load_generator(settings_of(tiny_sd, unet=str(tmp_path)), device="cpu")


def test_a_unet_of_another_model_is_refused(tiny_sd, tiny_sdxl):
    message = r"generator\.unet = .*: its cross_attention_dim is 32, that of the model's own 16"
    with pytest.raises(InputError, match=message):
        load_generator(settings_of(tiny_sd, unet=str(tiny_sdxl / "unet")), device="cpu")


@pytest.mark.parametrize("change", ["unet=/somewhere", "lora=[{path: /somewhere}]"])
def test_a_family_without_a_unet_refuses_both(tiny_dit, change):
    field = change.split("=")[0]
    with pytest.raises(InputError, match=rf"{field} = .*: family dit has no U-Net to change"):
        settings_of(tiny_dit, change, family="dit")


def save_decoder(folder: Path, *, levels: int) -> Path:
    torch.manual_seed(0)
    settings = {f"{part}_block_out_channels": (8,) * levels for part in ("encoder", "decoder")} | {
        f"num_{part}_blocks": (1,) * levels for part in ("encoder", "decoder")
    }
    AutoencoderTiny(**settings, scaling_factor=0.5).save_pretrained(folder)
    return folder


@torch.inference_mode()
def test_the_tiny_decoder_scales_latents_by_its_own_config(tiny_sd, tmp_path):
    folder = save_decoder(tmp_path, levels=2)
    generator = load_generator(settings_of(tiny_sd, tiny_decoder=str(folder)), device="cpu")
    latents = initial_noise([0, 1, 2], generator.latent_shape)
    pixels = AutoencoderTiny.from_pretrained(folder).decode(latents / 0.5).sample
    expected = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1)
    assert torch.equal(generator.decode(latents), expected)
    exact = load_generator(settings_of(tiny_sd), device="cpu").decode(latents)
    assert exact.shape == expected.shape
    assert not torch.equal(exact, expected)


def test_a_decoder_of_another_size_is_refused(tiny_sd, tmp_path):
    folder = save_decoder(tmp_path, levels=3)
    message = "decodes 4 channels to images 4 times as wide; the model has 4 channels .* 2 times"
    with pytest.raises(InputError, match=rf"generator\.tiny_decoder = .*{message}"):
        load_generator(settings_of(tiny_sd, tiny_decoder=str(folder)), device="cpu")


def test_the_networks_without_weights_are_those_that_are_loaded(tiny_sdxl, tmp_path):
    """Also of the fine-tuned U-Net and the tiny decoder; none of their weights is read."""
    unet = UNet2DConditionModel.from_pretrained(tiny_sdxl / "unet")
    unet.save_pretrained(tmp_path / "unet")
    more = {"unet": str(tmp_path / "unet"), "tiny_decoder": str(save_decoder(tmp_path, levels=2))}
    config = settings_of(tiny_sdxl, family="sdxl", **more)
    loaded = load_generator(config, device="cpu")
    for weights in (tmp_path / "unet").glob("*.safetensors"):
        weights.unlink()
    empty = load_generator(config, device="meta")
    for meta, real in (
        (empty.denoiser.network, loaded.denoiser.network),
        (empty.vae, loaded.vae),
    ):
        shapes = {name: weight.shape for name, weight in meta.named_parameters()}
        assert shapes == {name: weight.shape for name, weight in real.named_parameters()}
        assert all(weight.is_meta for weight in meta.parameters())
    assert empty.denoiser.unconditional.tokens.shape == loaded.denoiser.unconditional.tokens.shape
    assert type(empty.scheduler) is type(loaded.scheduler)
