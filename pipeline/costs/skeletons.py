"""The networks of a build without their weights, on the meta device."""

from pathlib import Path
from typing import Any

import diffusers
import open_clip
import torch
from diffusers import AutoencoderTiny, DiTTransformer2DModel, UNet2DConditionModel
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn

from data.errors import InputError
from data.files import read_json
from pipeline.checks.clip import refuse_other_sources
from pipeline.checks.model_paths import local_path
from pipeline.config import EncoderConfig, GeneratorConfig
from pipeline.generators.dit import WeightedLabels
from pipeline.generators.loading import native_shape

LOCAL_CLIP, HUB_CLIP = "local-dir:", "hf-hub:"


class Uncounted(InputError):
    """A model whose cost is not known: its files are not on this machine, or it does not run
    without weights."""


def model_folder(field: str, model: str, *, revision: str | None = None) -> Path:
    """The directory of a model, or of a hub id the copy that was fetched before.

    Raises:
        Uncounted: it was not.
    """
    folder = local_path(model)
    try:
        if folder is None:
            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        if folder.is_dir():
            return folder
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    remedy = "is not on this machine; what it costs can be told once it is"
    raise Uncounted(field, model, remedy)


def denoiser(config: GeneratorConfig) -> nn.Module:
    """The U-Net, or the transformer of family dit. Raises Uncounted."""
    if config.family == "dit":
        return _with_weighted_labels(_empty(DiTTransformer2DModel, _folder(config), "transformer"))
    if config.unet is not None:
        folder = model_folder("generator.unet", config.unet, revision=config.unet_revision)
        return _empty(UNet2DConditionModel, folder)
    return _empty(UNet2DConditionModel, _folder(config), "unet")


def denoiser_inputs(network: nn.Module, config: GeneratorConfig) -> dict[str, Any]:
    """What the network is told beside latents [1, C, h, w] and a time step."""
    settings: Any = network.config
    if config.family == "dit":
        return {"class_labels": _meta(1, settings.num_embeds_ada_norm + 1)}
    length = read_json(_folder(config) / "tokenizer/tokenizer_config.json")["model_max_length"]
    tokens = _meta(1, length, settings.cross_attention_dim)
    if config.family == "stable_diffusion":
        return {"encoder_hidden_states": tokens}
    numbers = 6  # original size, crop corner and target size: two each
    pooled = settings.projection_class_embeddings_input_dim
    pooled -= numbers * settings.addition_time_embed_dim
    added = {"text_embeds": _meta(1, pooled), "time_ids": _meta(1, numbers)}
    return {"encoder_hidden_states": tokens, "added_cond_kwargs": added}


def latents(network: nn.Module) -> Tensor:
    """Of one image, [1, C, h, w]."""
    return _meta(1, *native_shape(network))


def decoder(config: GeneratorConfig) -> Any:
    """The VAE, or the tiny decoder in its place; has `decode`. Raises Uncounted."""
    tiny = config.approximate.tiny_decoder
    if tiny is not None:
        field, revision = "generator.approximate.tiny_decoder", config.approximate
        folder = model_folder(field, tiny, revision=revision.tiny_decoder_revision)
        return _empty(AutoencoderTiny, folder)
    folder = _folder(config)
    return _empty(_part_class(folder, "vae"), folder, "vae")


def own_scheduler(config: GeneratorConfig) -> Any:
    """The scheduler that the model brings. Raises Uncounted."""
    folder = _folder(config)
    return _part_class(folder, "scheduler").from_pretrained(folder, subfolder="scheduler")


def image_tower(config: EncoderConfig) -> nn.Module:
    """The image tower of the open_clip model; takes [N, 3, S, S] for its `image_size` S.

    Raises:
        Uncounted: a hub id that was not fetched.
    """
    schema = next((s for s in (LOCAL_CLIP, HUB_CLIP) if config.model.startswith(s)), None)
    if schema is not None:
        folder = model_folder(
            "annotation.model", config.model.removeprefix(schema), revision=config.revision
        )
        settings = read_json(folder / "open_clip_config.json")["model_cfg"]
        refuse_other_sources(settings, folder, "annotation")
    else:
        settings = open_clip.get_model_config(config.model)
    with torch.device("meta"):
        clip = open_clip.CLIP(
            embed_dim=settings["embed_dim"],
            vision_cfg={**settings["vision_cfg"], "timm_model_pretrained": False},
            text_cfg={"layers": 1},  # never used
            quick_gelu=settings.get("quick_gelu", False),
        )
    return clip.visual.eval().requires_grad_(False)


def _with_weighted_labels(network: Any) -> nn.Module:
    """As pipeline.generators.dit mixes classes."""
    for block in network.transformer_blocks:
        embedder = block.norm1.emb
        embedder.class_embedder = WeightedLabels(embedder.class_embedder.embedding_table)
    return network


def _folder(config: GeneratorConfig) -> Path:
    return model_folder("generator.model", config.model, revision=config.revision)


def _part_class(folder: Path, part: str) -> Any:
    """The diffusers class that the model's index names for one of its parts."""
    return getattr(diffusers, read_json(folder / "model_index.json")[part][1])


def _empty(kind: Any, folder: Path, part: str | None = None) -> Any:
    with torch.device("meta"):
        return (
            kind.from_config(kind.load_config(folder, subfolder=part)).eval().requires_grad_(False)
        )


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")
