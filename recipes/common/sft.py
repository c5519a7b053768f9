"""Supervised fine-tuning (SFT) in the warm starts of the recipes: token ids, loss masks, batches and updates."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

ASSISTANT = "<|im_start|>assistant\n"
END = "<|im_end|>"


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None = None
) -> tuple[list[int], list[int]]:
    """Return the token ids and the loss mask of a ChatML conversation.

    Each turn is encoded separately, as in a rollout, so that no token spans two turns.

    Args:
        tokenizer: Tokenizer with a ChatML template.
        messages: The conversation.
        tools: Tool schemas for the template; None: none.

    Returns:
        Ids and mask, both `(tokens,)`. The mask is 1 at the assistant's words and the end token after them, else 0.
    """
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    ids: list[int] = []
    mask: list[int] = []
    for index, part in enumerate(text.split(ASSISTANT)):
        said, end, rest = part.partition(END) if index else ("", "", part)
        head = tokenizer.encode(ASSISTANT, add_special_tokens=False) if index else []
        trained = tokenizer.encode(said + end, add_special_tokens=False) if index else []
        after = tokenizer.encode(rest, add_special_tokens=False)
        ids += head + trained + after
        mask += [0] * len(head) + [1] * len(trained) + [0] * len(after)
    return ids, mask


def batch_of(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of rows: ids `[B, T]`, padded on the right, and labels `[B, T]`.

    Args:
        rows: Token ids and loss mask of each row, both `(tokens,)`.
        pad: Id of the padding token.

    Returns:
        Ids and labels. The label of a token is its id where the mask is 1, and -100 elsewhere.
    """
    width = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), width), pad)
    labels_BT = torch.full((len(rows), width), -100)
    for row, (ids, mask) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, : len(ids)] = torch.where(torch.tensor(mask).bool(), torch.tensor(ids), -100)
    return ids_BT, labels_BT


class Learner:
    """AdamW with a linear warm-up and a cosine decay.

    Args:
        model: Model whose parameters are learned.
        lr: Largest learning rate.
        steps: Number of updates.
        warmup: Number of updates until the largest learning rate.
        floor: Share of the largest learning rate that remains after the last update.
        weight_decay: AdamW's weight decay.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: float,
        steps: int,
        warmup: int,
        floor: float = 0.05,
        weight_decay: float = 0.01,
    ) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=weight_decay)

        def share(step: int) -> float:
            decay = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * step / steps))
            return min(1.0, (step + 1) / warmup) * decay

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, share)

    def learn(self, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
        """Make one update on rows of a causal model, and return the mean loss of their learned tokens.

        Args:
            rows: Token ids and loss mask of each row, both `(tokens,)`.
        """
        model: Any = self._model
        ids_BT, labels_BT = batch_of(rows, model.config.pad_token_id)
        learned_BT = labels_BT[:, 1:] != -100
        # Attention is causal and padding on the right, so no attention mask is needed. Logits are for labels alone.
        logits_NV = model.lm_head(model.model(input_ids=ids_BT).last_hidden_state[:, :-1][learned_BT])
        loss = torch.nn.functional.cross_entropy(logits_NV, labels_BT[:, 1:][learned_BT])
        self.update(loss)
        return loss

    def update(self, loss: torch.Tensor) -> None:
        """Make one update with the gradients of a loss."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
