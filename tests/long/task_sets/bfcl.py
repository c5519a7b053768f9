"""BFCL's dialogues: is our verdict on each turn the package's own, and what does a dialogue cost?

    python -m benchmarks.bfcl [--short]

Each of the 800 dialogues is played in six ways (`PLAYS`): the gold calls; nothing; one gold call removed, moved to
another turn, or made twice; one with other arguments. Our `DialogueEpisode` scores every turn. Beside it the calls are
written as text for the package's own executor, and the package's functions score the same turns, each by itself, and
the whole dialogue. The package evaluates its gold calls and these as Python, which is right here: no model wrote them.

The last line is one JSON object:

- `gold_right`: dialogues whose gold calls are right in every turn, of `dialogues`;
- `played`, `turns`: dialogues and turns that were compared; `right`: turns that are right, by way of playing;
- `different`: turns and whole dialogues for which the verdicts differ;
- `do_nothing`: reward of silence, by category: `state` is the share of the turns that BFCL's comparison of states alone
  lets pass, `turns`, `all` and `paper` are the rewards;
- `episode_p50_ms`: median time of a dialogue played with its gold calls, from its worlds to the last verdict;
  `by_category_p50_ms` has that of each category.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils as utils

from verl_multiturn.task_sets.bfcl.episode import DialogueEpisode
from verl_multiturn.task_sets.bfcl.package import CATEGORIES, Dialogue, WorldCall, dialogues

PLAYS = ("gold", "silent", "left out", "moved", "doubled", "other arguments")
Turns = list[list[WorldCall]]


def gold_turns(dialogue: Dialogue) -> Turns:
    """Return the gold calls of each turn, as a model makes them."""
    return [list(calls) for calls in dialogue.gold]


def other(value: Any, rng: random.Random) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.choice((1, -1, 10))
    if isinstance(value, str):
        return rng.choice(
            (f"{value}x", value[1:], value.upper() if value != value.upper() else value.lower(), "log.txt")
        )
    if isinstance(value, list):
        return [*value[1:], *(other(each, rng) for each in value[:1])]
    return value


def play(turns: Turns, way: str, rng: random.Random) -> Turns:
    """Return the calls of a dialogue that is played in one of the ways of `PLAYS`."""
    if way == "silent":
        return [[] for _ in turns]
    made = [list(calls) for calls in turns]
    places = [(turn, index) for turn, calls in enumerate(made) for index in range(len(calls))]
    if way == "gold" or not places:
        return made
    turn, index = rng.choice(places)
    call = made[turn][index]
    if way == "doubled":
        made[turn].insert(index, call)
    elif way == "other arguments":
        name = rng.choice(sorted(call.arguments)) if call.arguments else ""
        changed = {name: other(call.arguments[name], rng)} if name else {"missing": 1}
        made[turn][index] = WorldCall(call.name, {**call.arguments, **changed})
    else:
        del made[turn][index]
        if way == "moved":
            target = rng.randrange(len(made))
            made[target].insert(rng.randint(0, len(made[target])), call)
    return made


def ours(dialogue: Dialogue, turns: Turns) -> DialogueEpisode:
    """Play a dialogue here."""
    episode = DialogueEpisode(dialogue)
    for calls in turns:
        for call in calls:
            episode.call(call.name, call.arguments)
        episode.end_turn()
    return episode


def written(call: WorldCall) -> str:
    """Return a call as the package reads it."""
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def theirs(dialogue: Dialogue, gold: Sequence[Sequence[str]], turns: Turns) -> tuple[list[bool], bool]:
    """Play a dialogue in the package.

    Args:
        dialogue: The dialogue.
        gold: Its gold calls as the data has them.
        turns: The calls that are played.

    Returns:
        Whether each turn is right, by itself; and whether the package's checker finds the dialogue right.
    """
    said = [[[written(call) for call in calls]] if calls else [] for calls in turns]
    config = {"initial_config": dict(dialogue.config), "involved_classes": list(dialogue.classes)}
    whole = checker.multi_turn_checker(said, list(map(list, gold)), {"id": dialogue.id, **config}, "", "whole")

    def execute(calls: Sequence[str], who: str) -> tuple[list[str], dict[str, Any]]:
        found: tuple[list[str], dict[str, Any]] = utils.execute_multi_turn_func_call(
            list(calls), **config, model_name=who, test_entry_id=dialogue.id, long_context=dialogue.long_context
        )
        return found

    results: list[str] = []
    right = []
    for index, (steps, wanted) in enumerate(zip(said, gold, strict=True)):
        made, model = execute(steps[0] if steps else [], "model")
        expected, truth = execute(wanted, "gold")
        results += made
        right.append(
            not wanted
            or (
                not checker.is_empty_execute_response(steps)
                and checker.state_checker(model, truth)["valid"]
                and checker.response_checker(results, expected, index)["valid"]
            )
        )
    for name in [name for name in vars(utils) if name.endswith("_instance")]:
        delattr(utils, name)
    return right, whole["valid"]


def do_nothing(found: Sequence[Dialogue]) -> dict[str, float]:
    """Return the reward of silence in dialogues, a mean over them."""
    episodes = [ours(dialogue, [[] for _ in dialogue.turns]) for dialogue in found]
    state = [
        statistics.mean(all(verdict.same.values()) or not verdict.calls for verdict in episode.verdicts)
        for episode in episodes
    ]
    rewards = {name: [episode.score(name) for episode in episodes] for name in ("turns", "all", "paper")}
    return {name: round(statistics.mean(each), 3) for name, each in {"state": state, **rewards}.items()}


def run(every: int, seed: int) -> dict[str, Any]:
    """Compare, measure, print differences, and return the figures.

    Args:
        every: One dialogue in so many is played.
        seed: Decides how they are played.
    """
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    right: Counter[str] = Counter()
    nothing, times = {}, {}
    differences: list[Any] = []
    for category in CATEGORIES:
        found = list(dialogues(category).values())[::every]
        nothing[category] = do_nothing(found)
        spent = []
        for dialogue in found:
            gold = gold_turns(dialogue)
            began = time.perf_counter()
            episode = ours(dialogue, gold)
            spent.append(1000 * (time.perf_counter() - began))
            counts["dialogues"] += 1
            counts["gold_right"] += episode.score("all") == 1.0
            for way in PLAYS:
                turns = play(gold, way, rng)
                episode = ours(dialogue, turns)
                judged = [verdict.right for verdict in episode.verdicts]
                truth, whole = theirs(dialogue, dialogue.gold_text, turns)
                counts["played"] += 1
                counts["turns"] += len(judged)
                right[way] += sum(judged)
                counts["different"] += sum(a != b for a, b in zip(judged, truth, strict=True))
                counts["different"] += whole != (episode.score("all") == 1.0)
                if judged != truth or whole != all(judged):
                    differences.append([dialogue.id, way, judged, truth, whole])
        times[category] = spent
    for each in differences[:20]:
        print(each)
    return {
        **{name: counts[name] for name in ("gold_right", "dialogues", "played", "turns", "different")},
        "right": dict(right),
        "do_nothing": nothing,
        "episode_p50_ms": round(statistics.median(each for spent in times.values() for each in spent), 3),
        "by_category_p50_ms": {name: round(statistics.median(spent), 3) for name, spent in times.items()},
    }
