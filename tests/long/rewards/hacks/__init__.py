"""Cases of `benchmarks.reward_hacks`: wrong answers that try to earn, and right answers that must.

The cases are data: `REWARD.yaml` (and `REWARD_*.yaml`) has the tasks of a reward, its hacks by kind, and answers that a
library is known to accept. `shapers.py` and `large.py` have those of the shaper `otc` and of rewards beyond float32.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.rewards import compute_score

_AT_ONCE = 6
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Tried:
    """Reward of one answer.

    Attributes:
        reward: Name of the reward.
        kind: Kind of the hack.
        case: Short text of the case.
        earned: Score of the answer.
        honest: Score of an honest wrong answer to the same task.
        looseness: First cell of the row in `reward-functions.md` that names a looseness; empty for a hack.
        of: Second cell of that row: the library or the option that is so loose.
        control: Whether the answer is right, so that it must earn more than a wrong one.
    """

    reward: str
    kind: str
    case: str
    earned: float
    honest: float = 0.0
    looseness: str = ""
    of: str = ""
    control: bool = False

    @property
    def paid(self) -> bool:
        """True when the answer earned more than an honest wrong answer does."""
        return self.earned > self.honest + 1e-9


@dataclass(frozen=True)
class _Task:
    """A row of data, and how an answer to it is written."""

    data_source: str
    truth: Any
    wrong: Any
    right: list[Any]
    wrap: str = "{}"
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    question: str = "?"


@dataclass(frozen=True)
class _Case:
    task: _Task
    answer: Any
    tried: Tried


def read_cases(reward: str, places: Mapping[str, str], quick: bool = False) -> list[_Case]:
    """Read the cases of a reward.

    Args:
        reward: Name of the reward, and of its file.
        places: Values for words such as `$root` in the options.
        quick: Read one case of every kind, and none that takes long.
    """
    data: dict[str, Any] = {"tasks": {}, "hacks": [], "looseness": []}
    for file in sorted([_FOLDER / f"{reward}.yaml", *_FOLDER.glob(f"{reward}_*.yaml")]):
        for key, items in yaml.safe_load(file.read_text(encoding="utf-8")).items():
            data[key] = {**data[key], **items} if key == "tasks" else data[key] + items
    tasks = {name: _Task(**_filled(task, places)) for name, task in data["tasks"].items()}
    cases = [
        _Case(task, right, Tried(reward, "control", _short(right), 0.0, control=True))
        for task in tasks.values()
        for right in task.right
    ]
    for hack in [*data["hacks"], *data["looseness"]]:
        if quick and (hack.get("slow") or "looseness" in hack):
            continue
        for name in [hack["task"]] if isinstance(hack["task"], str) else hack["task"]:
            task = _with_options(tasks[name], _filled(hack.get("options", {}), places))
            for answer in _filled(hack["tries"][: 1 if quick else None], places):
                known = {"looseness": hack.get("looseness", ""), "of": hack.get("of", "")}
                tried = Tried(reward, hack.get("kind", "looseness"), _short(answer), 0.0, **known)
                cases.append(_Case(task, answer, tried))
    return cases


async def attack(reward: str, places: Mapping[str, str], quick: bool = False) -> AsyncIterator[Tried]:
    """Score every case of a reward, and an honest wrong answer to every task."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def scored(task: _Task, answer: Any) -> float:
        async with slots:
            return await _score(task, answer)

    cases = read_cases(reward, places, quick)
    rows = {_key(case.task): case.task for case in cases}
    honest = dict(zip(rows, await asyncio.gather(*[scored(row, row.wrong) for row in rows.values()]), strict=True))
    scores = await asyncio.gather(*[scored(case.task, case.answer) for case in cases])
    for case, score in zip(cases, scores, strict=True):
        yield replace(case.tried, earned=score, honest=honest[_key(case.task)])


async def _score(task: _Task, answer: Any) -> float:
    """Score an answer: a text, or a mapping with `texts`, `response`, `calls` or `whole` (reward-functions.md)."""
    given = answer if isinstance(answer, dict) and "text" not in answer and "parts" not in answer else {"one": answer}
    texts = given.get("texts") or [given["whole"] if "whole" in given else task.wrap.replace("{}", _text(given["one"]))]
    extra = {
        "question": task.question,
        "assistant_texts": list(map(_text, texts)),
        "assistant_calls": [
            [{"name": name, "arguments": arguments} for name, arguments in turn] for turn in given.get("calls", [])
        ],
        "call_statuses": given.get("statuses", []),
    }
    response = given.get("response", "".join(extra["assistant_texts"]))
    found = await compute_score(task.data_source, response, task.truth, extra, **task.options)
    return float(found["score"])


def answer_text(task: _Task, answer: Any) -> str | None:
    """Return an answer as the text of one turn; None for one of several turns or of calls, which is no text.

    Args:
        task: Its task.
        answer: The answer, as a file of cases has it.
    """
    if isinstance(answer, dict) and {"texts", "calls", "response"} & answer.keys():
        return None
    if isinstance(answer, dict) and "whole" in answer:
        return _text(answer["whole"])
    return task.wrap.replace("{}", _text(answer))


def _text(answer: Any) -> str:
    """Write an answer out: `{text, times}` is a text many times, `{parts}` are several of these."""
    if isinstance(answer, dict):
        parts = answer.get("parts")
        return "".join(map(_text, parts)) if parts else str(answer["text"]) * int(answer.get("times", 1))
    return str(answer)


def _short(answer: Any) -> str:
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}…"


def _key(task: _Task) -> str:
    return json.dumps([task.data_source, task.truth, task.options, task.wrap], sort_keys=True, default=str)


def _with_options(task: _Task, options: Mapping[str, dict[str, Any]]) -> _Task:
    merged = {name: {**task.options.get(name, {}), **options.get(name, {})} for name in {**task.options, **options}}
    return _Task(task.data_source, task.truth, task.wrong, task.right, task.wrap, merged, task.question)


def _filled(value: Any, places: Mapping[str, str]) -> Any:
    """Return a value with every word of `places` in its texts replaced, the longest word first."""
    if isinstance(value, dict):
        return {key: _filled(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, places) for item in value]
    if isinstance(value, str):
        for word in sorted(places, key=len, reverse=True):
            value = value.replace(word, places[word])
    return value
