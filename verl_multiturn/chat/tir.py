"""Text mode: tool-integrated reasoning in plain text.

It follows ToRL (arXiv 2503.23383), ZeroTIR (2505.07773), ReTool (2504.11536, its text form) and SimpleTIR (2509.02479).

    … ```python          the model writes this, and stops at the output marker (or at a closed box: `boxes.py`)
    print(6 * 7)
    ```
    ```output
    42                   the loop writes this into the same message, masked
    ```
    So the answer is …   the model goes on

Invariants:
- the model's text up to the token that completes the marker stays as it was sampled; the appended part is plain
  text between that token and the next sampled one, with no turn of the chat template in between;
- a call depends on the sampled text alone, not on how it is split into tokens;
- nothing in a tool response ends the output block (the first line with three backticks would) or becomes a control
  token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from verl_multiturn.chat.boxes import FENCE, OPENS
from verl_multiturn.chat.clipping import Encoder
from verl_multiturn.chat.codec import ChatCodec, Increment, Message, TokenBuilder
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.first_prompts import RequiredPart, Write
from verl_multiturn.chat.parsing.call_json import as_json
from verl_multiturn.chat.parsing.turns import AssistantTurn, MalformedCall, ParserTokenizer, ToolCall, turn_text
from verl_multiturn.errors import ConfigError

TIR = "tir"
"""The value of `rollout.multi_turn.format` that turns text mode on."""

STOP_PATTERN = r"(?:\A|\n)```output"
"""Regular expression for the output marker, at the beginning of a line or of the text sampled at once."""

_MARKER = re.compile(STOP_PATTERN)
_BACKTICKS = re.compile(r"`(?=``)")
_BREAK = "`\u200b"
# How many of the last tokens are decoded to see whether they end with a new line.
_TAIL = 16


class TextTokenizer(Encoder, ParserTokenizer, Protocol):
    """The part of a Hugging Face tokenizer that text mode uses."""


def code_tool(schemas: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the tool that runs a request's code; None for a request without tools.

    Raises:
        ConfigError: None of the tools takes code (see `takes_code`), or several do.
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
    """Return whether a tool with this schema requires a string `code`, and no other argument."""
    parameters = schema["function"].get("parameters") or {}
    code = (parameters.get("properties") or {}).get("code")
    return parameters.get("required") == ["code"] and isinstance(code, Mapping) and code.get("type") == "string"


class TirParser:
    """A parser that reads sampled text up to an output marker, or to the end of the message: one call, or none.

    A marker counts only at the beginning of a line. The call's code is the last ```` ```python ```` block between the
    previous output and the marker. A line of three backticks closes a block. A block that is not closed, or no block at
    all, makes a malformed call. The parser does not look for reasoning: text mode is for code within the reasoning.

    Args:
        tokenizer: Decodes sampled tokens.
        end_ids: Token ids that end a message. They are removed from its text.
    """

    def __init__(self, tokenizer: ParserTokenizer, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        """Read a turn, as `CallParser.parse` describes."""
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
    """Return the code of the last block, or None and the problem in words for the model.

    The words hold no backticks, since an output block cannot show them.
    """
    lines = text.split("\n")
    opened: int | None = None
    code: str | None = None
    for number, line in enumerate(map(str.rstrip, lines)):
        if line == OPENS:
            opened = number + 1
        elif line == FENCE and opened is not None:
            code, opened = "\n".join(lines[opened:number]), None
    if opened is not None:
        return None, "the last python block is not closed before the output block; nothing was run"
    return code, "there is no python block since the last output block; nothing was run"


class TirCodec(ChatCodec):
    """A codec that writes only the prompt with the chat template; everything after it is plain text.

    The prompt shows no tool schemas: the row's system message explains the format.

    Args:
        builder: verl's builder for the model.
        firewall: Cleans the text of rows, tools and users; None for a tokenizer without control tokens.
        tokenizer: Encodes and decodes the text that is appended.
        write: As for `ChatCodec`.
    """

    def __init__(
        self,
        builder: TokenBuilder,
        firewall: Firewall | None,
        tokenizer: TextTokenizer,
        write: Write | None = None,
    ) -> None:
        super().__init__(builder, firewall=firewall, tokenizer=tokenizer, write=write)
        self._text = tokenizer

    def initial(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]], check: RequiredPart = RequiredPart.ALL
    ) -> list[int]:
        """Return the ids of the first prompt, as `ChatCodec.initial` does, but without schemas.

        Raises:
            ConfigError: As in `ChatCodec.initial`, or the request has tools and not exactly one of them takes code.
        """
        code_tool(schemas)
        return super().initial(messages, [], check)

    def trusted(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with all control tokens in their text broken.

        In tool responses, three backticks in a row are broken, too.
        """
        if any(message.get("role") != "tool" for message in messages):
            return super().trusted(messages)
        # An observation: no template writes text beside it, and `observation` checks its other neighbours.
        unfenced = [{**message, "content": _unfenced(message["content"])} for message in messages]
        return [self._firewall.clean_message(message) for message in unfenced] if self._firewall else unfenced

    def harmless(self, text: str) -> str:
        """Return the text of a tool with all control tokens, and three backticks in a row, broken."""
        return super().harmless(_unfenced(text))

    def observation(
        self,
        before: Sequence[Message],
        added: Sequence[Message],
        ids: Sequence[int],
        schemas: Sequence[dict[str, Any]],
    ) -> Increment:
        """Return the tokens that complete the output block whose marker ends `ids`.

        The block begins with a new line, unless the sampled token that completed the marker ends with one.
        """
        result = _unfenced("\n".join(message["content"] for message in added))
        head = "" if self._text.decode(list(ids[-_TAIL:])).endswith("\n") else "\n"
        observed = self._encode(head, result)
        firewall = self._firewall
        if firewall is not None and firewall.count(observed) > firewall.count(self._encode(head, "")):
            observed = self._encode(head, firewall.seal(result))  # it formed a control token with its neighbours
        return Increment([], observed)

    def _encode(self, head: str, result: str) -> list[int]:
        tail = FENCE if result.endswith("\n") else f"\n{FENCE}"
        return list(self._text.encode(f"{head}{result}{tail}\n", add_special_tokens=False))


def _unfenced(text: str) -> str:
    """Return the text with zero-width spaces between three backticks in a row."""
    return _BACKTICKS.sub(_BREAK, text)
