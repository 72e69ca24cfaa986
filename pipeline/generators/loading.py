"""Load models with from_pretrained only: safetensors, a pinned revision, never code.

On the device "meta" the same networks are built without weights, from local config files only: they
compute shapes and costs.
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
from safetensors import SafetensorError, safe_open
from torch import nn

from semix.data.device import DTYPES, resolve_dtype
from semix.data.errors import InputError
from semix.data.files import read_json
from semix.pipeline.checks import check_generator, check_latent_size
from semix.pipeline.config import PIPELINES, GeneratorConfig, LoraConfig
from semix.pipeline.model_paths import (
    NotLocal,
    check_weights,
    local_copy,
    local_path,
    lora_file,
    path_or_pinned_id,
    quantisation,
    reason_in_words,
    require_local_copy,
    weight_files,
)

META = "meta"
MODEL, TINY = "generator.model", "generator.tiny_decoder"
LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
# Resolved at import, which takes seconds that workers spend ahead.
KINDS = {family: getattr(diffusers, name) for family, name in PIPELINES.items()}
WEIGHTS = "diffusion_pytorch_model"
NETWORK_FILES = [  # files of a hub repository that holds one network
    *("config.json", f"{WEIGHTS}.safetensors", f"{WEIGHTS}.safetensors.index.json"),
    f"{WEIGHTS}-*.safetensors",
]
STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_LISTED = 3  # missing weights listed in a message
# Errors of diffusers, transformers and the hub's client for missing or unreadable models.
LOADING_ERRORS = (OSError, ValueError, RuntimeError, SafetensorError)
# Errors of peft, too, for files that are no LoRA weights, or weights of another model.
LORA_ERRORS = (*LOADING_ERRORS, AttributeError, KeyError, IndexError)
DOWN_SUFFIXES = (".lora_A.weight", ".down.weight")  # one such tensor per layer, by format


def load_pipeline(config: GeneratorConfig, *, device: str, **components: Any) -> Any:
    """Load the family's diffusers pipeline on the device, with fine-tuned networks.

    Its networks are in evaluation mode, without gradients of their weights.

    Args:
        components: passed to `from_pretrained` instead of the model's own.
    Raises:
        InputError: it cannot be loaded, or the device lacks its precision or memory; it, or an
            added network, is not in safetensors, or of the hub without a commit.
        NotLocal: on the meta device, a hub model that is not on this machine.
    """
    check_generator(config)  # settings of a root have not passed a build's checks
    if device == META:
        pipeline = _without_weights(config, components)
    else:
        dtype = resolve_dtype(config.dtype, device, field="generator.dtype")
        pipeline = _with_weights(config, components, dtype)
        check_weights_fit(pipeline, config, device)
        if config.offload == "model":
            pipeline.enable_model_cpu_offload(device=device)
        else:
            pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.eval().requires_grad_(False)
    return pipeline


def check_networks(config: GeneratorConfig, *, device: str | None = None) -> None:
    """Check that the networks of a model on this machine have all their weights.

    Only headers of files are read, no weights. Quantised weights are checked when they are loaded.

    Args:
        device: on which they will be loaded; None skips checks of the device.
    Raises:
        InputError: a network that lacks weights, or cannot be loaded, or not on this device.
    """
    folder = local_copy(config.model, config.revision)
    if folder is not None:
        check_generator(config.model_copy(update={"model": str(folder)}))
        for component, kind in _network_kinds(folder, ["unet"] if config.unet else []).items():
            _read_headers(kind, folder / component, device, variant=config.variant, field=MODEL)
    for kind, model, revision, field in (
        (UNet2DConditionModel, config.unet, config.unet_revision, "generator.unet"),
        (AutoencoderTiny, config.tiny_decoder, config.tiny_decoder_revision, TINY),
    ):
        if model is not None and (folder := local_copy(model, revision)) is not None:
            _read_headers(kind, folder, device, variant=config.variant, field=field)


def _read_headers(kind: Any, folder: Path, device: str | None, **settings: Any) -> None:
    if (method := quantisation(folder)) is not None:
        is_diffusers = issubclass(kind, diffusers.ModelMixin)
        if method == "bitsandbytes" and is_diffusers and device == "cpu":
            remedy = "its weights were quantised by bitsandbytes, which diffusers loads on NVIDIA "
            raise InputError(settings["field"], folder, remedy + "GPUs alone; run it on one")
        return
    with _translate_errors(settings["field"], str(folder)), _silent():
        # In the precision of the file, so that values are not converted.
        dtype = _stored_dtype(folder, settings["variant"])
        _read_network(kind, folder, device_map=META, dtype=dtype, **settings)


def _read_network(
    kind: Any, folder: Path, *, variant: str | None, field: str, **settings: Any
) -> Any:
    """Load one network, in the variant if there are weights of it.

    Raises:
        InputError: it lacks weights, which the libraries would initialise at random.
    """
    variant = variant if variant in weight_files(folder) else None
    settings |= {"variant": variant, "output_loading_info": True}
    network, report = kind.from_pretrained(folder, use_safetensors=True, **settings)
    if missing := sorted(report["missing_keys"]):
        names = ", ".join(missing[:MAX_LISTED]) + (", ..." if len(missing) > MAX_LISTED else "")
        remedy = f"lacks {len(missing)} of the weights of a {kind.__name__} ({names}); fetch or "
        raise InputError(field, folder, remedy + "convert it again")
    return network


def _stored_dtype(folder: Path, variant: str | None) -> torch.dtype | None:
    """The precision of the stored weights of a network, read from the first one."""
    files = weight_files(folder)
    for path in files.get(variant) or files.get(None) or ():
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                return STORED_DTYPES.get(file.get_slice(name).get_dtype())
    return None


@contextmanager
def _silent() -> Iterator[None]:
    """Silence the log of diffusers and transformers during the block."""
    logs = [diffusers.utils.logging, transformers.utils.logging]
    levels = [log.get_verbosity() for log in logs]
    has_progress_bars = transformers.utils.logging.is_progress_bar_enabled()
    for log in logs:
        log.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.set_verbosity(level)
        if has_progress_bars:
            transformers.utils.logging.enable_progress_bar()


def _with_weights(
    config: GeneratorConfig, components: Mapping[str, object], dtype: torch.dtype
) -> Any:
    if config.unet is not None:
        model, settings = local_path(config.model) or config.model, {"variant": config.variant}
        unet = _tuned_unet(config, model, device="cpu", dtype=dtype, **settings)
        components = {**components, "unet": unet}
    folder = local_path(config.model)
    if folder is None:
        folder = _download(config, components)
        check_generator(config.model_copy(update={"model": str(folder)}))
    with _translate_errors(MODEL, config.model):
        networks = {
            component: _read_network(
                kind, folder / component, variant=config.variant, field=MODEL, dtype=dtype
            )
            for component, kind in _network_kinds(folder, components).items()
        }
    pipeline = _from_pretrained(config, folder, **components, **networks)
    add_lora(pipeline, config.lora)
    # Convolutions run faster on a GPU with the channels last, and no slower on a CPU.
    for name in ("unet", "vae"):
        if (component := pipeline.components.get(name)) is not None:
            component.to(memory_format=torch.channels_last)
    return pipeline


def _without_weights(config: GeneratorConfig, components: Mapping[str, object]) -> Any:
    """The pipeline on the meta device, without low-rank weights, which add no cost once fused."""
    folder = require_local_copy(config.model, config.revision, "generator.model")
    try:
        check_generator(config.model_copy(update={"model": str(folder)}))
        if config.unet is not None:
            components = {**components, "unet": _tuned_unet(config, folder, device=META)}
        networks = _empty_networks(folder, components)
        for network in networks.values():
            nn.Module.to(network, DTYPES[config.dtype])  # as is: nothing has a value to keep
        return _from_pretrained(config, folder, **components, **networks)
    except InputError as error:
        if error.field == MODEL and local_path(config.model) is None:  # perhaps partly downloaded
            raise NotLocal(MODEL, config.model, error.remedy) from error
        raise


def load_part(
    kind: Any,
    model: str,
    *,
    field: str,
    revision: str | None,
    device: str,
    variant: str | None = None,
    **settings: Any,
) -> Any:
    """Load one network of class `kind`, from a directory or from the pinned commit of a hub id.

    Args:
        device: "meta" loads no weights; any other device loads on the CPU.
    Raises:
        InputError: it cannot be loaded, lacks weights, is not in safetensors, or of the hub without
            a commit.
        NotLocal: on the meta device, a hub model that is not on this machine.
    """
    folder = path_or_pinned_id(model, revision, f"{field}_revision")
    if device == META:
        folder = require_local_copy(model, revision, field)
    with _translate_errors(field, model):
        if not isinstance(folder, Path):
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=NETWORK_FILES))
        if folder.is_dir():  # otherwise loading raises the error
            check_weights(folder, field)
        if device == META:
            return _empty_network(kind, folder)
        return _read_network(kind, folder, variant=variant, field=field, **settings)


def load_tiny_decoder(config: GeneratorConfig, vae: Any, *, device: str) -> Any:
    """Load an AutoencoderTiny (TAESD) in place of `vae`; its own config scales the latents.

    Args:
        vae: the model's own, whose precision it takes.
    Raises:
        InputError: it cannot be loaded, or decodes latents or images of another shape.
    """
    assert config.tiny_decoder is not None
    tiny = load_part(
        AutoencoderTiny,
        config.tiny_decoder,
        field=TINY,
        revision=config.tiny_decoder_revision,
        device=device,
    )
    expected = _describe_sizes(vae.config.latent_channels, vae.config.block_out_channels)
    actual = _describe_sizes(tiny.config.latent_channels, tiny.config.num_decoder_blocks)
    if actual != expected:
        raise InputError(TINY, config.tiny_decoder, f"decodes {actual}; the model has {expected}")
    return tiny.to(device=device, dtype=vae.dtype).eval()


def network_bytes(pipeline: Any, variant: str | None = None) -> dict[str, int]:
    """Bytes of the weights of each network of a pipeline; for a quantised one, of its files.

    Args:
        variant: of the files of a quantised network.
    """
    folder, sizes = Path(pipeline.name_or_path), {}
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            quantised = quantisation(folder / name) is not None
            size = file_bytes(folder / name, variant) if quantised else module_bytes(component)
            sizes[name] = size
    return sizes


def file_bytes(folder: Path, variant: str | None) -> int:
    """Bytes of the weight files of a network, with their headers."""
    files = weight_files(folder)
    return sum(path.stat().st_size for path in files.get(variant) or files.get(None) or ())


def module_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers; those that layers share are counted once."""
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_weights_fit(pipeline: Any, config: GeneratorConfig, device: str) -> None:
    """Raises InputError if a GPU lacks memory for the networks, and names the largest."""
    if not device.startswith("cuda"):
        return
    sizes, free = network_bytes(pipeline, config.variant), torch.cuda.mem_get_info(device)[0]
    all_at_once = config.offload == "none"
    needed = sum(sizes.values()) if all_at_once else max(sizes.values(), default=0)
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


