"""Model families behind one small protocol, chosen by `generator.family`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.config import Family, GeneratorConfig

if TYPE_CHECKING:
    from pipeline.generators.latent_diffusion import Denoiser, LatentDiffusion


def load_generator(config: GeneratorConfig, *, device: str) -> "LatentDiffusion":
    """Load the configured model; on the device "meta" without its weights, to be counted.

    Raises:
        InputError: no such model, a directory of another kind, an unsuitable scheduler.
        NotHere: on the meta device, of the hub and not fetched before.
    """
    # Whoever only asks for the rules of a scheduler waits for no diffusers.
    from data.device import float32_precision
    from pipeline.generators.dit import DiT
    from pipeline.generators.latent_diffusion import LatentDiffusion
    from pipeline.generators.text_models import StableDiffusion, StableDiffusionXL

    denoisers: dict[Family, Callable[..., Denoiser]] = {
        "stable_diffusion": StableDiffusion,
        "sdxl": StableDiffusionXL,
        "dit": DiT,
    }
    with float32_precision("ieee"):  # the empty prompt is encoded once and for all
        return LatentDiffusion(denoisers[config.family](config, device=device), config)
