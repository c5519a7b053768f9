"""The recipe `ask_first`: its tasks, its user, its reward's measurements, its warm start and its report."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.recipe_scripts import prepared, script
from verl_multiturn.interactions.running.registry import interaction_of_row, load_interactions

RECIPE = ROOT / "recipes" / "ask_first"
MISSING = {"names": ["Ann", "Bob"], "numbers": [34, 271], "thing": "apples", "missing": "Bob"}
COMPLETE = {**MISSING, "missing": ""}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))


def user() -> Any:
    return load_interactions(RECIPE / "user.yaml")["forgetful"]


def answers(kwargs: dict[str, Any], *turns: str) -> list[tuple[str, float | None, bool]]:
    """Return text, reward and end of the user's answers to the model's turns."""
    interaction, found = user(), []
    interaction.start("a", **kwargs)
    for turn in turns:
        reply = interaction.reply("a", [{"role": "assistant", "content": turn}], **kwargs)
        found.append((reply.text, reply.reward, reply.done))
    interaction.close("a")
    return found


def test_the_user_tells_a_missing_number_once() -> None:
    ask = "How many apples does Bob have?"
    assert answers(MISSING, ask, ask, "Answer: 305") == [
        ("Bob has 271 apples.", None, False),
        ("I said: Bob has 271 apples.", -0.5, False),
        ("", 1.0, True),
    ]


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        ("How many apples does Ann have?", ("I said: Ann has 34 apples.", -0.5, False)),
        ("How many apples does Tom have?", ("I do not understand.", -0.5, False)),
        ("", ("I do not understand.", -0.5, False)),
        ("Answer: 304", ("", 0.0, True)),
        ("How many apples does Bob have? Answer: 305", ("", 1.0, True)),
    ],
)
def test_the_user_judges(turn: str, reply: tuple[str, float | None, bool]) -> None:
    assert answers(COMPLETE, turn) == [reply]


def test_half_of_the_users_leave_a_number_out(tmp_path: Path) -> None:
    rows = prepared("ask_first", tmp_path, "--train-size", "40", "--test-size", "10")
    interactions = load_interactions(RECIPE / "user.yaml")
    kinds = []
    for row in rows["train"] + rows["test"]:
        chosen, kwargs = interaction_of_row(row, interactions, "a row")
        assert chosen is interactions["forgetful"]
        said = row["prompt"][-1]["content"]
        told = [str(number) in said.split() for number in kwargs["numbers"]]
        assert told == [name != kwargs["missing"] for name in kwargs["names"]]
        assert row["reward_model"]["ground_truth"] == str(sum(kwargs["numbers"]))
        kinds.append(row["data_source"])
    assert [kinds.count(f"ask_first/{kind}") for kind in ("missing", "complete")] == [25, 25]
    held_out = {row["prompt"][-1]["content"] for row in rows["test"]}
    assert not held_out & {row["prompt"][-1]["content"] for row in rows["train"]}


@pytest.mark.parametrize(
    ("missing", "texts", "asked", "acc"),
    [
        ("Bob", ["How many apples does Bob have?", "", "Answer: 305"], 1.0, 1.0),
        ("Bob", ["How many apples does Ann have?", "Answer: 304"], 0.0, 0.0),
        ("Bob", ["How many apples does Bob have? Answer: 305"], 0.0, 1.0),
        ("", ["How many apples does Bob have?", "Answer: 305"], 1.0, 1.0),
        ("", ["", "Answer: 305"], 0.0, 1.0),
        ("", [], 0.0, 0.0),
    ],
)
def test_what_is_measured(missing: str, texts: list[str], asked: float, acc: float) -> None:
    reward = script("ask_first", "reward")
    extra = {"assistant_texts": texts, "missing": missing}
    found = reward.compute_score("d", "Answer: 305", "305", extra)
    assert (found["score"], found["asked"], found["acc"]) == (0.0, asked, acc)


def test_a_good_conversation_of_the_warm_start_earns_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "common"))
    make_model = script("ask_first", "make_model")
    from missing_number import Task  # type: ignore[import-not-found]

    for kwargs, count in ((MISSING, 2), (COMPLETE, 1)):
        task = Task(("Ann", "Bob"), (34, 271), "apples", kwargs["missing"])
        messages = make_model.good(task, random.Random(0))
        turns = [m["content"] for m in messages if m["role"] == "assistant" and "tool_calls" not in m]
        got = answers(kwargs, *turns)
        assert len(got) == count
        assert sum(reward or 0.0 for _, reward, _ in got) == 1.0
        assert [text for text, _, done in got if not done] == [
            m["content"] for m in messages[2:] if m["role"] == "user"
        ]


def test_the_report(tmp_path: Path) -> None:
    report = script("ask_first", "report")

    def validated(missing: float, complete: float) -> dict[str, float]:
        return {
            "val-core/ask_first/missing/acc/mean@1": missing,
            "val-core/ask_first/complete/acc/mean@1": complete,
            "val-aux/ask_first/missing/asked/mean@1": 0.9,
            "val-aux/ask_first/complete/asked/mean@1": 0.1,
            "val-aux/ask_first/missing/reward/mean@1": 7.0,
        }

    trained = {
        "critic/score/mean": 0.5,
        "training/global_step": 1,
        "rollout/certificate/violations": 1,
        "rollout/certificate/rows": 64,
        "rollout/interaction/failures": 2,
        "timing_s/step": 3.0,
    }
    entries = [{"step": 0, "data": validated(0.0, 0.1)}, {"step": 1, "data": {**trained, **validated(0.8, 1.0)}}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)))
    found = report.summarize(tmp_path, 12.34, 5)
    assert {key: found[key] for key in list(found)[1:12]} == {
        "seed": 5,
        "accuracy_before": 0.05,
        "accuracy_after": 0.9,
        "asked_when_needed": 0.9,
        "asked_needlessly": 0.1,
        "seconds": 12.3,
        "violations": 1,
        "certificate_rows": 64,
        "environment_error": 2,
        "steps": 1,
        "reward_first": 0.5,
    }