def _download(config: GeneratorConfig, components: Mapping[str, object]) -> Path:
    """Download the pinned commit of a hub id, without `components`."""
    settings = {"revision": config.revision, "variant": config.variant, **components}
    with _translate_errors(MODEL, config.model):
        return Path(KINDS[config.family].download(config.model, use_safetensors=True, **settings))


def _from_pretrained(config: GeneratorConfig, folder: Path, **settings: Any) -> Any:
    """Load from a directory, so that nothing more is requested from the hub."""
    with _translate_errors(MODEL, config.model):
        # A component that was saved as none, such as T5, must be passed as None.
        index = read_json(folder / "model_index.json").items()
        settings = {name: None for name, entry in index if entry == [None, None]} | settings
        return KINDS[config.family].from_pretrained(folder, use_safetensors=True, **settings)


@contextmanager
def _translate_errors(field: str, model: str) -> Iterator[None]:
    """Translate errors of the libraries within the block to InputError."""
    try:
        yield
    except InputError:
        raise
    except LOADING_ERRORS as error:
        raise InputError(field, model, reason_in_words(error, model)) from error


def _describe_sizes(channels: int, levels: Any) -> str:
    return f"{channels} channels to images {2 ** (len(levels) - 1)} times as wide"


def _empty_networks(folder: Path, replaced: Container[str]) -> dict[str, nn.Module]:
    """The networks in the model's index, except those `replaced`, on the meta device."""
    with _translate_errors(MODEL, str(folder)):
        kinds = _network_kinds(folder, replaced)
        return {name: _empty_network(kind, folder / name) for name, kind in kinds.items()}


