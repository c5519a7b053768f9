"""Text mode: tool-integrated reasoning in plain text, as in ToRL (arXiv 2503.23383), ZeroTIR (2505.07773), ReTool
(2504.11536, its text form) and SimpleTIR (2509.02479).

    … ```python          the model writes this, and stops at the output marker
    print(6 * 7)
    ```
    ```output
    42                   the loop writes this into the same message, masked
    ```
    So the answer is …   the model goes on

Invariants:
- what the model writes up to the token that completes the marker stays as it was sampled; what is appended is plain
  text between that token and the next sampled one, with no turn of the chat template in between;
- a call depends on the sampled text alone, not on how it is split into tokens;
- nothing that a tool answers ends the output block, which the first line with three backticks would, or becomes a
  control token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from verl_multiturn.chat.call_json import as_json
from verl_multiturn.chat.clipping import Encoder
from verl_multiturn.chat.codec import ChatCodec, Increment, Message, TokenBuilder
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.parsers import AssistantTurn, MalformedCall, Tokenizer, ToolCall, turn_text
from verl_multiturn.errors import ConfigError

TIR = "tir"
"""The value of `rollout.multi_turn.format`."""

STOP_PATTERN = r"(?:\A|\n)```output"
"""The output marker as a regular expression: at the beginning of a line, or of what is sampled at once."""

_MARKER = re.compile(STOP_PATTERN)
_FENCE = "```"
_OPENS = "```python"
_BACKTICKS = re.compile(r"`(?=``)")
_BREAK = "`\u200b"
# Tokens whose text says whether the last line is over.
_TAIL = 16


class TextTokenizer(Encoder, Tokenizer, Protocol):
    """What is used of a Hugging Face tokenizer."""


def has_marker(text: str) -> bool:
    """Whether a sampled text has reached an output marker."""
    return _MARKER.search(text) is not None


def code_tool(schemas: Sequence[Mapping[str, Any]]) -> str | None:
    """The name of the tool that a request's code goes to; None for a request without tools.

    Raises:
        ConfigError: not exactly one of the tools takes code: a string `code` and nothing else that is required.
    """
    if not schemas:
        return None
    found = [str(schema["function"]["name"]) for schema in schemas if takes_code(schema)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(repr(schema["function"]["name"]) for schema in schemas)
    raise ConfigError(
        f"rollout.multi_turn.format={TIR}: {len(found) or 'none'} of the tools {listed} take code, expected exactly "
        "one that requires a string `code` and nothing else; change the tools of the YAML, or those that the data row "
        "selects"
    )


def takes_code(schema: Mapping[str, Any]) -> bool:
    """Whether a tool with this schema needs a string `code`, and nothing else."""
    parameters = schema["function"].get("parameters") or {}
    code = (parameters.get("properties") or {}).get("code")
    return parameters.get("required") == ["code"] and isinstance(code, Mapping) and code.get("type") == "string"


class TirParser:
    """Reads what was sampled up to an output marker, or to the end of the message: one call, or none.

    A marker must be at the beginning of a line. Before it, in what was sampled since the last output, the last
    ```` ```python ```` block is the call's code. A block ends with a line of three backticks; one that does not, or no
    block at all, is a malformed call. Whether the model reasons makes no difference: code within its reasoning is what
    this mode is for.

    Args:
        end_ids: ids that end a message; they are no text.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        text = turn_text(self._tokenizer, ids, self._end_ids)
        marker = _MARKER.search(text)
        if marker is None:
            return AssistantTurn(text)
        name, call_id = code_tool(schemas), f"call_{turn}_0"
        code, problem = _last_block(text[: marker.start()])
        if name is None:
            problem = "no code can be run here; answer without it"
        if name is None or code is None:
            return AssistantTurn(text, [MalformedCall(text, problem, call_id)])
        return AssistantTurn(text, [ToolCall(name, as_json({"code": code}), call_id)])


def _last_block(text: str) -> tuple[str | None, str]:
    """The code of the last block, or None and what is wrong, in words for the model (without backticks, which an output
    block cannot show)."""
    lines = text.split("\n")
    opened: int | None = None
    code: str | None = None
    for number, line in enumerate(map(str.rstrip, lines)):
        if line == _OPENS:
            opened = number + 1
        elif line == _FENCE and opened is not None:
            code, opened = "\n".join(lines[opened:number]), None
    if opened is not None:
        return None, "the last python block is not closed before the output block; nothing was run"
    return code, "there is no python block since the last output block; nothing was run"


class TirCodec(ChatCodec):
    """Writes the prompt with the chat template, without tool schemas: the row's system message explains the format.
    Whatever follows is text.

    Args:
        builder, firewall, tokenizer: as of `ChatCodec`.
    """

    def __init__(self, builder: TokenBuilder, firewall: Firewall | None, tokenizer: TextTokenizer) -> None:
        super().__init__(builder, firewall=firewall, tokenizer=tokenizer)
        self._text = tokenizer

    def initial(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> list[int]:
        """As `ChatCodec.initial`.

        Raises:
            ConfigError: also where the request's tools do not say where its code goes to.
        """
        code_tool(schemas)
        return super().initial(messages, [])

    def trusted(self, messages: Sequence[Message]) -> list[Message]:
        if any(message.get("role") != "tool" for message in messages):
            return super().trusted(messages)
        # An observation: there is no template beside it, and `observation` looks at what is.
        unfenced = [{**message, "content": _unfenced(message["content"])} for message in messages]
        return [self._firewall.clean_message(message) for message in unfenced] if self._firewall else unfenced

    def harmless(self, text: str) -> str:
        return super().harmless(_unfenced(text))

    def observation(
        self,
        before: Sequence[Message],
        added: Sequence[Message],
        ids: Sequence[int],
        schemas: Sequence[dict[str, Any]],
    ) -> Increment:
        """The rest of the output block, whose marker is the end of `ids`; a new line first where the sampled token that
        completed the marker has none."""
        result = _unfenced("\n".join(message["content"] for message in added))
        head = "" if self._text.decode(list(ids[-_TAIL:])).endswith("\n") else "\n"
        observed = self._encode(head, result)
        firewall = self._firewall
        if firewall is not None and firewall.count(observed) > firewall.count(self._encode(head, "")):
            observed = self._encode(head, firewall.seal(result))  # together with its neighbours it made a control token
        return Increment([], observed)

    def _encode(self, head: str, result: str) -> list[int]:
        tail = _FENCE if result.endswith("\n") else f"\n{_FENCE}"
        return list(self._text.encode(f"{head}{result}{tail}\n", add_special_tokens=False))


def _unfenced(text: str) -> str:
    """The text without three backticks in a row: zero-width spaces part them."""
    return _BACKTICKS.sub(_BREAK, text)
