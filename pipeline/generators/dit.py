"""DiT: a class-conditional transformer without text."""

import difflib
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semix.data.errors import InputError
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators.guidance import GuidedDenoiser
from semix.pipeline.generators.loading import load_pipeline, native_shape
from semix.pipeline.model_paths import local_path

NAMES = "generator.names"


class DiT(GuidedDenoiser):
    """The denoiser of a DiTPipeline; see `Denoiser`.

    A condition is a row of weights over the model's labels, so that mixing two classes mixes their
    embeddings in every block. Prompt templates are not used. Source of mixing one-hot vectors: the
    generator of CSM (Luo et al. 2025, arXiv 2504.13548).

    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(self, config: GeneratorConfig, *, device: str) -> None:
        self.config, self.device = config, device
        self.pipeline = load_pipeline(config, device=device)
        self.network = self.pipeline.transformer
        self.scheduler = self.pipeline.scheduler
        self.latent_shape: tuple[int, ...] = native_shape(self.network)
        for block in self.network.transformer_blocks:
            embedder = block.norm1.emb
            embedder.class_embedder = WeightedLabels(embedder.class_embedder.embedding_table)
        # Needed by compile_repeated_blocks; diffusers does not declare it for this class.
        self.network._repeated_blocks = ["BasicTransformerBlock"]
        self.labels = self.network.config.num_embeds_ada_norm
        # The row behind the labels is the one that training used for dropped labels.
        self.unconditional = one_hot_rows([self.labels], self.labels + 1, device=device)

    def encode(self, names: Sequence[str]) -> Conditioning:
        """One-hot weights [N, labels + 1].

        Raises:
            InputError: a name that is not, or not clearly, one of the model's labels.
        """
        numbers = labels_of_names(names, self.pipeline, self.config, self.labels)
        return one_hot_rows(numbers, self.labels + 1, device=self.device)

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning) -> Tensor:
        output = self.network(
            latents,
            timestep.expand(len(latents)),
            class_labels=condition.tokens,
            return_dict=False,
        )[0]
        return output[:, : latents.shape[1]]  # without the learned variance


class WeightedLabels(nn.Module):
    """Maps weights over labels to the weighted sum of their embeddings."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, weights: Tensor) -> Tensor:
        """[B, labels + 1] to [B, D]; exactly the embedding of a label of weight 1."""
        table = self.table.weight
        # In float32: half precision would round the weights of a mixture.
        return (weights.float() @ table.float()).to(table.dtype)


def one_hot_rows(numbers: Sequence[int], width: int, *, device: str) -> Conditioning:
    """One-hot weights of labels, [N, width]."""
    return Conditioning(F.one_hot(torch.tensor(numbers, device=device), width).float())


def labels_of_names(
    names: Sequence[str], pipeline: Any, config: GeneratorConfig, count: int
) -> list[int]:
    """The label of each class name, by the names in the model's index or by number.

    Args:
        count: labels of the model.
    Raises:
        InputError: see `label_numbers`.
    """
    model = local_path(config.model) or config.model
    index = pipeline.load_config(model, revision=config.revision)
    label_names = {int(number): text for number, text in index.get("id2label", {}).items()}
    return label_numbers(names, label_names, count, numbers=set(config.names.values()))


def label_numbers(
    names: Sequence[str],
    label_names: Mapping[int, str],
    count: int,
    *,
    numbers: Collection[str] = (),
) -> list[int]:
    """The label of each name, ignoring case and underscores.

    Args:
        label_names: by number; several names of one label are separated by commas.
        count: labels of the model.
        numbers: names that may be the number of a label.
    Raises:
        InputError: a name that is no label, or that several labels share.
    """
    by_name: dict[str, set[int]] = defaultdict(set)
    for number, text in label_names.items():
        for name in (text, *text.split(",")):
            by_name[_plain(name)].add(number)
    return [_number(name, by_name, count, name in numbers) for name in names]


def _number(name: str, by_name: Mapping[str, set[int]], count: int, by_number: bool) -> int:
    matches = sorted(by_name.get(_plain(name), ()))
    if len(matches) == 1:
        return matches[0]
    if matches:
        shared = ", ".join(map(str, matches))
        raise InputError(NAMES, repr(name), f"is what labels {shared} are called; give the number")
    if by_number and name.isdecimal():
        if int(name) < count:
            return int(name)
        raise InputError(NAMES, repr(name), f"the model's labels are 0 to {count - 1}")
    near = difflib.get_close_matches(_plain(name), by_name, n=3)
    hint = f" such as {', '.join(near)}" if near else ""
    remedy = f"is no label of the model; map it to one{hint} or to a label's number"
    raise InputError(NAMES, repr(name), remedy)


def _plain(name: str) -> str:
    spaced = unicodedata.normalize("NFC", name).replace("_", " ")
    return " ".join(spaced.split()).casefold()
