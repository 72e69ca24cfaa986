"""Any open_clip model as an encoder of stored pixels."""

from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.pretrained import download_pretrained_from_hf
from torch import Tensor

from data.errors import InputError
from pipeline.annotation.preprocessing import preprocess, unsupported
from pipeline.config import EncoderConfig

HUB = "hf-hub:"
BATCH = 256  # images in one forward pass at most, which bounds its memory


class ClipEncoder:
    """The image tower of an open_clip model, in float32.

    Args:
        field: where the settings come from, for error messages.
    Raises:
        InputError: no such model or weights, or preprocessing that is unknown.
    """

    def __init__(self, config: EncoderConfig, *, device: str, field: str = "annotation") -> None:
        try:
            self.model: Any = open_clip.create_model_and_transforms(
                _source(config),
                pretrained=config.pretrained,
                device=device,
                require_pretrained=True,  # open_clip itself would go on with random weights
            )[0].eval()
        except (RuntimeError, OSError, ValueError, AssertionError) as error:
            # open_clip asserts, without a word, that it knows the preprocessing.
            reason = (str(error).strip() or "its preprocessing is unknown").splitlines()[0]
            raise InputError(
                f"{field}.model", config.model, f"cannot be loaded: {reason}"
            ) from error
        self.device = device
        self.settings = self.model.visual.preprocess_cfg
        unknown = unsupported(self.settings)
        if unknown is not None:
            remedy = f"preprocesses images with {unknown}, which semix does not; use another model"
            raise InputError(f"{field}.model", config.model, remedy)

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        """Projected image features, not normalised: uint8 [N, H, W, 3] -> float32 [N, D]."""
        return torch.cat([self._encode(part) for part in images.split(BATCH)])

    def _encode(self, images: Tensor) -> Tensor:
        pixels = images.to(self.device).permute(0, 3, 1, 2)
        return self.model.encode_image(preprocess(pixels, self.settings)).float()


def _source(config: EncoderConfig) -> str:
    """The name for open_clip; a hub model becomes the folder of its pinned commit.

    open_clip takes no commit where it loads a model, but it does where it fetches files.
    """
    if not config.model.startswith(HUB):
        return config.model
    owner_name = config.model.removeprefix(HUB)
    settings, _ = (
        download_pretrained_from_hf(owner_name, filename=name, revision=config.revision)
        for name in ("open_clip_config.json", None)  # and its weights
    )
    return f"local-dir:{Path(settings).parent}"
