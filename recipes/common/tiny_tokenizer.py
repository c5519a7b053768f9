"""A tokenizer for tiny models: byte-level BPE with Qwen2.5's control tokens and single-digit numbers."""

from __future__ import annotations

import json
from collections.abc import Callable

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CALL_TOKENS = ["<tool_call>", "</tool_call>"]
# The rule by which Qwen2 splits text: words, single digits, punctuation, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(texts: list[str], template: str, entries: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on texts.

    Args:
        texts: The texts.
        template: Chat template in Jinja.
        entries: Largest size of the vocabulary, before the two tokens around tool calls are added.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens(CALL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def renderer(template: str) -> Callable[..., str]:
    """Return a function that renders a chat template before there is a tokenizer, with `messages` and `tools`.

    Args:
        template: Chat template in Jinja.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template).render
