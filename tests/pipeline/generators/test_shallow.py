"""The shallow part of a U-Net against the whole of it."""

import pytest
import torch
from diffusers import UNet2DConditionModel

from data.errors import InputError
from pipeline.generators.approximate.shallow import captured, check_unet, shallow_pass

SIZE, WIDTH = 8, 8


def unet(last: str = "UpBlock2D", **settings) -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=SIZE,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", last),
        block_out_channels=(WIDTH, 2 * WIDTH),
        layers_per_block=2,
        norm_num_groups=4,
        cross_attention_dim=WIDTH,
        attention_head_dim=2,
        **settings,
    ).eval()


def sdxl_settings() -> dict:
    return {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 6 * 4 + WIDTH,
        "use_linear_projection": True,
    }


def inputs(rows: int = 3, *, pooled: bool = False) -> tuple[torch.Tensor, torch.Tensor, dict]:
    torch.manual_seed(1)
    given = {"encoder_hidden_states": torch.randn(rows, 5, WIDTH)}
    if pooled:
        extra = {"text_embeds": torch.randn(rows, WIDTH), "time_ids": torch.ones(rows, 6)}
        given["added_cond_kwargs"] = extra
    return torch.randn(rows, 4, SIZE, SIZE), torch.tensor(321), given


@pytest.mark.parametrize(
    ("last", "settings"),
    [("UpBlock2D", {}), ("CrossAttnUpBlock2D", {}), ("UpBlock2D", sdxl_settings())],
)
@torch.inference_mode()
def test_features_of_the_same_input_give_the_full_prediction_exactly(last, settings):
    network = unet(last, **settings)
    check_unet(network, "field")
    latents, timestep, given = inputs(pooled=bool(settings))
    with captured(network) as found:
        full = network(latents, timestep, **given, return_dict=False)[0]
    (deep,) = found
    shallow = shallow_pass(network, deep, latents, timestep, **given)[0]
    assert torch.equal(shallow, full)
    # It reads its own latents, and the features.
    other = shallow_pass(network, deep, latents + 0.1, timestep, **given)[0]
    assert not torch.equal(other, full)
    assert not torch.equal(shallow_pass(network, deep + 0.1, latents, timestep, **given)[0], full)


@torch.inference_mode()
def test_only_the_outermost_layer_runs():
    network, ran = unet("CrossAttnUpBlock2D"), []
    for name, module in network.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    latents, timestep, given = inputs()
    deep = torch.randn(3, network.up_blocks[-1].resnets[-1].in_channels - WIDTH, SIZE, SIZE)
    shallow_pass(network, deep, latents, timestep, **given)
    parts = ("conv_in", "time_", "up_blocks.1.resnets.2", "up_blocks.1.attentions.2", "conv_")
    assert ran
    assert [name for name in ran if not name.startswith(parts)] == []


@torch.inference_mode()
def test_nothing_stays_hooked():
    network = unet()
    latents, timestep, given = inputs()
    with pytest.raises(RuntimeError), captured(network):
        network(latents[:, :1], timestep, **given)
    assert not network.up_blocks[-1].resnets[-1]._forward_pre_hooks


def test_other_networks_are_refused_by_name():
    with pytest.raises(InputError, match=r"f = Linear: is no U-Net whose features could be cached"):
        check_unet(torch.nn.Linear(1, 1), "f")
    with pytest.raises(InputError, match=r"f = generator\.model: has a U-Net of another build"):
        check_unet(unet(num_class_embeds=3), "f")
