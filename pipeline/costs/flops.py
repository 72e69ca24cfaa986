"""Exact FLOP counts: two a multiply-add, products of attention included."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config import BuildConfig, EncoderConfig, GeneratorConfig
from pipeline.costs import skeletons
from pipeline.costs.skeletons import Uncounted
from pipeline.generators.approximate.cache import cache_setting
from pipeline.generators.approximate.shallow import captured, shallow_pass


@dataclass(frozen=True)
class ModelCosts:
    """What a build's networks cost, in FLOP, and the shape of what they give.

    Attributes:
        row: one sample in one call of the denoiser; `shallow_row` through its outermost part.
        decode: latents of one image to pixels.
        clip: the image tower on one image; those of both CLIP models where there are two.
        image_size: side of a decoded image, pixels.
        feature_width: D of a CLIP feature, or of both together.
    """

    row: int
    shallow_row: int
    decode: int
    clip: int
    image_size: int
    feature_width: int


def model_costs(config: BuildConfig) -> ModelCosts:
    """Counted on the meta device from the models' config files; weights are not needed.

    Raises:
        Uncounted: a model is not on this machine, or cannot run on the meta device.
    """
    with _named("generator.model", config.generator.model):
        row = row_flops(config.generator)
        shallow = shallow_row_flops(config.generator)
        decode, image = _decode(config.generator)
    towers = [_named_clip(encoder, field) for field, encoder in config.annotation.encoders]
    return ModelCosts(
        row=row,
        shallow_row=shallow,
        decode=decode,
        clip=sum(clip for clip, _ in towers),
        image_size=image.shape[-1],
        feature_width=sum(feature.shape[-1] for _, feature in towers),
    )


def row_flops(config: GeneratorConfig) -> int:
    """FLOP of one sample in one call of the denoiser, at the model's own image size."""
    network = skeletons.denoiser(config)
    inputs = skeletons.denoiser_inputs(network, config)
    return flops(lambda: network(skeletons.latents(network), timestep=_step(), **inputs))[0]


def shallow_row_flops(config: GeneratorConfig) -> int:
    """FLOP of a row whose deep features are taken over; 0 where no cache is switched on."""
    if cache_setting(config.approximate) is None:
        return 0
    network: Any = skeletons.denoiser(config)
    inputs = skeletons.denoiser_inputs(network, config)
    latents = skeletons.latents(network)
    with captured(network) as found:
        flops(lambda: network(latents, timestep=_step(), **inputs))
    return flops(lambda: shallow_pass(network, found[0], latents, _step(), **inputs))[0]


def decode_flops(config: GeneratorConfig) -> int:
    """FLOP of the VAE, or of the tiny decoder, on one image."""
    return _decode(config)[0]


def clip_flops(config: EncoderConfig) -> int:
    """FLOP of the image tower on one image."""
    return _clip(config)[0]


@torch.no_grad()
def flops(call: Callable[[], Any]) -> tuple[int, Any]:
    """FLOP of whatever `call` runs, on any device, and what it gave."""
    with FlopCounterMode(display=False) as counter:
        output = call()
    return counter.get_total_flops(), output


@contextmanager
def _named(field: str, model: str) -> Iterator[None]:
    """Name the model whose network wants to see numbers, which the meta device has not."""
    try:
        yield
    except RuntimeError as error:
        raise Uncounted(field, model, f"cannot be counted without weights: {error}") from error


def _decode(config: GeneratorConfig) -> tuple[int, Tensor]:
    network, latents = skeletons.decoder(config), skeletons.latents(skeletons.denoiser(config))
    return flops(lambda: network.decode(latents, return_dict=False)[0])


def _named_clip(config: EncoderConfig, field: str) -> tuple[int, Tensor]:
    with _named(f"{field}.model", config.model):
        return _clip(config)


def _clip(config: EncoderConfig) -> tuple[int, Tensor]:
    tower: Any = skeletons.image_tower(config)
    size = tower.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return flops(lambda: tower(torch.empty(1, 3, height, width, device="meta")))


def _step() -> Tensor:
    return torch.zeros(1, dtype=torch.long, device="meta")
