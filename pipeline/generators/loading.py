"""from_pretrained, the only way models come in: safetensors, a pinned revision, never code.

On the device "meta" the same networks come without their weights, from config files of this
machine alone: they compute shapes, and what they would cost.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderTiny, UNet2DConditionModel
from huggingface_hub import snapshot_download
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import nn

from data.device import DTYPES, resolve_dtype
from data.errors import InputError
from data.files import read_json
from pipeline.checks import check_generator, refuse_no_size
from pipeline.config import PIPELINES, GeneratorConfig, LoraConfig
from pipeline.model_paths import NotHere, check_weights, fetched, local_path, lora_file, pinned

META = "meta"
MODEL = "generator.model"
LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
# Looked up when this is imported: it takes seconds, which workers spend ahead.
KINDS = {family: getattr(diffusers, name) for family, name in PIPELINES.items()}
WEIGHTS = "diffusion_pytorch_model"
PART_FILES = [  # of a hub repository that is one network
    *("config.json", f"{WEIGHTS}.safetensors", f"{WEIGHTS}.safetensors.index.json"),
    f"{WEIGHTS}-*.safetensors",
]
# What diffusers, transformers and the hub's client raise for models they cannot find or read.
UNREADABLE = (OSError, ValueError, RuntimeError, SafetensorError)
# And peft, for files that are no LoRA weights, or those of another model.
UNFIT = (*UNREADABLE, AttributeError, KeyError, IndexError)
DOWN = (".lora_A.weight", ".down.weight")  # one such tensor a layer, by format


def load_pipeline(config: GeneratorConfig, *, device: str, **parts: Any) -> Any:
    """The family's diffusers pipeline on the device, fine-tuned parts put in.

    Its networks only evaluate, and want no gradients of their weights.

    Args:
        parts: what `from_pretrained` shall take instead of the model's own.
    Raises:
        InputError: it cannot be loaded, or the device lacks its precision or room; it, or what is
            added to it, is of another format than safetensors or of the hub without a commit.
        NotHere: on the meta device, of the hub and not fetched before.
    """
    check_generator(config)  # once more: a root from elsewhere never passed a build's checks
    if device == META:
        pipeline = _without_weights(config, parts)
    else:
        dtype = resolve_dtype(config.dtype, device, field="generator.dtype")
        pipeline = _with_weights(config, parts, dtype)
        refuse_too_large(pipeline, config, device)
        if config.offload == "model":
            pipeline.enable_model_cpu_offload(device=device)
        else:
            pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.eval().requires_grad_(False)
    return pipeline


def _with_weights(config: GeneratorConfig, parts: Mapping[str, object], dtype: torch.dtype) -> Any:
    if config.unet is not None:
        model = local_path(config.model) or config.model
        parts = {**parts, "unet": _tuned_unet(config, model, device="cpu", dtype=dtype)}
    folder = local_path(config.model)
    if folder is None:
        folder = _downloaded(config, parts)
        check_generator(config.model_copy(update={"model": str(folder)}))
    pipeline = _from_pretrained(config, folder, dtype=dtype, variant=config.variant, **parts)
    add_lora(pipeline, config.lora)
    # Convolutions run faster on a GPU with the channels last, and no slower on a CPU.
    for name in ("unet", "vae"):
        if (part := pipeline.components.get(name)) is not None:
            part.to(memory_format=torch.channels_last)
    return pipeline


def _without_weights(config: GeneratorConfig, parts: Mapping[str, object]) -> Any:
    """Low-rank weights add nothing once they are in, so they stay away."""
    folder = fetched(config.model, config.revision, "generator.model")
    try:
        check_generator(config.model_copy(update={"model": str(folder)}))
        if config.unet is not None:
            parts = {**parts, "unet": _tuned_unet(config, folder, device=META)}
        networks = _empty_networks(folder, parts)
        for network in networks.values():
            nn.Module.to(network, DTYPES[config.dtype])  # as is: nothing has a value to keep
        return _from_pretrained(config, folder, **parts, **networks)
    except InputError as error:
        if error.field == MODEL and local_path(config.model) is None:  # perhaps fetched in part
            raise NotHere(MODEL, config.model, error.remedy) from error
        raise


def load_part(
    kind: Any, model: str, *, field: str, revision: str | None, device: str, **settings: Any
) -> Any:
    """One network of class `kind`, from a directory or from the pinned commit of a hub id.

    Args:
        device: only whether it is "meta" counts, which wants no weights; others load on the CPU.
    Raises:
        InputError: it cannot be loaded, is no safetensors, or of the hub without a commit.
        NotHere: on the meta device, of the hub and not fetched before.
    """
    place = pinned(model, revision, f"{field}_revision")
    if device == META:
        place = fetched(model, revision, field)
    with _named(field, model):
        if not isinstance(place, Path):
            place = Path(snapshot_download(model, revision=revision, allow_patterns=PART_FILES))
        if place.is_dir():  # else loading names it
            check_weights(place, field)
        if device == META:
            return _empty(kind, place)
        return kind.from_pretrained(place, use_safetensors=True, **settings)


def load_tiny_decoder(config: GeneratorConfig, vae: Any, *, device: str) -> Any:
    """An AutoencoderTiny (TAESD) that decodes what `vae` does; its own config scales the latents.

    Args:
        vae: the model's own, whose precision it takes over.
    Raises:
        InputError: it cannot be loaded, or decodes latents or images of another shape.
    """
    assert config.tiny_decoder is not None
    field = "generator.tiny_decoder"
    tiny = load_part(
        AutoencoderTiny,
        config.tiny_decoder,
        field=field,
        revision=config.tiny_decoder_revision,
        device=device,
    )
    there = _sizes(vae.config.latent_channels, vae.config.block_out_channels)
    here = _sizes(tiny.config.latent_channels, tiny.config.num_decoder_blocks)
    if here != there:
        raise InputError(field, config.tiny_decoder, f"decodes {here}; the model has {there}")
    return tiny.to(device=device, dtype=vae.dtype).eval()


def network_bytes(pipeline: Any) -> dict[str, int]:
    """What the weights of each network of a pipeline take."""
    parts = pipeline.components.items()
    return {name: module_bytes(part) for name, part in parts if isinstance(part, nn.Module)}


def module_bytes(module: nn.Module) -> int:
    """Of its parameters and buffers, each counted once where layers share it."""
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def refuse_too_large(pipeline: Any, config: GeneratorConfig, device: str) -> None:
    """Raises InputError for networks that a GPU has no room for, the largest by name."""
    if not device.startswith("cuda"):
        return
    sizes, free = network_bytes(pipeline), torch.cuda.mem_get_info(device)[0]
    needed = max(sizes.values()) if config.offload == "model" else sum(sizes.values())
    if needed > free:
        largest = max(sizes, key=sizes.__getitem__)
        remedy = (
            f"needs {needed / 1e9:.3g} GB of {device}, which has {free / 1e9:.3g} GB free; its "
        )
        remedy += f"{largest} alone takes {sizes[largest] / 1e9:.3g} GB. Take a larger GPU, or "
        remedy += "generator.offload: model, or generator.dtype: bfloat16"
        raise InputError(MODEL, config.model, remedy)


def native_shape(network: Any) -> tuple[int, int, int]:
    """(channels, height, width) of the latents that a U-Net or transformer was trained on."""
    size = network.config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    return network.config.in_channels, height, width


def _downloaded(config: GeneratorConfig, parts: Mapping[str, object]) -> Path:
    """The pinned commit of a hub id, without the `parts` that are given."""
    settings = {"revision": config.revision, "variant": config.variant, **parts}
    with _named(MODEL, config.model):
        return Path(KINDS[config.family].download(config.model, use_safetensors=True, **settings))


def _from_pretrained(config: GeneratorConfig, folder: Path, **settings: Any) -> Any:
    """From a directory alone, so that nothing else is asked of the hub."""
    with _named(MODEL, config.model):
        # A part that was saved as none, such as T5, must be said to be none.
        index = read_json(folder / "model_index.json").items()
        parts = {part: None for part, named in index if named == [None, None]} | settings
        return KINDS[config.family].from_pretrained(folder, use_safetensors=True, **parts)


@contextmanager
def _named(field: str, model: str) -> Iterator[None]:
    """Raises InputError for what the libraries raise meanwhile."""
    try:
        yield
    except InputError:
        raise
    except UNREADABLE as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(field, model, f"cannot be loaded: {lines[0]}") from error


def _sizes(channels: int, levels: Any) -> str:
    return f"{channels} channels to images {2 ** (len(levels) - 1)} times as wide"


def _empty_networks(folder: Path, given: Container[str]) -> dict[str, nn.Module]:
    """The networks that the model's index names, but for those `given`, on the meta device."""
    found = {}
    for part, named in read_json(folder / "model_index.json").items():
        if part in given or not isinstance(named, list) or named[0] not in LIBRARIES:
            continue
        kind = getattr(LIBRARIES[named[0]], named[1], None)
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            with _named(MODEL, str(folder)):
                found[part] = _empty(kind, folder / part)
    return found


