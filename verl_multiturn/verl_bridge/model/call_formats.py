"""Call parsers by format name: ours, and those that a user has registered with verl.

A parser registered with verl does not report a call that it cannot read. Our workarounds:
- reasoning is cut out before the parser sees the text;
- a section of reasoning that is not at the turn's beginning may hold calls, or lie within an argument. Where the parser
  reads other calls with that section kept, the calls are malformed;
- calls are also malformed when the parser raises an exception, or when their arguments are not JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.chat.parsing.call_json import read_whole_json
from verl_multiturn.chat.parsing.formats import FORMATS, make_call_parser
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS, THINK, ReasoningFinder
from verl_multiturn.chat.parsing.turns import AssistantTurn, CallParser, MalformedCall, ToolCall, turn_text
from verl_multiturn.chat.tir import TIR, TirParser
from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError

logger = logging.getLogger(__name__)

_JSON_TYPES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}


def known_formats() -> list[str]:
    """Return every value that `rollout.multi_turn.format` may have, sorted."""
    from verl.experimental.agent_loop.tool_parser import ToolParser

    return sorted({*FORMATS, TIR, *ToolParser._registry})


def check_format(name: str) -> None:
    """Check that a format has a parser, and warn when only a parser registered with verl reads it.

    Raises:
        ConfigError: There is no parser of this name.
    """
    if name not in known_formats():
        raise ConfigError(f"rollout.multi_turn.format: unknown format {name!r}; known are {', '.join(known_formats())}")
    if name not in {*FORMATS, TIR}:
        logger.warning(
            "rollout.multi_turn.format: %r is read by a parser registered with verl; a call that it skips is not "
            "noticed, and the conversation goes on as if it were an answer",
            name,
        )


def make_parser(name: str, tokenizer: Any, end_ids: Sequence[int]) -> CallParser:
    """Build the parser of a format.

    Args:
        name: `multi_turn.format`.
        tokenizer: The model's tokenizer.
        end_ids: Token ids that end a turn.

    Raises:
        ConfigError: There is no parser of this name.
    """
    check_format(name)
    if name == TIR:
        return TirParser(tokenizer, end_ids)
    marks = reasoning_marks(tokenizer)
    if name in FORMATS:
        return make_call_parser(name, tokenizer, end_ids, marks)
    return _VerlParser(name, tokenizer, end_ids, ReasoningFinder(marks))


def reasoning_marks(tokenizer: Any) -> list[tuple[str, str]]:
    """Return the pairs of texts with which a model may open and close a section of reasoning."""
    vocabulary = set(tokenizer.get_added_vocab()) if hasattr(tokenizer, "get_added_vocab") else set()
    return [pair for pair in REASONING_MARKS if pair == THINK or set(pair) & vocabulary]


def stop_ids(name: str, tokenizer: Any) -> list[int]:
    """Return the token ids that must end generation for a format, beyond the model's own end tokens."""
    from verl.experimental.agent_loop.tool_parser import ToolParser

    if name not in ToolParser._registry:
        return []
    return list(ToolParser.get_tool_parser(name, tokenizer).stop_token_ids)


class _FixedTextTokenizer:
    """A stand-in for a tokenizer that always decodes to one given text.

    verl's parsers decode the sampled ids themselves; this makes them read a text that was cut before.
    """

    pad_token = ""

    def __init__(self, text: str, tokenizer: Any) -> None:
        self._text = text
        self._tokenizer = tokenizer

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return self._text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _VerlParser:
    """A `CallParser` around a parser that is registered with verl."""

    def __init__(self, name: str, tokenizer: Any, end_ids: Sequence[int], reasoning: ReasoningFinder) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._reasoning = reasoning

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        opened = self._reasoning.opened_by(self._tokenizer.decode(list(before)))
        said = turn_text(self._tokenizer, ids, self._end_ids)
        reasoning, text = self._reasoning.split(said, opened)
        tools = [_verl_schema(schema) for schema in schemas]
        calls: list[ToolCall | MalformedCall] = []
        try:
            content, found = await self._extract(text, tools)
            rest = self._reasoning.after(said, opened)
            if rest.strip() != text.strip() and (await self._extract(rest, tools))[1] != found:
                raise ValueError("a mark of reasoning is in it, or it is within the reasoning")
            for index, (name, arguments) in enumerate(found):
                read_whole_json(arguments.strip())
                calls.append(ToolCall(name, arguments, f"call_{turn}_{index}"))
        except Exception as error:  # a foreign parser may raise anything at a model's text
            content, problem = text, f"the call cannot be read ({describe(error)})"[:200]
            calls.append(MalformedCall(text, problem, f"call_{turn}_{len(calls)}"))
        return AssistantTurn((reasoning + content).strip(), calls)

    async def _extract(self, text: str, tools: list[Any]) -> tuple[str, list[tuple[str, str]]]:
        """Return the result of verl's parser: the text, and each call's name and arguments (as JSON text)."""
        from verl.experimental.agent_loop.tool_parser import ToolParser

        parser = ToolParser.get_tool_parser(self._name, _FixedTextTokenizer(text, self._tokenizer))
        content, calls = await parser.extract_tool_calls([], tools)
        return content, [(call.name, call.arguments) for call in calls]


def _verl_schema(schema: dict[str, Any]) -> Any:
    """Return a tool's schema as verl's class.

    verl's class is stricter than the API: every property needs a `type`, and may have only a description and an enum
    besides.
    """
    from verl.tools.schemas import OpenAIFunctionToolSchema

    function = schema["function"]
    parameters = function.get("parameters") or {}
    properties = {}
    for key, value in (parameters.get("properties") or {}).items():
        types = sorted(types_of(value, parameters) - {"null"})
        described = {
            field: value[field] for field in ("description", "enum") if isinstance(value, dict) and field in value
        }
        properties[key] = {**described, "type": types[0] if len(types) == 1 else types or "string"}
    reduced = {"type": "object", "properties": properties, "required": parameters.get("required", [])}
    described = {"name": function["name"], "description": function.get("description", ""), "parameters": reduced}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": described})


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as the schema names them.

    Example: `{"type": "integer"}` gives `frozenset({"integer"})`.

    Args:
        schema: JSON Schema of one argument.
        root: The schema in which a `$ref` is looked up.
        depth: How many references and choices led here. The search ends at 8.

    Returns:
        Names of types. An empty set means any type.
    """
    if not isinstance(schema, dict) or depth > 8:
        return frozenset()
    if "type" in schema:
        return frozenset([schema["type"]] if isinstance(schema["type"], str) else schema["type"])
    if "enum" in schema or "const" in schema:
        return frozenset(_JSON_TYPES[type(value)] for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema:
        target: Any = root
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return types_of(target, root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            choices = [types_of(choice, root, depth + 1) for choice in schema[key]]
            return frozenset().union(*choices) if all(choices) else frozenset()
    known = [types for part in schema.get("allOf", ()) if (types := types_of(part, root, depth + 1))]
    return frozenset.intersection(*known) if known else frozenset()
