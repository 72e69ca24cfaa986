"""Prompts as the models' own tokenizers see them."""

from collections.abc import Sequence
from typing import Any

import torch

from data.errors import InputError
from pipeline.conditioning import Conditioning
from pipeline.config import PLACEHOLDER, GeneratorConfig
from pipeline.prompts import padded_names, prompts


def checked_prompts(
    config: GeneratorConfig, names: Sequence[str], tokenizers: Sequence[Any]
) -> list[list[str]]:
    """The prompts of all classes, for each template [T][K].

    Raises:
        InputError: a prompt has more tokens than one of the tokenizers allows, or names cannot
            be padded.
    """
    if config.pad_names:
        # Counted as it stands in a prompt, where underscores are spaces.
        names = padded_names(
            names, lambda name: _length(tokenizers[0], *prompts(PLACEHOLDER, [name]))
        )
    versions = [prompts(template, names) for template in config.templates]
    for tokenizer in tokenizers:
        for text in (text for texts in versions for text in texts):
            length, most = _length(tokenizer, text), tokenizer.model_max_length
            if length > most:
                remedy = f"has {length} tokens, the model reads {most}"
                raise InputError("generator.prompt", repr(text), remedy)
    return versions


def template_mean(encoded: Sequence[Conditioning]) -> Conditioning:
    """The mean over templates of what they encode to, N rows each."""
    if len(encoded) == 1:
        return encoded[0]
    pooled = [part.pooled for part in encoded if part.pooled is not None]
    return Conditioning(
        torch.stack([part.tokens for part in encoded]).mean(dim=0),
        torch.stack(pooled).mean(dim=0) if pooled else None,
    )


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, verbose=False).input_ids)
