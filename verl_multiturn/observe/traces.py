"""`trace_of`: the trace of a conversation that is over, as a tree of spans in plain types.

    agent_loop
    ├─ turn 0 ─┬─ generation
    │          └─ tool search, tool search        (or `interaction`)
    └─ turn 1 ─── generation

A trace is made from the `Outcome`, which has the times, and not from spans that are opened and closed while the
conversation runs. So a conversation pays for no trace, a backend can neither delay nor fail one, calls that run at the
same time cannot nest in one another, and a conversation that was cancelled leaves no open span.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from verl_multiturn.chat.parsing.turns import MalformedCall, ToolCall
from verl_multiturn.records import json_text
from verl_multiturn.records.json_text import dumps
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.outcome import ConversationRow, Outcome
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.tools.calls.results import CallResult, CallStatus

Kind = Literal["agent", "turn", "generation", "tool", "interaction"]
Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids."""
TAGS = ("sample_index", "step", "rollout_n", "validate", "experiment_name", "uid")
"""Attributes of a trace by which verl's backends find it."""


@dataclass
class Span:
    """A stretch of time in a conversation, with what went in and what came out, in plain types."""

    name: str
    kind: Kind
    began: float
    """Seconds since the epoch."""
    ended: float
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """What went wrong; "" otherwise."""
    children: list[Span] = field(default_factory=list)

    def walk(self) -> Iterator[Span]:
        """Yield the span and all below it, each before those below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def trace_of(life: Life, decode: Decode | None = None, experiment_name: str | None = None) -> Span:
    """Return the trace of a conversation that is over.

    Args:
        life: The conversation; its outcome is there.
        decode: Returns the text of token ids, for `trace.token2text`; None: the trace has the ids alone.
        experiment_name: `rollout.trace.experiment_name`.
    """
    outcome = life.outcome
    assert outcome is not None
    status = "invalid" if life.status == "finished" and not outcome.valid else life.status
    reason = outcome.trajectory.stop_reason
    outputs = {
        "messages": outcome.messages[outcome.asked :],
        "status": status,
        "stop_reason": None if reason is None else str(reason),
        "score": life.score,
        **({"reported": life.reported} if life.reported else {}),
        **({"calc_rewards": outcome.calc_rewards} if outcome.calc_rewards else {}),
        **({"interaction_score": outcome.score} if outcome.score else {}),
    }
    error = life.error or outcome.error or ("" if status in ("finished", "invalid") else status)
    attributes = {
        "sample_index": plain(life.row.get("index")),
        "step": life.step,
        "rollout_n": life.number,
        "validate": life.validation,
        "experiment_name": experiment_name,
        "uid": life.group,
        "agent_name": life.loop,
        "request_id": life.id,
        "status": status,
    }
    root = Span(
        "agent_loop",
        "agent",
        life.began,
        life.ended,
        plain({"messages": outcome.messages[: outcome.asked]}),
        {**plain(outputs), "rows": [_row(row, decode) for row in outcome.rows]},
        attributes,
        error,
        [_turn(turn, outcome, decode) for turn in outcome.turns],
    )
    _nest(root)
    return root


def _row(row: ConversationRow, decode: Decode | None) -> dict[str, Any]:
    """Return the tokens of a row under the names that verl's traces have for them.

    Ids are plain already, and there are thousands of them.
    """
    trajectory = row.trajectory
    start = trajectory.prompt_length
    ids, mask = list(trajectory.ids), list(trajectory.mask)
    texts = {}
    if decode is not None:
        texts = {"prompt_text": plain(decode(ids[:start])), "response_text": plain(decode(ids[start:]))}
    return {"prompt_ids": ids[:start], "response_ids": ids[start:], "response_mask": mask[start:], **texts}


def _turn(turn: Turn, outcome: Outcome, decode: Decode | None) -> Span:
    began = turn.at - turn.seconds
    children = [_generation(turn, outcome, decode)]
    asked = {call.id: call for call in turn.said.calls} if turn.said is not None else {}
    children += [_call(result, asked.get(result.call_id)) for result in turn.calls]
    if turn.reply is not None:
        reply = turn.reply
        told = {"text": reply.text, "images": reply.images, "reward": reply.reward, "done": reply.done}
        outputs = {**told, "truncated": reply.truncated, "metrics": reply.metrics}
        children.append(Span("interaction", "interaction", turn.at, reply.at, {}, plain(outputs)))
    name = f"{'summary' if turn.summary else 'turn'} {turn.number}"
    # A turn of a session has its reward here, beside those of its calls and of its reply.
    outputs = {"reward": turn.earned} if turn.earned is not None else {}
    attributes = {"turn": turn.number, "parent": turn.parent, "row": turn.place}
    ended = max(child.ended for child in children)
    return Span(name, "turn", began, ended, {}, plain(outputs), plain(attributes), children=children)


def _generation(turn: Turn, outcome: Outcome, decode: Decode | None) -> Span:
    ids: list[int] = []
    if isinstance(turn.place, int) and turn.sampled:
        trajectory = outcome.rows[turn.place].trajectory
        ids = list(trajectory.ids[trajectory.prompt_length + turn.start : trajectory.prompt_length + turn.end])
    outputs: dict[str, Any] = {"token_ids": ids}
    if decode is not None:
        outputs["response_text"] = plain(decode(ids))
    if (said := turn.said) is not None:
        calls = [_asked(call) for call in said.calls]
        outputs |= plain({"content": said.content, "reasoning": said.reasoning, "tool_calls": calls})
    inputs = {"messages": list(turn.given)} if turn.given else {}
    return Span("generation", "generation", turn.at - turn.seconds, turn.at, plain(inputs), outputs)


def _asked(call: ToolCall | MalformedCall) -> dict[str, str]:
    if isinstance(call, MalformedCall):
        return {"id": call.id, "malformed": call.text}
    return {"id": call.id, "name": call.name, "arguments": call.arguments}


def _call(result: CallResult, asked: ToolCall | MalformedCall | None) -> Span:
    outputs = {
        "text": result.text,
        "images": result.images,
        "status": str(result.status),
        "reward": result.reward,
        "metrics": result.metrics,
    }
    attributes = {"attempts": result.attempts, "queue_s": round(result.queue_s, 6), "cached": result.cached}
    began = result.at - result.seconds - result.queue_s
    error = "" if result.status is CallStatus.OK else result.text
    inputs = {} if asked is None else _asked(asked)
    name = f"tool {result.tool}".rstrip()
    return Span(name, "tool", began, result.at, plain(inputs), plain(outputs), plain(attributes), error)


def _nest(span: Span) -> None:
    """Let every span lie within the one above it. They do, unless the machine's clock was set meanwhile."""
    span.ended = max(span.began, span.ended)
    for child in span.children:
        child.began = min(max(child.began, span.began), span.ended)
        child.ended = min(child.ended, span.ended)
        _nest(child)


def plain(value: Any) -> Any:
    """Return a value in types that every backend can store; an image becomes its size."""
    return orjson.loads(dumps(json_text.plain(value, lambda image: f"<image {image.width}×{image.height}>")))


def chat_of(root: Span) -> list[dict[str, Any]]:
    """Return a trace's messages in OpenAI's form, each with a text as content, for backends that show a chat."""
    messages = itertools.chain(root.inputs["messages"], root.outputs["messages"])
    return [{**message, "content": _text(message.get("content"))} for message in messages]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_text(block.get("text", block)) if isinstance(block, dict) else str(block) for block in content)
    if isinstance(content, str):
        return content
    return "" if content is None else json.dumps(content, ensure_ascii=False)
