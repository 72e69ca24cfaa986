"""C1: batches of whole series against one call of diffusers' pipeline per image, per family."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from torch import Tensor

from benchmarks.flow_pipelines import save_flow
from benchmarks.measure import Result, interleaved, ratio
from benchmarks.models import build_config, open_root, standins
from semix.data.real import RealDataConfig, class_names
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import BuildConfig, GeneratorConfig
from semix.pipeline.generators.flow_models import packed
from semix.pipeline.noise import initial_noise
from semix.pipeline.shard import conditions, mix_groups

GROUPS = 8
FLOW = {"SD3": "sd3", "FLUX": "flux"}
BAR = 3.0  # times less CPU time than one image per call


def run() -> Result:
    result = Result("C1", "8 series of 8 alphas, 10 steps, guidance; CPU seconds of one thread")
    reference = compare(result, "Stable Diffusion", build_config())
    for name, family in FLOW.items():
        # Two ratios of the same size would differ a little by chance alone.
        flow_ratio = compare(result, name, flow_config(family))
        result.at_least(f"{name}: ratio to that of Stable Diffusion", flow_ratio / reference, 1.0)
    return result


def compare(result: Result, name: str, config: BuildConfig) -> float:
    """Add the results of one model; returns the speed-up over one image per call."""
    _, plan, models = open_root(config)
    generator = models.generator
    groups = [plan.group(index) for index in range(GROUPS)]
    noise = initial_noise([group.seed for group in groups], generator.latent_shape)
    condition = conditions(groups, models.embeddings, "linear")
    empty = generator.denoiser.unconditional
    make = peer(config.generator, noise.repeat_interleave(8, 0), condition, empty)

    def ours() -> Tensor:
        images, _ = mix_groups(
            groups, noise, embeddings=models.embeddings, generator=generator, batch_groups=GROUPS
        )
        return images.flatten(0, 1)

    difference = (ours().int() - make(1).int()).abs().max()
    result.at_most(f"{name}: largest pixel difference", int(difference), 1)
    sides = {
        "ours": ours,
        "pipeline, one image a call": lambda: make(1),
        "pipeline, eight images a call": lambda: make(8),
        "bare forwards": bare_forwards(generator, condition, config.generator),
    }
    seconds = interleaved(sides, repeats=3)  # many blocks: half a minute per turn of a flow model
    ours_s = seconds["ours"]
    single = ratio(seconds["pipeline, one image a call"], ours_s)
    eight = ratio(seconds["pipeline, eight images a call"], ours_s)
    bare = ratio(ours_s, seconds["bare forwards"])
    result.at_least(f"{name}: ratio to one image a call", single["ratio"], BAR)
    result.at_most(f"{name}: ours over the bare forwards", bare["ratio"], 1.15)
    figures = {"single": single, "eight": eight, "bare": bare, "cpu_seconds": seconds}
    result.figures[name] = figures
    return float(single["ratio"])


def flow_config(family: str) -> BuildConfig:
    """As `build_config`, for a small flow model with the quickstart's VAE and random weights."""
    vae = AutoencoderKL.from_pretrained(
        standins().diffusion / "vae", use_safetensors=True, shift_factor=0.0
    )
    folder = Path(tempfile.mkdtemp(prefix="semix-bench-"))
    names = class_names(RealDataConfig(name="digits"))
    save_flow(folder, f"small-{family}", device="cpu", names=names, vae=vae)
    settings = {"family": family, "model": folder, "prompt_length": 16, "image_size": 32}
    return build_config(*(f"generator.{name}={value}" for name, value in settings.items()))


def peer(
    config: GeneratorConfig, noise: Tensor, condition: Conditioning, empty: Conditioning
) -> Callable[[int], Tensor]:
    """The pipeline as its documentation calls it, with embeddings and latents of `rows` images."""
    pipeline = DiffusionPipeline.from_pretrained(config.model, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    size = {} if config.image_size is None else {"height": 32, "width": 32}

    @torch.inference_mode()
    def make(rows: int) -> Tensor:
        images = []
        for start in range(0, len(noise), rows):
            prompt, latents = condition[start : start + rows], noise[start : start + rows]
            prompts = {"prompt_embeds": prompt.tokens, "pooled_prompt_embeds": prompt.pooled}
            if config.family == "flux":
                latents = packed(latents)
            else:
                prompts["negative_prompt_embeds"] = empty.tokens.expand_as(prompt.tokens)
            if prompt.pooled is None:
                del prompts["pooled_prompt_embeds"]
            elif config.family != "flux":
                assert empty.pooled is not None
                prompts["negative_pooled_prompt_embeds"] = empty.pooled.expand_as(prompt.pooled)
            decoded = pipeline(
                **prompts,
                **size,
                latents=latents,
                num_inference_steps=config.steps,
                guidance_scale=config.guidance_scale,
                output_type="pt",
            ).images
            images.append((decoded * 255).round().to(torch.uint8).permute(0, 2, 3, 1))
        return torch.cat(images)

    return make


def bare_forwards(
    generator: Any, condition: Conditioning, config: GeneratorConfig
) -> Callable[[], None]:
    """The network calls of that batch alone: the lower bound of any sampler's time."""
    rows = len(condition) * (2 if config.two_rows else 1)
    latents = torch.randn(rows, *generator.latent_shape)
    condition_rows = condition[torch.arange(rows) % len(condition)]
    # No second row for guidance is made here; FLUX gets the scale as an input.
    scale = 1.0 if config.two_rows else config.guidance_scale

    @torch.inference_mode()
    def forwards() -> None:
        for _ in range(config.steps):
            generator.denoiser.guided(latents, torch.tensor(500), condition_rows, scale)
        for chunk in latents[: len(condition)].split(generator.decode_batch):
            generator.vae.decode(chunk, return_dict=False)

    return forwards
