"""The recipe closed_loop: its customers against a gateway, what its report traces, and how its loop goes on."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from recipes.closed_loop import customers, loop, report
from recipes.closed_loop.customers import Customers, Ledger, rewards_of, way_of
from recipes.closed_loop.programs import Programs, read_state, write_state
from tests.agent_sessions import END, make_run
from tests.recipe_scripts import composed
from tests.unit.gateway.test_gateway import ADMIN, Weights
from verl_multiturn.errors import ConfigError
from verl_multiturn.gateway.app import Gateway
from verl_multiturn.gateway.files import GatewaySettings
from verl_multiturn.records.read.learning import RecordLoader, SelectionRule, choose
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


def test_a_session_that_was_cut_off_has_the_reward_that_came_before() -> None:
    assert report.meant_by({"sent": []}) is None
    assert report.meant_by({"sent": [], "right": 1.0}) is None
    assert report.meant_by({"sent": [{"reward": 1.0}]}) == 1.0
    assert report.meant_by({"sent": [{"reward": 0.5}], "right": 1.0}) == 1.0


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


async def test_learned_tokens_are_traced_to_session_weights_and_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    take = RecordLoader.take

    def without_digests(loader: RecordLoader, pointer: Any) -> dict[str, Any]:
        record = take(loader, pointer)
        return {**record, "generations": [{**each, "digest": "0" * 64} for each in record["generations"]]}

    assert every > 0
    assert untraced({}) == 0
    assert untraced({}, ("b" * 64,)) == untraced({"models": []}) == untraced({"uid": "another"}) == every
    assert untraced({"request_id": lines[0]["request_id"]}) == every - lines[0]["trained_tokens"]
    assert untraced({"trained_tokens": 1}) == len(lines)
    monkeypatch.setattr(RecordLoader, "take", without_digests)
    assert untraced({}) == every


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


class Started:
    """The programs of a loop, of which none is started."""

    def __init__(self, fails: str = "") -> None:
        self.names: list[str] = []
        self._fails = fails
        self.words: dict[str, list[str]] = {}

    def run(self, name: str, *words: object) -> dict[str, Any]:
        self.names.append(name)
        self.words[name] = [str(word) for word in words]
        if name == self._fails:
            raise ConfigError(f"{name} failed")
        return {"model": f"hash-{name[-1]}", "models": []}

    ours = customers = run

    def gateway(self, name: str, model: Path, records: Path, words: Sequence[str]) -> Any:
        self.names.append(f"{name} serves {model.name}")
        names = self.names

        class Running:
            url = "http://127.0.0.1:1"

            def stop(self) -> None:
                names.append("stop")

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None:
                self.stop()

        return Running()


@pytest.fixture
def looped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    """Return a function that runs a loop of two rounds, with programs of which one may fail."""
    rows = [{"prompt": TASKS[0]["messages"], "reward_model": {"ground_truth": "1"}}] * 6
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = composed("closed_loop", out=tmp_path / "out", overrides=["loop.tasks=2"], steps=2)
    config.data.train_files = str(tmp_path / "train.parquet")
    row = SimpleNamespace(rate=0.5)
    monkeypatch.setattr(loop, "read_results", lambda out: SimpleNamespace(rows=[row]))

    def run(fails: str = "", rounds: int = 2, **own: Any) -> Started:
        started = Started(fails)
        monkeypatch.setattr(loop, "Programs", lambda *_: started)
        changed = OmegaConf.to_container(config)
        changed["loop"] |= own
        changed["trainer"]["total_training_steps"] = rounds
        loop.Loop(changed).run()
        return started

    return run


ROUND_1 = ["export-0", "eval-0", "gateway-1 serves 0", "ask-1", "stop", "gateway-2 serves 0", "reward-1", "learn-1"]
ROUND_1 += ["export-1", "deploy-1"]


def test_a_gateway_that_got_new_weights_collects_with_them(looped: Callable[..., Started]) -> None:
    started = looped()
    assert started.names == [
        *ROUND_1, "ask-2", "stop", "gateway-3 serves 1", "reward-2", "learn-2", "export-2", "deploy-2", "eval-2",
        "reward-3", "stop",
    ]  # fmt: skip
    assert "--variant" not in started.words["learn-1"]
    assert started.words["learn-2"][2:5] == ["--smoke", "--variant", "rl"]
    assert "recipe.models=['hash-0','hash-1']" in started.words["learn-2"]


@pytest.mark.parametrize("fails", ["ask-2", "learn-1", "deploy-1", "reward-3"])
def test_a_loop_goes_on_after_the_last_part_that_was_done(looped: Callable[..., Started], fails: str) -> None:
    whole = [name for name in [*ROUND_1, "ask-2", "reward-2", "learn-2", "export-2", "deploy-2", "eval-2", "reward-3"]
             if name != "stop" and not name.startswith("gateway")]  # fmt: skip
    with pytest.raises(ConfigError, match=f"{fails} failed"):
        looped(fails)
    names = looped().names
    assert [name for name in names if name in whole] == whole[whole.index(fails) :]
    assert names[-1] == "stop", "no gateway is left behind"
    assert looped().names == []


def test_a_loop_may_get_further_rounds(looped: Callable[..., Started]) -> None:
    """The rewards with which it ended are not taken for those of its next round."""
    looped()
    assert [name for name in looped(rounds=3).names if name[-1] == "3" or name == "reward-4"] == [
        "ask-3", "reward-3", "learn-3", "export-3", "deploy-3", "eval-3", "reward-4",
    ]  # fmt: skip


def test_the_model_of_each_round_may_be_evaluated(looped: Callable[..., Started]) -> None:
    names = looped(evaluates_each=True).names
    assert [name for name in names if name.startswith("eval")] == ["eval-0", "eval-1", "eval-2"]


def test_a_loop_with_other_settings_is_refused(looped: Callable[..., Started]) -> None:
    with pytest.raises(ConfigError, match="learn-1 failed"):
        looped("learn-1")
    with pytest.raises(ConfigError, match=r"is a loop with other settings .*; name another --out"):
        looped(samples=3)


def test_the_state_of_a_loop_outlives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert read_state(path) == {}
    write_state(path, {"model-0": {"hash": "a"}})
    (tmp_path / "state.part").write_text('{"mod')
    assert read_state(path) == {"model-0": {"hash": "a"}}
    assert json.loads(path.read_text()) == {"model-0": {"hash": "a"}}
