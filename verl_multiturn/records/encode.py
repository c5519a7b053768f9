"""`record_of`: the record of a conversation that ended (`schema.Record`), as a plain dictionary.

    loop    `Ended`: references to what is known of it, made on the event loop in microseconds
    thread  `record_of(ended)`: the record, which takes milliseconds

Invariant: nothing changes what an `Ended` refers to once it is made, so that the thread may read it at any later time.
A conversation's trajectories are sealed and its turns answered by then; `rollout`, `proxy` and `verl_bridge` copy what
they change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from verl_multiturn.certificate.receipts import Receipt
from verl_multiturn.chat.parsing.turns import MalformedCall
from verl_multiturn.interactions.running.replies import CheckedReply
from verl_multiturn.records.plain import digest_of, plain, valid_text
from verl_multiturn.records.schema import SCHEMA
from verl_multiturn.rollout.outcome import ConversationRow, Outcome, Request, SessionReport
from verl_multiturn.rollout.trajectory import Source
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.tools.calls.results import CallResult

_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, eq=False)
class Ended:
    """What is known of a conversation, or of an agent's session, that ended."""

    outcome: Outcome
    """What became of it."""
    generations: Sequence[Receipt]
    """Receipts of what the engine returned, in the order of `outcome.turns`."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """verl's row: `raw_prompt`, `data_source`, `reward_model`, `extra_info`, `index`."""
    request: Request | None = None
    """What the row asked for; None for a session, whose agent asks."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, under the engine's names."""
    loop: str = ""
    """Name of the agent loop."""
    uid: str = ""
    """verl's id of the group."""
    number: int = 0
    """Number of the conversation in its group (verl's `session_id`)."""
    rerolled_from: str | None = None
    """uid of the group in whose place this one was begun; None: none."""
    validation: bool = False
    step: int = 0
    """Step of the trainer in which it was begun."""
    began: float = 0.0
    """Time (`time.time`) at which it began."""
    ended: float = 0.0
    """Time at which it had ended, before its reward was computed."""
    void: bool = False
    """Whether it has a void turn."""
    timeline: Sequence[tuple[str, str, int | None, float, float]] = ()
    """What happened when: kind, name, turn, start and end of each span (`schema.Span`)."""


def record_of(ended: Ended) -> dict[str, Any]:
    """Return the record of a conversation, in the form of `schema.Record` and in the types of JSON."""
    outcome, images = ended.outcome, _Images()
    return {
        "schema": SCHEMA,
        "request_id": outcome.request_id,
        "uid": valid_text(ended.uid),
        "number": ended.number,
        "rerolled_from": ended.rerolled_from,
        "validation": ended.validation,
        "step": ended.step,
        "loop": ended.loop,
        "began": _time(ended.began),
        "ended": _time(ended.ended),
        "sample": _sample(ended, images),
        "sampling": plain(ended.sampling),
        "stop_reason": str(outcome.stop_reason),
        "valid": outcome.valid,
        "void": ended.void,
        "error": valid_text(outcome.error),
        "outages": plain(outcome.outages),
        "rows": [_row(row, images) for row in outcome.rows],
        "generations": [
            _generation(turn, receipt, outcome) for turn, receipt in zip(outcome.turns, ended.generations, strict=True)
        ],
        "calls": [call for turn in outcome.turns for call in _calls(turn, images)],
        "replies": _replies(outcome, images),
        "messages": plain(outcome.messages, images),
        "asked": outcome.asked,
        "calc_rewards": plain(outcome.calc_rewards),
        "score": plain(float(outcome.score)),
        "differences": [str(difference) for difference in outcome.differences],
        "time_up": outcome.time_up,
        "generate_s": _time(outcome.generate_s),
        "tools_s": _time(outcome.tools_s),
        "interaction_s": _time(outcome.interaction_s),
        "session": None if outcome.session is None else _session(outcome.session, images),
        "timeline": [
            {"kind": kind, "name": valid_text(name), "turn": turn, "start": _time(start), "end": _time(end)}
            for kind, name, turn, start, end in ended.timeline
        ],
    }


