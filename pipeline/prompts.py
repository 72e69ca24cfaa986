"""Turn class names into prompts, and check them with the models' own tokenizers."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from semix.data.errors import InputError
from semix.pipeline.config import PLACEHOLDER, Family, GeneratorConfig

FILLER = ","  # one token in every vocabulary here, without meaning
# The tokenizer (of T5 or Qwen3) that reads `prompt_length` tokens; CLIP's has a fixed length.
LONG_TOKENIZERS: dict[Family, str] = {
    "sd3": "tokenizer_3",
    "flux": "tokenizer_2",
    "flux2": "tokenizer",
    "z_image": "tokenizer",
}
CHAT_THINKING: dict[Family, bool] = {"flux2": False, "z_image": True}  # of Qwen3


def prompts(template: str, names: Sequence[str]) -> list[str]:
    """The template with each class name put in; underscores of folder names become spaces."""
    readable = (unicodedata.normalize("NFC", name).replace("_", " ") for name in names)
    return [template.replace(PLACEHOLDER, name) for name in readable]


class Chat:
    """A tokenizer that wraps prompts as user messages in the chat template of Qwen3."""

    def __init__(self, tokenizer: Any, *, thinking: bool) -> None:
        self.tokenizer, self.thinking = tokenizer, thinking
        self.model_max_length = tokenizer.model_max_length

    def __call__(self, text: str, **settings: Any) -> Any:
        message = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self.thinking,
        )
        return self.tokenizer(message, **settings)


def configure_tokenizer(tokenizer: Any, config: GeneratorConfig, part: str) -> Any:
    """Set up a tokenizer as its family uses it; `part` is its name in the pipeline."""
    if LONG_TOKENIZERS.get(config.family) != part:
        return tokenizer
    tokenizer.model_max_length = config.prompt_length
    thinking = CHAT_THINKING.get(config.family)
    return tokenizer if thinking is None else Chat(tokenizer, thinking=thinking)


def checked_prompts(
    config: GeneratorConfig, names: Sequence[str], tokenizers: Sequence[Any]
) -> list[list[str]]:
    """The prompts of all classes per template, [T][K], after checks.

    Raises:
        InputError: a prompt has more tokens than one of the tokenizers allows; names cannot be
            padded; prompts of unequal length for z_image.
    """
    if config.pad_names:
        # Counted within a prompt, where underscores are spaces.
        names = padded_names(
            names, lambda name: _length(tokenizers[0], *prompts(PLACEHOLDER, [name]))
        )
    template_prompts = [prompts(template, names) for template in config.templates]
    for tokenizer in tokenizers:
        for text in (text for texts in template_prompts for text in texts):
            length, limit = _length(tokenizer, text), tokenizer.model_max_length
            if length > limit:
                remedy = f"has {length} tokens, the model reads {limit}"
                raise InputError("generator.prompt", repr(text), remedy)
    if config.family == "z_image":
        _check_equal_lengths([text for texts in template_prompts for text in texts], tokenizers[0])
    return template_prompts


def _check_equal_lengths(texts: Sequence[str], tokenizer: Any) -> None:
    """Z-Image reads a prompt at its own length, and only equal lengths can be mixed."""
    if not texts:
        return
    lengths = {text: _length(tokenizer, text) for text in texts}
    shortest, longest = (choose(lengths, key=lengths.__getitem__) for choose in (min, max))
    if lengths[shortest] != lengths[longest]:
        remedy = f"has {lengths[longest]} tokens and {shortest!r} {lengths[shortest]}, and Z-Image "
        remedy += "mixes prompts of one length; set generator.pad_names to true"
        raise InputError("generator.prompt", repr(longest), remedy)


def prompt_names(config: GeneratorConfig, class_names: Sequence[str]) -> list[str]:
    """The name of each class in prompts: its own, or its entry in `generator.names`.

    Raises:
        InputError: `generator.names` renames an unknown class.
    """
    return [_renames(config.names, class_names).get(name, name) for name in class_names]


def _renames(names: Mapping[str, str], class_names: Sequence[str]) -> Mapping[str, str]:
    unknown = sorted(set(names) - set(class_names))
    if unknown:
        known = ", ".join(class_names[:10]) + (", ..." if len(class_names) > 10 else "")
        raise InputError("generator.names", unknown[0], f"is no class of the data ({known})")
    return names


def padded_names(names: Sequence[str], length: Callable[[str], int]) -> list[str]:
    """Names filled with commas until all have as many tokens as the longest.

    Args:
        length: tokens of a text.
    Raises:
        InputError: the model's tokenizer does not count a comma as one token.
    """
    lengths = [length(name) for name in names]
    padded = [
        " ".join([name, *[FILLER] * (max(lengths) - count)])
        for name, count in zip(names, lengths, strict=True)
    ]
    for name in padded:
        if length(name) != max(lengths):
            remedy = (
                "this model's tokenizer cannot fill names evenly; switch generator.pad_names off"
            )
            raise InputError("generator.pad_names", repr(name), remedy)
    return padded


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, verbose=False).input_ids)
