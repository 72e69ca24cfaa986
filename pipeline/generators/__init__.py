"""Load the generator of a model family, selected by `generator.family`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from semix.pipeline.config import FLOW_FAMILIES, Family, GeneratorConfig

if TYPE_CHECKING:
    from semix.pipeline.generators.latent_diffusion import Denoiser, LatentDiffusion


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
    from semix.pipeline.generators.dit import DiT
    from semix.pipeline.generators.flow_models import Flux, StableDiffusion3
    from semix.pipeline.generators.latent_diffusion import LatentDiffusion
    from semix.pipeline.generators.qwen_models import Flux2, ZImage
    from semix.pipeline.generators.text_models import StableDiffusion, StableDiffusionXL

    denoisers: dict[Family, Callable[..., Denoiser]] = {
        "stable_diffusion": StableDiffusion,
        "sdxl": StableDiffusionXL,
        "dit": DiT,
        "sd3": StableDiffusion3,
        "flux": Flux,
        "flux2": Flux2,
        "z_image": ZImage,
    }
    with float32_precision("ieee"):  # the empty prompt is encoded once and for all
        options = {"names": names} if config.family in FLOW_FAMILIES else {}
        denoiser = denoisers[config.family](config, device=device, **options)
        return LatentDiffusion(denoiser, config, device=device)