class _Images:
    """Digests of one record's images; rows and messages share many of them."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, Any]] = {}

    def __call__(self, image: Any) -> dict[str, Any]:
        known = self._known.get(id(image))
        if known is None:
            known = self._known[id(image)] = digest_of(image)
        return known

    def of(self, images: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the digests of images; what is none, and was shown to no model, is left out."""
        return [made for image in images if isinstance(made := plain(image, self), dict)]


def _time(seconds: float) -> float:
    return round(seconds, 6)


def _sample(ended: Ended, images: _Images) -> dict[str, Any]:
    row, request = ended.row, ended.request
    extra, model = row.get("extra_info"), row.get("reward_model")
    index = row.get("index")
    if index is None and isinstance(extra, Mapping):
        index = extra.get("index")
    source = row.get("data_source")
    interaction = None if request is None else request.interaction
    return {
        "index": plain(index),
        "data_source": None if source is None else valid_text(str(source)),
        "ground_truth": plain(model.get("ground_truth"), images) if isinstance(model, Mapping) else None,
        "extra_info": plain(extra, images),
        "messages": plain(list(row.get("raw_prompt", ())) if request is None else request.messages, images),
        "tools": [] if request is None else [valid_text(name) for name in request.tools],
        "tools_kwargs": {} if request is None else plain(request.tools_kwargs, images),
        "interaction": None if interaction is None else valid_text(str(interaction.name)),
        "interaction_kwargs": {} if request is None else plain(request.interaction_kwargs, images),
    }


def _row(row: ConversationRow, images: _Images) -> dict[str, Any]:
    trajectory = row.trajectory
    sources = np.asarray(trajectory.sources, np.int64)
    logprobs = np.asarray(trajectory.logprobs, np.float32)[sources == Source.SAMPLED]
    columns = np.stack(
        [
            np.asarray(trajectory.mask, np.int64),
            np.asarray(trajectory.versions, np.int64),
            np.asarray(trajectory.turn_ids, np.int64),
            sources,
        ]
    )
    return {
        "prompt_length": trajectory.prompt_length,
        "ids": trajectory.ids,
        "logprobs": shortest(logprobs),
        "runs": runs_of(columns),
        "images": images.of(row.images),
    }


def runs_of(columns: NDArray[np.int64]) -> list[list[int]]:
    """Return runs of equal columns: how many there are in a row, then the values of one.

    Args:
        columns: Shape `(values, tokens)`.
    """
    if not columns.shape[1]:
        return []
    starts = np.flatnonzero(np.any(columns[:, 1:] != columns[:, :-1], axis=0)) + 1
    starts = np.concatenate([[0], starts])
    counts = np.diff(starts, append=columns.shape[1])
    found: list[list[int]] = np.vstack([counts, columns[:, starts]]).T.tolist()
    return found


def shortest(values: NDArray[np.float32]) -> list[Any]:
    """Return numbers that are written as the shortest decimals which are read as the same float32.

    NaN and infinity become their names.
    """
    found: list[Any] = orjson.loads(orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY))
    if None in found:
        found = [str(float(value)) if number is None else number for number, value in zip(found, values, strict=True)]
    return found


