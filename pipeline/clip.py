"""Any open_clip model as an encoder of stored pixels."""

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

from data.errors import InputError
from pipeline.config import AnnotationConfig


class ClipEncoder:
    """The image tower of an open_clip model, in float32.

    Raises:
        InputError: no such model or weights.
    """

    def __init__(self, config: AnnotationConfig, *, device: str) -> None:
        try:
            self.model = open_clip.create_model_and_transforms(
                config.model, pretrained=config.pretrained, device=device
            )[0].eval()
        except (RuntimeError, OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                "annotation.model", config.model, f"cannot be loaded: {reason}"
            ) from error
        self.device = device
        self.settings = self.model.visual.preprocess_cfg

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        """Projected image features, not normalised: uint8 [N, H, W, 3] -> float32 [N, D]."""
        pixels = images.to(self.device).permute(0, 3, 1, 2)
        return self.model.encode_image(preprocess(pixels, self.settings)).float()


def preprocess(pixels: Tensor, settings: dict) -> Tensor:
    """CLIP's own preprocessing on a device tensor: bicubic, centre crop, normalise.

    Args:
        pixels: uint8 [N, 3, H, W].
        settings: open_clip's preprocess_cfg: size, mean, std, interpolation.
    Returns:
        float32 [N, 3, S, S].
    """
    size = settings["size"] if isinstance(settings["size"], int) else settings["size"][0]
    height, width = pixels.shape[-2:]
    scale = size / min(height, width)
    target = (round(height * scale), round(width * scale))
    values = pixels.float()
    if target != (height, width):
        values = F.interpolate(values, target, mode=settings["interpolation"], antialias=True)
        # open_clip resizes 8-bit images, which rounds and clips the overshoot.
        values = values.round().clamp(0, 255)
    top, left = (target[0] - size) // 2, (target[1] - size) // 2
    values = values[..., top : top + size, left : left + size] / 255
    mean, std = (
        torch.tensor(settings[key], device=pixels.device).view(3, 1, 1) for key in ("mean", "std")
    )
    return (values - mean) / std
