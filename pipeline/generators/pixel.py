"""Class-conditional U-Nets that make pixels without a VAE: consistency models, EDM, DDPM."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor, nn

from semix.data.errors import InputError
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators.dit import WeightedLabels, labels_of_names, one_hot_rows
from semix.pipeline.generators.guidance import GuidedDenoiser
from semix.pipeline.generators.loading import load_pipeline, native_shape


class PixelModel(GuidedDenoiser):
    """The denoiser of a pipeline that holds a class-conditional UNet2DModel; see `Denoiser`.

    A condition is a row of weights over the model's labels, as in CSM's own generator (Luo et al.
    2025, arXiv 2504.13548). Such models have no empty label, so they take no guidance.

    Raises:
        InputError: the model cannot be loaded, or has no labels.
    """

    def __init__(self, config: GeneratorConfig, *, device: str) -> None:
        self.config, self.device = config, device
        self.pipeline = load_pipeline(config, device=device)
        self.network = self.pipeline.unet
        self.labels = self.network.config.num_class_embeds
        if not isinstance(self.network.class_embedding, nn.Embedding) or not self.labels:
            remedy = "its U-Net has no labels (num_class_embeds); take a class-conditional one"
            raise InputError("generator.model", config.model, remedy)
        self.network.class_embedding = WeightedLabels(self.network.class_embedding)
        self.scheduler = self.pipeline.scheduler
        self.latent_shape: tuple[int, ...] = native_shape(self.network)
        self.pipeline.vae = Pixels(self.latent_shape[0])
        self.unconditional = one_hot_rows([0], self.labels, device=device)  # only counted

    def encode(self, names: Sequence[str]) -> Conditioning:
        """One-hot weights [N, labels].

        Raises:
            InputError: a name that is not, or not clearly, one of the model's labels.
        """
        numbers = labels_of_names(names, self.pipeline, self.config, self.labels)
        return one_hot_rows(numbers, self.labels, device=self.device)

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning) -> Tensor:
        output: Tensor = self.network(
            latents, timestep, class_labels=condition.tokens, return_dict=False
        )[0]
        return output[:, : latents.shape[1]]  # without a learned variance


class Pixels(nn.Module):
    """In the place of a VAE: latents are pixels."""

    dtype = torch.float32

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.decoder = nn.Identity()
        self.config = FrozenDict(
            latent_channels=channels, block_out_channels=(1,), scaling_factor=1.0
        )

    def decode(self, latents: Tensor, *, return_dict: bool) -> tuple[Any]:
        return (self.decoder(latents),)
