"""24 changes of our code, such as a mistake would make them; `benchmarks.replay` has to find each.

A change replaces one function or value for the time of a replay. `expected` has the beginning of its difference, and
whether it is named with a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from verl_multiturn.certificate import receipts
from verl_multiturn.chat.codec import ChatCodec, Increment
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.parsing.text_parser import TextParser
from verl_multiturn.interactions.running import replies
from verl_multiturn.interactions.running import session as users
from verl_multiturn.proxy.sessions import session as sessions
from verl_multiturn.proxy.sessions.forest import Forest
from verl_multiturn.proxy.sessions.turn_reading import TurnReader
from verl_multiturn.replay.calls import ReplayDifference
from verl_multiturn.rollout import context as contexts
from verl_multiturn.rollout import conversation as conversations
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.trajectory import Source, Trajectory
from verl_multiturn.tools.running import session as tools
from verl_multiturn.tools.running.results import CallStatus


@dataclass(frozen=True)
class Change:
    """A change of our code."""

    place: Any
    """Where the changed thing is: a class or a module."""
    name: str
    make: Callable[[Any], Any]
    """Returns the new value from the old one."""
    fields: tuple[str, ...]
    """Beginnings of the fields in which it shows first."""
    has_token: bool = False

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the change for the time of a block."""
        with patch.object(self.place, self.name, self.make(getattr(self.place, self.name))):
            yield


def _after(old: Any) -> Any:
    def after(limits: Limits, at: Any) -> Any:
        reason = old(limits, at)
        return StopReason.RESPONSE_LENGTH if reason is StopReason.TURN_LENGTH else reason

    return after


def _append(change: Callable[[dict[str, Any]], None]) -> Callable[[Any], Any]:
    """Return a change of the sampled tokens that `Trajectory._append` writes."""

    def make(old: Any) -> Any:
        def append(self: Trajectory, ids: Any, **given: Any) -> None:
            old(self, ids, **given)
            if given["source"] is Source.SAMPLED:
                change(vars(self))

        return append

    return make


def _unmask(columns: dict[str, Any]) -> None:
    columns["mask"][-1] = 0


def _round(columns: dict[str, Any]) -> None:
    columns["logprobs"][-1] = round(columns["logprobs"][-1], 1) - 1.0


def _newest(columns: dict[str, Any]) -> None:
    columns["versions"][-1] += 1


def _parse(old: Any) -> Any:
    async def parse(self: Any, *args: Any) -> Any:
        turn = await old(self, *args)
        return replace(turn, content=turn.content[:-1])

    return parse


def _observation(old: Any) -> Any:
    def observation(self: Any, *args: Any) -> Increment:
        made = old(self, *args)
        return Increment([], made.observation)

    return observation


def _failure(old: Any) -> Any:
    def failure(result: Any, *given: Any) -> Any:
        if old(result, *given).status is CallStatus.TIMEOUT:
            result.status = CallStatus.ERROR
        return result

    return failure


def _match(old: Any) -> Any:
    def match(self: Forest, messages: Any, key: str, renamed: bool = True) -> Any:
        return old(self, messages, f"{key}{len(self.ledger)}", renamed)

    return match


def _read(old: Any) -> Any:
    async def read(self: Any, *args: Any) -> Any:
        turn, stop = await old(self, *args)
        return replace(turn, content=f"{turn.content} "), stop

    return read


def _delivered(old: Any) -> Any:
    def delivered(self: Any) -> None:
        self.samples = []

    return delivered


CHANGES: dict[str, Change] = {
    "a limit takes another's place": Change(Limits, "after_assistant_turn", _after, ("stop_reason",)),
    "a budget of one more": Change(
        Limits, "turn_budget", lambda old: lambda self, used: old(self, used) + 1, ("generations.max_tokens",)
    ),
    "an observation need not fit": Change(
        Limits, "fits_observation", lambda old: lambda self, used, more: True, ("generations", "stop_reason", "rows")
    ),
    "characters are cut at another side": Change(
        Limits, "truncate", lambda old: lambda self, text: text[-self.max_tool_response_length :],
        ("generations.prompt",), True,
    ),
    "another reminder": Change(
        Limits, "reminder", lambda old: lambda self, turns: old(self, turns + 1), ("generations.prompt",), True
    ),
    "no separator after a turn": Change(ChatCodec, "observation", _observation, ("generations.prompt",), True),
    "clipped to one token less": Change(
        ChatCodec, "clip", lambda old: lambda self, text, tokens, side: old(self, text, tokens - 1, side),
        ("generations.prompt", "generations.max_tokens"), True,
    ),
    "the firewall is off": Change(
        Firewall, "clean", lambda old: lambda self, text, role="tool": text, ("calls.altered", "generations.prompt")
    ),
    "a turn's message has no calls": Change(
        conversations, "assistant_message",
        lambda old: lambda turn: {"role": "assistant", "content": turn.content}, ("generations.prompt", "messages"),
    ),
    "a token is masked": Change(Trajectory, "_append", _append(_unmask), ("rows[0].mask",), True),
    "a logprob is rounded": Change(Trajectory, "_append", _append(_round), ("rows[0].logprobs",), True),
    "a version is too new": Change(Trajectory, "_append", _append(_newest), ("rows[0].versions",), True),
    "a receipt has other ids": Change(
        receipts, "_digest", lambda old: lambda request, ids: old(request, ids[1:]), ("generations.prompt_digest",)
    ),
    "the parser drops a letter": Change(TextParser, "parse", _parse, ("generations.text",)),
    "a late call is an error": Change(tools, "read_failure", _failure, ("calls.status",)),
    "an answer keeps less": Change(
        tools, "read_answer", lambda old: lambda result, given, most, foreign=False: old(result, given, 30, foreign),
        ("calls.text", "calls.truncated", "generations.prompt"),
    ),
    "a call more is executed": Change(
        tools.ToolSession, "_refusal", lambda old: lambda self, running: old(self, max(0, running - 1)),
        ("calls.status",),
    ),
    "a user's reward is halved": Change(
        users, "read_reply",
        lambda old: lambda *args: replace(made := old(*args), reward=made.reward and made.reward / 2),
        ("replies.reward",),
    ),
    "a user's last word is read": Change(
        replies, "_flag", lambda old: lambda value, where: False, ("replies.done", "stop_reason", "generations"),
    ),
    "a window of one step more": Change(
        contexts, "window", lambda old: lambda messages, asked, turns: old(messages, asked, turns + 1),
        ("generations.prompt",), True,
    ),
    "other words before a summary": Change(
        contexts, "SUMMARY", lambda old: "So far:\n", ("generations.prompt",), True
    ),
    "a session's requests begin anew": Change(
        Forest, "match", _match, ("generations.max_tokens", "generations.prompt", "session.requests")
    ),
    "a session reads a blank more": Change(TurnReader, "read", _read, ("generations.text",)),
    "deliveries do not count": Change(
        sessions.Delivery, "delivered", _delivered, ("generations.row", "generations.cause", "session.requests")
    ),
}  # fmt: skip
"""Changes by name."""


def finds(change: Change, found: Mapping[str, Sequence[ReplayDifference]]) -> ReplayDifference | None:
    """Return the first difference that names a change as it has to be named."""
    firsts = [next((each for each in differences), None) for differences in found.values()]
    for first in firsts:
        if first is not None and first.field.startswith(change.fields):
            if change.has_token and first.token is None:
                continue
            if first.turn is not None or first.field in ("stop_reason", "messages"):
                return first
    return None
