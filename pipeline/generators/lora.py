"""Low-rank weights, added to the networks' own when a model is loaded."""

from collections.abc import Sequence
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import nn

from data.errors import InputError
from pipeline.checks.model_paths import lora_file
from pipeline.config import LoraConfig

DOWN = (".lora_A.weight", ".down.weight")  # one such tensor a layer, by format

# What diffusers and peft raise for files that are no LoRA weights, or those of another model.
UNFIT = (
    OSError,
    SafetensorError,
    ValueError,
    RuntimeError,
    AttributeError,
    KeyError,
    IndexError,
)


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


def _layers_in_file(pipeline: Any, folder: str, settings: dict[str, Any]) -> int:
    weights = pipeline.lora_state_dict(folder, unet_config=pipeline.unet.config, **settings)[0]
    return sum(key.endswith(DOWN) for key in weights)


def _layers_in_networks(pipeline: Any) -> int:
    networks = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    modules = [module for network in networks for module in network.modules()]
    return sum(isinstance(module, BaseTunerLayer) for module in modules)
