"""Customers of τ² without a language model, for `--smoke`: each sends its task's text, and leaves after an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.config import read_model
from verl_multiturn.task_sets.tau2.package import STOP_WORDS, user_prompt
from verl_multiturn.task_sets.tau2.user import Customer, CustomerSettings

_REASON = re.compile(r"Reason for call:\n(.*?)\n\t[A-Z][a-z]+ [a-z]+:", re.DOTALL)


def wish_of(prompt: str) -> str:
    """Return a customer's first message: why the customer calls, in the words of the task.

    Args:
        prompt: The message that τ² gives to the model that plays the customer.
    """
    found = _REASON.search(prompt)
    return " ".join(found[1].split()) if found else "Hello."


def first_words(domain: str, task: str) -> str:
    """Return the first message of a task's customer."""
    return wish_of(user_prompt(domain, task))


class ScriptedCustomer(Customer):
    """A customer who sends one message, and leaves.

    Args:
        config: `CustomerSettings`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config, read_model(CustomerSettings, config, "ScriptedCustomer: config"))

    async def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Send the customer's wish; after the agent's answer, leave."""
        # The customer's own turns are those of the assistant here.
        has_spoken = any(message["role"] == "assistant" for message in messages)
        return STOP_WORDS[0] if has_spoken else wish_of(messages[0]["content"])
