"""`RoleFigures`: trained tokens and advantages by role, and its warnings after the second step."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.trainer_rows import WritableStore, put_in_place
from verl_multiturn.rows.keys import RowKey

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

TRAINED = {"trained": ["white", "black"], "roots": 2}


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
