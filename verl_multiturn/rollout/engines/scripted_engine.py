"""A scripted engine for tests: it returns the turns that it was given, and remembers its requests.

    engine = ScriptedEngine([tokenizer.encode("<tool_call>…</tool_call><|im_end|>"), tokenizer.encode("42<|im_end|>")])

The class is public. `scripted_rollout` (in `rollout.scripted_chat`) takes tools and texts, and needs no tokenizer of
yours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engines.protocol import Ask, Generation

Script = Sequence[Sequence[int]] | Callable[[str, Sequence[int], int], Sequence[int]]


class ScriptEndedError(EngineError):
    """A script has no more turns. Whoever wrote it reads so; it is no failure of an engine that a log should have."""


class ScriptedEngine:
    """An `Engine` whose turns are given in advance.

    Args:
        script: The ids of each turn, in order and for every request alike; or a function `(request_id, ids, turn) ->
            ids`. When a list of turns runs out, `generate` raises `EngineError`.
        version: The weight version that the engine reports.
        logprob: The log-probability that the engine reports for every token.
    """

    def __init__(self, script: Script, version: int = 0, logprob: float = -0.5) -> None:
        self._script = script
        self._version = version
        self._logprob = logprob
        self._turns: dict[str, int] = {}
        self.seen: list[tuple[str, list[int]]] = []
        """`(request_id, ids)` of every call, in order."""
        self.images: list[list[Any]] = []
        """The images of every call, in order."""

    async def generate(self, ask: Ask) -> Generation:
        """Return the next turn of the request, cut to `ask.max_new_tokens`.

        Raises:
            EngineError: The script has no more turns.
        """
        turn = self._turns.get(ask.request_id, 0)
        self._turns[ask.request_id] = turn + 1
        self.seen.append((ask.request_id, list(ask.ids)))
        self.images.append(list(ask.images))
        if callable(self._script):
            said = list(self._script(ask.request_id, ask.ids, turn))
        elif turn < len(self._script):
            said = list(self._script[turn])
        else:
            raise ScriptEndedError(
                f"the script has {len(self._script)} turns; request {ask.request_id!r} asked for one more; add it"
            )
        cut = said[: ask.max_new_tokens]
        return Generation(
            ids=cut,
            logprobs=[self._logprob] * len(cut),
            versions=[self._version] * len(cut),
            finish="length" if len(cut) < len(said) else "stop",
        )
