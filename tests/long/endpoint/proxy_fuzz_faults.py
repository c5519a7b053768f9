"""Faults that `benchmarks.proxy_fuzz --control` puts into the proxy, each with the counter that has to see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any
from unittest.mock import patch

from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.proxy.sessions import canonical
from verl_multiturn.proxy.sessions import rows as session_rows
from verl_multiturn.proxy.sessions.forest import Forest
from verl_multiturn.proxy.sessions.nodes import CompletionNode, PromptNode
from verl_multiturn.proxy.sessions.renaming import Renaming
from verl_multiturn.proxy.sessions.session import AgentSession, Delivery
from verl_multiturn.rollout.turn import Turn


@dataclass(frozen=True)
class Fault:
    """A fault of the proxy."""

    what: str
    seen_by: str
    """The counter that has to see it."""
    patched: Callable[[], Sequence[AbstractContextManager[Any]]]


def _twice() -> Sequence[AbstractContextManager[Any]]:
    row = session_rows._row

    def all_of_it(end: CompletionNode, index: int, turns: Sequence[Turn]) -> Any:
        return row(end, index, [replace(turn, place=index) for turn in turns])

    return [patch.object(session_rows, "_row", all_of_it)]


def _gone_is_delivered() -> Sequence[AbstractContextManager[Any]]:
    gone = Delivery.undelivered

    def undelivered(self: Delivery) -> None:
        def ended(task: Any) -> None:
            if not task.cancelled() and task.exception() is None:
                self.delivered()

        if self.task is not None and self.samples:
            self.task.add_done_callback(ended)
        else:
            gone(self)

    return [patch.object(Delivery, "undelivered", undelivered)]


def _left_out() -> Sequence[AbstractContextManager[Any]]:
    outcome, receipts = AgentSession.outcome, AgentSession.receipts
    lost: dict[int, int] = {}

    def without_one(self: AgentSession, *args: Any, **kwargs: Any) -> Any:
        made = outcome(self, *args, **kwargs)
        at = next((at for at, place in enumerate(made.places) if isinstance(place, str)), None)
        if at is not None:
            del made.turns[at]
            lost[id(self)] = at
        return made

    def without_its(self: AgentSession) -> Any:
        made = receipts(self)
        if id(self) in lost:
            del made[lost.pop(id(self))]
        return made

    return [patch.object(AgentSession, "outcome", without_one), patch.object(AgentSession, "receipts", without_its)]


def _called_dropped() -> Sequence[AbstractContextManager[Any]]:
    outcome = AgentSession.outcome

    def renamed(self: AgentSession, *args: Any, **kwargs: Any) -> Any:
        made = outcome(self, *args, **kwargs)
        for turn in made.turns:
            turn.place = "dropped_row" if turn.place == "undelivered" else turn.place
        return made

    return [patch.object(AgentSession, "outcome", renamed)]


def _rendered_again() -> Sequence[AbstractContextManager[Any]]:
    follow = PromptNode.follow

    def changed(self: PromptNode, template: list[int], added: list[int]) -> None:
        follow(self, template, added)
        assert self.parent is not None
        del self.ids[len(self.parent.prompt.ids)]  # the first sampled one
        self.length -= 1

    return [patch.object(PromptNode, "follow", changed)]


def _forgotten(self: AgentSession, delivery: Delivery) -> None:
    delivery.samples = []


FAULTS = (
    Fault("each row trains all that it holds", "trained_twice", _twice),
    Fault("a client that has gone counts as one that has the answer", "undelivered_trained", _gone_is_delivered),
    Fault("a generation without a row is left out of the receipts", "unaccounted", _left_out),
    Fault("an undelivered generation is called one of a dropped row", "unaccounted", _called_dropped),
    Fault(
        "texts of requests reach the tokenizer as they are",
        "control_tokens",
        lambda: [patch.object(ChatCodec, "trusted", lambda self, messages: list(messages))],
    ),
    Fault(
        "messages are compared without their texts",
        "violations",
        lambda: [patch.object(canonical, "content_key", lambda content: "")],
    ),
    Fault(
        "arguments are compared as they are written",
        "violations",
        lambda: [patch.object(canonical, "arguments_key", lambda text: text)],
    ),
    Fault(
        "any id may stand for any other",
        "violations",
        lambda: [patch.object(Renaming, "reads", lambda self, *_: self)],
    ),
    Fault(
        "ids that a client renamed begin a root",
        "violations",
        lambda: [patch.object(Forest, "match", partialmethod(Forest.match, renamed=False))],
    ),
    Fault("the engine is given other ids than it sampled", "violations", _rendered_again),
    Fault(
        "what a client left behind is sampled again",
        "violations",
        lambda: [patch.object(AgentSession, "keep", _forgotten)],
    ),
)
