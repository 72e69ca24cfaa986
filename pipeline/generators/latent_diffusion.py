"""Sample and decode images with the denoiser of any family."""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from semix.data.device import float32_precision
from semix.data.errors import InputError
from semix.data.machine import keep_compiled_to_ourselves
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators.enhancers import Step, build_enhancer
from semix.pipeline.generators.loading import load_tiny_decoder
from semix.pipeline.generators.schedulers import sampler

COMPILER = "clang++" if sys.platform == "darwin" else "g++"  # torch's default; CXX overrides it
# Compiled programs per function. A U-Net's blocks have up to four shapes, each for several
# kinds of batch: images with or without guidance, noises scored with or without gradients.
MAX_PROGRAMS = 64
BYTES_PER_PIXEL = (30 << 30) // (16 * 1024 * 1024)
DECODING_BYTES = 8 << 30
MAX_DECODED = 16  # images; larger batches are hardly faster


class Denoiser(Protocol):
    """The part of a generator that differs by family.

    Attributes:
        pipeline: the diffusers pipeline, with `vae` and `scheduler`.
        network: the U-Net or transformer.
        scheduler: the model's own, from which `sampler` makes the one that is used.
        latent_shape: (channels, height, width) of one image's latents.
        unconditional: the row of the empty prompt or label.
    """

    pipeline: Any
    network: nn.Module
    scheduler: Any
    latent_shape: tuple[int, ...]
    unconditional: Conditioning

    def encode(self, names: Sequence[str]) -> Conditioning:
        """Encode each class name to one row. Raises InputError for a name the model cannot take."""

    def guided(
        self, latents: Tensor, timestep: Tensor, condition: Conditioning, guidance_scale: float
    ) -> Tensor:
        """The network's guided prediction [B, C, h, w], float32, also if guidance
        doubles the batch inside."""


class LatentDiffusion:
    """A model that maps noise and conditioning to images deterministically.

    Latents stay float32 at any precision of the network. float32 arithmetic is exact, not TF32;
    only a decoder that was upcast from float16 uses TF32.

    Args:
        weak: the model of the steps back in `generator.enhance`; None takes the model itself.
    Raises:
        InputError: the model's scheduler cannot sample deterministically; a tiny decoder that
            does not suit the model; no compiler for `generator.compile`.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        config: GeneratorConfig,
        *,
        device: str,
        weak: Denoiser | None = None,
    ) -> None:
        self.denoiser, self.weak = denoiser, weak
        self.config = config
        self.latent_shape = denoiser.latent_shape
        vae = denoiser.pipeline.vae
        tiny = config.tiny_decoder is not None
        decoder = load_tiny_decoder(config, vae, device=device) if tiny else vae
        # float16 weights have 10 bits of mantissa, like TF32's operands: TF32 loses nothing here.
        self.decode_precision = "tf32" if decoder.dtype == torch.float16 else "ieee"
        self.vae = upcast(decoder)
        levels = len(vae.config.block_out_channels)
        # Pixels of an image; one position of FLUX.2's latents packs four of the VAE's.
        pixels = math.prod(denoiser.latent_shape) // vae.config.latent_channels * 4 ** (levels - 1)
        self.decode_batch = config.decode_batch or decode_batch_size(pixels)
        self.device = torch.device(device)  # on which networks compute, also if they are offloaded
        weights = denoiser.network.parameters()  # some are integers in a quantised network
        self.dtype = next(weight.dtype for weight in weights if weight.is_floating_point())
        self.scheduler = sampler(
            denoiser.scheduler,
            steps=config.steps,
            name=config.scheduler,
            spacing=config.timestep_spacing,
        )
        self.enhancer = build_enhancer(config, self.scheduler)
        for each in filter(None, (denoiser, weak)):
            compile_network(each.network, config.compile)
        if config.compile == "full":
            compile_network(self.vae.decoder, config.compile)

    @torch.no_grad()  # not inference mode: noise gradients may pass through the conditioning
    @float32_precision("ieee")
    def encode(self, names: Sequence[str]) -> Conditioning:
        """The conditioning of each class name, one row per name."""
        return self.denoiser.encode(names)

    @torch.no_grad()  # not inference mode: gradients flow through weights loaded here, too
    def sample(self, noise: Tensor, condition: Conditioning) -> Tensor:
        """Noise of variance 1, float32 [B, C, h, w], to clean latents of the same shape.

        Args:
            condition: B rows.
        """
        scheduler, config = self.scheduler, self.config
        scheduler.set_timesteps(config.steps)
        calls = len(scheduler.timesteps)
        latents = noise.to(self.device) * scheduler.init_noise_sigma
        # The network's time steps are copied in one transfer, since each makes the CPU wait; the
        # scheduler uses its own, on the CPU.
        timesteps = scheduler.timesteps.to(self.device)
        if self.enhancer is not None:
            self.enhancer.begin(config.steps)
        for call, timestep in enumerate(scheduler.timesteps):
            guidance_scale = config.guidance_scale if config.guided(call, calls) else 1.0
            forward = partial(
                self._step,
                timestep=timestep,
                network_timestep=timesteps[call],
                condition=condition,
                guidance_scale=guidance_scale,
            )
            if self.enhancer is None or not config.enhances(call, calls):
                latents = forward(latents)
                continue
            step = Step(
                call=call,
                timestep=timesteps[call],
                time=timestep,
                condition=condition,
                unconditional=self.denoiser.unconditional.expand(len(condition)),
                predict=partial(self.predict, denoiser=self.weak),
                forward=forward,
            )
            latents = self.enhancer(latents, step)
        return latents

    def _step(
        self,
        latents: Tensor,
        *,
        timestep: Tensor,
        network_timestep: Tensor,
        condition: Conditioning,
        guidance_scale: float,
    ) -> Tensor:
        scaled = self.scheduler.scale_model_input(latents, timestep)
        output = self.predict(scaled, network_timestep, condition, guidance_scale)
        stepped: Tensor = self.scheduler.step(output, timestep, latents, return_dict=False)[0]
        return stepped

    @float32_precision("ieee")
    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        condition: Conditioning,
        guidance_scale: float,
        *,
        denoiser: Denoiser | None = None,
    ) -> Tensor:
        """The guided prediction, float32; a scale of at most 1 is no guidance.

        Args:
            latents: [B, C, h, w], scaled by the scheduler.
            denoiser: another one than the model's own.
        """
        inputs, timestep = latents.to(self.dtype), timestep.to(self.device)
        with raised_program_limit(self.config.compile):
            denoiser = denoiser or self.denoiser
            return denoiser.guided(inputs, timestep, condition, guidance_scale)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Clean latents [B, C, h, w] to pixels uint8 [B, H, W, 3] on the device."""
        batches = latents.split(self.decode_batch)
        with float32_precision(self.decode_precision), raised_program_limit(self.config.compile):
            return torch.cat([self._decode(batch) for batch in batches])

    def _decode(self, latents: Tensor) -> Tensor:
        vae_latents = denormalise(latents, self.vae)
        pixels = self.vae.decode(vae_latents.to(self.vae.dtype), return_dict=False)[0].float()
        values = (pixels / 2 + 0.5).clamp(0, 1) * 255
        return values.round().to(torch.uint8).permute(0, 2, 3, 1)


