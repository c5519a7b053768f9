"""Scripted judges of `rubric`: literal scores, texts that try to earn, and a judge that is away.

    python -m benchmarks.rubric

- `literal`: conversations whose score by each judge stands here as a number;
- `texts`: the answers of every hack in `reward_hacks` that fit a text, and no reward's task: each is sent to each
  judge, and none may earn;
- `outage`: conversations whose judge is away, and one whose judge replies, through verl's reward worker and our
  trainer: no token of those may be trained.

The last line is one JSON object. What a real model may be talked into is not shown: these judges cannot be talked into
anything but by what they read outside the one JSON string.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.long.rewards.hacks import answer_text, read_cases
from tests.long.rewards.hacks.rubric_reply import reply
from tests.long.rewards.parity.judged import judging
from verl_multiturn.rewards import aclose, compute_score
from verl_multiturn.rewards.router import REWARDS

JUDGES = ("strict", "quotes", "thinks", "unsure", "echo", "parrot", "obeys")
CRITERIA = [
    {"name": "right", "text": "The last turn says the same as the reference.", "weight": 3},
    {"name": "polite", "text": "The turn says please.", "turns": "each"},
]
REFERENCE = "The seven of clubs."
LITERAL: list[tuple[str, list[str], float]] = [
    ("right and polite", ["Which card, please?", REFERENCE], 0.875),
    ("right", ["Which card?", REFERENCE], 0.75),
    ("right in one turn", ["the seven of clubs."], 0.75),
    ("wrong and polite", ["Which card, please?", "The ace, please."], 0.25),
    ("wrong", ["Which card?", "The ace."], 0.0),
    ("right in reasoning", ["Which card?", f"<think>{REFERENCE}</think>The ace."], 0.0),
    ("nothing", ["Which card, please?", "<think>The"], 0.125),
]
"""Conversations with the score that a judge gives who compares exactly: three parts of four for the last turn, and one
for the share of polite turns."""
GIVE_VERDICTS = ("strict", "thinks", "obeys")
"""The others say more than a verdict, or none: their conversations count as failed, and score 0."""
_AT_ONCE = 6
_PLACES = {"$url": "http://127.0.0.1:9/v1", "$root": "."}


@dataclass(frozen=True)
class Judged:
    """The score of a conversation.

    Attributes:
        part: `literal` or `texts`.
        judge: Name of the judge.
        case: Short text of the case.
        score: Its score.
        expected: The score that it must have.
        failed: Whether it counts as failed.
    """

    part: str
    judge: str
    case: str
    score: float
    expected: float
    failed: bool


async def judge_all(judges: tuple[str, ...] = JUDGES, rewards: list[str] | None = None) -> list[Judged]:
    """Let each judge score each case.

    Args:
        judges: Names of the judges.
        rewards: The rewards whose hacks are sent; None: all.
    """
    slots = asyncio.Semaphore(_AT_ONCE)
    texts = hack_texts(rewards)

    async def scored(part: str, judge: str, case: str, said: list[str], expected: float, criteria: Any) -> Judged:
        rubric = {"url": url, "model": judge, "attempts": 1, "timeout_s": 120, "criteria": criteria}
        told = {"question": "Which card?", "assistant_texts": said, "assistant_calls": [], "call_statuses": []}
        async with slots:
            found = await compute_score("rubric/cards", said[-1], REFERENCE, told, rubric=rubric)
        return Judged(part, judge, case, float(found["score"]), expected, bool(found["failed"]))

    with judging(reply) as url:
        asked = [
            scored("literal", judge, case, said, expected if judge in GIVE_VERDICTS else 0.0, CRITERIA)
            for judge in judges
            for case, said, expected in LITERAL
        ]
        asked += [scored("texts", judge, text[:200], [text], 0.0, CRITERIA[:1]) for judge in judges for text in texts]
        try:
            return await asyncio.gather(*asked)
        finally:
            await aclose()


def hack_texts(rewards: list[str] | None = None) -> list[str]:
    """Return the answers of hacks that fit a text, each once.

    Args:
        rewards: The rewards whose hacks they are; None: all.
    """
    named = list(REWARDS) if rewards is None else rewards
    cases = [case for reward in named for case in read_cases(reward, _PLACES) if not case.tried.control]
    texts = [text for case in cases if (text := answer_text(case.task, case.answer)) is not None]
    return list(dict.fromkeys(texts))


def outage() -> dict[str, int]:
    """Return how many tokens are trained of conversations whose judge is away, and of one whose judge replies."""
    import pytest

    from tests.integration.test_outages import FakeKeeper, trainer_of
    from tests.integration.trainer_rows import WritableStore, put_in_place, step
    from tests.long.rewards.rubric_rows import TURNS, reward_section, scored, trained_tokens

    store = WritableStore()
    store.kv_list = lambda partition_id: {partition_id: {}}  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        put_in_place(store, patch)
        with judging(reply) as url:
            for number, place in enumerate([url, _PLACES["$url"], _PLACES["$url"]]):
                store.add("u", number, scored("u", number, TURNS, reward_section(place)))
        before = trained_tokens(store)
        metrics = step(trainer_of(FakeKeeper(), actor_rollout_ref__rollout__n=3), store.batch())
        there = int(store.rows["u_0_0"]["response_mask"].sum())
        return {
            "outage_conversations": 2,
            "outage_sampled": before - there,
            "outage_trained": trained_tokens(store) - there,
            "judged_trained": there,
            "certificate_violations": int(metrics["rollout/certificate/violations"]),
        }


def faults(found: list[Judged]) -> list[str]:
    """Return a line for each conversation whose score is another one than it must be.

    Args:
        found: The scores.
    """
    return [
        f"{each.part}: {each.judge}: {each.case!r} scored {each.score:g}, expected {each.expected:g}"
        for each in found
        if abs(each.score - each.expected) > 1e-9
    ]


def summarize(found: list[Judged], lines: list[str]) -> dict[str, Any]:
    """Count for the last line of output.

    Args:
        found: The scores.
        lines: The faults.
    """
    texts = [each for each in found if each.part == "texts"]
    return {
        "literal": sum(each.part == "literal" for each in found),
        "texts": len(texts) // max(1, len({each.judge for each in texts})),
        "tried": len(texts),
        "paid": sum(each.score > 0 for each in texts),
        "failed_by_judge": dict(sorted(Counter(each.judge for each in found if each.failed).items())),
        "right_paid": sum(each.score == 0.75 for each in found if each.part == "literal"),
        "faults": len(lines),
    }
