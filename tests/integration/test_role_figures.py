"""`RoleFigures`: trained tokens and advantages by role, and its warnings after the second step."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.trainer_rows import WritableStore, put_in_place
from verl_multiturn.rows.keys import RowKey

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

TRAINED: dict[str, Any] = {"trained": ["white", "black"], "roots": 2}


def conversation(white: float, spoken: tuple[str, ...] = ("white", "black"), uid: str = "u") -> dict[str, Any]:
    """Return the stats of a session of both roles, of which some spoke."""
    session = {**TRAINED, "roles": {role: int(role in spoken) for role in TRAINED["trained"]}}
    roles = {
        role: {**session, "role": role, "outcome": white if role == "white" else -white, "outside": []}
        for role in spoken
    }
    turns = [{"turn": at, "role": role, "reward": None} for at, role in enumerate(spoken)]
    return {"valid": True, "group": uid, "turns": turns, "roles": roles, "session": session,
            "conversation": {"score": 0.0}}  # fmt: skip


def without_roles(score: float, roots: int = 2, uid: str = "u") -> dict[str, Any]:
    return {"valid": True, "group": uid, "turns": [], "session": {"roots": roots}, "conversation": {"score": score}}


def warned(caplog: pytest.LogCaptureFixture, *steps: list[dict[str, Any]]) -> list[str]:
    from verl_multiturn.verl_bridge.trainer.rows.role_figures import RoleFigures

    caplog.clear()
    figures = RoleFigures()
    with caplog.at_level(logging.WARNING):
        for stats in steps:
            figures.watch(stats)
    return [record.getMessage() for record in caplog.records]


def test_a_trained_role_that_never_spoke_is_warned_of_after_two_steps(caplog: pytest.LogCaptureFixture) -> None:
    alone = [conversation(1.0, ("white",)), conversation(0.0, ("white",))]
    assert warned(caplog, alone) == []
    assert warned(caplog, alone, alone) == warned(caplog, alone, alone, alone) == [
        "role 'black' is trained and never spoke in 4 sessions of 2 steps, so that it learns nothing; let the agent "
        "name it as the model of its requests, or take it out of proxy.train"
    ]  # fmt: skip
    assert warned(caplog, alone, [*alone, conversation(1.0)]) == []
    invalid = [{**each, "valid": False} for each in alone]
    assert warned(caplog, invalid, invalid) == []


def test_a_simulated_user_that_never_spoke_is_warned_of_by_its_own_setting(caplog: pytest.LogCaptureFixture) -> None:
    speakers = {"trained": ["assistant", "user"], "roles": {"assistant": 1, "user": 0}}
    turns = [{"turn": 0, "role": "assistant", "reward": None}]
    alone = {"valid": True, "group": "u", "turns": turns, "roles": {"assistant": {"score": 1.0}}, "speakers": speakers,
             "conversation": {"score": 1.0}}  # fmt: skip
    (said,) = warned(caplog, [alone], [alone])
    assert said.startswith("role 'user' is trained and never spoke in 2 sessions of 2 steps")
    assert said.endswith("give rows a PolicyUser whose turn comes, or take it out of train")


def test_zero_sum_scores_without_roles_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    games = [without_roles(0.0), without_roles(0.0)]
    hint = (
        "none of 2 groups of 2 steps has a signal, and sessions have several roots: if several players speak in them, "
        "zero-sum scores cancel; set proxy.roles"
    )
    assert warned(caplog, games) == []
    assert warned(caplog, games, games, games) == [hint]
    assert warned(caplog, games, [without_roles(0.0), without_roles(1.0)]) == []
    one_root = [without_roles(0.0, 1), without_roles(0.0, 1)]
    assert warned(caplog, one_root, one_root) == []
    won = [conversation(1.0), conversation(1.0)]  # roles are set
    assert warned(caplog, won, won) == []
    assert warned(caplog, games[:1], games[:1]) == []  # nothing was compared


def test_trained_tokens_and_advantages_of_each_role(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows
    from verl_multiturn.verl_bridge.trainer.rows.role_figures import RoleFigures

    store = WritableStore()
    put_in_place(store, monkeypatch)
    rows = {
        "u_0_0": ("white", [1, 0, 1], [0.5, 9.0, -1.0]),
        "u_0_1": ("white", [1, 0, 0], [0.25, 0.0, 0.0]),
        "u_0_2": ("black", [0, 0, 0], [1.0, 1.0, 1.0]),
        "u_1_0": (None, [1, 1, 1], [3.0, 3.0, 3.0]),
    }
    fetched: dict[Any, Any] = {}
    for name, (role, mask, advantages) in rows.items():
        store.rows[name] = {"response_mask": torch.tensor(mask), "advantages": torch.tensor(advantages)}
        fetched[RowKey.parse(name)] = {"valid": True, "turns": [{"turn": 0, "role": role, "reward": None}]}
    batch = SimpleNamespace(keys=list(rows), tags=[{}] * len(rows), partition_id="train")
    figures = RoleFigures()
    figures.look(BatchRows(batch, fetched))
    assert figures.metrics() == {
        "rollout/role/white/trained_tokens": 3,
        "rollout/role/white/advantage/mean_abs": pytest.approx(1.75 / 3),
        "rollout/role/black/trained_tokens": 0,
    }
    figures.begin_step()
    calls = store.calls
    figures.look(BatchRows(SimpleNamespace(keys=["u_1_0"], tags=[{}], partition_id="train"), fetched))
    assert (figures.metrics(), store.calls) == ({}, calls)


def game_rows(session: int, white: float, acc: float) -> dict[str, dict[str, Any]]:
    """Return the columns of a game's two rows, as a filter reads them, by name."""
    rows = {}
    for at, (role, outcome) in enumerate({"white": white, "black": -white}.items()):
        stats = {
            "valid": True, "turns": [{"turn": at, "role": role, "reward": None}], "reported": {"acc": acc},
            "conversation": {"row": at, "rows": 2, "score": 0.0},
            "session": {**TRAINED, "role": role, "outcome": outcome, "outside": []},
        }  # fmt: skip
        rows[f"u_{session}_{at}"] = {"metrics": {"rollout": stats}}
    return rows


@pytest.mark.parametrize(
    ("results", "signal", "cause", "right"),
    [
        ([1.0, -1.0, 1.0], True, None, 2),
        ([1.0, 1.0, 1.0], False, "all_right", 3),
        ([-1.0, -1.0, -1.0], False, "all_wrong", 0),
    ],
)
def test_a_filter_asks_each_role_and_the_first_for_who_is_right(
    monkeypatch: pytest.MonkeyPatch, results: list[float], signal: bool, cause: str | None, right: int
) -> None:
    from verl_multiturn.verl_bridge.trainer.groups.signal_filter import SignalFilter

    store = WritableStore()
    put_in_place(store, monkeypatch)
    for session, white in enumerate(results):
        store.rows |= game_rows(session, white, white)
    store.tags = {name: {} for name in store.rows}
    made = SignalFilter("difficulty", 1, len(results))
    assert made.pools is not None
    made.pools.drawn["u"] = 7
    made.judge(store.batch(), ["u"], 1)
    metrics = made.metrics()
    assert (made.silent, metrics["rollout/filter/no_signal"]) == (frozenset(() if signal else "u"), int(not signal))
    assert [metrics[f"rollout/filter/{each}"] for each in ("all_right", "all_wrong")] == [
        int(cause == each) for each in ("all_right", "all_wrong")
    ]
    assert (made.pools.seen[7].right, made.pools.seen[7].signal) == (right, signal)
