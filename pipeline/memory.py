"""What a build needs of a GPU's memory: weights, and live tensors of a batch, counted."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from semix.pipeline.clip import image_tower
from semix.pipeline.config import FLOW_FAMILIES, BuildConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.loading import META, load_pipeline, module_bytes, network_bytes
from semix.pipeline.generators.prompt_encoder import IMAGES
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TEXTS = "text_encoder"  # how the names of text encoders start


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes, without what the allocator leaves unused and libraries work in.

    Attributes:
        texts: the text encoders.
        network: the U-Net or transformer.
        vae: or the tiny decoder.
        clip: image towers, which stay.
        sampling: in a call of the network on a whole batch, beside weights.
        decoding: in decoding as many images as are decoded at a time, beside weights.
        apart: the text encoders are gone before the network comes.
        offload: one network at a time is there.
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
        """The least that must be there at a time for any work to be done."""
        if self.offload:
            return self.clip + max(self.texts, self.network, self.vae)
        if self.apart:
            return self.clip + max(self.texts, self.network + self.vae)
        return self.clip + self.texts + self.network + self.vae

    @property
    def encoding(self) -> int:
        """While prompts are encoded; nothing where a machine has kept what they encode to."""
        others = 0 if self.apart or self.offload else self.network + self.vae
        return self.clip + self.texts + others

    @property
    def making(self) -> int:
        """While images are made."""
        if self.offload:
            return self.clip + max(self.network + self.sampling, self.vae + self.decoding)
        resident = self.clip + self.network + self.vae + (0 if self.apart else self.texts)
        return resident + max(self.sampling, self.decoding)


def memory_needed(config: BuildConfig) -> MemoryEstimate:
    """Of one worker, counted from the models' config files; weights are not needed.

    Raises:
        NotHere: they are not on this machine.
        InputError: a model that cannot be used.
    """
    generator = config.generator.model_copy(update={"compile": "none"})
    loaded = load_generator(generator, device=META)
    sizes = network_bytes(loaded.denoiser.pipeline, generator.variant)
    apart = generator.family in FLOW_FAMILIES
    if apart:  # the text encoders are gone again
        texts_alone = load_pipeline(generator, device=META, **dict.fromkeys(IMAGES))
        sizes |= network_bytes(texts_alone, generator.variant)
    texts = sum(size for name, size in sizes.items() if name.startswith(TEXTS))
    towers = [image_tower(encoder, field) for field, encoder in config.annotation.encoders]
    rows = config.shards.groups_per_batch * config.mixing.images
    latents = torch.empty(rows, *loaded.latent_shape, device=META)
    told, step = loaded.denoiser.unconditional.expand(rows), torch.tensor(0)
    scale = generator.guidance_scale
    decoded = latents[: loaded.decode_batch]
    return MemoryEstimate(
        texts=texts,
        network=sizes["unet" if "unet" in sizes else "transformer"],
        vae=module_bytes(loaded.vae),
        clip=sum(module_bytes(tower) for tower in towers),
        sampling=peak_bytes(lambda: loaded.predict(latents, step, told, scale)),
        decoding=peak_bytes(lambda: loaded.decode(decoded)),
        apart=apart,
        offload=generator.offload == "model",
    )


@torch.no_grad()
def peak_bytes(call: Callable[[], object]) -> int:
    """The most that tensors made by `call` take at a time; on the meta device it computes nothing.

    Attention counts as GPUs compute it, without the matrix of all pairs.
    """
    with _FusedAttention(), _Live() as live:
        call()
    return live.most


class _Live(TorchDispatchMode):
    """Adds up the storages that operations make, until nothing holds them any more."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.now = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and _key(leaf) not in given | self.known:
                self._add(leaf.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


class _FusedAttention(TorchFunctionMode):
    """Takes the place of attention by its result alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            query, _, value = (*args, *(kwargs or {}).values())[:3]
            if query.device.type == META:
                return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
