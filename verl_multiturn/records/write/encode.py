"""`record_of`: the record of a conversation that ended (`schema.Record`), as a plain dictionary.

    loop    `Life.complete`: references to its known data, made on the event loop in microseconds
    thread  `record_of(life)`: the record, which takes milliseconds
            `conversation_of(life)`: the same with data that no record keeps; live traces are made of it

Invariant: the data of a life does not change once it is complete, so that the thread may read it at any later time.
A conversation's trajectories are sealed and its turns answered by then; `rollout`, `proxy` and `verl_bridge` copy the
data that they change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.certificate.receipts import Receipt
from verl_multiturn.chat.images import is_pil
from verl_multiturn.chat.parsing.turns import MalformedCall, ToolCall
from verl_multiturn.interactions.running.replies import CheckedReply
from verl_multiturn.records.json_text import parse_strictly
from verl_multiturn.records.rows import row_of, version_runs
from verl_multiturn.records.schema import SCHEMA
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.outcome import ConversationRow, Outcome, SessionReport
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.tools.running.results import CallResult

_LARGEST = (1 << 63) - 1


def record_of(life: Life) -> dict[str, Any]:
    """Return the record of a conversation that has ended by itself or was cancelled, in the form of `schema.Record`.

    `json_text.plain` makes JSON's types of the values of rows, tools, interactions and agents, images among it.
    """
    outcome = life.outcome or Outcome.begun(life.id)
    is_whole = life.generations is not None
    rows, generations = (outcome.rows, life.generations or ()) if is_whole else ([], ())
    return {
        "schema": SCHEMA,
        "request_id": life.id,
        "uid": life.group,
        "number": life.number,
        "rerolled_from": life.rerolled_from,
        "validation": life.validation,
        "step": life.step,
        "loop": life.loop,
        "status": "finished" if is_whole else "cancelled",
        "began": _time(life.began),
        "ended": _time(life.ended),
        "row": None if life.data_row is None else dict(zip(("number", "digest"), life.data_row, strict=True)),
        "model": life.model if life.model is None or isinstance(life.model, str) else list(life.model),
        "sample": _sample(life),
        "sampling": life.sampling,
        "stop_reason": str(outcome.stop_reason) if is_whole else "",
        "valid": is_whole and outcome.valid,
        "void": life.void,
        "error": outcome.error,
        "outages": outcome.outages,
        "rows": [_row(row) for row in rows],
        "generations": [
            _generation(turn, receipt, outcome)
            for turn, receipt in zip(outcome.turns if is_whole else (), generations, strict=True)
        ],
        "calls": [call for turn in outcome.turns for call in _calls(turn)],
        "replies": _replies(outcome),
        "messages": outcome.messages,
        "asked": outcome.asked,
        "calc_rewards": outcome.calc_rewards,
        "score": outcome.score if is_whole else 0.0,
        "scores": outcome.scores if is_whole else {},
        "trained": list(outcome.trained),
        "differences": [str(difference) for difference in outcome.differences],
        "time_up": outcome.time_up,
        "generate_s": _time(outcome.generate_s),
        "tools_s": _time(outcome.tools_s),
        "interaction_s": _time(outcome.interaction_s),
        "session": None if outcome.session is None else _session(outcome.session, life),
        "timeline": [
            {"kind": kind, "name": name, "turn": turn, "start": _time(start), "end": _time(end)}
            for kind, name, turn, start, end in ([] if life.timeline is None else life.timeline.spans)
        ],
    }


def conversation_of(life: Life) -> dict[str, Any]:
    """Return all that is known of a conversation that is over: its record, and the data that no record keeps.

    One that was cancelled or raised has its rows, generations and stop reason as far as it got. Each generation has two
    entries more: `said`, its reasoning and all its calls as the model wrote them, or None where it was not read; and
    `given`, the messages that a session's agent sent for it.
    """
    outcome = life.outcome or Outcome.begun(life.id)
    found, reason = record_of(life), outcome.trajectory.stop_reason
    if life.generations is None:
        found["stop_reason"] = "" if reason is None else str(reason)
        found["valid"] = reason is not None and outcome.valid
        found["rows"] = [_row(row) for row in outcome.rows]
        found["generations"] = [_generation(turn, None, outcome) for turn in outcome.turns]
    for turn, generation in zip(outcome.turns, found["generations"], strict=True):
        generation["said"], generation["given"] = _said(turn), turn.given
    return found


def _said(turn: Turn) -> dict[str, Any] | None:
    if turn.said is None:
        return None
    calls = [
        {"id": call.id, "malformed": call.text}
        if isinstance(call, MalformedCall)
        else {"id": call.id, "name": call.name, "arguments": call.arguments}
        for call in turn.said.calls
    ]
    return {"reasoning": turn.said.reasoning, "calls": calls}


def _time(seconds: float) -> float:
    return round(seconds, 6)


def _sample(life: Life) -> dict[str, Any]:
    row, request = life.row, life.request
    extra, model, source = (row.get(name) for name in ("extra_info", "reward_model", "data_source"))
    index = row.get("index")
    if index is None and isinstance(extra, Mapping):
        index = extra.get("index")
    interaction = None if request is None else request.interaction
    return {
        "index": index,
        "data_source": None if source is None else str(source),
        "ground_truth": model.get("ground_truth") if isinstance(model, Mapping) else None,
        "extra_info": extra,
        "messages": list(row.get("raw_prompt", ())) if request is None else request.messages,
        "tools": [] if request is None else list(request.tools),
        "tools_kwargs": {} if request is None else request.tools_kwargs,
        "interaction": None if interaction is None else interaction.name,
        "interaction_kwargs": {} if request is None else request.interaction_kwargs,
    }


def _row(row: ConversationRow) -> dict[str, Any]:
    made = row.trajectory
    columns = made.ids, made.mask, made.logprobs, made.versions, made.turn_ids, made.sources
    return row_of(made.prompt_length, *columns, _images(row.images))


def _images(images: Sequence[Any]) -> list[Any]:
    """Return the images that a tool or a row gave as such; the model saw no others."""
    return [image for image in images if is_pil(image)]


def _generation(turn: Turn, receipt: Receipt | None, outcome: Outcome) -> dict[str, Any]:
    """Return a generation. Its tokens are in it where no row holds them: a faulty one's never got into its row.

    Without a receipt, as where the conversation was cancelled, it has the entries that a turn knows of.
    """
    row = turn.place if isinstance(turn.place, int) and turn.sampled else None
    cause = turn.place if isinstance(turn.place, str) else "invalid"
    own = receipt if row is None else None
    return {
        "prompt_tokens": receipt and receipt.prompt_tokens,
        "prompt_digest": receipt and receipt.prompt_digest,
        "max_tokens": receipt and receipt.max_tokens,
        "tokens": turn.end - turn.start if receipt is None else len(receipt.ids),
        "finish": turn.finish,
        "digest": receipt and receipt.digest,
        "completion": turn.completion,
        "row": row,
        "start": None if row is None else outcome.rows[row].trajectory.prompt_length + turn.start,
        "cause": cause if row is None else None,
        "ids": own and own.ids,
        "logprobs": own and own.logprobs,
        "versions": own and version_runs(own.versions),
        "cached_tokens": turn.cached,
        "parent": turn.parent,
        "summary": turn.summary,
        "state": turn.state,
        "reward": None if turn.reward is None else float(turn.reward),
        "text": None if turn.said is None else turn.said.content,
        "lane": turn.lane,
        "role": turn.role if receipt is None else receipt.role,
        "call_ids": [] if outcome.session is None or turn.said is None else [call.id for call in turn.said.calls],
        "asked_at": _time(turn.at - turn.seconds),
        "at": _time(turn.at),
    }


def _calls(turn: Turn) -> list[dict[str, Any]]:
    asked = {} if turn.said is None else {call.id: call for call in turn.said.calls}
    return [_call(turn.number, call, asked.get(call.call_id)) for call in turn.calls]


def _call(turn: int, call: CallResult, asked: ToolCall | MalformedCall | None) -> dict[str, Any]:
    name: str = call.tool
    arguments: Any = None
    if isinstance(asked, MalformedCall):
        name, arguments = "", asked.text
    elif asked is not None:
        name, arguments = asked.name, _arguments(asked.arguments)
    return {
        "turn": turn,
        "id": call.call_id,
        "tool": call.tool,
        "name": name,
        "arguments": arguments,
        "status": str(call.status),
        "text": call.text if call.whole is None else call.whole,
        "images": _images(call.images),
        "reward": float(call.reward),
        "metrics": call.metrics,
        "attempts": call.attempts,
        "cached": call.cached,
        "truncated": call.truncated,
        "altered": call.altered,
        "queue_s": _time(call.queue_s),
        "seconds": _time(call.seconds),
        "at": _time(call.at),
    }


def _arguments(text: str) -> Any:
    """Return the arguments of a call as the object that they are; as their text where JSON would change them."""
    try:
        return parse_strictly(text, _small)
    except (ValueError, RecursionError):
        return text


def _small(digits: str) -> int:
    if len(digits) > 20 or not -_LARGEST <= (number := int(digits)) <= _LARGEST:
        raise ValueError("an integer of more than 64 bits")
    return number


def _replies(outcome: Outcome) -> list[dict[str, Any]]:
    opening = [] if outcome.opening is None else [_reply(None, outcome.opening)]
    return opening + [_reply(turn.number, turn.reply) for turn in outcome.turns if turn.reply is not None]


def _reply(turn: int | None, reply: CheckedReply) -> dict[str, Any]:
    return {
        "turn": turn,
        "text": reply.text,
        "images": _images(reply.images),
        "reward": reply.reward,
        "done": reply.done,
        "truncated": reply.truncated,
        "state": reply.state,
        "metrics": reply.metrics,
        "shows": list(reply.shows),
        "at": _time(reply.at),
    }


def _session(session: SessionReport, life: Life) -> dict[str, Any]:
    """Return the part that only an agent's session has."""
    known: list[int] = []
    requests: list[dict[str, Any]] = []
    for place, request in enumerate(session.requests):
        # Most often it is the very list of an earlier request.
        same = next((first for first in known if session.requests[first].tools == request.tools), None)
        tools = list(request.tools) if same is None else same
        if same is None:
            known.append(place)
        requests.append(
            {
                "at": _time(request.at),
                "protocol": request.protocol,
                "role": request.role,
                "parent": request.parent,
                "shared": request.shared,
                "messages": request.messages,
                "tools": tools if request.tools else None,
                "wishes": request.wishes,
                "generations": list(request.generations),
                "delivered": request.delivered,
                "order": request.order,
                "refused": request.refused,
                "opponent": request.opponent,
                "said": list(request.said),
            }
        )
    return {
        "task": life.task,
        "user": life.user,
        "requests": requests,
        "events": session.events,
        "roots": session.roots,
        "unenforced": session.unenforced,
        "reward": None if session.reward is None else float(session.reward),
        "by_id": session.by_id,
        "rewards": {role: float(reward) for role, reward in session.rewards.items()},
        "roles": list(session.roles),
        "trained": list(session.trained),
        "opponents": dict(session.opponents),
        "end": session.end,
        "problem": session.problem,
    }
