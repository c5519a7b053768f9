"""Tiny Qwen2 models, with which the recipes' warm starts begin."""

from __future__ import annotations

import math

import torch
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


def tiny_config(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int, positions: int, initializer_range: float
) -> Qwen2Config:
    """Return the configuration of a tiny Qwen2 with four heads and tied embeddings.

    Args:
        tokenizer: Its tokenizer, of `tiny_tokenizer`.
        hidden_size: Size of a token's vector; the inner layer has three times as much.
        layers: Number of layers.
        positions: Largest number of tokens.
        initializer_range: Standard deviation of the random weights; about 1/sqrt(hidden_size).
    """
    return Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        bos_token_id=None,
    )


def suffix_logits(model: Qwen2ForCausalLM, prefix_ids: list[int], ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the logits `[B, T, V]` of rows that share a prefix, which the model runs only once, with gradients.

    Args:
        model: The model.
        prefix_ids: Token ids of the shared prefix.
        ids_BT: Token ids of the rows after the prefix.
    """
    return model.lm_head(suffix_states(model, prefix_ids, ids_BT))


def suffix_states(model: Qwen2ForCausalLM, prefix_ids: list[int], ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states `[B, T, H]` of rows that share a prefix, as `suffix_logits` takes them."""
    cache = model.model(input_ids=torch.tensor([prefix_ids]), use_cache=True).past_key_values
    expanded = DynamicCache()
    for index, layer in enumerate(cache.layers):
        rows = (ids_BT.shape[0], -1, -1, -1)
        expanded.update(layer.keys.expand(*rows), layer.values.expand(*rows), index)
    return model.model(input_ids=ids_BT, past_key_values=expanded).last_hidden_state
