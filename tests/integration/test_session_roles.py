"""Sessions of several roles in our trainers: rows, rewards, certificate; and learned again from their records."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.agent_sessions import Agent, echo, make_run, turns, user
from tests.integration.trainer_rows import WritableStore, make_trainer, stats_in, step
from verl_multiturn.certificate.receipts import Receipt
from verl_multiturn.errors import CertificateError, ConfigError, RewardContractError
from verl_multiturn.proxy.agents.end import AgentEnd, read_result
from verl_multiturn.proxy.endpoint import session_end
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.rollout.outcome import Outcome

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

SETTINGS = "actor_rollout_ref__rollout__custom__multiturn__"
PROXY = {"actor_rollout_ref__rollout__agent__default_agent_loop": "proxy_agent", "algorithm__adv_estimator": "mt_grpo"}
NAMES = ["white", "black"]


@dataclass
class Game:
    """A game of two moves for each side; black moves second, and once more at the end."""

    result: Any
    """The agent's result; a function of the ids of its completions."""
    train: tuple[str, ...] = ("white", "black")
    speakers: tuple[str, ...] = ("white", "black", "white", "black", "black")


async def play(game: Game, name: str = "r") -> tuple[Outcome, list[Receipt]]:
    """Play a game, in which each side keeps a history of its own."""
    run = make_run(turns(*"abcdefgh"), roles=Roles(tuple(NAMES), game.train))
    agent, ids = Agent(run, name), []
    histories: dict[str, list[dict[str, Any]]] = {role: [user(f"You are {role}.")] for role in NAMES}
    for role in game.speakers:
        got = await agent.ask(histories[role], model=role)
        histories[role] += [echo(got), user("Your turn.")]
        ids.append(f"chatcmpl-{got.id}")
    agent.session.returned()
    await agent.session.closed()
    result = read_result(game.result(ids) if callable(game.result) else game.result)
    outcome = await session_end(agent.session, AgentEnd("returned", result), run)
    return outcome, agent.session.receipts()


def add(store: WritableStore, uid: str, session: int, game: Game, score: float = 0.0) -> list[Any]:
    """Write a game's rows, as verl's worker writes our loop's output; return them."""
    from tests.integration.test_agent_loop import runner
    from verl_multiturn import ScriptedEngine
    from verl_multiturn.verl_bridge.loops.rewards import share_score

    outcome, receipts = asyncio.run(play(game, f"{uid} {session}"))
    outputs = runner(ScriptedEngine([])).finish(outcome, receipts, {"uid": uid, "session_id": session}, 4, {})
    final = outputs[-1]
    if final.reward_score is None:  # as the reward function's
        final.reward_score = score
        final.extra_fields["reward_extra_info"] = {"acc": score}
    share_score(outputs)
    for row, output in enumerate(outputs):
        store.add(uid, session, output, row)
    return list(outputs)


def trainer_of(train: list[str] | None = None, n: int = 4) -> Any:
    roles = {f"{SETTINGS}proxy__roles": NAMES, f"{SETTINGS}proxy__train": train}
    changes: dict[str, Any] = {**PROXY, **roles, "actor_rollout_ref__rollout__n": n}
    trainer = make_trainer(**changes)
    trainer._prompts = 1
    return trainer


ZERO_SUM = {"roles": {"white": 1, "black": -1}}


def test_each_role_has_its_reward_at_the_end_of_its_last_row(store: WritableStore) -> None:
    outputs = add(store, "u", 0, Game(ZERO_SUM))
    assert [output.role for output in outputs] == ["white", "black"]
    assert store.scores() == {"u_0_0": [1.0], "u_0_1": [-1.0]}
    for row, made in zip(store.rows.values(), outputs, strict=True):
        assert row["rm_scores"][-1] == made.outcome
        assert row["response_mask"][-1] == 1
    assert [each["conversation"]["score"] for each in stats_in(store)] == [0.0, 0.0]
    sessions = [each["session"] for each in stats_in(store)]
    assert [(each["role"], each["outcome"], each["outside"]) for each in sessions] == [
        ("white", 1.0, []),
        ("black", -1.0, []),
    ]
    assert [(each["roles"], each["trained"]) for each in sessions] == [({"white": 2, "black": 3}, NAMES)] * 2
    assert [turn["role"] for each in stats_in(store) for turn in each["turns"]] == ["white"] * 2 + ["black"] * 3
    assert [output.extra_fields["reward_extra_info"] for output in outputs] == [{"acc": 1.0}] * 2


@pytest.mark.parametrize(("result", "score"), [(0.5, 0.0), (None, 0.5)])
def test_a_single_number_is_the_reward_of_each_role(store: WritableStore, result: Any, score: float) -> None:
    outputs = add(store, "u", 0, Game(result), score)
    assert store.scores() == {"u_0_0": [0.5], "u_0_1": [0.5]}
    assert [each["session"]["outcome"] for each in stats_in(store)] == [0.5, 0.5]
    assert {each["conversation"]["score"] for each in stats_in(store)} == {1.0}
    assert [output.extra_fields["reward_extra_info"] for output in outputs] == [{"acc": 0.5}] * 2


