"""Encode stored pixels with any open_clip model, with its own preprocessing on the device."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import open_clip
import torch
import torch.nn.functional as F
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError
from safetensors import SafetensorError
from torch import Tensor, nn

from semix.data.device import float32_precision, resolve_dtype
from semix.data.errors import InputError
from semix.pipeline.checks import (
    HUB,
    HUB_WEIGHTS,
    LOCAL,
    check_encoder,
    check_folder,
    check_tower_sources,
    tag_repository,
)
from semix.pipeline.config import EncoderConfig
from semix.pipeline.model_paths import CLIP_SETTINGS, reason_in_words, require_local_copy

log = logging.getLogger("semix.build")

BATCH = 256  # maximum images in one forward pass, which bounds its memory
INTERPOLATIONS = {"bicubic": "bicubic", "random": "bicubic", "bilinear": "bilinear"}
RESIZE_MODES = ("shortest", "squash", "longest")


class Preprocessing(TypedDict):
    """open_clip's preprocess_cfg."""

    size: int | Sequence[int]
    mean: float | list[float]
    std: float | list[float]
    interpolation: NotRequired[str]
    resize_mode: NotRequired[str]
    fill_color: NotRequired[float]
    mode: NotRequired[str]


class ClipEncoder:
    """The image tower of an open_clip model; the text tower never reaches the device.

    Args:
        dtype: of the network: float16, bfloat16, or float32 (true float32, never TF32).
        field: path of the settings, for error messages.
    Raises:
        InputError: no such model or weights, weights of another format than safetensors, a hub
            model without a commit, unknown preprocessing, or a precision that the device lacks.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        device: str,
        dtype: str = "float32",
        field: str = "annotation",
    ) -> None:
        check_encoder(config, field)  # settings of a root have not passed a build's checks
        self.dtype = resolve_dtype(dtype, device, field="annotation.dtype")
        self.model = _without_text(_load(config, field)).to(device, self.dtype)
        self.device = device
        self.settings: Preprocessing = self.model.visual.preprocess_cfg
        unknown = unsupported(self.settings)
        if unknown is not None:
            remedy = f"preprocesses images with {unknown}, which semix does not; use another model"
            raise InputError(f"{field}.model", config.model, remedy)

    @torch.inference_mode()
    @float32_precision("ieee")
    def encode(self, images: Tensor) -> Tensor:
        """Projected image features: uint8 [N, H, W, 3] -> float32 [N, D].

        As open_clip returns them: of unit L2 norm for CoCa, not normalised for all others.
        """
        return torch.cat([self._encode(batch) for batch in images.split(BATCH)])

    def _encode(self, images: Tensor) -> Tensor:
        pixels = images.to(self.device).permute(0, 3, 1, 2)
        inputs = preprocess(pixels, self.settings).to(self.dtype)
        return self.model.encode_image(inputs).float()


@torch.inference_mode()
@float32_precision("ieee")
def encode_texts(
    config: EncoderConfig, texts: Sequence[str], *, device: str, field: str = "annotation"
) -> Tensor:
    """Text features of unit length by an open_clip model's text tower: float32 [N, D].

    Raises:
        InputError: as `ClipEncoder`; the model has no text tower, or no tokenizer on this machine;
            or a text has more tokens than the model reads.
    """
    check_encoder(config, field)
    ids = _tokenised(_text_tokenizer(config, field), texts)
    model = _load(config, field)
    if not hasattr(model, "encode_text"):
        remedy = "has no text tower, so it knows no concepts; leave them out"
        raise InputError(f"{field}.model", config.model, remedy)
    model = model.to(device)
    features = [model.encode_text(batch.to(device)).float() for batch in ids.split(BATCH)]
    return F.normalize(torch.cat(features), dim=-1).cpu()


def _text_tokenizer(config: EncoderConfig, field: str) -> Any:
    """The model's tokenizer, from this machine alone, without code of the model's."""
    name = str(_source(config, field)["model_name"])
    text = open_clip.get_model_config(name).get("text_cfg", {})
    options = {}
    if text.get("hf_tokenizer_name"):
        options["trust_remote_code"] = False  # whatever the model's settings say
    if not name.startswith(LOCAL) and ("hf_tokenizer_name" in text or "siglip" in name.lower()):
        remedy = "its tokenizer would be downloaded without a pinned commit; use a local-dir: model"
        raise InputError(f"{field}.model", config.model, remedy)
    try:
        return open_clip.get_tokenizer(name, **options)
    except (OSError, ValueError, RuntimeError) as error:
        remedy = f"its tokenizer cannot be loaded: {reason_in_words(error, config.model)}"
        raise InputError(f"{field}.model", config.model, remedy) from error


def _tokenised(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Token numbers, int64 [N, L]. Raises InputError for a text that would be cut."""
    length = tokenizer.context_length
    ids: Tensor = tokenizer(list(texts))
    longer: Tensor = tokenizer(list(texts), context_length=2 * length)
    for text, row, uncut in zip(texts, ids, longer, strict=True):
        if not torch.equal(row, uncut[:length]):
            raise InputError("concept", text, f"has more than the {length} tokens that CLIP reads")
    return ids


