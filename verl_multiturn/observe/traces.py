"""`trace_of`: the trace of a conversation that is over, for the backends of `rollout.trace`.

It is the tree of spans of the conversation's record (`spans.tree_of`), with inputs, outputs and attributes in plain
types. The record is made for it (`records.write.encode`), whether or not the run keeps records. Nothing in it is
hidden.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from verl_multiturn.observe.spans import TraceSpan, tree_of
from verl_multiturn.records import json_text
from verl_multiturn.records.json_text import dumps
from verl_multiturn.records.write.encode import conversation_of
from verl_multiturn.rollout.life import Life

Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids."""
TAGS = ("sample_index", "step", "rollout_n", "validate", "experiment_name", "uid")
"""Attributes of a trace by which verl's backends find it."""
_OUTPUTS = {
    "tool": ("text", "images", "status", "reward", "metrics"),
    "interaction": ("text", "images", "reward", "done", "truncated", "metrics"),
}
"""Entries of a call, and of a reply, that are outputs of its span."""


def trace_of(life: Life, decode: Decode | None = None, experiment_name: str | None = None) -> TraceSpan:
    """Return the trace of a conversation that is over.

    Args:
        life: The conversation; its outcome is there.
        decode: Returns the text of token ids, for `trace.token2text`; None: the trace has the ids alone.
        experiment_name: `rollout.trace.experiment_name`.
    """
    record = plain(conversation_of(life))
    root = tree_of(record).root
    status = "invalid" if life.status == "finished" and not record["valid"] else life.status
    rows = [_row(row, decode) for row in record["rows"]]
    root.inputs = {"messages": record["messages"][: record["asked"]]}
    root.outputs = {
        "messages": record["messages"][record["asked"] :],
        "status": status,
        "stop_reason": record["stop_reason"] or None,
        "score": plain(life.score),
        **({"reported": plain(life.reported)} if life.reported else {}),
        **({"verdicts": plain(life.verdicts)} if life.verdicts else {}),
        **({"calc_rewards": record["calc_rewards"]} if record["calc_rewards"] else {}),
        **({"interaction_score": record["score"]} if record["score"] else {}),
        **({"rewards": rewards} if (rewards := (record["session"] or {}).get("rewards") or record["scores"]) else {}),
        "rows": rows,
    }
    root.attributes = {
        "sample_index": record["sample"]["index"],
        "step": record["step"],
        "rollout_n": record["number"],
        "validate": record["validation"],
        "experiment_name": experiment_name,
        "uid": record["uid"],
        "agent_name": record["loop"],
        "request_id": record["request_id"],
        "status": status,
    }
    root.error = life.error or record["error"] or ("" if status in ("finished", "invalid") else status)
    for number, turn in enumerate(root.children):
        _fill(number, turn, rows, decode)
    return root


def _row(row: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    """Return the tokens of a row under the names that verl's traces have for them."""
    start, ids = row["prompt_length"], row["ids"]
    mask = [masked for count, masked, *_ in row["runs"] for _ in range(count)]
    texts = {}
    if decode is not None:
        texts = {"prompt_text": plain(decode(ids[:start])), "response_text": plain(decode(ids[start:]))}
    return {"prompt_ids": ids[:start], "response_ids": ids[start:], "response_mask": mask[start:], **texts}


def _fill(number: int, turn: TraceSpan, rows: Sequence[Mapping[str, Any]], decode: Decode | None) -> None:
    """Fill in the fields that backends show of a turn and of its spans."""
    generation, (first, *answers) = turn.entry, turn.children
    said = generation["said"]
    calls = {} if said is None else {call["id"]: call for call in said["calls"]}
    first.inputs = {"messages": generation["given"]} if generation["given"] else {}
    first.outputs = _sampled(generation, rows, decode)
    for span in answers:
        span.outputs = {name: span.entry[name] for name in _OUTPUTS[span.kind]}
        if span.kind == "tool":
            span.inputs = calls.get(span.entry["id"], {})
            span.attributes = {name: span.entry[name] for name in ("attempts", "queue_s", "cached")}
    # A turn of a session has its reward here, beside those of its calls and of its reply.
    rewards = [span.entry["reward"] for span in answers if span.kind == "interaction" or span.entry["reward"]]
    earned = [float(reward) for reward in (*rewards, generation["reward"]) if reward is not None]
    turn.outputs = {"reward": plain(sum(earned))} if earned else {}
    place = generation["cause"] if generation["row"] is None else generation["row"]
    turn.attributes = {"turn": number, "parent": generation["parent"], "row": place}
    if (role := generation.get("role")) is not None:
        turn.attributes["role"] = role


def _sampled(generation: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], decode: Decode | None) -> dict[str, Any]:
    """Return the engine's output: the ids that a row holds, and the message parsed from them."""
    ids: list[int] = []
    if generation["row"] is not None:
        row = rows[generation["row"]]
        start = generation["start"] - len(row["prompt_ids"])
        ids = row["response_ids"][start : start + generation["tokens"]]
    outputs: dict[str, Any] = {"token_ids": ids}
    if decode is not None:
        outputs["response_text"] = plain(decode(ids))
    if (said := generation["said"]) is not None:
        outputs |= {"content": generation["text"], "reasoning": said["reasoning"], "tool_calls": said["calls"]}
    return outputs


def plain(value: Any) -> Any:
    """Return a value in types that every backend can store; an image becomes its size."""
    return orjson.loads(dumps(json_text.plain(value, lambda image: f"<image {image.width}×{image.height}>")))


def chat_of(root: TraceSpan) -> list[dict[str, Any]]:
    """Return a trace's messages in OpenAI's form, each with a text as content, for backends that show a chat."""
    messages = itertools.chain(root.inputs["messages"], root.outputs["messages"])
    return [{**message, "content": _text(message.get("content"))} for message in messages]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_text(block.get("text", block)) if isinstance(block, dict) else str(block) for block in content)
    if isinstance(content, str):
        return content
    return "" if content is None else json.dumps(content, ensure_ascii=False)
