"""The recipes frozen_lake and alfworld: their rows, the texts for the model, and episodes in the real environments."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.conftest import ROOT
from tests.recipe_scripts import RECIPES, composed, prepared, script, write_run
from tests.support.sample_records import sample_record
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Reply
from verl_multiturn.interactions.running.registry import interaction_of_row, load_interactions
from verl_multiturn.runs.environment import environment_of
from verl_multiturn.runs.plan import plan_run

pytestmark = pytest.mark.slow

LAKE, ALFWORLD = RECIPES / "frozen_lake", RECIPES / "alfworld"


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the folders that a run has: those of the recipes' scripts, and the root for classes in YAML files."""
    monkeypatch.setattr(sys, "path", [str(ROOT), str(LAKE), str(ALFWORLD), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def played(config: Path, row: dict[str, Any], turns: Sequence[str]) -> list[Reply]:
    """Play a row's episode in the real environment, with given turns; return the first message and the answers."""

    async def play() -> list[Reply]:
        interaction, kwargs = interaction_of_row(row, load_interactions(config), "row")
        env: Any = interaction
        try:
            replies = [await env.start("x", **kwargs)]
            for turn in turns:
                replies.append(await env.reply("x", [{"role": "assistant", "content": turn}]))
            await env.close("x")
        finally:
            await env.aclose()
        return replies

    return asyncio.run(play())


def test_no_held_out_map_is_trained_on(tmp_path: Path) -> None:
    lake = script("frozen_lake", "lake")
    held_out = lake.held_out_maps()
    assert len(set(held_out)) == 256
    for seed in ("0", "1"):
        rows = prepared("frozen_lake", tmp_path / seed, "--seed", seed)
        train, test = ([tuple(row["extra_info"]["map"]) for row in rows[split]] for split in ("train", "test"))
        assert test == held_out
        assert len(set(train)) == 2048
        assert not set(train) & set(held_out)
    # Without the exception, a seed's maps do have some of them.
    assert set(islice(lake.draw_maps(0), 500)) & set(held_out)


def test_the_maps_are_those_of_the_published_runs() -> None:
    lake = script("frozen_lake", "lake")
    assert lake.held_out_maps()[:2] == [("SFFF", "FFFH", "FFFF", "HFFG"), ("SFHF", "FHFF", "FHHF", "FFFG")]
    assert list(islice(lake.draw_maps(0), 2)) == [("SFFF", "FFFF", "FFHF", "FFFG"), ("SHHH", "FFHF", "FFFF", "HHFG")]


def test_a_written_map_is_played_as_it_stands() -> None:
    lake = ["SFHF", "FHFF", "FFFH", "HFFG"]
    row = {"extra_info": {"interaction_kwargs": {"lake": {"env_kwargs": {"desc": lake}}}}}
    replies = played(LAKE / "lake.yaml", row, ["down", "Down", "right", "RIGHT", "down", "right"])
    assert [reply.text for reply in replies[:3]] == [
        "P F H F\nF H F F\nF F F H\nH F F G",
        "F F H F\nP H F F\nF F F H\nH F F G",
        "F F H F\nF H F F\nP F F H\nH F F G",
    ]
    assert [reply.reward for reply in replies[1:]] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    fallen = played(LAKE / "lake.yaml", row, ["right", "right"])[-1]
    assert (fallen.reward, fallen.done) == (0.0, True)


def test_the_lake_is_gymnasiums(tmp_path: Path) -> None:
    lake = script("frozen_lake", "lake")
    row = prepared("frozen_lake", tmp_path, "--train-size", "4", "--test-size", "1")["test"][0]
    drawn = tuple(row["extra_info"]["map"])
    far, field, way = lake.distances(drawn), 0, []
    while far[field]:
        way.append(lake.best_actions(drawn, field, far)[0])
        field = lake.next_field(field, way[-1])
    fields = [0]
    for action in way:
        fields.append(lake.next_field(fields[-1], action))
    replies = played(LAKE / "lake.yaml", row, ["I wonder.", *(lake.ACTIONS[action].title() for action in way)])
    assert replies[0].text == lake.show_field(drawn, 0)
    assert replies[0].text.startswith("P ")
    assert "none of the actions" in replies[1].text
    assert [reply.text for reply in replies[2:-1]] == [lake.show_field(drawn, field) for field in fields[1:-1]]
    assert [reply.reward for reply in replies[2:]] == [0.0] * (len(way) - 1) + [1.0]
    assert [reply.done for reply in replies] == [False] * (len(way) + 1) + [True]


def test_every_step_on_the_lake_is_gymnasiums() -> None:
    import gymnasium

    lake, drawn = script("frozen_lake", "lake"), ["SFFF", "FFFF", "FFFF", "FFFG"]
    table = gymnasium.make("FrozenLake-v1", desc=drawn, is_slippery=lake.SLIPPERY).unwrapped.P  # type: ignore[attr-defined]
    for field in range(lake.SIZE**2 - 1):  # the last one is the goal
        reached = [table[field][action][0][1] for action in range(len(lake.ACTIONS))]
        assert [lake.next_field(field, action) for action in range(len(lake.ACTIONS))] == reached


def test_the_shares_of_the_lake_are_right() -> None:
    lake = script("frozen_lake", "lake")
    assert lake.distances(("SFHH", "HFFH", "HHFF", "HHHG"))[0] == 6
    assert 0 not in lake.distances(("SHFF", "HFFF", "FFFF", "FFFG"))
    # One way of six steps: any step off it costs two more, or a hole, or stays at the edge.
    share = lake.random_policy_share(("SFHH", "HFFH", "HHFF", "HHHG"))
    assert 4**-6 < share < 0.01


def test_the_lakes_report_counts_what_the_environment_gave(tmp_path: Path) -> None:
    """Not the scores, which a lottery draws."""

    def record(step: int, temperature: float, reward: float) -> dict[str, Any]:
        replies = [{"turn": 0, "text": "", "reward": 0.0}, {"turn": 1, "text": "", "reward": reward}]
        changes = {"validation": not temperature, "replies": replies, "stop_reason": "environment_done"}
        return sample_record(request_id=uuid4().hex, step=step, **changes)

    made = [record(0, 0, reward) for reward in (0.0, 0.0, 0.0, 1.0)] + [
        record(2, 0, reward) for reward in (1.0, 1.0, 1.0, 0.0)
    ]
    made += [record(1, 1.0, 1.0), record(1, 1.0, 0.0)]
    write_run(tmp_path, made)
    found = script("frozen_lake", "report").report(tmp_path)
    assert (found["greedy_before"], found["greedy_after"], found["sampled_by_step"]) == (0.25, 0.75, [0.5])
    assert (found["seed"], found["steps"], found["violations"], found["environment_error"]) == (5, 1, 0, 0)
    assert (found["map_size"], found["is_slippery"]) == ("4x4", False)
    assert 0 < found["random_policy"] < 0.05


@pytest.mark.stack
def test_the_variants_of_the_lake_change_what_they_say() -> None:
    assert composed("frozen_lake", "gigpo").algorithm.adv_estimator == "mt_gigpo"
    plain, lottery = composed("frozen_lake"), composed("frozen_lake", "lottery")
    modes = [each.actor_rollout_ref.rollout.custom.multiturn.interaction_reward.mode for each in (plain, lottery)]
    assert modes == ["replace", "none"]
    assert plain.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == script("frozen_lake", "lake").TURNS
    draw = script("frozen_lake", "lottery").compute_score
    drawn = [draw("", "", "", {}) for _ in range(200)]
    assert set(drawn) == {0.0, 1.0}
    assert 60 < sum(drawn) < 140


def test_a_run_finds_the_classes_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    plan = plan_run("frozen_lake", out=tmp_path)
    assert environment_of(plan, {"recipe": {"on_cpu": False}})["PYTHONPATH"] == f"{ROOT}:/mine"
    monkeypatch.delenv("PYTHONPATH")
    assert environment_of(plan, {"recipe": {"on_cpu": False}})["PYTHONPATH"] == str(ROOT)


def test_the_made_household_can_be_solved(tmp_path: Path) -> None:
    rows = prepared("alfworld", tmp_path, "--smoke")
    tiny_model, household = script("alfworld", "tiny_model"), script("alfworld", "household")
    for row in [rows["train"][0], rows["test"][0]]:
        seed = row["extra_info"]["interaction_kwargs"]["household"]["seed"]
        world = household.Household()
        world.reset(seed)
        solution = world.solution()
        turns = [f"<think>Hm.</think><action>{action}</action>" for action in solution]
        replies = played(ALFWORLD / "household.yaml", row, ["go on", "<action>fly</action>", *turns])
        assert "put the" in replies[0].text
        assert "Possible actions: go to " in replies[0].text
        assert [reply.reward for reply in replies[1:]] == [-0.1, -0.1, 0.0, 0.0, 0.0, 10.0]
        assert replies[-1].done
        # The tiny model learns the content of a window: the first message, and the last two steps.
        shown = [reply.text for reply in (replies[0], *replies[3:])]
        learned = tiny_model.turns_of(seed)
        for number, turn in enumerate(learned):
            users = [message["content"] for message in turn if message["role"] == "user"]
            assert users == [shown[0], *shown[1 : number + 1][-2:]]
        assert all(len(later) >= len(earlier) for earlier, later in pairwise(learned))


def test_a_row_of_alfworld_names_its_game(tmp_path: Path) -> None:
    for name in ("train/b/1", "train/a/2", "train/movable_recep/3", "valid_seen/c/1"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "game.tw-pddl").write_text("{}")
    rows = prepared("alfworld", tmp_path / "out", "--source", str(tmp_path / "data"))
    games = [row["extra_info"]["interaction_kwargs"]["household"]["env_kwargs"]["game"] for row in rows["train"]]
    assert games == [f"{tmp_path}/data/train/{name}/game.tw-pddl" for name in ("a/2", "b/1")]
    assert len(rows["test"]) == 1
    for row in rows["train"]:
        interaction_of_row(row, load_interactions(ALFWORLD / "alfworld.yaml"), "row")
    with pytest.raises(ConfigError, match=r"has no game\.tw-pddl; run `alfworld-download`"):
        prepared("alfworld", tmp_path / "none", "--source", str(tmp_path / "nowhere"))