def _network_kinds(folder: Path, replaced: Container[str]) -> dict[str, Any]:
    """The classes of the networks in the model's index, except those `replaced`."""
    kinds = {}
    for component, entry in read_json(folder / "model_index.json").items():
        if component in replaced or not isinstance(entry, list) or entry[0] not in LIBRARIES:
            continue
        kind = getattr(LIBRARIES[entry[0]], entry[1], None)
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            kinds[component] = kind
    return kinds


def _empty_network(kind: Any, folder: Path) -> Any:
    """A network of diffusers or transformers from its config file, without weights."""
    with torch.device(META):
        if issubclass(kind, diffusers.ModelMixin):
            return kind.from_config(kind.load_config(folder))
        return kind(kind.config_class.from_dict(read_json(folder / "config.json")))


def _tuned_unet(
    config: GeneratorConfig, model: Path | str, *, device: str, **settings: Any
) -> UNet2DConditionModel:
    """Load a tuned U-Net. Raises InputError if it takes or gives other than the model's own."""
    assert config.unet is not None
    field = "generator.unet"
    settings |= {"field": field, "revision": config.unet_revision, "device": device}
    unet = load_part(UNet2DConditionModel, config.unet, **settings)
    base = unet.load_config(model, subfolder="unet", revision=config.revision)
    for name in ("in_channels", "out_channels", "cross_attention_dim", "addition_embed_type"):
        if unet.config[name] != base.get(name):
            remedy = f"its {name} is {unet.config[name]}, that of the model's own {base.get(name)}"
            raise InputError(field, config.unet, remedy)
    check_latent_size(unet.config, field, config.unet)  # a hub model was not checked before
    return unet


