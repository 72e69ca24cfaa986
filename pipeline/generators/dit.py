"""DiT: a transformer that knows classes by number, without text."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import DiTPipeline
from torch import Tensor, nn

from pipeline.checks.model_paths import local_path
from pipeline.conditioning import Conditioning
from pipeline.config import GeneratorConfig
from pipeline.generators.labels import label_numbers
from pipeline.generators.loading import load_pipeline, native_shape


class DiT:
    """The denoiser of a DiTPipeline; see `Denoiser`.

    A class is a row of weights over the model's labels, so that mixing two classes mixes their
    embeddings in every block. Prompt templates have no meaning here. Source of mixing one-hot
    vectors: the generator of CSM (Luo et al. 2025, arXiv 2504.13548).

    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(self, config: GeneratorConfig, *, device: str) -> None:
        self.config = config
        self.pipeline = load_pipeline(DiTPipeline, config, device=device)
        self.network = self.pipeline.transformer
        self.latent_shape: tuple[int, ...] = native_shape(self.network)
        for block in self.network.transformer_blocks:
            embedder = block.norm1.emb
            embedder.class_embedder = WeightedLabels(embedder.class_embedder.embedding_table)
        # What compile_repeated_blocks looks for; diffusers has not declared it for this class.
        self.network._repeated_blocks = ["BasicTransformerBlock"]
        self.labels = self.network.config.num_embeds_ada_norm
        # The row behind the labels is the one that training put in place of a dropped label.
        self.unconditional = self._rows([self.labels])

    def encode(self, names: Sequence[str]) -> Conditioning:
        """One-hot weights [N, labels + 1].

        Raises:
            InputError: a name that is not, or not clearly, one of the model's labels.
        """
        model = local_path(self.config.model) or self.config.model
        index = self.pipeline.load_config(model, revision=self.config.revision)
        known = {int(number): names for number, names in index.get("id2label", {}).items()}
        numbers = set(self.config.names.values())
        return self._rows(label_numbers(names, known, self.labels, numbers=numbers))

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning) -> Tensor:
        output = self.network(
            latents,
            timestep.expand(len(latents)),
            class_labels=condition.tokens,
            return_dict=False,
        )[0]
        return output[:, : latents.shape[1]]  # behind it a learned variance, which DDIM needs not

    def _rows(self, numbers: Sequence[int]) -> Conditioning:
        chosen = torch.tensor(numbers, device=self.pipeline.device)
        return Conditioning(F.one_hot(chosen, self.labels + 1).float())


class WeightedLabels(nn.Module):
    """Weights over labels to the weighted sum of their embeddings."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, weights: Tensor) -> Tensor:
        """[B, labels + 1] to [B, D]; exactly a label's embedding where its weight alone is 1."""
        table = self.table.weight
        # In float32: half precision would round the weights of a mixture.
        return (weights.float() @ table.float()).to(table.dtype)