def _generation(turn: Turn, receipt: Receipt, outcome: Outcome) -> dict[str, Any]:
    """Return a generation. Its own columns are in it where its row does not hold its tokens."""
    row = turn.place if isinstance(turn.place, int) else None
    own = row is None or not turn.sampled
    return {
        "prompt_tokens": receipt.prompt_tokens,
        "prompt_digest": receipt.prompt_digest,
        "max_tokens": receipt.max_tokens,
        "tokens": len(receipt.ids),
        "finish": turn.finish,
        "digest": receipt.digest,
        "row": row,
        "start": None if row is None else outcome.rows[row].trajectory.prompt_length + turn.start,
        "cause": None if row is not None else turn.place,
        "ids": receipt.ids.tolist() if own else None,
        "logprobs": shortest(receipt.logprobs) if own else None,
        "versions": runs_of(receipt.versions[None]) if own else None,
        "cached_tokens": turn.cached,
        "parent": turn.parent,
        "summary": turn.summary,
        "state": turn.state,
        "reward": None if turn.reward is None else plain(float(turn.reward)),
        "text": None if turn.said is None else valid_text(turn.said.content),
        "asked_at": _time(turn.at - turn.seconds),
        "at": _time(turn.at),
    }


def _calls(turn: Turn, images: _Images) -> list[dict[str, Any]]:
    asked = {} if turn.said is None else {call.id: call for call in turn.said.calls}
    return [_call(turn.number, call, asked.get(call.call_id), images) for call in turn.calls]


def _call(turn: int, call: CallResult, asked: Any, images: _Images) -> dict[str, Any]:
    if isinstance(asked, MalformedCall):
        name, arguments = "", valid_text(asked.text)
    else:
        name, arguments = (call.tool, None) if asked is None else (asked.name, _arguments(asked.arguments))
    return {
        "turn": turn,
        "id": call.call_id,
        "tool": valid_text(call.tool),
        "name": valid_text(name),
        "arguments": arguments,
        "status": str(call.status),
        "text": valid_text(call.text if call.whole is None else call.whole),
        "images": images.of(call.images),
        "reward": plain(float(call.reward)),
        "metrics": plain(call.metrics, images),
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
        read = json.loads(text, object_pairs_hook=_with_each_key_once, parse_int=_small)
    except (ValueError, RecursionError):
        return valid_text(text)
    return plain(read)


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return found


def _small(digits: str) -> int:
    if len(digits) > 20 or not -_LARGEST <= (number := int(digits)) <= _LARGEST:
        raise ValueError("an integer of more than 64 bits")
    return number


def _replies(outcome: Outcome, images: _Images) -> list[dict[str, Any]]:
    opening = [] if outcome.opening is None else [_reply(None, outcome.opening, images)]
    return opening + [_reply(turn.number, turn.reply, images) for turn in outcome.turns if turn.reply is not None]


def _reply(turn: int | None, reply: CheckedReply, images: _Images) -> dict[str, Any]:
    return {
        "turn": turn,
        "text": valid_text(reply.text),
        "images": images.of(reply.images),
        "reward": reply.reward,
        "done": reply.done,
        "truncated": reply.truncated,
        "state": reply.state,
        "metrics": plain(reply.metrics, images),
        "at": _time(reply.at),
    }


def _session(session: SessionReport, images: _Images) -> dict[str, Any]:
    """Return the part that only an agent's session has."""
    known: list[int] = []
    requests: list[dict[str, Any]] = []
    for place, request in enumerate(session.requests):
        # Most often it is the very list of an earlier request.
        same = next((first for first in known if session.requests[first].tools == request.tools), None)
        tools = plain(list(request.tools), images) if same is None else same
        if same is None:
            known.append(place)
        requests.append(
            {
                "at": _time(request.at),
                "protocol": request.protocol,
                "parent": request.parent,
                "shared": request.shared,
                "messages": plain(list(request.messages), images),
                "tools": tools if request.tools else None,
                "wishes": plain(request.wishes),
                "generations": list(request.generations),
                "delivered": request.delivered,
                "order": request.order,
                "refused": request.refused,
            }
        )
    return {
        "requests": requests,
        "roots": session.roots,
        "unenforced": plain(dict(session.unenforced)),
        "reward": None if session.reward is None else plain(float(session.reward)),
        "by_id": session.by_id,
        "end": session.end,
        "problem": valid_text(session.problem),
    }
