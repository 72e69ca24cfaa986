"""Any open_clip model as an encoder of stored pixels."""

import logging
from pathlib import Path
from typing import Any

import open_clip
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError
from safetensors import SafetensorError
from torch import Tensor

from data.device import float32_precision, resolve_dtype
from data.errors import InputError
from pipeline.annotation.preprocessing import preprocess, unsupported
from pipeline.checks.clip import (
    HUB,
    HUB_WEIGHTS,
    SETTINGS,
    check_encoder,
    check_folder,
    tag_repository,
)
from pipeline.config import EncoderConfig

log = logging.getLogger("semix.build")

BATCH = 256  # images in one forward pass at most, which bounds its memory


class ClipEncoder:
    """The image tower of an open_clip model.

    Args:
        dtype: float32, which is never TF32, float16 or bfloat16; of the network.
        field: where the settings come from, for error messages.
    Raises:
        InputError: no such model or weights, weights of another format than safetensors, a hub
            model without a commit, preprocessing that is unknown, or a precision that the device
            lacks.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        device: str,
        dtype: str = "float32",
        field: str = "annotation",
    ) -> None:
        check_encoder(config, field)  # a root from elsewhere never passed a build's checks
        self.dtype = resolve_dtype(dtype, device, field="annotation.dtype")
        try:
            self.model: Any = open_clip.create_model_and_transforms(
                **_source(config, field),
                device=device,
                require_pretrained=True,  # open_clip itself would go on with random weights
            )[0].eval()
        except InputError:
            raise
        except SafetensorError as error:
            remedy = f"its weights are no whole safetensors file ({error}); fetch or convert them"
            raise InputError(f"{field}.model", config.model, f"{remedy} again") from error
        except (RuntimeError, OSError, ValueError, AssertionError) as error:
            # open_clip asserts, without a word, that it knows the preprocessing.
            reason = (str(error).strip() or "its preprocessing is unknown").splitlines()[0]
            raise InputError(
                f"{field}.model", config.model, f"cannot be loaded: {reason}"
            ) from error
        self.model.to(self.dtype)
        self.device = device
        self.settings = self.model.visual.preprocess_cfg
        unknown = unsupported(self.settings)
        if unknown is not None:
            remedy = f"preprocesses images with {unknown}, which semix does not; use another model"
            raise InputError(f"{field}.model", config.model, remedy)

    @torch.inference_mode()
    @float32_precision("ieee")
    def encode(self, images: Tensor) -> Tensor:
        """Projected image features, not normalised: uint8 [N, H, W, 3] -> float32 [N, D]."""
        return torch.cat([self._encode(part) for part in images.split(BATCH)])

    def _encode(self, images: Tensor) -> Tensor:
        pixels = images.to(self.device).permute(0, 3, 1, 2)
        inputs = preprocess(pixels, self.settings).to(self.dtype)
        return self.model.encode_image(inputs).float()


def _source(config: EncoderConfig, field: str) -> dict[str, Any]:
    """What open_clip shall load: the architecture and a safetensors file, both of this machine.

    Left to itself it falls back on pickles, and of the hub it asks for no commit.
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
        "pretrained": _fetched(repository, HUB_WEIGHTS, None),
        "image_mean": tag["mean"],
        "image_std": tag["std"],
        "image_interpolation": tag["interpolation"],
        "image_resize_mode": tag["resize_mode"],
    }


def _hub_folder(config: EncoderConfig) -> Path:
    """Of the pinned commit, with its settings and its weights in it."""
    repository = config.model.removeprefix(HUB)
    files = [_fetched(repository, name, config.revision) for name in (SETTINGS, HUB_WEIGHTS)]
    return Path(files[0]).parent


def _fetched(repository: str, name: str, revision: str | None) -> str:
    try:
        return hf_hub_download(repository, name, revision=revision)
    except RemoteEntryNotFoundError:
        remedy = f"{repository} has no {name} on the hub; take another model or tag, or convert it"
        raise FileNotFoundError(f"{remedy} once, as docs/format.md says under Safety") from None


def _note_activation(config: EncoderConfig, tag: dict[str, Any]) -> None:
    """open_clip's own warning about a tag, which it gives where it finds the weights itself."""
    own, trained = open_clip.get_model_config(config.model), tag.get("quick_gelu", False)
    if trained != own.get("quick_gelu", False):
        text = "%s: %s was trained with%s QuickGELU, unlike this model; features are a little off"
        log.warning(text, config.model, config.pretrained, "" if trained else "out")
