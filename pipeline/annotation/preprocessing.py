"""A CLIP model's own preprocessing, on a batch and on the device."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INTERPOLATIONS = {"bicubic": "bicubic", "random": "bicubic", "bilinear": "bilinear"}
RESIZE_MODES = ("shortest", "squash", "longest")


def unsupported(settings: dict[str, Any]) -> str | None:
    """What a model's preprocess_cfg asks for that `preprocess` does not do; None if nothing."""
    known = {"interpolation": tuple(INTERPOLATIONS), "resize_mode": RESIZE_MODES, "mode": ("RGB",)}
    for key, choices in known.items():
        value = settings.get(key, choices[0])
        if value not in choices:
            return f"{key} {value!r}"
    return None


def preprocess(pixels: Tensor, settings: dict[str, Any]) -> Tensor:
    """Resize, crop or pad to the model's size, and normalise, as open_clip does for inference.

    Args:
        pixels: uint8 [N, 3, H, W].
        settings: open_clip's preprocess_cfg: size, mean, std, interpolation, resize_mode and
            fill_color.
    Returns:
        float32 [N, 3, S, S], or the two sides that `size` names.
    """
    size = settings["size"]
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    target = _resized(pixels.shape[-2:], (height, width), settings.get("resize_mode", "shortest"))
    mode = INTERPOLATIONS[settings.get("interpolation", "bicubic")]
    values = _resize(pixels.float(), target, mode=mode)
    values = _centred(values, (height, width), fill=settings.get("fill_color", 0)) / 255
    mean, std = (_channels(settings[key], pixels.device) for key in ("mean", "std"))
    return (values - mean) / std


def _resized(shape: torch.Size, size: tuple[int, int], mode: str) -> tuple[int, int]:
    """Height and width after resizing and before cropping, rounded as open_clip rounds."""
    height, width = shape
    if mode == "squash":
        return size
    if mode == "shortest" and size[0] == size[1]:  # torchvision's Resize, which rounds down
        short = min(height, width)
        return size[0] * height // short, size[0] * width // short
    ratios = height / size[0], width / size[1]
    ratio = max(ratios) if mode == "longest" else min(ratios)
    return round(height / ratio), round(width / ratio)


def _resize(values: Tensor, target: tuple[int, int], *, mode: str) -> Tensor:
    """As Pillow resizes 8-bit images: in width, then in height, each time rounded and clipped.

    Pillow may begin with the height where that shrinks much more; the images of a shard are
    square.
    """
    for shape in ((values.shape[-2], target[1]), target):
        if shape != tuple(values.shape[-2:]):
            values = F.interpolate(values, shape, mode=mode, antialias=True)
            values = (values + 0.5).floor().clamp(0, 255)  # a half goes up
    return values


def _centred(values: Tensor, size: tuple[int, int], *, fill: float) -> Tensor:
    """The middle of [..., H, W], padded where it is too small."""
    missing = [max(0, want - have) for want, have in zip(size, values.shape[-2:], strict=True)]
    if any(missing):
        sides = [m // 2 + odd * (m % 2) for m in reversed(missing) for odd in (0, 1)]
        values = F.pad(values, sides, value=fill)
    top, left = (
        round((have - want) / 2) for have, want in zip(values.shape[-2:], size, strict=True)
    )
    return values[..., top : top + size[0], left : left + size[1]]


def _channels(value: float | list[float], device: torch.device) -> Tensor:
    channels = [value] * 3 if isinstance(value, int | float) else value
    return torch.tensor(channels, device=device).view(3, 1, 1)