def test_rewards_of_completions_stay_with_their_role(store: WritableStore) -> None:
    game = Game(lambda ids: {**ZERO_SUM, "completions": {ids[0]: 0.25, ids[1]: 0.5, ids[4]: 0.125}})
    add(store, "u", 0, game)
    assert store.scores() == {"u_0_0": [0.25, 1.0], "u_0_1": [0.5, -0.875]}
    assert {each["conversation"]["score"] for each in stats_in(store)} == {0.875}


def test_rewards_that_cancel_out_between_roles_are_too_large_for_each(store: WritableStore) -> None:
    from verl_multiturn.rows.reward_numbers import LARGEST_REWARD, LARGEST_SCORE

    (white, black) = add(store, "u", 0, Game({"roles": {"white": LARGEST_REWARD, "black": -LARGEST_REWARD}}))
    white.earned, black.earned = ({"white": LARGEST_SCORE, "black": -LARGEST_SCORE} for _ in range(2))
    for output in (white, black):
        with pytest.raises(RewardContractError, match="let rewards be smaller"):
            output.as_dict()


def test_the_sums_of_completions_rewards_are_known_by_role(store: WritableStore) -> None:
    game = Game(lambda ids: {**ZERO_SUM, "completions": {ids[0]: 0.25, ids[1]: 0.5, ids[4]: 0.125}})
    assert [output.earned for output in add(store, "u", 0, game)] == [{"white": 0.25, "black": 0.625}] * 2


def test_a_role_that_is_not_trained_has_no_token_and_the_certificate_counts_it(store: WritableStore) -> None:
    game = Game(lambda ids: {**ZERO_SUM, "completions": {ids[1]: 5.0}}, train=("white",))
    for session in range(2):
        (output,) = add(store, "u", session, game)
        assert (output.role, output.total()) == ("white", 1.0)
    assert store.scores() == {"u_0_0": [1.0], "u_1_0": [1.0]}
    assert [each["session"]["outside"] for each in stats_in(store)] == [[], []]
    assert [each["session"]["untrained"] for each in stats_in(store)] == [{"not_trained_role": 3}] * 2
    metrics = step(trainer_of(train=["white"], n=2), store.batch())
    assert metrics["rollout/certificate/violations"] == 0
    assert metrics["rollout/certificate/rows"] == 2
    assert metrics["rollout/certificate/not_trained_role"] == 6
    assert metrics["rollout/proxy/untrained/not_trained_role"] == 6
    # Two completions of one letter and an end token each, of white alone.
    assert (
        metrics["rollout/certificate/tokens"]
        == sum(int(row["response_mask"].sum()) for row in store.rows.values())
        == 8
    )


def test_both_roles_are_trained_without_a_violation(store: WritableStore) -> None:
    for session, result in enumerate([ZERO_SUM, 0.5, {"roles": {"white": -1, "black": 1}}]):
        add(store, "u", session, Game(result))
    metrics = step(trainer_of(), store.batch())
    assert (metrics["rollout/certificate/violations"], metrics["rollout/certificate/rows"]) == (0, 6)
    assert (metrics["rollout/certificate/tokens"], metrics["rollout/certificate/not_trained_role"]) == (30, 0)


def test_a_trainer_that_trains_other_roles_does_not_update(store: WritableStore) -> None:
    add(store, "u", 0, Game(ZERO_SUM))
    add(store, "u", 1, Game(ZERO_SUM))
    trainer = trainer_of(train=["white"])
    with pytest.raises(CertificateError, match="row 1 is of the role 'black', which is not trained"):
        step(trainer, store.batch())
    assert trainer.updates == []


def forge_turns(stats: dict[str, Any]) -> None:
    for turn in stats["turns"]:
        turn["role"] = "white"


def forge_reward(stats: dict[str, Any]) -> None:
    stats["session"]["role"] = "white"


def forge_none(stats: dict[str, Any]) -> None:
    stats["turns"], stats["session"]["role"] = [], None


@pytest.mark.parametrize(
    ("forge", "named"), [(forge_turns, "'black', 'white'"), (forge_reward, "'black', 'white'"), (forge_none, "None")]
)
def test_a_row_under_anothers_name_is_found_before_the_update(store: WritableStore, forge: Any, named: str) -> None:
    add(store, "u", 0, Game(ZERO_SUM))
    add(store, "u", 1, Game(ZERO_SUM))
    forge(store.rows["u_0_1"]["metrics"]["rollout"])
    with pytest.raises(CertificateError, match=rf"\(row u_0_1\): it is taken for one of the roles {named}, by"):
        step(trainer_of(), store.batch())


