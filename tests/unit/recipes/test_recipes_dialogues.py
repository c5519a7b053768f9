"""The recipes artist and errands: their rows, and the dialogues that these play."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from recipes.errands import report
from recipes.errands.errands import HOME, REQUESTS, Errand, make_errands
from recipes.errands.report import all_right, right
from tests.recipe_scripts import RECIPES, composed, prepared, script, write_run
from tests.support.sample_records import sample_record
from verl_multiturn import Limits, Outcome, scripted_rollout
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.running.registry import interaction_of_row, load_interactions
from verl_multiturn.runs.data import tool_call
from verl_multiturn.task_sets.bfcl.package import CATEGORIES, Dialogue, dialogue_of
from verl_multiturn.task_sets.bfcl.user import own_dialogue
from verl_multiturn.tools.loading.kwargs import hidden_tools, tools_of_row
from verl_multiturn.tools.loading.registry import load_tools

ARTIST, ERRANDS = RECIPES / "artist", RECIPES / "errands"


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the folders of the recipes' scripts, and forget the modules that a test before read there."""
    monkeypatch.setattr(sys, "path", [str(ARTIST), str(ERRANDS), *sys.path])
    for name in ("dialogue_rows", "smoke_model", "errands"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def gold_turns(dialogue: Dialogue) -> list[str]:
    """Return a model's turns that make the gold calls."""
    said = []
    for calls in dialogue.gold:
        said += [tool_call(call.name, dict(call.arguments)) for call in calls]
        said.append("That is done.")
    return said


def rollout(row: dict[str, Any], tools: Path, user: Path, turns: list[str]) -> Outcome:
    """Roll out a row's conversation with the recipe's tools and user; the model writes `turns`."""
    chosen, _ = tools_of_row(row, load_tools(tools), "row")
    interaction, kwargs = interaction_of_row(row, load_interactions(user), "row")
    return asyncio.run(
        scripted_rollout(
            list(chosen.values()),
            turns,
            row["prompt"],
            interaction=interaction,
            interaction_kwargs=kwargs,
            limits=Limits(prompt_length=30_000, response_length=30_000, max_parallel_calls=4),
        )
    )


def test_numbers_for_training_validate_in_no_category(tmp_path: Path) -> None:
    rows = prepared("artist", tmp_path, "--source", "base+long_context", "--tools", str(ARTIST / "tools.yaml"))
    assert {split: len(found) for split, found in rows.items()} == {"train": 200, "test": 400}
    numbers = {
        split: {row["extra_info"]["dialogue"].rpartition("_")[2] for row in found} for split, found in rows.items()
    }
    assert not numbers["train"] & numbers["test"]
    assert {row["data_source"] for row in rows["test"]} == {f"bfcl/{name}" for name in CATEGORIES}
    assert {row["data_source"] for row in rows["train"]} == {"bfcl/base", "bfcl/long_context"}
    tools = load_tools(ARTIST / "tools.yaml")
    for row in rows["test"][::40]:  # as they are read, with the keys of all rows
        chosen, given = tools_of_row(row, tools, "row")
        dialogue = dialogue_of(row["extra_info"]["dialogue"])
        assert set(chosen) == set(row["extra_info"]["tool_selection"])
        assert hidden_tools(given) == [name for names in dialogue.hidden.values() for name in names]
    with pytest.raises(ConfigError, match="'composite' is no category"):
        script("artist", "dialogue_rows").read_categories("base+composite")


def test_a_smoke_row_earns_what_its_calls_deserve(tmp_path: Path) -> None:
    rows = prepared("artist", tmp_path, "--smoke", "--tools", str(ARTIST / "tools.yaml"))
    row = random.Random(0).choice(rows["train"])
    dialogue = dialogue_of(row["extra_info"]["dialogue"])
    for reward in ("paper", "all", "turns"):
        user = ARTIST / "users" / f"{reward}.yaml"
        right = rollout(row, ARTIST / "tools.yaml", user, gold_turns(dialogue))
        assert right.score + sum(reply.reward or 0 for reply in right.replies) == 1.0
        silent = rollout(row, ARTIST / "tools.yaml", user, ["No."] * len(dialogue.turns))
        assert silent.score + sum(reply.reward or 0 for reply in silent.replies) < 0.6


@pytest.mark.slow
def test_the_variants_take_other_rewards() -> None:
    users = {
        variant: composed("artist", *variant).actor_rollout_ref.rollout.custom.multiturn.interaction_config_path
        for variant in ((), ("all",), ("turns",))
    }
    assert [Path(path).name for path in users.values()] == ["paper.yaml", "all.yaml", "turns.yaml"]


def errand_turns(errand: Errand, *theres: str) -> list[str]:
    """Return the turns of a model that takes "there" for these folders."""
    calls = [errand.call(index, folder) for index, folder in enumerate((errand.folder, *theres))]
    return [said for call in calls for said in (tool_call(*call), "Done.")]


def test_no_held_out_errand_is_trained_on(tmp_path: Path) -> None:
    rows = prepared("errands", tmp_path, "--tools", str(ERRANDS / "tools.yaml"))
    dialogues = {
        split: [row["extra_info"]["interaction_kwargs"]["bfcl"]["dialogue"] for row in found]
        for split, found in rows.items()
    }
    assert (len(dialogues["train"]), len(dialogues["test"]), len(set(dialogues["test"]))) == (2048, 128, 128)
    assert not set(dialogues["train"]) & set(dialogues["test"])
    tools = load_tools(ERRANDS / "tools.yaml")
    assert {tuple(tools_of_row(row, tools, "row")[0]) for row in rows["test"]} == {("cp", "mv")}


def test_an_errand_is_asked_in_few_words() -> None:
    errand = Errand("music", ("Move", "Copy", "Move"), ("plan.txt", "poem.txt", "map.txt"))
    dialogue = own_dialogue(errand.dialogue())
    assert dialogue.turns == ('Move "plan.txt" to "music".', 'Copy "poem.txt" there.', 'Move "map.txt" there.')
    assert [call.name for calls in dialogue.gold for call in calls] == ["mv", "cp", "mv"]
    assert list(dialogue.config["GorillaFileSystem"]["root"]) == [HOME]


def test_an_errand_is_paid_by_the_request(tmp_path: Path) -> None:
    rows = prepared("errands", tmp_path, "--train-size", "8", "--test-size", "4")

    def earned(user: str, *theres: str) -> tuple[list[float | None], list[bool]]:
        """Return the reward of each turn, and which of them were right."""
        row, errand = rows["test"][0], make_errands(1, seed=9_000_000)[0]
        wanted = [folder or errand.folder for folder in theres]
        outcome = rollout(row, ERRANDS / "tools.yaml", ERRANDS / user, errand_turns(errand, *wanted))
        record = {"replies": [{"metrics": reply.metrics} for reply in outcome.replies]}
        assert outcome.score == 0
        return [reply.reward for reply in outcome.replies], right(record)

    third = 1 / REQUESTS
    assert earned("user.yaml", "", "") == ([third, third, third], [True, True, True])
    assert earned("user.yaml", HOME, "") == ([third, 0, 0], [True, False, False])  # a wrong turn spoils later ones
    assert earned("user.yaml", "", HOME) == ([third, third, 0], [True, True, False])
    lottery = [earned("lottery.yaml", "", HOME) for _ in range(40)]
    assert {value for values, _ in lottery for value in values} == {0, third}
    assert all(judged == [True, True, False] for _, judged in lottery)


def test_an_errand_that_was_cut_is_not_right() -> None:
    said = {"metrics": {}}
    good, bad = ({"metrics": {"turn_right": value}} for value in (1.0, 0.0))
    records = [{"replies": [said, good, good, good]}, {"replies": [said, good]}, {"replies": [said, good, bad, bad]}]
    assert [right(record) for record in records] == [[True] * 3, [True, False, False], [True, False, False]]
    assert (all_right(records), all_right(records[1:]), all_right([])) == (0.3333, 0.0, None)


def test_the_errands_report_leaves_invalid_conversations_out(tmp_path: Path) -> None:
    def made(step: int, validation: bool, valid: bool, turns: int) -> dict[str, Any]:
        replies = [{"turn": n, "text": "", "metrics": {"turn_right": 1.0}} for n in range(turns)]
        return sample_record(request_id=uuid4().hex, step=step, validation=validation, valid=valid, replies=replies)

    records = [made(0, True, True, 1), made(0, True, False, 0), made(2, True, True, 3), made(2, True, False, 2)]
    write_run(tmp_path, [*records, made(1, False, True, 3), made(1, False, False, 0), made(3, True, False, 0)])
    found = report.report(tmp_path)
    assert (found["all_right_by_step"], found["sampled_by_step"]) == ({0: 0.0, 2: 1.0, 3: None}, [1.0])
    assert (found["held_out"], found["right_by_request"], found["invalid"]) == (0, [], 4)


def test_a_model_that_says_one_folder_is_right_for_that_folder_alone() -> None:
    def made(folder: str, value: float) -> dict[str, Any]:
        told = [{"text": "Move it there.", "metrics": {"turn_right": each}} for each in (1.0, value, value)]
        return {"replies": [{"text": f'Move "menu.txt" to "{folder}".', "metrics": {}}, *told]}

    records = [made("games", 0.0), made("music", 1.0), made("music", 1.0), made("photos", 0.0)]
    assert all_right(records) == 0.5
    assert report.right_by_folder(records) == {"games": 0.0, "music": 1.0, "photos": 0.0, "school": None}


@pytest.mark.slow
def test_errands_are_credited_by_the_turn() -> None:
    users = {}
    for variant in ((), ("lottery",)):
        config = composed("errands", *variant)
        assert config.algorithm.adv_estimator == "mt_turns"
        users[variant] = config.actor_rollout_ref.rollout.custom.multiturn.interaction_config_path
    assert [Path(path).name for path in users.values()] == ["user.yaml", "lottery.yaml"]
