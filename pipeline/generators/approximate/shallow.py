"""The outermost part of a U-Net, and the deep features that it takes over."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
from torch import Tensor, nn

from data.errors import InputError


def check_unet(network: Any, field: str) -> None:
    """Raises InputError for a network that `shallow_pass` does not know how to cut."""
    if not isinstance(network, UNet2DConditionModel):
        name = type(network).__name__
        raise InputError(field, name, "is no U-Net whose features could be cached; leave it out")
    unet: Any = network
    settings = unet.config
    usual = (
        isinstance(unet.up_blocks[-1], UpBlock2D | CrossAttnUpBlock2D)
        and settings.addition_embed_type in (None, "text_time")
        and settings.class_embed_type is None
        and settings.num_class_embeds is None
        and settings.encoder_hid_dim is None
        and settings.time_embedding_act_fn is None
        and not settings.center_input_sample
    )
    if not usual:
        raise InputError(field, "generator.model", "has a U-Net of another build; leave it out")


@contextmanager
def captured(unet: Any) -> Iterator[list[Tensor]]:
    """Collect the deep features [B, C, h, w] of each call made meanwhile.

    They are what the last layer of the last up block reads beside the skip from `conv_in`
    (DeepCache, Ma et al. 2024, branch 0).
    """
    found: list[Tensor] = []
    skip = unet.conv_in.out_channels

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found.append(inputs[0][:, :-skip])

    handle = unet.up_blocks[-1].resnets[-1].register_forward_pre_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def shallow_pass(
    unet: Any,
    deep: Tensor,
    latents: Tensor,
    timestep: Tensor,
    *,
    encoder_hidden_states: Tensor,
    added_cond_kwargs: dict[str, Any] | None = None,
    return_dict: bool = False,
) -> tuple[Tensor]:
    """The network's prediction from given deep features: only its outermost layers run.

    Takes and returns what `UNet2DConditionModel.forward` does.

    Args:
        deep: [B, C, h, w], as `captured` collects them.
        latents: [B, 4, h, w].
    """
    embedding = unet.time_embedding(unet.get_time_embed(sample=latents, timestep=timestep))
    added = unet.get_aug_embed(
        emb=embedding,
        encoder_hidden_states=encoder_hidden_states,
        added_cond_kwargs=added_cond_kwargs,
    )
    if added is not None:
        embedding = embedding + added
    block = unet.up_blocks[-1]
    hidden = block.resnets[-1](torch.cat([deep, unet.conv_in(latents)], dim=1), embedding)
    if isinstance(block, CrossAttnUpBlock2D):
        hidden = block.attentions[-1](
            hidden, encoder_hidden_states=encoder_hidden_states, return_dict=False
        )[0]
    if unet.conv_norm_out is not None:
        hidden = unet.conv_act(unet.conv_norm_out(hidden))
    return (unet.conv_out(hidden),)