def add_lora(pipeline: Any, loras: Sequence[LoraConfig]) -> None:
    """Fuse the low-rank updates, times their `scale`, into the weights, so that they add no cost.

    Raises:
        InputError: a file that cannot be read, or fits the model's networks only partly or not.
    """
    for lora in loras:
        folder, name = lora_file(lora)
        settings = {"weight_name": name, "revision": lora.revision, "use_safetensors": True}
        try:
            stored = _layers_in_file(pipeline, folder, settings)
            pipeline.load_lora_weights(folder, **settings)
            fitted = _layers_in_networks(pipeline)
            pipeline.fuse_lora(lora_scale=lora.scale)
            pipeline.unload_lora_weights()
        except LORA_ERRORS as error:
            remedy = f"cannot be added: {' '.join(str(error).split())[:200]}"
            raise InputError("generator.lora", lora.path, remedy) from error
        # diffusers ignores layers that do not fit.
        if not 0 < stored == fitted:
            remedy = f"{fitted} of its {stored} layers fit this model; was it made for another?"
            raise InputError("generator.lora", lora.path, remedy)


def _layers_in_file(pipeline: Any, folder: str, settings: Mapping[str, object]) -> int:
    weights = pipeline.lora_state_dict(folder, unet_config=pipeline.unet.config, **settings)[0]
    return sum(key.endswith(DOWN_SUFFIXES) for key in weights)


def _layers_in_networks(pipeline: Any) -> int:
    components = pipeline.components.values()
    networks = [component for component in components if isinstance(component, nn.Module)]
    modules = [module for network in networks for module in network.modules()]
    return sum(isinstance(module, BaseTunerLayer) for module in modules)
