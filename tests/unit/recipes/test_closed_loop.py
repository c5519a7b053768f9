"""The recipe closed_loop: its customers against a gateway, what its report traces, and how its loop goes on."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from recipes.closed_loop import customers, report
from recipes.closed_loop.customers import Customers, Ledger, rewards_of, way_of
from recipes.closed_loop.programs import Programs, read_state, write_state
from tests.agent_sessions import END, make_run
from tests.unit.gateway.test_gateway import ADMIN, Weights
from verl_multiturn.errors import ConfigError
from verl_multiturn.gateway.app import Gateway
from verl_multiturn.gateway.sessions import GatewaySettings
from verl_multiturn.records.read.sessions import SessionIndex
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.scripted_chat import tiny_tokenizer

TASKS = [
    {
        "task_id": f"round-1-{number}",
        "messages": [{"role": "system", "content": "Answer."}, {"role": "user", "content": f"{number} + 1?"}],
        "answer": str(number + 1),
    }
    for number in range(2)
]


def says_two(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
    return tiny_tokenizer().encode(f"Answer: 2{END}")


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[str]:
    served = Gateway(make_run(ScriptedEngine(says_two)), Weights(), folder, GatewaySettings(), ADMIN)
    await served.start()
    try:
        yield served.address
    finally:
        await served.aclose()


async def asked_and_rewarded(tmp_path: Path, rounds: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let customers ask, and reward after a restart; return the ledger's sessions and the gateway's."""
    records, ledger = tmp_path / "records", Ledger(tmp_path / "ledger.jsonl")
    async with gateway(records) as url:
        own = Customers(url, ADMIN, ledger, 1)
        await asyncio.to_thread(own.ask, TASKS, 6)
        await asyncio.to_thread(own.ask, TASKS, 6)  # a repeat has nothing to do
    for number in range(1, rounds + 1):
        async with gateway(records) as url:
            own = Customers(url, ADMIN, ledger, number)
            await asyncio.to_thread(own.reward)
            await asyncio.to_thread(own.reward)
    index = SessionIndex(records)
    index.refresh()
    return ledger.sessions(), dict(index.sessions)


async def test_rewards_that_come_late_and_twice_count_once(tmp_path: Path) -> None:
    ledger, sessions = await asked_and_rewarded(tmp_path)
    assert sorted((each.task, each.reward) for each in sessions.values()) == (
        [("round-1-0", 0.0)] * 6 + [("round-1-1", 1.0)] * 6
    )
    assert report.rewards(ledger, sessions) == {
        "rewarded": 12, "late": 6, "repeated": 8, "corrected": 2, "counted_twice": 0, "wrong_rewards": 0,
    }  # fmt: skip
    assert [each["counted"] for own in ledger.values() for each in own["sent"]] == [
        each["expected"] for own in ledger.values() for each in own["sent"]
    ]


async def test_a_reward_that_counts_twice_or_differs_is_seen(tmp_path: Path) -> None:
    ledger, sessions = await asked_and_rewarded(tmp_path)
    name = next(name for name, own in ledger.items() if own["way"] == "late" and own["right"])
    sessions[name].rewards.append(sessions[name].rewards[0])
    assert report.rewards(ledger, sessions)["counted_twice"] == 1
    ledger[name]["right"] = 0.0
    assert report.rewards(ledger, sessions)["wrong_rewards"] == 1
    del sessions[name]
    assert report.rewards(ledger, sessions)["wrong_rewards"] == 1


async def test_some_tasks_are_rewarded_in_the_round_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(customers, "LATER", 2)
    ledger, sessions = await asked_and_rewarded(tmp_path)
    assert {each.reward for each in sessions.values() if each.task == "round-1-1"} == {None}
    assert report.rewards(ledger, sessions)["wrong_rewards"] == 0
    ledger, sessions = await asked_and_rewarded(tmp_path, rounds=2)
    assert {each.reward for each in sessions.values() if each.task == "round-1-1"} == {1.0}
    assert report.rewards(ledger, sessions)["wrong_rewards"] == 0


@pytest.mark.parametrize("right", [0.0, 1.0])
@pytest.mark.parametrize("way", [*customers.WAYS, "round after"])
def test_the_rewards_of_a_session_add_up_to_the_right_one(way: str, right: float) -> None:
    last, named = 0.0, {}
    for each in rewards_of(way, right):
        if each.id is None:
            last = each.value
        elif each.counted:
            assert each.id not in named
            named[each.id] = each.value
        else:
            assert each.id in named
    assert last + sum(named.values()) == right


def test_each_way_is_gone() -> None:
    assert {way_of(task, slot) for task in range(8) for slot in range(6)} == {*customers.WAYS, "round after"}


def test_a_line_of_the_ledger_that_was_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path)
    first.note(event="session", session_id="a", way="late")
    with path.open("a") as file:
        file.write('{"event": "end", "sess')
    Ledger(path).note(event="end", session_id="a", right=1.0)
    assert Ledger(path).sessions() == {
        "a": {"sent": [], "event": "end", "session_id": "a", "way": "late", "right": 1.0}
    }


async def test_learned_tokens_are_traced_to_session_weights_and_receipt(tmp_path: Path) -> None:
    from verl_multiturn.records.read.learning import SelectionRule, choose

    await asked_and_rewarded(tmp_path)
    chosen = choose([tmp_path / "records"], SelectionRule(min_score=1.0)).conversations
    lines = [{**each.lineage(number, 0), "trained_tokens": sum(each.trained)} for number, each in enumerate(chosen)]
    assert len(lines) == 6

    def untraced(change: dict[str, Any], models: Sequence[str] = ("a" * 64,)) -> int:
        trace = report.Trace(tmp_path / "records")
        for line in lines:
            trace.add({**line, **change}, models, in_group=True)
        assert trace.tokens == sum({**line, **change}["trained_tokens"] for line in lines)
        return trace.untraced

    every = sum(line["trained_tokens"] for line in lines)
    assert every > 0
    assert untraced({}) == 0
    assert untraced({}, ("b" * 64,)) == untraced({"models": []}) == untraced({"uid": "another"}) == every
    assert untraced({"request_id": lines[0]["request_id"]}) == every - lines[0]["trained_tokens"]
    assert untraced({"trained_tokens": 1}) == len(lines)


def test_a_program_that_fails_is_named_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    programs = Programs(tmp_path / "logs", "secret", "GATEWAY_KEY")
    shown = programs.run("env", ["bash", "-c", "env"])
    assert "GATEWAY_KEY=secret" in shown
    assert "RANK=" not in shown
    assert "MASTER_PORT" not in shown
    with pytest.raises(ConfigError, match=r"(?s)learn-1 ended with exit status 3; its log is .*learn-1.log.*no disk"):
        programs.run("learn-1", ["bash", "-c", "echo no disk; exit 3"])


def test_the_state_of_a_loop_outlives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert read_state(path) == {}
    write_state(path, {"model-0": {"hash": "a"}})
    (tmp_path / "state.part").write_text('{"mod')
    assert read_state(path) == {"model-0": {"hash": "a"}}
    assert json.loads(path.read_text()) == {"model-0": {"hash": "a"}}
