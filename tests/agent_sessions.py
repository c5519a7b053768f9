"""Sessions of agents on a scripted engine, for tests of the proxy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.session_play import certified
from verl_multiturn.certificate.receipts import ReceiptingEngine, Receipts
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.chat.rendering_check import RenderingCheck
from verl_multiturn.chat.template import Template
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.rendering import PromptRenderer
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.proxy.sessions.turn_reading import TurnReader
from verl_multiturn.rollout.engines.protocol import Engine
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.scripted_chat import tiny_codec, tiny_tokenizer

END = "<|im_end|>"
HEADER = "<|im_start|>assistant\n"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def echo(completion: Completion, **changed: Any) -> dict[str, Any]:
    """Return a completion as the OpenAI SDK sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.content or None}
    if completion.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in completion.calls
        ]
    return {**message, **changed}


def answer(completion: Completion, *texts: str) -> list[dict[str, Any]]:
    """Return the messages of tools that answer a completion's calls."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(completion.calls, texts, strict=True)
    ]


def turns(*texts: str) -> Callable[[str, Sequence[int], int], list[int]]:
    """Return a script that gives the texts in order to any caller. A text that ends with "…" lacks its end token."""
    left = list(texts)

    def script(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
        text = left.pop(0)
        return tiny_tokenizer().encode(text[:-1] if text.endswith("…") else text + END)

    return script


def tiny_template() -> Template:
    """Return the tiny tokenizer's template, with the Hermes format."""
    tokenizer = tiny_tokenizer()
    ends = [tokenizer.eos_token_id]
    codec = tiny_codec(tokenizer)
    check = RenderingCheck(tokenizer, {}, HEADER, ends)
    return Template(tokenizer, codec, check, JsonParser(tokenizer, ends), ends, HEADER)


def make_run(engine: Engine | Callable[[str, Sequence[int], int], Sequence[int]], **settings: Any) -> ProxyRun:
    """Return the parts that sessions share, with the tiny tokenizer and the Hermes format."""
    tokenizer = tiny_tokenizer()
    ends = [tokenizer.eos_token_id]
    codec = tiny_codec(tokenizer)
    made = ScriptedEngine(engine, version=3) if callable(engine) else engine
    limits: dict[str, Any] = {"prompt_length": 4096, "response_length": 4096}
    limits |= {key: settings.pop(key) for key in ("prompt_length", "response_length", "turn_length") if key in settings}
    return ProxyRun(
        engine=ReceiptingEngine(StopTexts(made, tokenizer)),
        renderer=PromptRenderer(codec, ends),
        reader=TurnReader(JsonParser(tokenizer, ends), tokenizer, ends, [THINK]),
        limits=Limits(**limits),
        fill_id=tokenizer.eos_token_id,
        **settings,
    )


class Agent:
    """A client of one session that gets the answers to its requests."""

    def __init__(self, run: ProxyRun, name: str = "s") -> None:
        self.trained = None if run.roles is None else run.roles.trained
        self.session = AgentSession(name, run, {"temperature": 1.0})

    async def ask(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), lost: bool = False, **more: Any
    ) -> Completion:
        delivery = await self.session.complete(ChatRequest(list(messages), tools, **more))
        (delivery.undelivered if lost else delivery.delivered)()
        return delivery.completions[0]

    async def close(self, reason: StopReason = StopReason.FINISHED) -> tuple[Outcome, list[Receipts]]:
        """End the session; return its outcome and receipts, which the certificate has found right."""
        self.session.end()
        await self.session.closed()
        await self.session.select()
        outcome = self.session.outcome(reason)
        receipts = Receipts.of_rows(
            self.session.id, self.session.receipts(), outcome.places, "u", 0, False, not outcome.valid
        )
        assert certified(outcome, receipts, self.trained) == []
        return outcome, receipts


def texts(outcome: Outcome) -> list[list[tuple[str, str]]]:
    """Return the rows as text, split where the source changes: `[("PROMPT", "…"), ("SAMPLED", "…"), …]`."""
    tokenizer = tiny_tokenizer()
    rows = []
    for row in outcome.rows:
        parts: list[tuple[str, list[int]]] = []
        for source, index in zip(row.trajectory.sources, row.trajectory.ids, strict=True):
            if not parts or parts[-1][0] != source.name:
                parts.append((source.name, []))
            parts[-1][1].append(index)
        rows.append([(name, tokenizer.decode(ids)) for name, ids in parts])
    return rows
