"""A function of one's own computes the advantages in our trainers, and its mistakes end the run before an update."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration import test_session_rows as sessions
from tests.integration.test_several_rows import SETTINGS, add, advantages, trainer_of, updating
from tests.integration.trainer_rows import CALL, WritableStore, make_output, step
from verl_multiturn.verl_bridge.names import STATS

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

OWN = '''
"""Algorithms of an author."""

def rloo(group, *, scale=1.0):
    """RLOO: the reward less the mean of the others."""
    rewards = [member.reward for member in group]
    if len(group) == 1:
        return [0.0]
    return [scale * (own - (sum(rewards) - own) / (len(group) - 1)) for own in rewards]

def by_turn(group):
    """The number of the turn, in the first member of a group alone."""
    return [[float(turn.number + 1) for turn in member.turns] if not i else 0 for i, member in enumerate(group)]

def by_depth(group):
    """How many completions a completion continues."""
    def depth(member, turn):
        above = [other for other in member.turns if other.number == turn.parent]
        return 1 + depth(member, above[0]) if above else 0
    return [[depth(member, turn) + member.outcome for turn in member.turns] for member in group]

def order(group):
    """The place of a member in its group; what it changes in its input is changed in a copy."""
    places = list(range(len(group)))
    for member in group:
        for turn in member.turns:
            turn.reward, turn.start, turn.end, turn.number = 9.0, 0, 3, 7
        member.turns.clear()
    group.clear()
    return places

def is_nan(group):
    return [float("nan") if member.reward == 1.0 else 0.0 for member in group]

def too_few(group):
    return [0.0] * (len(group) - 1)

def wrong_turns(group):
    return [[0.0] * (len(member.turns) + 1) for member in group]

def text(group):
    return ["a"] * len(group)

def nothing(group):
    pass

def raises(group):
    return [1 / (1 - member.reward) for member in group]

class Calls:
    """The number of calls so far."""

    def __init__(self):
        self.calls = 0

    def __call__(self, group):
        self.calls += 1
        return [float(self.calls) for _ in group]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]

class Mean:
    """A running mean of all rewards: the first step of a run compares with 0."""

    def __init__(self):
        self.rewards = []

    def __call__(self, group):
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else 0.0
        self.rewards += [member.reward for member in group]
        if any(member.reward > 8 for member in group):
            raise ValueError("too large")
        return [member.reward - mean for member in group]

    def state_dict(self):
        return {"rewards": self.rewards}

    def load_state_dict(self, state):
        self.rewards = list(state["rewards"])
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:"


def trainer_with(name: str, **changes: Any) -> Any:
    return updating(trainer_of(name, **{"actor_rollout_ref__rollout__n": 2, **changes}))


def options(**given: Any) -> dict[str, Any]:
    return {f"{SETTINGS}advantage__options": given}


@pytest.mark.parametrize("uids", [["b", "a", "c"], ["c", "b", "a"]])
def test_the_order_of_groups_is_that_of_data_rows_and_not_of_drawn_uids(
    store: WritableStore, own: str, uids: list[str]
) -> None:
    """By step, by index, and by content where the index is verl's 0 for all of them."""
    from verl_multiturn.verl_bridge.workers.queue_rows import place_of_sample

    rows = [(3, 9, "Late"), (4, 0, "Zwei"), (4, 0, "Eins")]
    for uid, (begun, index, text) in zip(uids, rows, strict=True):
        data_row = {"global_steps": begun, "index": index, "raw_prompt": [{"role": "user", "content": text}]}
        for number in range(2):
            add(store, uid, number, [0.0])
            store.rows[f"{uid}_{number}_0"]["metrics"][STATS]["sample"] = place_of_sample(data_row)
    step(trainer_with(f"{own}Calls"), store.batch())
    assert [store.advantage(f"{uid}_0_0") for uid in uids] == [1.0, 3.0, 2.0]


def test_a_function_gets_conversations_and_not_rows(store: WritableStore, own: str) -> None:
    """One has three rows, and one of the others is invalid."""
    add(store, "u", 0, [0.0, 0.5, 0.0], score=0.5)
    add(store, "u", 1, [0.0])
    add(store, "u", 2, [-9.0, 0.0], valid=False)
    add(store, "v", 0, [0.0, 0.0], score=1.0)  # alone: it is asked all the same
    metrics = step(trainer_with(f"{own}rloo", **options(scale=2.0)), store.batch())
    assert metrics["rollout/certificate/violations"] == 0
    assert advantages(store) == {
        "u_0_0": 2.0, "u_0_1": 2.0, "u_0_2": 2.0, "u_1_0": -2.0, "u_2_0": 0.0, "u_2_1": 0.0,
    }  # fmt: skip
    assert advantages(store, "v") == {"v_0_0": 0.0, "v_0_1": 0.0}
    step(trainer_with(f"{own}by_turn"), store.batch())
    assert advantages(store) == {
        "u_0_0": 1.0, "u_0_1": 2.0, "u_0_2": 3.0, "u_1_0": 0.0, "u_2_0": 0.0, "u_2_1": 0.0,
    }  # fmt: skip


def test_values_for_turns_go_to_the_tokens_of_the_turns(store: WritableStore, own: str) -> None:
    for session, turns in enumerate(([CALL, "2<|im_end|>"], ["2<|im_end|>"])):
        output = make_output("u", session, turns)
        output.reward_score = 1.0
        store.add("u", session, output)
    step(trainer_with(f"{own}by_turn"), store.batch())
    row = store.rows["u_0_0"]
    first, second = row["metrics"]["rollout"]["turns"]
    assert set(row["advantages"][first["start"] : first["end"]].tolist()) == {1.0}
    assert set(row["advantages"][second["start"] : second["end"]].tolist()) == {2.0}
    assert not row["advantages"][row["response_mask"] == 0].any()


