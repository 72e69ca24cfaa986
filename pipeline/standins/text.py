"""Captions of the classes, and a CLIP tokenizer in which each of their words is one token."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import CLIPTokenizer

from semix.data.errors import InputError
from semix.pipeline.config import PLACEHOLDER
from semix.pipeline.prompts import prompts

Captions = list[list[str]]  # [K][T], per class; its bare name comes last

START, END = "<|startoftext|>", "<|endoftext|>"
WORD_END = "</w>"  # marks the last letter of a word, as in every CLIP vocabulary
MIN_TOKENS, MAX_TOKENS = 16, 77  # tokens of a caption with its two marks; 77 is CLIP's limit


def captions_of(class_names: Sequence[str], templates: Sequence[str]) -> Captions:
    """Fill each template with each class name, as for generation, then add the bare name."""
    by_template = [prompts(template, class_names) for template in (*templates, PLACEHOLDER)]
    return [list(texts) for texts in zip(*by_template, strict=True)]


def build_tokenizer(class_names: Sequence[str], captions: Captions) -> CLIPTokenizer:
    """Build a tokenizer with all bytes and the lower-cased words of the captions.

    Any text can be tokenised: words not in the captions are spelt in bytes. `model_max_length`
    suffices for the longest caption and is at least 16.

    Raises:
        InputError: two classes have equal tokens; a name is empty, too long or has a control token.
    """
    merges = learn_merges(words_of(text for texts in captions for text in texts))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(letter + WORD_END for letter in alphabet)]
    tokens += dict.fromkeys(a + b for a, b in merges)
    # the end mark comes last: open_clip finds the end of a text as its highest token
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*tokens, START, END]))}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges)  # type: ignore[arg-type]  # takes pairs
    _check_names(tokenizer, class_names, captions)
    tokenizer.model_max_length = _context_length(tokenizer, class_names, captions)
    return tokenizer


def tokenise(tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    """Token ids int64 [T,L], padded to the tokenizer's length, as in a diffusers pipeline."""
    encoded = tokenizer(
        texts,
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    )
    ids = encoded["input_ids"]
    assert isinstance(ids, Tensor)
    return ids


def words_of(texts: Iterable[str]) -> list[str]:
    """The words of all texts after CLIP's pre-tokenisation, in its byte alphabet, sorted."""
    backend = CLIPTokenizer().backend_tokenizer
    normal = map(backend.normalizer.normalize_str, texts)
    splits = map(backend.pre_tokenizer.pre_tokenize_str, normal)
    return sorted({word for split in splits for word, _ in split})


def learn_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, in order, that make each word one token.

    Source: Sennrich et al. 2016, algorithm 1, run until nothing is left to merge.
    """
    spellings = [[*word[:-1], word[-1] + WORD_END] for word in words]
    merges: list[tuple[str, str]] = []
    while spellings := [symbols for symbols in spellings if len(symbols) > 1]:
        counts = Counter(pair for symbols in spellings for pair in pairwise(symbols))
        top_pair = max(counts, key=lambda pair: (counts[pair], pair))  # ties by the alphabet
        merges.append(top_pair)
        spellings = [_merge(symbols, top_pair) for symbols in spellings]
    return merges


def _merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in symbols:
        # a symbol is merged only once: in "aaa" the first two
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def _check_names(tokenizer: CLIPTokenizer, class_names: Sequence[str], captions: Captions) -> None:
    """Raises InputError for a name without tokens, or two with equal tokens."""
    names: dict[tuple[int, ...], str] = {}
    for name, (*_, bare) in zip(class_names, captions, strict=True):
        ids = tuple(tokenizer(bare, add_special_tokens=False)["input_ids"])
        if not ids:
            raise InputError("class_names", repr(name), "is blank; give the class a name")
        if set(ids) & set(tokenizer.all_special_ids):
            raise InputError("class_names", repr(name), f"leave out {START} and {END}")
        if ids in names:
            remedy = f"reads like {names[ids]!r} to the models; rename one of the two"
            raise InputError("class_names", repr(name), remedy)
        names[ids] = name


def _context_length(
    tokenizer: CLIPTokenizer, class_names: Sequence[str], captions: Captions
) -> int:
    lengths = [max(len(tokenizer(text)["input_ids"]) for text in texts) for texts in captions]
    longest = max(lengths)
    if longest > MAX_TOKENS:
        name = class_names[lengths.index(longest)]
        remedy = f"its caption has {longest} tokens of at most {MAX_TOKENS}; shorten the name"
        raise InputError("class_names", repr(name), remedy)
    return max(MIN_TOKENS, longest)
