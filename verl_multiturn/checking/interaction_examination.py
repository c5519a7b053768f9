"""Checks of an interaction, one method for each."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from verl_multiturn.checking.episodes import InteractionProbe, MethodFault, PlayedEpisode
from verl_multiturn.checking.examination import Examination, Grade, Timed
from verl_multiturn.checking.instruments import ExaminationWatch
from verl_multiturn.checking.method_calls import ProbeResult
from verl_multiturn.checking.other_rows import made_kwargs
from verl_multiturn.checking.shared_state import Moment, overwritten
from verl_multiturn.describe import show
from verl_multiturn.interactions.running.session import METHODS

OTHERS = 16
"""Number of episodes beside the one that is compared."""
# Texts of models that no author thinks of.
_ANY_ANSWER = {
    "an empty turn": "",
    "spaces": " \n ",
    "100,000 characters": "x" * 100_000,
    "control characters": "\x00\x1b[31m \u202e",
    "a control token": "<|im_end|><|im_start|>system",
    "half a tag": "<action>",
    "JSON": '{"action": null}',
    "a huge number": "9" * 5000,
}
ADVICE = {
    "row kwargs": "give them as a data row does: --kwargs; with --interaction NAME, of a YAML",
    "start type": "return a Reply, or None, on every path",
    "start over": "let `reply` end a conversation: `start` returns the first message, or None",
    "reply type": "return Reply(text, reward=…, done=…) on every path: a text alone, None and a tuple are none",
    "start raised": "raise OutageError for a service that is down; else mend that line; the row's kwargs are --kwargs",
    "reply raised": "answer whatever a model writes; raise OutageError for a service that is down; else mend that line",
    "score raised": "raise OutageError for a service that is down; else mend that line",
    "score type": "return a number on every path, or one for each of the two roles",
    "close": "give everything back, and raise nothing",
    "field": "give the field its type: text a str, reward a number, done and truncated True or False, image a list",
    "number": "mend what makes it: a division by 0, a logarithm of 0, a sum without an end",
    "late": "let each wait and loop in it end; start the server that it waits for; give a slow one more time: "
    "--timeout-s",
    "outage": "do what the error names; start the service where it is down, and check again",
    "actions": "give turns that it understands: --actions, or `actions` in the config; more turns: --rounds",
    "end": "give turns that lead to the end: --actions, or more of them: --rounds; where there is none, return done or "
    "truncated at some turn",
    "every call": "return a Reply from every call",
    "event loop": "every conversation waits meanwhile: await, use asyncio.to_thread, or make the method synchronous",
    "leftovers": "give it back in close",
    "close after a failed start": "close is called whenever start began: look the conversation up with "
    "pop(instance_id, None)",
    "any answer": "answer whatever a model writes, with a reward if it is wrong: an error makes the conversation "
    "invalid, and a model could choose that",
    "one episode": "keep what belongs to a conversation under its instance_id, and draw from a random.Random(seed) of "
    "its own: the module `random` is shared by all",
    "cancel": "let CancelledError pass, and clean up in `finally` or with `async with`",
}
"""Advice by the name of the check."""


class InteractionExamination(Examination):
    """All checks of one interaction.

    Args:
        probe: The interaction.
        watch: As in `Examination`.
        temporary: As in `Examination`.
    """

    def __init__(self, probe: InteractionProbe, watch: ExaminationWatch, temporary: Path) -> None:
        super().__init__(probe, watch, temporary, ADVICE)
        self._probe = probe

    async def first(self) -> bool:
        """Play one episode, and return whether to go on."""
        episode = PlayedEpisode()
        problems = await self._probe.play(episode)
        fine = {"start": "says nothing first", "score": episode.shown_score, "close": ""}
        if episode.answers:
            text, *_ = episode.answers[0]
            fine["start"] = f"opens with {show(text, 60)}" if text else fine["start"]
            fine["reply"] = episode.in_words()
        for method in METHODS:
            if method in problems:
                self.judge(method, problems[method].said, self._remedy(method, problems[method]), fine.get(method, ""))
            else:
                self.note(method, Grade.SKIPPED, "", "first mend what is above")
        self._unreached(episode)
        return not episode.failure

    def _remedy(self, method: str, fault: MethodFault) -> str:
        """Return the remedy for a fault: its own, or the advice of the method and kind, of the kind, of the method."""
        advice = self.advice
        if not fault:
            return ""
        return fault.remedy or advice.get(f"{method} {fault.kind}") or advice.get(fault.kind) or advice[method]

    def _unreached(self, episode: PlayedEpisode) -> None:
        """Warn of what the player's turns did not come to: a turn that was understood, a reward, the end."""
        turns = f"{episode.turns} turn{'s' if episode.turns != 1 else ''}"
        if 0 < episode.unreadable == episode.turns:
            found = "no action can be read in any of the player's turns, so that little is checked"
            self.note("actions", Grade.WARNING, found, self.advice["actions"])
        elif episode.failure or episode.is_over:
            return
        elif self._probe.writes_letters and episode.reached_nothing():
            found = f"the player writes letters, and in {turns} came to no reward above 0 and no end"
            self.note("actions", Grade.WARNING, found, self.advice["actions"])
        else:
            found = f"never done or truncated in {turns}; only the turn limits or the response's length end it"
            self.note("end", Grade.WARNING, found, self.advice["end"])

    def checks(self) -> dict[str, Callable[[str], Awaitable[None]]]:
        """Return the other checks by name."""
        return {
            "event loop": self.event_loop,
            "leftovers": self.leftovers,
            "close after a failed start": self.end_after_a_failed_begin,
            "any answer": self._any_answer,
            "one episode": self._one_episode,
            **{f"cancel {method}": functools.partial(self.cancel, method=method) for method in METHODS},
        }

    async def converse(self, timed: Timed) -> None:
        """Run one conversation of one turn."""
        probe, self.last_id = self._probe, uuid.uuid4().hex
        await timed("start", probe.call("start", self.last_id))
        await timed("reply", self._reply(self.last_id, probe.action(0)))
        await timed("score", probe.call("score", self.last_id))
        await timed("close", probe.call("close", self.last_id))

    async def end(self) -> None:
        """Close the interaction."""
        returned = await asyncio.to_thread(self._probe.interaction.aclose)
        if inspect.isawaitable(returned):
            await returned

    def arguments_of(self, method: str) -> tuple[Any, ...]:
        """Return the player's first turn for `reply`.

        Args:
            method: Name of the method.
        """
        return (_said(self._probe.action(0)),) if method == "reply" else ()

    async def _reply(self, instance_id: str, text: str) -> ProbeResult:
        return await self._probe.call("reply", instance_id, _said(text))

    async def _any_answer(self, check: str) -> None:
        """Answer with models' texts, each in a conversation of its own."""
        probe = self._probe

        async def answer(text: str) -> str:
            instance_id = uuid.uuid4().hex
            await probe.call("start", instance_id)
            _, fault = probe.read("reply", await self._reply(instance_id, text))
            await probe.call("close", instance_id)
            return fault.said

        found = await asyncio.gather(*(answer(text) for text in _ANY_ANSWER.values()))
        problems = [f"{case}: {problem}" for case, problem in zip(_ANY_ANSWER, found, strict=True) if problem]
        self.judge(check, "; ".join(problems[:4]), self.advice[check], f"{len(_ANY_ANSWER)} tried")

    async def _one_episode(self, check: str) -> None:
        """Play an episode alone, again, and beside others, half of which are of other rows."""
        probe, advice = self._probe, self.advice[check]
        alone, again = PlayedEpisode(), PlayedEpisode()
        await probe.play(alone)
        await probe.play(again)
        if changed := alone.difference(again):
            seeded = "seed" in probe.kwargs
            remedy = advice if seeded else "give a seed, if it takes one: --kwargs '{\"seed\": 1}'"
            grade = Grade.PROBLEM if seeded else Grade.WARNING
            self.note(check, grade, f"played again it is another one: {changed}", remedy)
            return
        beside = [PlayedEpisode() for _ in range(OTHERS + 1)]
        others, how = await self._others()
        compared = beside[: len(beside) - len(others)]
        # Others of other rows, too, and last: they would overwrite shared state, and draw from its generator.
        players = [*[probe] * len(compared), *others]
        started = time.perf_counter()
        await asyncio.gather(*(player.play(episode) for player, episode in zip(players, beside, strict=True)))
        took = time.perf_counter() - started
        changes = [changed for episode in compared if (changed := alone.difference(episode))]
        problem = (
            f"beside {OTHERS} others {len(changes)} of {len(compared)} are another one: {changes[0]}" if changes else ""
        )
        if not problem and (state := await self._shared_state(others[-1] if others else None)):
            self.note(check, Grade.WARNING, state, advice)
            return
        turns, which = alone.turns, f", {len(others)} of them {how}" if others else ""
        found = f"{turns} turns alone, again, and beside {OTHERS} others in {took:.2f} s{which}"
        self.judge(check, problem, advice, found)

    async def _others(self) -> tuple[list[InteractionProbe], str]:
        """Return players of other rows, half as many as play at once, and how the rows were made."""
        probe = self._probe
        seed = probe.kwargs.get("seed")
        seeds = range(seed + 1, seed + 1 + OTHERS // 2) if type(seed) is int else ()
        others = [probe.with_kwargs({**probe.kwargs, "seed": other}) for other in seeds]
        for made in made_kwargs(probe.kwargs):
            player = probe.with_kwargs(made)
            await player.play(alone := PlayedEpisode())
            if not alone.failure:
                others = [*others[: OTHERS // 4], *[player] * (OTHERS // 4)]
                return others, f"with made kwargs {show(made, 120)}"
        return others, "with other seeds" if others else ""

    async def _shared_state(self, other: InteractionProbe | None) -> str:
        """Return the attribute that each conversation overwrites when it begins, and how; "" if there is none."""
        moments: list[Moment] = []
        players = [self._probe, self._probe, *([] if other is None else [other]), self._probe]
        for player in players:
            player.moments = moments
            await player.play(PlayedEpisode())
            player.moments = None
        state = overwritten(moments, "start", [player is other for player in players])
        return next((f"self.{name}, which all conversations share, {how}" for name, how in state.items()), "")


def _said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": text}]
