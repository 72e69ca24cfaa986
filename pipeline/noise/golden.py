"""Golden Noise: a network that changes the noise of a series to suit its condition.

Source: Zhou et al. 2024, arXiv 2411.09502, and its code, whose names of weights are kept. The files
that were published are pickles; docs/noise.md says how to convert one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from diffusers.models.normalization import AdaGroupNorm
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from semix.data.errors import InputError

FIELD = "noise.network"
SWIN, SWIN_SIZE = "swin_tiny_patch4_window7_224", 224
HIDDEN, WIDE, HEADS = 64, 1024, 8


class GoldenNoise(nn.Module):
    """Maps noise and tokens to noise. float32, on the CPU, so that no bit depends on the device.

    Args:
        size: side of the latents, of 4 channels.
        condition_size: numbers in the tokens of one condition.
    """

    def __init__(self, size: int, condition_size: int) -> None:
        super().__init__()
        self.size, self.condition_size = size, condition_size
        self.unet_svd = SingularValues(2 * size)
        self.unet_embedding = Swin(size)
        self.embeeding = AdaGroupNorm(condition_size, 4, 1, eps=1e-6)  # sic
        self.alpha = nn.Parameter(torch.zeros(()))
        self.beta = nn.Parameter(torch.zeros(()))

    def forward(self, noise: Tensor, tokens: Tensor) -> Tensor:
        """Noise [B, 4, h, w] and tokens [B, T, D] to noise [B, 4, h, w]."""
        of_text = self.embeeding(noise, tokens.flatten(1))
        residual = (2 * torch.sigmoid(self.alpha) - 1) * of_text
        residual = residual + self.beta * self.unet_embedding(noise + of_text)
        return self.unet_svd(noise) + residual


class SingularValues(nn.Module):
    """Changes the singular values of noise, as one matrix of 2 x 2 channels."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.mlp1, self.mlp2 = _mlp(side, HIDDEN), _mlp(side, HIDDEN)
        self.mlp3 = nn.Sequential(nn.Linear(side, side))
        self.attention = Attention(side)
        self.mlp4 = _mlp(side, WIDE)

    def forward(self, noise: Tensor) -> Tensor:
        matrix = _as_matrix(noise)
        left, values, right = torch.linalg.svd(matrix)
        rows = self.mlp1(left.mT) + self.mlp2(right) + self.mlp3(values)[:, None]
        changed = self.mlp4(self.attention(rows).mean(1)) + values
        return _as_channels(left @ torch.diag_embed(changed) @ right)


class Attention(nn.Module):
    """Self-attention over rows [B, N, side]."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(side, 3 * side, bias=False), nn.Linear(side, side)

    def forward(self, rows: Tensor) -> Tensor:
        batch, count, side = rows.shape
        heads = self.qkv(rows).view(batch, count, 3, HEADS, side // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads.unbind(0))
        return self.proj(attended.transpose(1, 2).reshape(batch, count, side))


class Swin(nn.Module):
    """A Swin Transformer on noise that is scaled to its size, and back."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.upconv, self.downconv = nn.Conv2d(7, 4, 1), nn.Conv2d(4, 3, 1)
        self.swin: Any = timm.create_model(SWIN, pretrained=False)

    def forward(self, noise: Tensor) -> Tensor:
        pixels = self.downconv(functional.interpolate(noise, [SWIN_SIZE] * 2))
        features = self.swin.forward_features(pixels)  # [B, 7, 7, 768], taken as 7 channels
        return self.upconv(functional.interpolate(features, [self.size] * 2))


def load_golden(path: str, *, latent_shape: tuple[int, ...], condition_size: int) -> GoldenNoise:
    """Load a network from a safetensors file.

    Raises:
        InputError: no such file, one of another network, or one for other latents or conditions.
    """
    try:
        tensors = load_file(Path(path).expanduser())
    except (OSError, SafetensorError) as error:
        remedy = f"cannot be read as safetensors ({error}); docs/noise.md says how to convert one"
        raise InputError(FIELD, path, remedy) from None
    network = GoldenNoise(*_sizes(tensors, path))
    known = network.state_dict()  # the published code keeps a batch norm that it does not use
    missing = sorted(known.keys() - tensors.keys())
    if missing:
        remedy = f"lacks {missing[0]} and {len(missing) - 1} further weights of Golden Noise"
        raise InputError(FIELD, path, remedy)
    shape, expected = tuple(latent_shape), (4, network.size, network.size)
    if shape != expected or condition_size != network.condition_size:
        remedy = f"was made for latents {list(expected)} and {network.condition_size:,} numbers of "
        remedy += f"text; this model has {list(shape)} and {condition_size:,}"
        raise InputError(FIELD, path, remedy)
    network.load_state_dict({name: tensors[name] for name in known})
    return network.float().eval().requires_grad_(False)


def _sizes(tensors: Mapping[str, Tensor], path: str) -> tuple[int, int]:
    """Side of the latents, and numbers of a condition."""
    try:
        return tensors["unet_svd.mlp1.0.weight"].shape[1] // 2, tensors[
            "embeeding.linear.weight"
        ].shape[1]
    except KeyError as error:
        remedy = f"holds no {error.args[0]}; it is no network of Golden Noise"
        raise InputError(FIELD, path, remedy) from None


def _mlp(side: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(side, hidden), nn.ReLU(), nn.Linear(hidden, side))


def _as_matrix(noise: Tensor) -> Tensor:
    """[B, 4, h, w] to [B, 2 h, 2 w]: channels 0 and 1 above 2 and 3."""
    batch, _, height, width = noise.shape
    blocks = noise.view(batch, 2, 2, height, width).permute(0, 1, 3, 2, 4)
    return blocks.reshape(batch, 2 * height, 2 * width)


def _as_channels(matrix: Tensor) -> Tensor:
    """The inverse of `_as_matrix`."""
    batch, height, width = matrix.shape
    blocks = matrix.view(batch, 2, height // 2, 2, width // 2).permute(0, 1, 3, 2, 4)
    return blocks.reshape(batch, 4, height // 2, width // 2)
