"""Encode prompts with a flow model's text encoders before its transformer is loaded; cache them.

T5 takes 9.5 GB in half precision, Qwen3 8 GB: embeddings are computed once per machine, and cached
ones need no text encoder.
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
from semix.data.store import MAX_BYTES
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

EncodePrompt = Callable[[Any, str], Conditioning]  # (pipeline with text encoders, prompt)


class PromptEncoder:
    """Encodes prompts, one row each.

    Args:
        encode_prompt: encodes one prompt to one row.
    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(
        self, config: GeneratorConfig, *, device: str, encode_prompt: EncodePrompt
    ) -> None:
        self.config, self.device, self.encode_prompt = config, device, encode_prompt
        loaded = load_pipeline(config, device=device, **self.arguments_without(*ENCODERS, *IMAGES))
        tokenizers = [(name, getattr(loaded, name, None)) for name in TOKENIZERS]
        self.tokenizers = [
            configure_tokenizer(tokenizer, config, name)
            for name, tokenizer in tokenizers
            if tokenizer is not None
        ]
        self.cache: dict[str, Conditioning] = {}

    def arguments_without(self, *components: str) -> dict[str, None]:
        """Arguments with which `load_pipeline` does not load these components."""
        parameters = inspect.signature(KINDS[self.config.family].__init__).parameters
        return {name: None for name in components if name in parameters}

    def prefetch(self, names: Sequence[str]) -> None:
        """Encode the prompts of these classes, and the empty prompt, into the cache."""
        template_prompts = checked_prompts(self.config, names, self.tokenizers)
        self.prepare(["", *(text for texts in template_prompts for text in texts)])

    def encode(self, names: Sequence[str]) -> Conditioning:
        """Encode class names, one row per name, the mean over the templates.

        Raises:
            InputError: a prompt is longer than a text encoder reads.
        """
        template_prompts = checked_prompts(self.config, names, self.tokenizers)
        # All at once, so that the text encoders are loaded only once.
        self.prepare(text for texts in template_prompts for text in texts)
        return template_mean([self.rows(texts) for texts in template_prompts])

    def rows(self, texts: Sequence[str]) -> Conditioning:
        """One row per prompt; the text encoders are removed when it returns."""
        self.prepare(texts)
        return concatenate(self.cache[text] for text in texts)

    def prepare(self, texts: Iterable[str]) -> None:
        """Take prompts from the cache, and encode the missing ones."""
        texts = list(dict.fromkeys(texts))
        for text in texts:
            if text not in self.cache and (row := self._read(text)) is not None:
                self.cache[text] = row
        if missing := [text for text in texts if text not in self.cache]:
            pipeline = load_pipeline(
                self.config, device=self.device, **self.arguments_without(*IMAGES)
            )
            for text in missing:
                # One prompt per call, so that an embedding does not depend on the other prompts.
                with torch.no_grad():
                    self.cache[text] = self.encode_prompt(pipeline, text)
                self._write(text)
            pipeline.remove_all_hooks()
            del pipeline
            gc.collect()  # layers with hooks refer to each other
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _read(self, text: str) -> Conditioning | None:
        """The cached row of a prompt; None if there is none or it is damaged."""
        digest = self._digest(text)
        if digest is None:
            return None
        path = _cache(digest)
        try:
            tensors, facts = open_sealed(read_bytes(path, max_bytes=MAX_BYTES))
            if facts.get("digest") != digest:
                raise ValueError("belongs to another prompt or model")
            rows = {name: torch.from_numpy(t).to(self.device) for name, t in tensors.items()}
            return Conditioning(**rows)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s is not used, and made again: %s", path, error)
            return None

    def _write(self, text: str) -> None:
        """Write a row to the cache folder; only warn if it cannot be written."""
        digest, row = self._digest(text), self.cache[text]
        if digest is None:
            return
        tensors = {"tokens": row.tokens.cpu()}
        if row.pooled is not None:
            tensors["pooled"] = row.pooled.cpu()
        try:
            write_atomically(_cache(digest), seal(tensors, {"digest": digest}))
        except OSError as error:
            log.warning("the encoding of a prompt is not cached: %s", error)

    def _digest(self, text: str) -> str | None:
        """Digest of a prompt; None on the meta device, where tensors have no values."""
        return None if self.device == META else fingerprint([self._identity, text])

    @cached_property
    def _identity(self) -> object:
        """All that decides the encoding: text encoders, tokenizers, settings and device."""
        config, folder = self.config, local_path(self.config.model)
        source: object = [config.model, config.revision]
        if folder is not None:
            folders = (folder / name for name in (*ENCODERS, *TOKENIZERS))
            source = [file_hashes(path, variant=config.variant) for path in folders]
        settings = [config.family, config.prompt_length, config.dtype, config.variant]
        return [source, settings, torch.device(self.device).type, library_versions()]


def _cache(digest: str) -> Path:
    return cache_folder() / f"prompt-{digest}.safetensors"
