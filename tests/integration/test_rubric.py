"""Verdicts of criteria on their way to the trainer: turns, records, and a judge that is away."""

import json
from typing import Any

import pytest

from tests.integration.test_outages import FakeKeeper, masked, trainer_of
from tests.integration.trainer_rows import WritableStore, put_in_place, step
from tests.long.rewards.hacks.rubric_reply import reply
from tests.long.rewards.parity.judged import judging
from tests.long.rewards.rubric_rows import TURNS, reward_section, scored, trained_tokens

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

AWAY = "http://127.0.0.1:9/v1"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> WritableStore:
    store = WritableStore()
    put_in_place(store, monkeypatch)
    store.kv_list = lambda partition_id: {partition_id: {}}  # type: ignore[attr-defined]
    return store


def values_in(fields: dict[str, Any]) -> dict[int, float]:
    return {place: float(value) for place, value in enumerate(fields["rm_scores"]) if value}


def test_the_value_of_a_turn_lies_on_the_turn_and_the_judge_has_read_the_tools_answer() -> None:
    from verl_multiturn.rows.keys import RowKey
    from verl_multiturn.verl_bridge.loops.output import joined_row
    from verl_multiturn.verl_bridge.names import STATS

    asked: list[Any] = []

    def noted(request: dict[str, Any]) -> str:
        asked.append(json.loads(json.loads(request["messages"][1]["content"])["conversation"]))
        return reply(request)

    with judging(noted) as url:
        output = scored("u", 0, TURNS, reward_section(url))
    assert asked == [
        [
            {"role": "user", "text": "1+1"},
            {
                "turn": 1,
                "role": "assistant",
                "text": "please",
                "calls": [{"name": "calculator", "arguments": '{"expression": "1+1"}'}],
            },
            {"role": "tool", "name": "calculator", "text": "2"},
            {"turn": 2, "role": "assistant", "text": "2"},
        ]
    ]
    fields = output.as_dict()
    first, last = (turn["end"] - 1 for turn in output.stats["turns"])
    assert values_in(fields) == {first: 0.125, last: 0.75}
    assert output.total() == 0.875
    assert "transcript" not in fields["extra_fields"]
    stats = fields["metrics"][STATS]
    assert stats["verdicts"] == {"right": 1.0, "polite": {"1": 1.0, "2": 0.0}}
    joined = joined_row(RowKey("u", "0", "0"), stats, fields, 1, validation=False)
    assert json.loads(joined.parts or "")["verdicts"] == stats["verdicts"]
    assert joined.score == 0.875


def test_values_of_several_rows_and_roles_keep_their_sum() -> None:
    from verl_multiturn.verl_bridge.loops.turn_values import TurnEnd

    with judging(reply) as url:
        output = scored("u", 0, TURNS, reward_section(url))
    last = len(output.response_ids) - 1
    output.stats["conversation"] = {"row": 1, "rows": 2}
    output.extra_fields["reward_extra_info"]["turn_values"] = "[0.125, 0.25]"
    for ends, expected in (
        ([TurnEnd(0, 3, None), TurnEnd(1, 4, None)], {4: 0.25, last: 0.5}),
        ([None, TurnEnd(1, 4, None)], {4: 0.25, last: 0.625}),
        ([TurnEnd(1, 3, "user"), TurnEnd(0, 4, None)], {last: 0.625}),
        ([None, None], {last: 0.875}),
    ):
        output.ends = ends
        assert values_in(output.as_dict()) == expected
    output.stats["conversation"] = {"row": 0, "rows": 2}
    output.ends = [TurnEnd(0, 3, None), TurnEnd(1, 4, None)]
    assert values_in(output.as_dict()) == {3: 0.125}


def test_turn_values_that_are_not_one_for_each_text_are_the_functions_mistake() -> None:
    from verl_multiturn.errors import RewardContractError

    with judging(reply) as url:
        output = scored("u", 0, TURNS, reward_section(url))
    output.extra_fields["reward_extra_info"]["turn_values"] = "[1.0]"
    with pytest.raises(RewardContractError, match=r"turn_values '\[1.0\]'; expected a number for each of the 2"):
        output.as_dict()


def test_mt_turns_compares_the_turns(store: WritableStore) -> None:
    from verl_multiturn.verl_bridge.names import STATS

    with judging(reply) as url:
        for number, turns in enumerate([TURNS, [TURNS[0].removeprefix("please "), "3<|im_end|>"]]):
            store.add("u", number, scored("u", number, turns, reward_section(url)))
    ends = [[turn["end"] - 1 for turn in row["metrics"][STATS]["turns"]] for row in store.rows.values()]
    settings = {"algorithm__adv_estimator": "mt_turns", "actor_rollout_ref__rollout__n": 2}
    metrics = step(trainer_of(FakeKeeper(), **settings), store.batch())
    found = [[float(row["advantages"][end]) for end in own] for row, own in zip(store.rows.values(), ends, strict=True)]
    # The returns are 0.875 and 0.75, and twice 0.
    assert found == [[0.4375, 0.375], [-0.4375, -0.375]]
    assert metrics["rollout/reward/verdicts/right"] == 0.5
    assert metrics["rollout/reward/verdicts/polite"] == 0.25
    assert metrics["rollout/certificate/violations"] == 0


def test_nothing_is_trained_behind_a_judge_that_is_away(store: WritableStore) -> None:
    with judging(reply) as url:
        store.add("u", 0, scored("u", 0, TURNS, reward_section(url)))
    for number in (1, 2):
        output = scored("u", number, TURNS, reward_section(AWAY))
        report = output.extra_fields["reward_extra_info"]
        assert (report["outage"], report["verdicts"], output.reward_score) == (1.0, "", 0.0)
        store.add("u", number, output)
    before = trained_tokens(store)
    assert before
    metrics = step(trainer_of(FakeKeeper(), actor_rollout_ref__rollout__n=3), store.batch())
    assert masked(store) == masked(store, "loss_mask") == ["u_1_0", "u_2_0"]
    assert trained_tokens(store) == int(store.rows["u_0_0"]["response_mask"].sum())
    assert metrics["rollout/outage/rows_left_out"] == 2
    assert metrics["rollout/certificate/violations"] == 0
