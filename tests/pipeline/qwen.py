"""A small genuine tokenizer of Qwen's kind: bytes, merges learnt from captions, a chat template."""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Tokenizer

END = "<|endoftext|>"


def qwen_tokenizer(captions: Sequence[str]) -> Qwen2Tokenizer:
    model = Tokenizer(BPE())
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=600,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    model.train_from_iterator(["x , user assistant", *captions] * 3, trainer)
    model_json = json.loads(model.to_str())["model"]
    merges = [tuple(pair) for pair in model_json["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=model_json["vocab"], merges=merges)
    marks = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = (
        "{% for turn in messages %}<|im_start|>{{ turn.role }} {{ turn.content }}<|im_end|>"
        "{% endfor %}<|im_start|>assistant{% if not enable_thinking %} ,{% endif %}"
    )
    return tokenizer