def test_a_role_that_never_spoke_has_no_row_and_is_reported(store: WritableStore) -> None:
    add(store, "u", 0, Game({"roles": {"white": 1}}, speakers=("white",)))
    assert store.scores() == {"u_0_0": [1.0]}
    (only,) = stats_in(store)
    assert (only["session"]["roles"], only["session"]["trained"]) == ({"white": 1, "black": 0}, NAMES)


def test_right_or_wrong_is_the_role_that_the_model_played(store: WritableStore) -> None:
    """Play as where an opponent is white: the reward of white is not the model's."""
    (output,) = add(store, "u", 0, Game(ZERO_SUM, speakers=("black",)))
    assert (output.role, output.extra_fields["reward_extra_info"]) == ("black", {"acc": -1.0})
    (output,) = add(store, "u", 1, Game(lambda ids: {"completions": {ids[0]: 0.5}, **ZERO_SUM}, speakers=("black",)))
    assert (output.outcome, output.total()) == (-1.0, -0.5)


def test_a_session_of_silent_trained_roles_is_invalid(store: WritableStore) -> None:
    (output,) = add(store, "u", 0, Game(ZERO_SUM, train=("white",), speakers=("black",)))
    assert (output.role, output.outcome, output.response_mask[-1]) == (None, 0.0, 0)
    assert stats_in(store)[0]["valid"] is False


def recorded(game: Game) -> dict[str, Any]:
    """Return the record of a game, as JSON reads it."""
    from verl_multiturn.records.json_text import line_of
    from verl_multiturn.records.read.lines import require_schema
    from verl_multiturn.records.verify.record import verify_record
    from verl_multiturn.records.write.encode import record_of
    from verl_multiturn.rollout.life import Life

    outcome, receipts = asyncio.run(play(game))
    record: dict[str, Any] = json.loads(line_of(record_of(Life("r", outcome=outcome, generations=receipts))))
    require_schema(record)
    assert verify_record(record).violations == []
    return record


def test_the_record_of_a_session_has_its_roles_and_is_verified_by_them() -> None:
    from verl_multiturn.records.verify.record import verify_record

    record = recorded(Game(ZERO_SUM, train=("white",)))
    assert [each["role"] for each in record["generations"]] == ["white", "black", "white", "black", "black"]
    assert [each["cause"] for each in record["generations"]] == [
        None,
        "not_trained_role",
        None,
        *["not_trained_role"] * 2,
    ]
    session = record["session"]
    assert (session["rewards"], session["roles"], session["trained"]) == (ZERO_SUM["roles"], NAMES, ["white"])
    assert [each["role"] for each in session["requests"]] == ["white", "black", "white", "black", "black"]
    record["generations"][1]["role"] = "white"  # of which the digest of its receipt knows
    (violation,) = [each for each in verify_record(record).violations if each.turn is not None]
    assert "generation 1 is not what the engine returned: the digest is " in str(violation)


@pytest.mark.parametrize(
    ("result", "score", "outcomes"),
    [
        (ZERO_SUM, 0.0, {"white": 1.0, "black": -1.0}),
        (0.5, 1.0, {"white": 0.5, "black": 0.5}),
        (None, 3.0, {"white": 1.5, "black": 1.5}),
        (lambda ids: {"completions": {ids[0]: 0.5, ids[1]: 0.25}}, 2.75, {"white": 1.5, "black": 1.25}),
    ],
)
def test_a_recorded_session_is_learned_from_by_role(result: Any, score: float, outcomes: dict[str, float]) -> None:
    from tests.integration.test_agent_loop import runner
    from verl_multiturn import ScriptedEngine
    from verl_multiturn.verl_bridge.offline.from_records.loop import recorded_outputs

    settings = runner(ScriptedEngine([])).output_settings
    outputs = recorded_outputs(recorded(Game(result)), score, settings, 3)
    assert {output.role: output.as_dict()["rm_scores"].sum().item() for output in outputs} == outcomes
    assert {output.total() for output in outputs} == {score}
    assert [turn["role"] for turn in outputs[1].stats["turns"]] == ["black"] * 3


def test_a_recorded_session_of_other_roles_than_the_runs_is_refused() -> None:
    from verl_multiturn.config import ProxySettings
    from verl_multiturn.verl_bridge.offline.from_records.loop import _check_roles

    record = recorded(Game(ZERO_SUM, train=("white",)))
    _check_roles(record, ProxySettings(roles=NAMES, train=["white"]), "data row 3")
    for proxy, own in ((ProxySettings(), "None"), (ProxySettings(roles=NAMES), "['white', 'black']")):
        with pytest.raises(ConfigError) as raised:
            _check_roles(record, proxy, "data row 3")
        assert f"data row 3: its recorded session trains the roles ['white'], and the run {own}; set " in str(
            raised.value
        )
    _check_roles({"session": None}, ProxySettings(), "data row 3")
    _check_roles({"session": {"reward": 1.0}}, ProxySettings(), "data row 3")  # of an older version
