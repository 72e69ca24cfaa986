"""C1: batches of whole series against one StableDiffusionPipeline call an image."""

import torch
from diffusers import StableDiffusionPipeline

from benchmarks.measure import Result, interleaved, ratio
from benchmarks.models import build_config, opened
from pipeline.conditioning import Conditioning
from pipeline.noise import initial_noise
from pipeline.shard import conditions, mix_groups

GROUPS = 8


def run() -> Result:
    result = Result("C1", "8 series of 8 alphas, 10 steps, guidance; CPU seconds of one thread")
    config = build_config()
    _, plan, models = opened(config)
    generator = models.generator
    groups = [plan.group(index) for index in range(GROUPS)]
    noise = initial_noise([group.seed for group in groups], generator.latent_shape)
    condition = conditions(groups, models.embeddings, "linear")
    peer = peer_pipeline(config.generator.model)

    def ours() -> torch.Tensor:
        images, _ = mix_groups(
            groups, noise, embeddings=models.embeddings, generator=generator, batch_groups=GROUPS
        )
        return images.flatten(0, 1)

    def one_by_one() -> torch.Tensor:
        return peer_images(peer, noise.repeat_interleave(8, 0), condition, config, size=1)

    def by_series() -> torch.Tensor:
        return peer_images(peer, noise.repeat_interleave(8, 0), condition, config, size=8)

    difference = (ours().int() - one_by_one().int()).abs().max()
    result.at_most("largest pixel difference", int(difference), 1)
    sides = {
        "ours": ours,
        "pipeline, one image a call": one_by_one,
        "pipeline, eight images a call": by_series,
        "bare forwards": bare_forwards(generator, condition, steps=config.generator.steps),
    }
    seconds = interleaved(sides)
    ours_s = seconds["ours"]
    single = ratio(seconds["pipeline, one image a call"], ours_s)
    eight = ratio(seconds["pipeline, eight images a call"], ours_s)
    bare = ratio(ours_s, seconds["bare forwards"])
    result.at_least("ratio to one image a call", single["ratio"], 3.0)
    result.at_most("ours over the bare forwards", bare["ratio"], 1.15)
    result.figures |= {"single": single, "eight": eight, "bare": bare, "cpu_seconds": seconds}
    return result


def peer_pipeline(model: str) -> StableDiffusionPipeline:
    pipeline = StableDiffusionPipeline.from_pretrained(
        model, use_safetensors=True, safety_checker=None, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.inference_mode()
def peer_images(
    peer: StableDiffusionPipeline,
    noise: torch.Tensor,
    condition: Conditioning,
    config: object,
    *,
    size: int,
) -> torch.Tensor:
    """The pipeline as its documentation calls it with embeddings and latents, `size` at a time."""
    settings = config.generator  # type: ignore[attr-defined]
    empty = peer.encode_prompt("", "cpu", 1, False)[0]
    images = []
    for tokens, latents in zip(condition.tokens.split(size), noise.split(size), strict=True):
        made = peer(
            prompt_embeds=tokens,
            negative_prompt_embeds=empty.expand_as(tokens),
            latents=latents,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance_scale,
            output_type="pt",
        ).images
        images.append((made * 255).round().to(torch.uint8).permute(0, 2, 3, 1))
    return torch.cat(images)


def bare_forwards(generator, condition: Conditioning, *, steps: int):  # type: ignore[no-untyped-def]
    """Nothing but the network calls of that batch: what no sampler can go below."""
    unet, vae = generator.denoiser.network, generator.vae
    rows = 2 * len(condition)
    latents = torch.randn(rows, *generator.latent_shape)
    tokens = condition.tokens.repeat(2, 1, 1)
    decode = generator.decode_batch

    @torch.inference_mode()
    def forwards() -> None:
        for step in range(steps):
            unet(latents, torch.tensor(step), encoder_hidden_states=tokens, return_dict=False)
        for part in latents[: rows // 2].split(decode):
            vae.decode(part, return_dict=False)

    return forwards