def _load(config: EncoderConfig, field: str) -> Any:
    """Load the whole model on the CPU, float32. Raises InputError if that fails."""
    try:
        return open_clip.create_model_and_transforms(
            **_source(config, field),
            require_pretrained=True,  # open_clip itself would go on with random weights
        )[0].eval()
    except InputError:
        raise
    except SafetensorError as error:
        remedy = f"its weights are no whole safetensors file ({error}); fetch or convert them again"
        raise InputError(f"{field}.model", config.model, remedy) from error
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        # open_clip asserts, without a message, that it knows the preprocessing.
        reason = "cannot be loaded: its preprocessing is unknown"
        if str(error).strip():
            reason = reason_in_words(error, config.model)
        raise InputError(f"{field}.model", config.model, reason) from error


def _without_text(model: Any) -> Any:
    """Delete all attributes but the image tower, which is all that `encode_image` needs."""
    members = [*model.named_children(), *model.named_parameters(recurse=False)]
    names = [name for name, _ in (*members, *model.named_buffers(recurse=False))]
    for name in names:
        if name != "visual":
            delattr(model, name)
    return model


def image_tower(config: EncoderConfig, field: str) -> nn.Module:
    """The image tower on the meta device, for counting: [N, 3, S, S] -> [N, D].

    S is its `image_size`.

    Raises:
        InputError: a tower that would be downloaded from elsewhere.
        NotLocal: a hub model that is not on this machine.
    """
    name = config.model
    if name.startswith(HUB):
        folder = require_local_copy(name.removeprefix(HUB), config.revision, f"{field}.model")
        name = f"{LOCAL}{folder}"
    settings = open_clip.get_model_config(name)
    check_tower_sources(settings, name, field)
    with torch.device("meta"):
        clip = open_clip.CLIP(
            embed_dim=settings["embed_dim"],
            # CoCa's tower would return tokens beside the feature.
            vision_cfg=settings["vision_cfg"]
            | {"timm_model_pretrained": False, "output_tokens": False},
            text_cfg={"layers": 1},  # never used
            quick_gelu=settings.get("quick_gelu", False),
        )
    return clip.visual.eval().requires_grad_(False)


def _source(config: EncoderConfig, field: str) -> dict[str, object]:
    """Arguments for open_clip: the architecture and a local safetensors file.

    By default open_clip falls back on pickles and pins no commit of a hub model.
    """
    repository = None
    if config.model.startswith(HUB):
        folder = _hub_folder(config)
        check_folder(folder, field)
        return {"model_name": f"local-dir:{folder}"}
    if config.pretrained is not None:
        repository = tag_repository(config)
    if repository is None:
        return {"model_name": config.model, "pretrained": config.pretrained}
    tag = open_clip.get_pretrained_cfg(config.model, config.pretrained)
    _note_activation(config, tag)
    return {
        "model_name": config.model,
        "pretrained": _download(repository, HUB_WEIGHTS, None),
        "image_mean": tag["mean"],
        "image_std": tag["std"],
        "image_interpolation": tag["interpolation"],
        "image_resize_mode": tag["resize_mode"],
    }


