"""Parsers by format name: ours for Hermes, then verl's, then SGLang's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_multiturn.chat.parsers import AssistantTurn, CallParser, HermesParser, MalformedCall, ToolCall, turn_text
from verl_multiturn.errors import ConfigError

_HERMES = {"hermes", "chatml", "qwen", "qwen25"}
# Names of SGLang 0.5.12's FunctionCallParser; listed, since importing SGLang only to refuse a typo takes seconds.
_SGLANG = {
    "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4", "gigachat3", "glm45", "glm47", "hunyuan", "interns1",
    "kimi_k2", "lfm2", "llama3", "mimo", "minimax-m2", "mistral", "poolside_v1", "pythonic", "step3", "step3p5",
    "trinity",
}  # fmt: skip


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
    if name in _HERMES:
        return HermesParser(tokenizer, end_ids)
    from verl.experimental.agent_loop.tool_parser import ToolParser

    if name in ToolParser._registry:
        return _VerlParser(ToolParser.get_tool_parser(name, tokenizer), tokenizer)
    return _SGLangParser(name, tokenizer, end_ids)


class _VerlParser:
    def __init__(self, parser: Any, tokenizer: Any) -> None:
        self._parser = parser
        self._tokenizer = tokenizer

    async def parse(self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int) -> AssistantTurn:
        from verl.tools.schemas import OpenAIFunctionToolSchema

        tools = [OpenAIFunctionToolSchema.model_validate(schema) for schema in schemas]
        try:
            content, found = await self._parser.extract_tool_calls(list(ids), tools)
        except Exception as error:  # a parser of another's that trips over what a model wrote
            return _unreadable(self._tokenizer.decode(list(ids)), error, turn)
        calls = [ToolCall(call.name, call.arguments, f"call_{turn}_{index}") for index, call in enumerate(found)]
        return AssistantTurn(content=content, calls=list(calls))


class _SGLangParser:
    def __init__(self, name: str, tokenizer: Any, end_ids: Sequence[int]) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)

    async def parse(self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int) -> AssistantTurn:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        text = turn_text(self._tokenizer, ids, self._end_ids)
        parser = FunctionCallParser([Tool.model_validate(schema) for schema in schemas], self._name)
        try:
            content, found = parser.parse_non_stream(text) if parser.has_tool_call(text) else (text, [])
        except Exception as error:  # a parser of another's that trips over what a model wrote
            return _unreadable(text, error, turn)
        calls = [ToolCall(call.name or "", call.parameters, f"call_{turn}_{index}") for index, call in enumerate(found)]
        return AssistantTurn(content=content, calls=list(calls))


def _unreadable(text: str, error: Exception, turn: int) -> AssistantTurn:
    problem = f"the call cannot be read ({type(error).__name__}: {error})"[:200]
    return AssistantTurn(content=text, calls=[MalformedCall(text, problem, f"call_{turn}_0")])
