"""Make the tokenizer of this folder anew.

    python verl_multiturn/rollout/tiny_chat/make_tokenizer.py

It is a byte-level BPE of a few hundred entries with ChatML's control tokens: small, and no text is unknown to it.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ENTRIES = 400
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CALLS = ["<tool_call>", "</tool_call>"]
FOLDER = Path(__file__).parent
TEXT = """
system user assistant tool
You may call these tools: Write a call as
{"type": "function", "function": {"name": "lookup", "description": "Look a key up.", "parameters": {"type": "object",
"properties": {"key": {"type": "string", "description": "The key."}, "count": {"type": "integer"}},
"required": ["key"]}}}
{"name": "lookup", "arguments": {"key": "value"}}
The answer is in what the tool said, and this is all that there is to say about it. What is it? How many are there?
Error: the arguments are no valid JSON; there is no tool with that name, call another one of them again.
"""


def main() -> None:
    """Write tokenizer.json, and the file that names its tokens for transformers (tokenizer_config.json)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    bpe.add_tokens([AddedToken(text, normalized=False) for text in CALLS])
    (FOLDER / "tokenizer.json").write_text(bpe.to_str(pretty=False), encoding="utf-8")
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
