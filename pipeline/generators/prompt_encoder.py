"""What a flow model's text encoders say of prompts: made before its transformer, kept by content.

T5 takes 9.5 GB in half precision, Qwen3 8: their embeddings are made once on a machine, and whoever
finds them loads no text encoder.
"""

import gc
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from semix.data.files import read_bytes, write_atomically
from semix.data.fingerprint import fingerprint
from semix.data.machine import cache_folder
from semix.data.store import MOST
from semix.data.tensors import open_sealed, seal
from semix.pipeline.conditioning import Conditioning, concatenate, template_mean
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators.loading import KINDS, META, load_pipeline
from semix.pipeline.model_paths import local_path
from semix.pipeline.prompts import checked_prompts, configure_tokenizer
from semix.pipeline.provenance import file_hashes, library_versions

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
IMAGES = ("transformer", "vae")
log = logging.getLogger("semix.generators")

EncodePrompt = Callable[[Any, str], Conditioning]  # a pipeline with its text encoders, and a prompt


class PromptEncoder:
    """Conditionings of prompts, one row each.

    Args:
        encode_prompt: gives the row of a prompt.
    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(
        self, config: GeneratorConfig, *, device: str, encode_prompt: EncodePrompt
    ) -> None:
        self.config, self.device, self.encode_prompt = config, device, encode_prompt
        silent = load_pipeline(config, device=device, **self.without(*ENCODERS, *IMAGES))
        found = [(name, getattr(silent, name, None)) for name in TOKENIZERS]
        self.tokenizers = [
            configure_tokenizer(part, config, name) for name, part in found if part is not None
        ]
        self.cache: dict[str, Conditioning] = {}

    def without(self, *parts: str) -> dict[str, None]:
        """What `load_pipeline` is told to leave these out."""
        taken = inspect.signature(KINDS[self.config.family].__init__).parameters
        return {part: None for part in parts if part in taken}

    def prefetch(self, names: Sequence[str]) -> Conditioning:
        """The row of the empty prompt; those of these classes are made with the same loading."""
        versions = checked_prompts(self.config, names, self.tokenizers)
        self.prepare(["", *(text for texts in versions for text in texts)])
        return self.rows([""])

    def encode(self, names: Sequence[str]) -> Conditioning:
        """A row for each class name, the mean over the templates.

        Raises:
            InputError: a prompt is longer than a text encoder reads.
        """
        versions = checked_prompts(self.config, names, self.tokenizers)
        self.prepare(text for texts in versions for text in texts)  # all with one loading
        return template_mean([self.rows(texts) for texts in versions])

    def rows(self, texts: Sequence[str]) -> Conditioning:
        """A row for each prompt; the encoders are gone when it returns."""
        self.prepare(texts)
        return concatenate(self.cache[text] for text in texts)

    def prepare(self, texts: Iterable[str]) -> None:
        """Find the prompts, or ask for those that are not there."""
        texts = list(dict.fromkeys(texts))
        for text in texts:
            if text not in self.cache and (kept := self._read(text)) is not None:
                self.cache[text] = kept
        if missing := [text for text in texts if text not in self.cache]:
            pipeline = load_pipeline(self.config, device=self.device, **self.without(*IMAGES))
            for text in missing:
                # One prompt a call: the embedding then never depends on which others there are.
                with torch.no_grad():
                    self.cache[text] = self.encode_prompt(pipeline, text)
                self._write(text)
            pipeline.remove_all_hooks()
            del pipeline
            gc.collect()  # layers that were hooked hold each other
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _read(self, text: str) -> Conditioning | None:
        """What this machine has of the prompt; a damaged file counts as nothing."""
        digest = self._digest(text)
        if digest is None:
            return None
        path = _cache(digest)
        try:
            parts, facts = open_sealed(read_bytes(path, most=MOST))
            if facts.get("digest") != digest:
                raise ValueError("belongs to another prompt or model")
            rows = {name: torch.from_numpy(part).to(self.device) for name, part in parts.items()}
            return Conditioning(**rows)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s is not used, and made again: %s", path, error)
            return None

    def _write(self, text: str) -> None:
        """Put it into the cache folder; one that cannot be written is only worth a warning."""
        digest, row = self._digest(text), self.cache[text]
        if digest is None:
            return
        parts = {"tokens": row.tokens.cpu()}
        if row.pooled is not None:
            parts["pooled"] = row.pooled.cpu()
        try:
            write_atomically(_cache(digest), seal(parts, {"digest": digest}))
        except OSError as error:
            log.warning("what a prompt encodes to is not cached: %s", error)

    def _digest(self, text: str) -> str | None:
        """None on the meta device, where nothing has a value."""
        return None if self.device == META else fingerprint([self._identity, text])

    @cached_property
    def _identity(self) -> object:
        """All that decides the numbers: encoders and tokenizers, how they are asked, and where."""
        config, folder = self.config, local_path(self.config.model)
        source: object = [config.model, config.revision]
        if folder is not None:
            parts = (folder / part for part in (*ENCODERS, *TOKENIZERS))
            source = [file_hashes(part, variant=config.variant) for part in parts]
        asked = [config.family, config.prompt_length, config.dtype, config.variant]
        return [source, asked, torch.device(self.device).type, library_versions()]


def _cache(digest: str) -> Path:
    return cache_folder() / f"prompt-{digest}.safetensors"
