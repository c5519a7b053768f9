"""`ChatEngine`: OpenAI's `/v1/chat/completions` as an `Engine`, for a model whose prompts and answers are words.

    messages, schemas ─▶ endpoint ─▶ text, calls ─▶ TurnWriter ─▶ ids ─▶ the parser reads the same calls

The endpoint has another template, another call format and often another tokenizer. The ids are only our way of writing
down its answer: they were not sampled, and nothing of such a conversation may be trained.

Invariants:
- the parser reads from the ids exactly the calls that came, in their order: names, and arguments as JSON;
- text never becomes a call or a control token, whatever it looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.parsing.call_json import NamedCall, UnreadableCallError, as_json, read_whole_json
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS, ReasoningFinder
from verl_multiturn.chat.parsing.turns import HEADER, CallParser, ToolCall
from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.rollout.engines.http_engine import HttpEngine
from verl_multiturn.rollout.engines.protocol import Ask, Finish, Generation
from verl_multiturn.rollout.trajectory import NO_VERSION

CHAT = "/chat/completions"
"""Path of chat completions, below the address of an endpoint."""
_FINISH: Mapping[Any, Finish] = {"stop": "stop", "tool_calls": "stop", "length": "length"}
_BREAK = "\u200b"
_MARK = re.compile(r"[<\[]")
"""How all marks of calls and of reasoning begin."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class ChatTurn(NamedTuple):
    """The answer of an endpoint in one turn."""

    text: str
    calls: list[NamedCall]
    """Names, and arguments as the endpoint wrote them, which need not be JSON."""
    finish: Finish


