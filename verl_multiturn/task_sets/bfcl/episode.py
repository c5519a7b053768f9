"""`DialogueEpisode`: one dialogue that is played, and the verdict on each turn of the user.

The rule is BFCL's, written anew (`benchmarks.bfcl` compares it with the package's checker, turn by turn). A turn is
right if the model made at least one call in it, all worlds are in the state of the gold worlds after the gold calls of
the same turn, and each result of these gold calls is among the results of the model's calls so far. Whatever the model
does in a turn without gold calls is right.

Invariants:
- gold calls are made in worlds of their own, once for each turn, when the turn ends;
- after the last turn no call is made any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl_multiturn.errors import ConfigError
from verl_multiturn.task_sets.bfcl.package import Dialogue, WorldCall
from verl_multiturn.task_sets.bfcl.worlds import DialogueWorlds

Wrong = Literal["", "no call", "state", "results"]


@dataclass(frozen=True)
class TurnVerdict:
    """The verdict on one turn.

    Attributes:
        wrong: The first fault, in BFCL's order; "" where the turn is right.
        same: For each class whether the model's world is in the state of the gold one.
        calls: Number of the turn's gold calls.
        matched: How many of these the model made in the turn: the same function with the same arguments.
    """

    wrong: Wrong
    same: Mapping[str, bool]
    calls: int
    matched: int

    @property
    def right(self) -> bool:
        """Return whether the turn is right."""
        return not self.wrong


class DialogueEpisode:
    """A dialogue that is played.

    Args:
        dialogue: The dialogue.

    Attributes:
        dialogue: As given.
        verdicts: The verdicts on the turns that have ended.

    Raises:
        ConfigError: The package of the worlds is not installed, or a world cannot be in the dialogue's state.
    """

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue
        self.verdicts: list[TurnVerdict] = []
        state = dialogue.classes, dialogue.config, dialogue.long_context
        try:
            self._model, self._gold = DialogueWorlds(*state), DialogueWorlds(*state)
        except ConfigError as error:
            raise ConfigError(f"dialogue {dialogue.id!r}: {error}") from error
        self._results: Counter[str] = Counter()
        self._made: list[WorldCall] = []

    @property
    def turn(self) -> int:
        """Return the index of the turn that is played; the number of turns after the last one."""
        return len(self.verdicts)

    @property
    def over(self) -> bool:
        """Return whether all turns have ended."""
        return self.turn == len(self.dialogue.turns)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Make a call of the model, and return its result."""
        if self.over:
            return "Error during execution: the dialogue is over"
        self._made.append(WorldCall(name, arguments))
        result = self._model.call(name, arguments)
        self._results[result] += 1
        return result

    def end_turn(self) -> TurnVerdict:
        """End the turn that is played, and return the verdict on it."""
        gold = self.dialogue.gold[self.turn]
        expected = Counter(self._gold.call(call.name, call.arguments) for call in gold)
        same = self._model.same(self._gold)
        wrong: Wrong = ""
        if gold:
            if not self._made:
                wrong = "no call"
            elif not all(same.values()):
                wrong = "state"
            elif expected - self._results:
                wrong = "results"
        verdict = TurnVerdict(wrong, same, len(gold), self._matched(gold))
        self.verdicts.append(verdict)
        self._made = []
        return verdict

    def _matched(self, gold: Sequence[WorldCall]) -> int:
        left = [(call.name, call.arguments) for call in self._made]
        matched = 0
        for call in gold:
            if (call.name, call.arguments) in left:
                left.remove((call.name, call.arguments))
                matched += 1
        return matched

    def score(self, reward: Literal["turns", "all", "paper"]) -> float:
        """Return the reward of the calls played; a turn that did not end is wrong.

        Args:
            reward: `turns`: the share of the turns that are right. `all`: 1 if all are. `paper`: half the share of the
                classes whose world ends in the state of the gold one, and half the share of the gold calls that the
                model made in their turn.
        """
        verdicts = self.verdicts
        if reward == "turns":
            return sum(verdict.right for verdict in verdicts) / len(self.dialogue.turns)
        if reward == "all":
            return float(self.over and all(verdict.right for verdict in verdicts))
        matched = sum(verdict.matched for verdict in verdicts)
        calls = sum(map(len, self.dialogue.gold))
        same = list(verdicts[-1].same.values()) if self.over else [False]
        return 0.5 * sum(same) / max(1, len(same)) + (0.5 * matched / calls if calls else 0.5)


Episode = DialogueEpisode
"""The name in version 0.1, until 2027-06-01."""
