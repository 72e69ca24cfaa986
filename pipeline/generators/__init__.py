"""Load the generator of a model family, selected by `generator.family`."""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from semix.pipeline.config import FLOW_FAMILIES, Family, GeneratorConfig

if TYPE_CHECKING:
    from semix.pipeline.generators.latent_diffusion import LatentDiffusion

DENOISERS: dict[Family, tuple[str, str]] = {  # module and class of each family
    "stable_diffusion": ("text_models", "StableDiffusion"),
    "sdxl": ("text_models", "StableDiffusionXL"),
    "dit": ("dit", "DiT"),
    "pixel": ("pixel", "PixelModel"),
    "sd3": ("flow_models", "StableDiffusion3"),
    "flux": ("flow_models", "Flux"),
    "flux2": ("qwen_models", "Flux2"),
    "z_image": ("qwen_models", "ZImage"),
}


def load_generator(
    config: GeneratorConfig, *, device: str, names: Sequence[str] = ()
) -> "LatentDiffusion":
    """Load the configured model; on the device "meta" without weights, for counting.

    Args:
        names: of classes to encode. Flow models encode them first, so that their text encoders are
            removed before the transformer is loaded.
    Raises:
        InputError: no such model, a directory of another kind, an unsuitable scheduler.
        NotLocal: on the meta device, a hub model that is not on this machine.
    """
    # Imported late: the rules of schedulers are needed without diffusers, too.
    from semix.data.device import float32_precision
    from semix.pipeline.generators.latent_diffusion import LatentDiffusion

    module, name = DENOISERS[config.family]
    denoiser_class = getattr(import_module(f"{__name__}.{module}"), name)
    with float32_precision("ieee"):  # the empty prompt is encoded once and for all
        options = {"names": names} if config.family in FLOW_FAMILIES else {}
        denoiser = denoiser_class(config, device=device, **options)
        weak = None if config.weak is None else denoiser_class(config.weak, device=device)
        return LatentDiffusion(denoiser, config, device=device, weak=weak)