class TurnWriter:
    """A writer of turns as ids, in the format `hermes`, which can hold any JSON.

    A call whose arguments are not a JSON object is written such that it cannot be read.

    Args:
        tokenizer: Hugging Face tokenizer of the model in whose ids the turns are written.
        firewall: Breaks its control tokens.
        parser: Reads the format `hermes`.
        end_id: Token that ends a turn.
    """

    def __init__(self, tokenizer: Any, firewall: Firewall, parser: CallParser, end_id: int) -> None:
        self._tokenizer = tokenizer
        self._firewall = firewall
        self._parser = parser
        self._reasoning = ReasoningFinder(REASONING_MARKS)
        self._end_id = end_id

    async def write(self, said: ChatTurn, before: Sequence[int]) -> list[int]:
        """Return the ids of a turn.

        Args:
            said: The turn.
            before: The last ids before it. Where they open a section of reasoning, it is closed first.

        Raises:
            EngineError: No ids of this tokenizer are read as these calls.
        """
        given = [_call(*call) for call in said.calls]
        opened = self._reasoning.opened_by(self._tokenizer.decode(list(before)))
        start = self._encode(f"{dict(REASONING_MARKS)[opened]}\n\n") if opened else []
        end = [] if said.finish == "length" and (said.text or given) else [self._end_id]
        # Control tokens in the text are broken; where it is read as a call all the same, all that may be a mark is.
        texts = said.text, _MARK.sub(rf"\g<0>{_BREAK}", said.text)
        for text, write in product(map(self._clean, texts), (_plain, _escaped)):
            calls = [f"<tool_call>\n{write(call)}\n</tool_call>" for call in given]
            turn = "\n".join(filter(None, [text, *calls]))
            if self._clean(turn) != turn:
                continue
            ids = [*start, *self._encode(turn), *end]
            read = (await self._parser.parse(ids, (), 0, before)).calls
            found = [{"name": call.name, "arguments": call.arguments} for call in read if isinstance(call, ToolCall)]
            wanted = [{**call, "arguments": as_json(call["arguments"])} for call in given if isinstance(call, dict)]
            places = [isinstance(call, ToolCall) for call in read], [isinstance(call, dict) for call in given]
            if found == wanted and places[0] == places[1]:
                return ids
        raise EngineError(f"what the endpoint said cannot be written in the model's tokens: {show(said.text)}")

    def _clean(self, text: str) -> str:
        try:
            return self._firewall.clean(text, "assistant")
        except ConfigError as error:  # here the configuration is right
            raise EngineError(str(error)) from None

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class ChatEngine(HttpEngine):
    """OpenAI's `/v1/chat/completions`, given messages and schemas and answering with text and calls.

    Log-probabilities are unknown (0.0), and so are the weights.

    Args:
        url: Address that ends before `/chat/completions`, as in `https://api.openai.com/v1`.
        model: Name of the model at the endpoint.
        writer: Writes its turns as ids.
        options: As `HttpEngine` has them.
    """

    level = "chat"
    alive_below = 500  # hosted endpoints need not list their models

    reads_messages = True
    """It gives the endpoint messages and tools, not the ids of a prompt."""

    def __init__(self, url: str, model: str, writer: TurnWriter, **options: Any) -> None:
        super().__init__(url, "/models", **options)
        self._model, self._writer = model, writer

    async def check(self) -> None:
        """Ask the model for a few words.

        Raises:
            ConfigError: There is no answer: the address, the model's name or the key is wrong, or the model does not
                take `max_tokens`.
        """
        body = {"model": self._model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        try:
            await self._post(CHAT, body)
        except EngineError as error:
            told = f"the model {self._model!r} does not answer ({describe(error)})"
            raise ConfigError(f"{told}; correct its name, the address or the key in OPENAI_API_KEY") from None

    async def generate(self, ask: Ask) -> Generation:
        """Let the endpoint write the next turn, as `Engine.generate` describes.

        The budget counts the endpoint's tokens there, and ours here: a turn that has more of ours is cut.

        Raises:
            EngineError: There is no answer, or it is not a turn.
        """
        if not ask.messages:
            raise EngineError(f"{self.url}{CHAT} is asked in words, and whoever asks has only ids")
        body = {
            "model": self._model,
            "messages": [_message(each) for each in ask.messages],
            **({"tools": list(ask.tools)} if ask.tools else {}),
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.sampling.get("temperature", 1.0),
            **({"top_p": top_p} if (top_p := ask.sampling.get("top_p", 1.0)) != 1.0 else {}),
        }
        said = self._said(await self._post(CHAT, body))
        ids = await self._writer.write(said, ask.ids[-HEADER:])
        finish: Finish = said.finish if len(ids) <= ask.max_new_tokens else "length"
        ids = ids[: ask.max_new_tokens]
        return Generation(ids, [0.0] * len(ids), [NO_VERSION] * len(ids), finish)

    def _said(self, answer: Mapping[str, Any]) -> ChatTurn:
        where = f"{self.url}{CHAT}"
        try:
            choice = answer["choices"][0]
            message, end = choice["message"], choice["finish_reason"]
            text = message.get("content") or message.get("refusal") or ""
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = [(function["name"], function["arguments"]) for function in functions]
            finish = _FINISH.get(end)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise EngineError(f"{where} answered what is no chat completion: {describe(error)}") from error
        if not all(isinstance(each, str) for each in (text, *(part for call in calls for part in call))):
            raise EngineError(f"{where} answered what is no chat completion: its text or a part of a call is no text")
        if finish is None:
            raise EngineError(f"{where} ended the turn by {show(end)}, which is no end of a turn")
        if end == "tool_calls" and not calls:
            raise EngineError(f"{where} ended the turn by 'tool_calls', and there are none")
        if not text.strip() and not calls and finish != "length":
            raise EngineError(f"{where} answered with neither text nor calls")
        return ChatTurn(text, calls, finish)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form, in which arguments are text, and a tool's answer has the id of its call."""
    sent = dict(message)
    if message["role"] == "tool":
        sent.pop("name", None)
    if message["role"] == "assistant" and isinstance(text := message.get("content"), str):
        for opened, closed in REASONING_MARKS:  # the empty section that `TurnWriter` closed is not the endpoint's
            if text.startswith(opened + closed):
                text = text[len(opened + closed) :].lstrip()
        sent["content"] = text
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [{**call, "type": "function", "function": _function(call["function"])} for call in calls]
        sent["content"] = sent.get("content") or None
    return sent


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else _plain(arguments)}


def _call(name: str, arguments: str) -> Any:
    """Return the text between the tags of a call; for an unreadable one, a list, which is not a call."""
    try:
        value = read_whole_json(arguments.strip() or "{}")  # some endpoints write nothing where there is no argument
        as_json(value)
    except (UnreadableCallError, RecursionError):
        return [name, arguments]
    return {"name": name, "arguments": value} if isinstance(value, dict) else [name, arguments]


def _plain(value: Any) -> str:
    """Write JSON; half characters, which no tokenizer takes, as escapes."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or text == text.encode("utf-8", "replace").decode() else json.dumps(value)


def _escaped(value: Any) -> str:
    """Write JSON whose texts are escapes alone, so that they form no mark and no control token."""

    def escape(found: re.Match[str]) -> str:
        units = json.loads(found[0]).encode("utf-16-be", "surrogatepass").hex()
        return '"' + re.sub("....", r"\\u\g<0>", units) + '"'

    return _STRING.sub(escape, json.dumps(value))
