"""Parsers by format name: ours for Hermes and gpt-oss, then verl's, then SGLang's.

Those of others skip what they cannot read, and say so in a log at most. Around each of them the same three things hold
here: reasoning is cut out before it sees the text, an exception of its own becomes a malformed call, and calls that
were begun are counted, so that one it skipped becomes a malformed call too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.chat.parsers import (
    REASONING_MARKS,
    THINK,
    AssistantTurn,
    CallParser,
    HarmonyParser,
    HermesParser,
    MalformedCall,
    Reasoning,
    ToolCall,
    turn_text,
)
from verl_multiturn.errors import ConfigError

_HERMES = {"hermes", "chatml", "qwen", "qwen25"}
# Names of SGLang 0.5.12's FunctionCallParser; listed, since importing SGLang only to refuse a typo takes seconds.
_SGLANG = {
    "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4", "gigachat3", "glm45", "glm47", "hunyuan", "interns1",
    "kimi_k2", "lfm2", "llama3", "mimo", "minimax-m2", "mistral", "poolside_v1", "pythonic", "step3", "step3p5",
    "trinity",
}  # fmt: skip


@dataclass(frozen=True)
class CallMarks:
    """How a format's calls are recognised in text, whether or not they can be read."""

    begun: str
    """Regular expression; one match for each call, or for each list of calls."""
    written: str
    """What the model is told."""
    span: tuple[str, str] = ("", "")
    """Opens and closes a call; a reasoning mark within it is an argument's text."""


_TAGS = ("<tool_call>", "</tool_call>")
_GLM = CallMarks("<tool_call>", "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>", _TAGS)
_CODER = CallMarks(
    "<tool_call>",
    "<tool_call><function=name><parameter=key>value</parameter></function></tool_call>",
    _TAGS,
)
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_MARKS = {
    "llama3": CallMarks(r'<\|python_tag\|>|\A\s*\{\s*"name"', '{"name": "…", "parameters": {…}}'),
    "mistral": CallMarks(r"\[TOOL_CALLS\]", "[TOOL_CALLS]name[ARGS]{…}", ("[TOOL_CALLS]", "")),
    "deepseekv3": CallMarks(
        _DEEPSEEK[0], "<｜tool▁call▁begin｜>function<｜tool▁sep｜>name, then its JSON in a ```json block", _DEEPSEEK
    ),
    "deepseekv31": CallMarks(_DEEPSEEK[0], "<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>", _DEEPSEEK),
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _GLM,
    "qwen3_coder": _CODER,
    "kimi": CallMarks(r"<\|tool_call_begin\|>", "functions.name:0 and its JSON between the tool-call tokens"),
    "kimi_k2": CallMarks(r"<\|tool_call_begin\|>", "functions.name:0 and its JSON between the tool-call tokens"),
    "gemma4": CallMarks(r"<\|tool_call>", "<|tool_call>call:name{…}<tool_call|>", ("<|tool_call>", "<tool_call|>")),
    "lfm2": CallMarks(
        r"<\|tool_call_start\|>",
        "<|tool_call_start|>[name(key=value)]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
}


def known_formats() -> list[str]:
    """Every value that `rollout.multi_turn.format` may have."""
    from verl.experimental.agent_loop.tool_parser import ToolParser

    return sorted(_HERMES | set(ToolParser._registry) | _SGLANG)


def check_format(name: str) -> None:
    """Raises ConfigError when there is no parser of this name."""
    if name not in known_formats():
        raise ConfigError(f"rollout.multi_turn.format: unknown format {name!r}; known are {', '.join(known_formats())}")


def make_parser(name: str, tokenizer: Any, end_ids: Sequence[int]) -> CallParser:
    """The parser of a format.

    Raises:
        ConfigError: there is none of this name.
    """
    check_format(name)
    vocabulary = set(tokenizer.get_added_vocab()) if hasattr(tokenizer, "get_added_vocab") else set()
    marks = [pair for pair in REASONING_MARKS if pair == THINK or set(pair) & vocabulary]
    if name in _HERMES:
        return HermesParser(tokenizer, end_ids, Reasoning(marks))
    if name == "gpt-oss":
        return HarmonyParser(tokenizer)
    span = _MARKS[name].span if name in _MARKS else ("", "")
    return _ForeignParser(name, tokenizer, end_ids, Reasoning(marks, span))


def stop_ids(name: str, tokenizer: Any) -> list[int]:
    """Ids that must end generation for a format, beside the model's own end tokens."""
    from verl.experimental.agent_loop.tool_parser import ToolParser

    if name in _HERMES or name not in ToolParser._registry:
        return []
    return list(ToolParser.get_tool_parser(name, tokenizer).stop_token_ids)


class _Given:
    """Stands for a tokenizer in verl's parsers, which decode what they read themselves."""

    pad_token = ""

    def __init__(self, text: str, tokenizer: Any) -> None:
        self._text = text
        self._tokenizer = tokenizer

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return self._text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _ForeignParser:
    """A parser of verl or SGLang."""

    def __init__(self, name: str, tokenizer: Any, end_ids: Sequence[int], reasoning: Reasoning) -> None:
        from verl.experimental.agent_loop.tool_parser import ToolParser

        self._name = name
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._reasoning = reasoning
        self._from_verl = name in ToolParser._registry
        if not self._from_verl:
            # Some seconds, which no request should wait for.
            from sglang.srt.environ import envs
            from sglang.srt.function_call import function_call_parser  # noqa: F401

            # Otherwise a call of a tool that does not exist is dropped in silence.
            envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        opened = self._reasoning.opened_by(self._tokenizer.decode(list(before)))
        reasoning, text = self._reasoning.split(turn_text(self._tokenizer, ids, self._end_ids), opened)
        calls: list[ToolCall | MalformedCall] = []
        problem = ""
        try:
            content, found = await self._extract(text, schemas)
            calls.extend(ToolCall(name, arguments, f"call_{turn}_{i}") for i, (name, arguments) in enumerate(found))
        except Exception as error:  # a parser of another's that trips over what a model wrote
            content, problem = text, f"the call cannot be read ({type(error).__name__}: {error})"[:200]
        marks = _MARKS.get(self._name)
        begun = len(re.findall(marks.begun, text)) if marks else 0
        if marks and not problem and begun > len(calls):
            problem = f"{begun - len(calls)} of {begun} calls cannot be read; write a call as {marks.written}"
        if problem:
            calls.append(MalformedCall(text, problem, f"call_{turn}_{len(calls)}"))
        return AssistantTurn((reasoning + content).strip(), calls)

    async def _extract(self, text: str, schemas: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        """The text beside the calls, and each call's name and arguments."""
        if self._from_verl:
            from verl.experimental.agent_loop.tool_parser import ToolParser
            from verl.tools.schemas import OpenAIFunctionToolSchema

            tools = [OpenAIFunctionToolSchema.model_validate(schema) for schema in schemas]
            parser = ToolParser.get_tool_parser(self._name, _Given(text, self._tokenizer))
            content, found = await parser.extract_tool_calls([], tools)
            return content, [(call.name, call.arguments) for call in found]
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        detector = FunctionCallParser([Tool.model_validate(schema) for schema in schemas], self._name)
        content, items = detector.parse_non_stream(text) if detector.has_tool_call(text) else (text, [])
        return content, [(item.name or "", item.parameters) for item in items]
