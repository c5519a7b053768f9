"""Prompts of data rows: those of a run, and those that the bare template could make.

`prompt_of` is the only place of `benchmarks.rows` that calls the product. `could_show` never does.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from tests.long.tokens.row_parts import Case
from tests.long.tokens.row_words import REASONING, SYSTEM
from tests.support.families import family
from tests.support.template_play import template_of
from verl_multiturn import BaseTool, Interaction, Reply, ToolSchema
from verl_multiturn.rollout.conversation import Conversation
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.limits import Limits

ROW = 7
"""Index of the rows; a refusal has to name it."""
_FAR = 1_000_000
Message = dict[str, Any]


class _Greeter(Interaction):
    """A user who writes first, and gets no answer."""

    async def start(self, instance_id: str, **kwargs: Any) -> Reply | None:
        return Reply(self.config["opening"])

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        return Reply("", done=True)


class _Answerer(Interaction):
    """A user who begins nothing, and answers."""

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        return Reply(self.config["opening"] or "")


async def prompt_of(name: str, case: Case) -> str:
    """Return the prompt that a run's engine gets for a row, decoded.

    This is a run's way: `make_request`, then `Conversation.run`, whose engine fails at its first turn.

    Args:
        name: Name of the family.
        case: The row.

    Raises:
        ConfigError: The product refuses the row.
    """
    from verl_multiturn.verl_bridge.rows import make_request  # imports verl

    template = template_of(name)
    prompt = copy.deepcopy(case.messages if case.stored is None else case.stored)
    row = {"raw_prompt": prompt, "index": ROW, "extra_info": {"index": ROW}, "tools_kwargs": {}}
    before = repr(row)
    tools = {each["function"]["name"]: BaseTool({}, ToolSchema.read(each, "rows")) for each in case.schemas}
    interactions: dict[str, Interaction] = {}
    if case.interaction:
        kind = _Answerer if case.replies or case.opening is None else _Greeter
        user = kind({"opening": case.opening})
        user.name = "user"
        interactions = {"user": user}
    request = make_request(row, tools, {}, "r", False, interactions)
    engine = ScriptedEngine([])
    limits = Limits(prompt_length=_FAR, response_length=_FAR)
    await Conversation(engine, template.codec, template.parser, limits).run(request)
    if repr(row) != before:
        return "the row itself was changed"
    return str(template.tokenizer.decode(engine.seen[0][1]))


def bare(name: str, messages: Sequence[Any], schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a family's template by itself, "" where it raises."""
    try:
        text: str = family(name).tokenizer.apply_chat_template(
            list(messages), tools=list(schemas) or None, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a template is other people's code and may raise anything
        return ""
    return text


@cache
def plain_prompt(name: str, schemas: str) -> str:
    """Return the prompt of a user's "x" with tools, which are given as JSON."""
    return bare(name, [{"role": "user", "content": "x"}], json.loads(schemas))


def could_show(name: str, case: Case, faultless: Callable[[str], bool]) -> bool:
    """Return whether the bare template shows all of a row, in some form that a careful author could have written.

    Args:
        name: Name of the family.
        case: The row.
        faultless: Returns whether a prompt shows all.
    """
    messages = [*case.messages, *([{"role": "user", "content": case.opening}] if case.opening is not None else [])]
    for form in itertools.product((False, True), repeat=6):
        try:
            written = list(_written(messages, *form))
        except (AttributeError, KeyError, TypeError, ValueError):
            return False  # an odd row
        text = bare(name, written, case.schemas)
        if text and faultless(text):
            return True
    return False


def _written(
    messages: Sequence[Any],
    as_text: bool,
    nulls: bool,
    later_user: bool,
    joined: bool,
    one_user: bool,
    no_reasoning: bool,
) -> Iterator[Message]:
    """Yield the messages in one of the forms in which templates take them.

    Args:
        messages: The messages as their author wrote them.
        as_text: Whether arguments are JSON text.
        nulls: Whether a message with calls and without text has the content None.
        later_user: Whether later system messages are the user's.
        joined: Whether the first system messages are one.
        one_user: Whether messages of one role in a row are one.
        no_reasoning: Whether reasoning is dropped.
    """
    made: list[Message] = []
    for index, message in enumerate(messages):
        role, content = message["role"], _text(message.get("content"))
        leading = all(each["role"] in SYSTEM for each in messages[:index])
        if role in SYSTEM:
            role = "system" if leading or not later_user else "user"
        plain: Message = {"role": role, "content": content}
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [_call(call, as_text) for call in calls]
            plain["content"] = None if nulls and not content else content
        plain |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}
        plain |= {key: message[key] for key in REASONING if message.get(key) and not no_reasoning}
        same = bool(made) and made[-1]["role"] == role and not calls
        if same and ((joined and role == "system" and leading) or (one_user and role == "user")):
            made[-1]["content"] = f"{made[-1]['content']}\n\n{content}"
        else:
            made.append(plain)
    yield from made


def _text(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(str(block["text"]) for block in content if block["text"])
    return content


def _call(call: Mapping[str, Any], as_text: bool) -> Message:
    given = call["function"].get("arguments") or {}
    read = json.loads(given) if isinstance(given, str) else _without_nulls(given)
    arguments = json.dumps(read, ensure_ascii=False) if as_text else read
    return {
        "id": call.get("id") or "call00000",
        "type": "function",
        "function": {**call["function"], "arguments": arguments},
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
