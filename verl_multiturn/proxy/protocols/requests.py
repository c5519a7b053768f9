"""`ChatRequest` and `Completion`: an agent's request and its answer, in one form for all protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.parsing.turns import ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ChatRequest:
    """A request for completions, as a protocol reads it."""

    messages: Sequence[Message]
    """The conversation in the form of OpenAI's chat completions, in the client's order and with the client's roles.

    `content` is a text, "" or absent; or a list of parts where there are images. `tool_calls` have `id` and
    `function.name`; `function.arguments` is the client's JSON text. `reasoning_content` is there where it was sent.
    """
    tools: Sequence[dict[str, Any]] = ()
    """Schemas `{"type": "function", "function": {"name", "description", "parameters"}}`; nothing else is in them."""
    n: int = 1
    """Number of requested completions."""
    stop: Sequence[str] = ()
    """Texts at which a completion ends."""
    max_tokens: int | None = None
    """The most tokens of a completion; None: the rest of the context."""
    logprobs: bool = False
    """Whether the client wants the log-probability of each token."""
    reads_calls: bool = True
    """False: calls in the completion stay text, as the client forbids them (`tool_choice` none)."""
    stream: bool = False
    include_usage: bool = False
    """Whether the client wants the usage at the end of a stream of chat completions."""
    custom_tools: frozenset[str] = frozenset()
    """Names of those `tools` whose calls carry a text. To the model they are functions with one argument, `input`."""
    model: str = ""
    """The model's name as the client wrote it; it is sent back. With `proxy.roles` it names the role."""
    protocol: str = "chat"
    """Name of the protocol: `chat`, `messages` or `responses`."""
    unenforced: Sequence[str] = ()
    """Names of fields that are accepted and change nothing, such as `temperature`; they are counted."""


@dataclass(frozen=True)
class Completion:
    """One generation in the words of the protocols, from the session's memory to the client and to `proxy.select`."""

    id: str
    """Unique in the session, of letters and digits; the protocols put their own prefixes before it."""
    content: str
    """Text outside of calls and reasoning, without the text at which it stopped. An unreadable call is part of it."""
    reasoning: str = ""
    """Text of the reasoning, without its marks."""
    calls: Sequence[ToolCall] = ()
    """Its readable calls; their ids are nine letters and digits, unique in the session."""
    finish: FinishReason = "stop"
    stop: str | None = None
    """The text of the request's `stop` that ended it."""
    prompt_tokens: int = 0
    """Tokens that the engine was given."""
    completion_tokens: int = 0
    """Tokens that were sampled, of reasoning, calls and the end token, too."""
    token_logprobs: Sequence[tuple[str, float]] = field(default_factory=list)
    """Text and log-probability of each sampled token; empty unless they were requested."""
    messages: Sequence[Message] = ()
    """Messages of the request that it answers. These, the tools and the parent are there for `proxy.select` alone."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the request's tools."""
    parent: str | None = None
    """Id of the completion that it continues; None where it begins anew."""
    role: str | None = None
    """Name of the role that wrote it; None without `proxy.roles`."""


Sent = Callable[[str], Completion | None]
"""Returns the completion of a session that has an id, or a call with it; None if there is none."""


def nothing_sent(id_: str) -> None:
    """Return None, as a session that has no completions does."""


class RefusedError(Exception):
    """A request that gets an error and no completion.

    Args:
        status: HTTP status. 400 if a retry cannot succeed.
        code: Machine-readable cause, such as `context_length_exceeded`.
        message: One sentence with the fault and the remedy.
        retry_after_s: Seconds after which a repeat may succeed; 0: it is not known, or none can.
    """

    def __init__(self, status: int, code: str, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status
        self.code = code
        self.message = message


class ContextLengthError(RefusedError):
    """A prompt that leaves no room for a completion; by its code and words harnesses know when to compact.

    Args:
        tokens: Tokens of the prompt.
        most: The most that a prompt may have.
    """

    def __init__(self, tokens: int, most: int) -> None:
        message = (
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
            "tokens. Please reduce the length of the messages."
        )
        super().__init__(400, "context_length_exceeded", message)
        self.tokens = tokens
        self.most = most