def _hub_folder(config: EncoderConfig) -> Path:
    """The local folder of the pinned commit, with settings and weights in it."""
    repository = config.model.removeprefix(HUB)
    files = [_download(repository, name, config.revision) for name in (CLIP_SETTINGS, HUB_WEIGHTS)]
    return Path(files[0]).parent


def _download(repository: str, name: str, revision: str | None) -> str:
    try:
        return hf_hub_download(repository, name, revision=revision)
    except RemoteEntryNotFoundError:
        remedy = f"{repository} has no {name} on the hub; take another model or tag, or convert it"
        raise FileNotFoundError(f"{remedy} once, as docs/format.md says under Safety") from None


def _note_activation(config: EncoderConfig, tag: Mapping[str, object]) -> None:
    """Give open_clip's warning about a tag, which it gives only if it downloads the weights."""
    model, tag_has_quick_gelu = (
        open_clip.get_model_config(config.model),
        tag.get("quick_gelu", False),
    )
    if tag_has_quick_gelu != model.get("quick_gelu", False):
        text = "%s: %s was trained with%s QuickGELU, unlike this model; features are a little off"
        log.warning(text, config.model, config.pretrained, "" if tag_has_quick_gelu else "out")


def unsupported(settings: Preprocessing) -> str | None:
    """The setting of a model's preprocess_cfg that `preprocess` does not support, or None."""
    values = {"interpolation": tuple(INTERPOLATIONS), "resize_mode": RESIZE_MODES, "mode": ("RGB",)}
    for key, choices in values.items():
        value = settings.get(key, choices[0])
        if value not in choices:
            return f"{key} {value!r}"
    return None


def preprocess(pixels: Tensor, settings: Preprocessing) -> Tensor:
    """Resize, crop or pad to the model's size, and normalise, as open_clip does for inference.

    Args:
        pixels: uint8 [N, 3, H, W].
    Returns:
        float32 [N, 3, S, S], or the two sides that `size` names.
    """
    size = settings["size"]
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    resize_mode = settings.get("resize_mode", "shortest")
    target = _target_size(pixels.shape[-2:], (height, width), resize_mode)
    mode = INTERPOLATIONS[settings.get("interpolation", "bicubic")]
    values = _resize(pixels.float(), target, mode=mode)
    values = _centre_crop(values, (height, width), fill=settings.get("fill_color", 0)) / 255
    mean, std = (_channels(value, pixels.device) for value in (settings["mean"], settings["std"]))
    return (values - mean) / std


def _target_size(shape: torch.Size, size: tuple[int, int], mode: str) -> tuple[int, int]:
    """Height and width after resizing and before cropping, with open_clip's rounding."""
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
    """Resize like Pillow for 8-bit images: first width, then height, each rounded and clipped.

    Pillow may begin with the height if that shrinks much more; the images of a shard are square.
    """
    for shape in ((values.shape[-2], target[1]), target):
        if shape != tuple(values.shape[-2:]):
            values = F.interpolate(values, shape, mode=mode, antialias=True)
            values = (values + 0.5).floor().clamp(0, 255)  # a half goes up
    return values


def _centre_crop(values: Tensor, size: tuple[int, int], *, fill: float) -> Tensor:
    """The centre crop of [..., H, W], padded if that is too small."""
    padding = [max(0, want - have) for want, have in zip(size, values.shape[-2:], strict=True)]
    if any(padding):
        sides = [m // 2 + odd * (m % 2) for m in reversed(padding) for odd in (0, 1)]
        values = F.pad(values, sides, value=fill)
    top, left = (
        round((have - want) / 2) for have, want in zip(values.shape[-2:], size, strict=True)
    )
    return values[..., top : top + size[0], left : left + size[1]]


def _channels(value: float | list[float], device: torch.device) -> Tensor:
    channels = [value] * 3 if isinstance(value, int | float) else value
    return torch.tensor(channels, device=device).view(3, 1, 1)
