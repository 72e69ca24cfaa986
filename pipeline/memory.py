"""Estimate the GPU memory of a build by counting weights and the live tensors of a batch."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from semix.pipeline.clip import image_tower
from semix.pipeline.config import FLOW_FAMILIES, BuildConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.loading import META, load_pipeline, module_bytes, network_bytes
from semix.pipeline.generators.prompt_encoder import IMAGES

TEXTS = "text_encoder"  # prefix of the names of text encoders


@dataclass(frozen=True)
class MemoryEstimate:
    """GPU memory of a worker in bytes, without the allocator's unused memory and workspaces.

    Attributes:
        texts: the text encoders.
        network: the U-Net or transformer.
        vae: the VAE or the tiny decoder.
        clip: image towers, which stay on the GPU.
        sampling: activations of a call of the network on a whole batch.
        decoding: activations of decoding one `decode_batch`.
        apart: the text encoders are removed before the network is loaded.
        offload: only one network is on the GPU at a time.
    """

    texts: int
    network: int
    vae: int
    clip: int
    sampling: int
    decoding: int
    apart: bool
    offload: bool

    @property
    def weights(self) -> int:
        """Bytes of the weights that must be on the GPU at once."""
        if self.offload:
            return self.clip + max(self.texts, self.network, self.vae)
        if self.apart:
            return self.clip + max(self.texts, self.network + self.vae)
        return self.clip + self.texts + self.network + self.vae

    @property
    def encoding(self) -> int:
        """Bytes while prompts are encoded, unless their encodings are cached."""
        image_networks = 0 if self.apart or self.offload else self.network + self.vae
        return self.clip + self.texts + image_networks

    @property
    def making(self) -> int:
        """Bytes while images are generated and decoded."""
        if self.offload:
            return self.clip + max(self.network + self.sampling, self.vae + self.decoding)
        resident = self.clip + self.network + self.vae + (0 if self.apart else self.texts)
        return resident + max(self.sampling, self.decoding)


def memory_needed(config: BuildConfig) -> MemoryEstimate:
    """Memory of one worker, counted from the models' config files; weights are not needed.

    Raises:
        NotLocal: the models are not on this machine.
        InputError: a model that cannot be used.
    """
    generator = config.generator.model_copy(update={"compile": "none"})
    loaded = load_generator(generator, device=META)
    sizes = network_bytes(loaded.denoiser.pipeline, generator.variant)
    apart = generator.family in FLOW_FAMILIES
    if apart:  # the pipeline has no text encoders any more
        texts_alone = load_pipeline(generator, device=META, **dict.fromkeys(IMAGES))
        sizes |= network_bytes(texts_alone, generator.variant)
    texts = sum(size for name, size in sizes.items() if name.startswith(TEXTS))
    towers = [image_tower(encoder, field) for field, encoder in config.annotation.encoders]
    rows = config.shards.groups_per_batch * config.mixing.images
    latents = torch.empty(rows, *loaded.latent_shape, device=META)
    condition, step = loaded.denoiser.unconditional.expand(rows), torch.tensor(0)
    scale = generator.guidance_scale
    decoded = latents[: loaded.decode_batch]
    return MemoryEstimate(
        texts=texts,
        network=sizes["unet" if "unet" in sizes else "transformer"]
        * (1 if loaded.weak is None else 2),
        vae=module_bytes(loaded.vae),
        clip=sum(module_bytes(tower) for tower in towers),
        sampling=peak_bytes(lambda: loaded.predict(latents, step, condition, scale)),
        decoding=peak_bytes(lambda: loaded.decode(decoded)),
        apart=apart,
        offload=generator.offload == "model",
    )


@torch.no_grad()
def peak_bytes(call: Callable[[], object]) -> int:
    """Peak bytes of the tensors that `call` makes; on the meta device nothing is computed.

    Attention counts as fused kernels compute it, without the matrix of all pairs.
    """
    with _FusedAttention(), _LiveTensors() as live:
        call()
    return live.peak


class _LiveTensors(TorchDispatchMode):
    """Adds up the storages that operations allocate, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.live_bytes = 0
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and _key(leaf) not in inputs | self.storages:
                self._add(leaf.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.storages.add(key)
        self.live_bytes += size
        self.peak = max(self.peak, self.live_bytes)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self.storages.discard(key)
        self.live_bytes -= size


class _FusedAttention(TorchFunctionMode):
    """Replaces attention on the meta device by an empty result of the right shape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            query, _, value = (*args, *(kwargs or {}).values())[:3]
            if query.device.type == META:
                return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