def test_an_agents_session_is_a_forest(store: WritableStore, own: str) -> None:
    trees = [sessions.Tree([None, 0, 0, None], 0.5, returned=True), sessions.Tree([None, 0, 1], 0.25)]
    for session, tree in enumerate(trees):
        sessions.add(store, "u", session, tree)
    trainer = sessions.trainer_of(algorithm__adv_estimator=f"{own}by_depth", actor_rollout_ref__rollout__n=2)
    assert step(trainer, store.batch())["rollout/certificate/violations"] == 0
    assert [sessions.learned(store, "u", 0, row) for row in range(3)] == [[0.5, 1.5], [1.5], [0.5]]
    assert sessions.learned(store, "u", 1, 0) == [0.25, 1.25, 2.25]


def test_the_order_is_that_of_the_conversations_and_the_batch_is_out_of_reach(store: WritableStore, own: str) -> None:
    for session in (3, 10, 0, 2):
        add(store, "u", session, [0.0, 0.0], score=session / 10)
    keys, before = list(store.rows), store.scores()
    for batch in (keys, keys[::-1], keys[3:] + keys[:3]):
        metrics = step(trainer_with(f"{own}order"), store.batch(batch))
        assert metrics["rollout/certificate/violations"] == 0
        assert advantages(store) == {
            f"u_{session}_{row}": place for place, session in enumerate((0, 2, 3, 10)) for row in range(2)
        }
    assert store.scores() == before


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            "is_nan",
            r"returned nan for conversation 0 in the group w of 2 conversations .* \[1\.0, 0\.0\]",
        ),
        ("too_few", "returned 1 values, .* in the group w of 2 conversations .*; return 2, one for each conversation"),
        ("wrong_turns", r"returned 2 values, \[0\.0, 0\.0\], for conversation 0 in the group w .*one number, or 1"),
        ("text", r"returned 'a' for conversation 0 in the group w .*; return a finite number"),
        ("nothing", "returned None in the group w .*; return a list of 2, one for each conversation"),
        (
            "raises",
            r"raised ZeroDivisionError: .* \(own\.py:4\d\) for the group w of 2 .*; mend that line",
        ),
    ],
)
def test_a_mistake_ends_the_run_before_the_update(store: WritableStore, own: str, function: str, said: str) -> None:
    from verl_multiturn.errors import AdvantageContractError

    for session, score in enumerate((1.0, 0.0)):
        add(store, "w", session, [0.0], score=score)
    trainer = trainer_with(f"{own}{function}")
    before = {key: row["advantages"].clone() for key, row in store.rows.items()}
    with pytest.raises(AdvantageContractError, match=rf"^algorithm\.adv_estimator='{own}{function}' {said}"):
        step(trainer, store.batch())
    assert trainer.updates == []
    assert all((row["advantages"] == before[key]).all() for key, row in store.rows.items())


def test_a_slow_function_is_told_of_once(
    store: WritableStore, own: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from verl_multiturn.advantages import function

    for session in range(2):
        add(store, "u", session, [0.0], score=float(session))
    clock = iter(range(0, 1000, 12))
    monkeypatch.setattr(function, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    trainer = trainer_with(f"{own}rloo")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            step(trainer, store.batch())
    told = [record.getMessage() for record in caplog.records if "adv_estimator" in record.getMessage()]
    assert told == [
        f"algorithm.adv_estimator='{own}rloo' took 12 s for the 1 groups of a step, while all devices waited; make it "
        "faster"
    ]


def saving(trainer: Any, folder: Path) -> Any:
    """Let a trainer keep checkpoints of our own files in a folder."""
    base = type(trainer).__mro__[-2]
    base._save_checkpoint = lambda self: None  # type: ignore[attr-defined]
    base._load_checkpoint = lambda self: setattr(self, "global_steps", 4)  # type: ignore[attr-defined]
    trainer.config.trainer.default_local_dir = str(folder)
    trainer.config.trainer.resume_mode = "auto"
    return trainer


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_a_state_goes_through_a_checkpoint(
    store: WritableStore, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from verl_multiturn.verl_bridge.trainer import hooks
    from verl_multiturn.verl_bridge.trainer.groups import history

    monkeypatch.setattr(history, "clear_groups", lambda uids, partition: 0)
    monkeypatch.setattr(hooks, "list_prompts", lambda partition: {})
    for session, score in enumerate((1.0, 0.0)):
        add(store, "u", session, [0.0], score=score)

    def made(name: str, **changes: Any) -> Any:
        return saving(trainer_with(f"{own}{name}", mode=mode, **changes), tmp_path)

    first = made("Mean")
    for expected in ({"u_0_0": 1.0, "u_1_0": 0.0}, {"u_0_0": 0.5, "u_1_0": -0.5}):
        step(first, store.batch())
        assert advantages(store) == expected
    first._save_checkpoint()
    kept = json.loads((tmp_path / "global_step_4" / "trained.json").read_text())
    assert kept["advantage"] == {"function": f"{own}Mean", "state": {"rewards": [1.0, 0.0, 1.0, 0.0]}}
    assert kept["queue"] is (mode != "sync")
    again = made("Mean")
    again._load_checkpoint()
    step(again, store.batch())
    assert advantages(store) == {"u_0_0": 0.5, "u_1_0": -0.5}
    assert again._estimator.saved()["state"] == {"rewards": [1.0, 0.0] * 3}
    if mode == "sync":
        return  # without a queue and a state there is no file of ours to read
    other = made("rloo")
    other._load_checkpoint()
    assert f"the checkpoint has a state of '{own}Mean', and '{own}rloo' keeps none" in caplog.text