def denormalise(latents: Tensor, vae: Any) -> Tensor:
    """Undo the normalisation of latents [B, C, h, w]; the result is the input of the VAE's decoder.

    Args:
        vae: FLUX.2's has the statistics in its batch norm. Others have them in their config:
            `scaling_factor`, and optionally `latents_mean` and `latents_std` (per channel) or
            `shift_factor`.
    """
    config, norm = vae.config, getattr(vae, "bn", None)
    if norm is not None:
        deviation = (norm.running_var + config.batch_norm_eps).sqrt()
        denormalised = latents * _channels(deviation, latents) + _channels(
            norm.running_mean, latents
        )
        return nn.functional.pixel_shuffle(denormalised, 2)
    denormalised = latents / config.scaling_factor
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and deviation is not None:
        denormalised = denormalised * _channels(deviation, latents) + _channels(mean, latents)
    return denormalised + (config.get("shift_factor") or 0.0)


def decode_batch_size(pixels: int) -> int:
    """Number of images in one VAE decode, by the pixels of one image.

    It does not depend on the free memory of the device, because the batch size changes the last
    bits, and a shard must be the same wherever it is made.

    16 images of 1024 x 1024 took Stable Diffusion's VAE 30 GiB in float32, so a pixel takes 1920
    bytes at any precision. 8 GiB hold 4 of these.
    """
    return max(1, min(MAX_DECODED, DECODING_BYTES // (BYTES_PER_PIXEL * pixels)))


def upcast(vae: Any) -> Any:
    """The VAE, in float32 if float16 would overflow into black images."""
    needs_float32 = vae.config.get("force_upcast", False)
    return vae.float() if needs_float32 and vae.dtype == torch.float16 else vae


def _channels(values: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(values).to(like).view(1, -1, 1, 1)


def compile_network(network: Any, mode: str) -> None:
    """Compile in place; compilation runs at the first call, once for each batch size.

    Args:
        mode: none; regional: the transformer blocks, alike and quick to compile. Convolutions stay
            uncompiled, so this covers all FLOP of a DiT, 75 % of SDXL's, 54 % of Stable
            Diffusion 2.1's and 45 % of 1.5's. full: the whole network, more slowly; the caller
            compiles the decoder, too.
    Raises:
        InputError: this machine has no compiler for torch's code, or no private folder for it.
    """
    check_compiler(mode)
    if mode == "none":
        return
    keep_compiled_to_ourselves()
    if mode == "regional":
        network.compile_repeated_blocks(fullgraph=True, dynamic=False)
    else:
        network.compile(dynamic=False)


def raised_program_limit(mode: str) -> AbstractContextManager[object]:
    """Raise Dynamo's limit of programs around each call of a compiled network.

    By default Dynamo keeps eight programs per function: with one more it fails, or for `full`
    silently runs the network uncompiled. Its settings are per thread, and autograd calls
    checkpointed networks from its own threads.
    """
    if mode == "none":
        return nullcontext()
    from torch._dynamo import config  # takes seconds, needed only for compiled networks

    return config.patch(recompile_limit=MAX_PROGRAMS)


def check_compiler(mode: str) -> None:
    """Raises InputError if `mode` needs a compiler that this machine lacks."""
    compiler = os.environ.get("CXX", COMPILER)
    if mode != "none" and shutil.which(shlex.split(compiler)[0]) is None:
        remedy = f"needs the C++ compiler {compiler}, which is not there; install it, name "
        remedy += "another in CXX, or set it to none"
        raise InputError("generator.compile", mode, remedy)