def _empty(kind: Any, folder: Path) -> Any:
    """A network of diffusers or transformers from its config file, without weights."""
    with torch.device(META):
        if issubclass(kind, diffusers.ModelMixin):
            return kind.from_config(kind.load_config(folder))
        return kind(kind.config_class.from_dict(read_json(folder / "config.json")))


def _tuned_unet(
    config: GeneratorConfig, model: Path | str, *, device: str, **settings: Any
) -> UNet2DConditionModel:
    """Raises InputError for one that takes or gives other than the model's own."""
    assert config.unet is not None
    field = "generator.unet"
    settings |= {"field": field, "revision": config.unet_revision, "device": device}
    unet = load_part(UNet2DConditionModel, config.unet, **settings)
    own = unet.load_config(model, subfolder="unet", revision=config.revision)
    for name in ("in_channels", "out_channels", "cross_attention_dim", "addition_embed_type"):
        if unet.config[name] != own.get(name):
            remedy = f"its {name} is {unet.config[name]}, that of the model's own {own.get(name)}"
            raise InputError(field, config.unet, remedy)
    refuse_no_size(unet.config, field, config.unet)  # of the hub it was not known before
    return unet


def add_lora(pipeline: Any, loras: Sequence[LoraConfig]) -> None:
    """Add each one's `scale` x update to the weights, so that it costs nothing afterwards.

    Raises:
        InputError: it cannot be read, or fits the model's networks not at all or only in part.
    """
    for lora in loras:
        folder, name = lora_file(lora)
        settings = {"weight_name": name, "revision": lora.revision, "use_safetensors": True}
        try:
            given = _layers_in_file(pipeline, folder, settings)
            pipeline.load_lora_weights(folder, **settings)
            fitting = _layers_in_networks(pipeline)
            pipeline.fuse_lora(lora_scale=lora.scale)
            pipeline.unload_lora_weights()
        except UNFIT as error:
            remedy = f"cannot be added: {' '.join(str(error).split())[:200]}"
            raise InputError("generator.lora", lora.path, remedy) from error
        # diffusers goes on without what fits nowhere.
        if not 0 < given == fitting:
            remedy = f"{fitting} of its {given} layers fit this model; was it made for another?"
            raise InputError("generator.lora", lora.path, remedy)


def _layers_in_file(pipeline: Any, folder: str, settings: Mapping[str, object]) -> int:
    weights = pipeline.lora_state_dict(folder, unet_config=pipeline.unet.config, **settings)[0]
    return sum(key.endswith(DOWN) for key in weights)


def _layers_in_networks(pipeline: Any) -> int:
    networks = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    modules = [module for network in networks for module in network.modules()]
    return sum(isinstance(module, BaseTunerLayer) for module in modules)
