"""Prompts against a local model's tokenizers, before its weights are loaded."""

from collections.abc import Sequence

from pipeline.checks.model_paths import local_path
from pipeline.config import GeneratorConfig
from pipeline.prompts import checked_prompts, spoken_names


def check_prompts(config: GeneratorConfig, class_names: Sequence[str]) -> None:
    """Names and prompts of all classes; of a hub id only the names.

    Raises:
        InputError: `generator.names` renames a class that is not there; a prompt that the model
            would cut off; names that cannot be padded.
    """
    names = spoken_names(config, class_names)
    folder = local_path(config.model)
    if folder is None or config.family == "dit":
        return
    # transformers takes seconds, which finding a wrong path need not cost
    from transformers import CLIPTokenizer

    parts = [folder / part for part in ("tokenizer", "tokenizer_2") if (folder / part).is_dir()]
    checked_prompts(config, names, [CLIPTokenizer.from_pretrained(part) for part in parts])
