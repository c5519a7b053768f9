"""Siblings before scripted judges: literal ranks, texts that try to rise, other orders, and a judge that is away.

`benchmarks.rubric` prints the counts:

- `ranked`: groups whose ranks by each judge stand here as numbers;
- `orders`: the same siblings in every other order, before a judge that compares and one that looks at places: the same
  ranks, or all of them counted as disagreements;
- `rising`: the texts of `rubric_judges.py`, each as a sibling of two honest answers: it must be last, and the two must
  have what they have without it;
- an outage: no sibling has a rank then.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from tests.long.rewards.parity.judged import judging
from verl_multiturn.errors import OutageError
from verl_multiturn.rewards import aclose
from verl_multiturn.rewards.judge_client import content_of
from verl_multiturn.rewards.relative import rank_siblings
from verl_multiturn.rewards.rubric import RubricOptions
from verl_multiturn.rewards.score import Solution

REFERENCE, POLITE = "The seven of clubs.", "Which card, please?"
CRITERION = {"name": "right", "text": "It says the same as the reference; else a polite question is better."}
JUDGES = ("strict", "quotes", "thinks", "unsure", "echo", "parrot", "obeys", "places")
GIVE_VERDICTS = ("strict", "thinks", "obeys")
LITERAL: list[tuple[list[str], list[float]]] = [
    ([POLITE, REFERENCE, "The ace."], [0.5, 1.0, 0.0]),
    ([REFERENCE, REFERENCE, "The ace."], [0.75, 0.75, 0.0]),
    (["The ace.", "", POLITE, REFERENCE], [1 / 3, 0.0, 2 / 3, 1.0]),
    (["<think>The seven of clubs.</think>", POLITE], [0.0, 1.0]),
    (["The ace.", "The ace."], [0.5, 0.5]),
]
"""Texts of siblings, and the rank of each by a judge that compares exactly."""
_KEYS = ("criteria", "ticket", "reference", "task", "conversations")
_AT_ONCE = 6


def rank_reply(asked: dict[str, Any]) -> str:
    """Return the judge's reply to a question about siblings, by its model's name.

    The names are those of `hacks/rubric_reply.py`. `obeys` turns the right order round, if anything of a text is where
    an order could be read: anywhere but within the one JSON string of its conversation. `places` keeps the order of the
    question.
    """
    messages, model = asked["messages"], asked["model"]
    question = json.loads(messages[-1]["content"])
    if "conversations" not in question:
        return "I am here."
    conversations = question["conversations"]
    texts = {label: json.loads(given)[-1]["text"] for label, given in conversations.items()}
    ranking = list(conversations)
    if model != "places":
        ranking.sort(key=lambda label: -worth(texts[label]))
    if model == "obeys" and reads_outside(messages):
        ranking.reverse()
    verdict = json.dumps({"ticket": question["ticket"], "ranking": ranking})
    last = next(reversed(texts.values()))
    return {
        "quotes": f"They said: {last}\n{verdict}",
        "thinks": f"<think>They said: {last}</think>\n{verdict}",
        "unsure": f"They said {last} and I cannot say",
        "echo": last,
        "parrot": messages[-1]["content"],
    }.get(model, verdict)


def worth(text: str) -> int:
    """Return what a text is worth to a judge that compares exactly."""
    return 2 if text == REFERENCE else int(text == POLITE)


def reads_outside(messages: list[dict[str, Any]]) -> bool:
    """Return whether a question has anything but what an honest one has outside the conversations' JSON strings."""
    raw = messages[1]["content"]
    question = json.loads(raw)
    if [each["role"] for each in messages] != ["system", "user"] or list(question) != list(_KEYS):
        return True
    for label, given in question["conversations"].items():
        whole = f"{json.dumps(label)}: {content_of(given)}"
        if len(label) != 4 or raw.count(whole) != 1 or len(json.loads(given)) != 1:
            return True
        raw = raw.replace(whole, "")
    honest = {**question, "conversations": {}}
    blanks = ", " * (len(question["conversations"]) - 1)
    return raw != content_of(honest).replace('"conversations": {}', f'"conversations": {{{blanks}}}')


async def rank_all(texts: list[str], judges: tuple[str, ...] = JUDGES) -> dict[str, Any]:
    """Let each judge rank each group; return the counts of the last line, and the faults under `faults`.

    Args:
        texts: Texts that try to rise.
        judges: Names of the judges.
    """
    slots, faults = asyncio.Semaphore(_AT_ONCE), []

    async def ranks(judge: str, said: list[str], seed: int) -> list[Any]:
        options = RubricOptions(
            url=url, model=judge, relative=True, attempts=1, timeout_s=120, criteria=[CRITERION]  # type: ignore[list-item]
        )  # fmt: skip
        solutions = [Solution("rubric/cards", (text,), extra_info={"question": "Which card?"}) for text in said]
        async with slots:
            return await rank_siblings(solutions, REFERENCE, options, seed)

    async def compared(part: str, judge: str, said: list[str], expected: list[float], seed: int = 0) -> None:
        found = await ranks(judge, said, seed)
        wanted: list[Any] = [round(value, 9) for value in expected]
        asked = len({text for text in said if text and "<think>" not in text}) > 1
        if asked and judge == "places":
            wanted = [0.5] * len(said)  # of those that are shown
        elif asked and judge not in GIVE_VERDICTS:
            wanted = ["failed"] * len(said)
        got = ["failed" if "failed" in each else round(each["rank"], 9) for each in found]
        if got != wanted:
            faults.append(f"{part}: {judge}: {said!r} have {got}, expected {wanted}"[:400])

    async def in_every_order(said: list[str], expected: list[float]) -> int:
        disagreed = 0
        for number, order in enumerate(itertools.permutations(range(len(said)))):
            mixed = [said[place] for place in order]
            await compared("orders", "strict", mixed, [expected[place] for place in order], number)
            places = await ranks("places", mixed, number)
            disagreed += sum(each["disagreements"] for each in places) == len(said) * (len(said) - 1)
        return disagreed

    with judging(rank_reply) as url:
        try:
            literal = [(judge, *group) for judge in judges if judge != "places" for group in LITERAL]
            await asyncio.gather(*(compared("ranked", judge, *group) for judge, *group in literal))
            said, expected = LITERAL[0]
            disagreed = await in_every_order(said, expected)
            tried = [(judge, text) for judge in judges if judge in GIVE_VERDICTS for text in texts]
            await asyncio.gather(
                *(compared("rising", judge, [REFERENCE, text, POLITE], [1.0, 0.0, 0.5]) for judge, text in tried)
            )
        finally:
            await aclose()
    return {
        "ranked": len(literal),
        "orders": 6,
        "orders_all_disagreeing": disagreed,
        "rising_tried": len(tried),
        "rising_paid": sum(line.startswith("rising") for line in faults),
        "outage_ranked": await _ranked_in_an_outage(),
        "faults": faults,
    }


async def _ranked_in_an_outage() -> int:
    """Return how many siblings have a rank whose judge is away."""
    options = RubricOptions(url="http://127.0.0.1:9/v1", model="strict", relative=True, attempts=1)
    solutions = [Solution("rubric/cards", (text,)) for text in (REFERENCE, POLITE)]
    try:
        return len(await rank_siblings(solutions, None, options, 0))
    except OutageError:
        return 0
    finally:
        await aclose()
