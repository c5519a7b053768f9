"""Rewards, metrics and groups by role, in literal numbers: `observe/roles.py`, `reward_numbers.have_signal`."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from tests.agent_sessions import Agent, make_run, turns, user
from tests.support.role_samples import joined_games, sample_game, write_games
from tests.support.sample_records import BEGAN, sample_record, sample_run
from verl_multiturn.observe.convert.atif import trajectory
from verl_multiturn.observe.convert.otel import write_otel
from verl_multiturn.observe.convert.parquet import write_parquet
from verl_multiturn.observe.convert.perfetto import write_perfetto
from verl_multiturn.observe.convert.source import RunSource
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.explain.explanation import explain
from verl_multiturn.observe.metrics import Stats, compared_groups, conversations, earned
from verl_multiturn.observe.pass_at_k import passed_shares
from verl_multiturn.observe.roles import of_roles, rewards_by_role, role_of, role_rewards, silent, trained_roles
from verl_multiturn.observe.show.documents import ShowDocuments
from verl_multiturn.observe.show.terminal import print_document
from verl_multiturn.observe.traces import trace_of
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read.joins import table_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import Reward, by_role, rewards_in, rewards_of
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import SessionReport
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.rows.reward_numbers import ScoreRange, have_signal

TRAINED = ["white", "black"]
BOTH, WHITE = {"white": 2, "black": 1, "user": 3}, {"white": 2, "black": 0, "user": 3}


def row(role: str | None, rewards: list[float], outcome: float | None = None, **details: Any) -> Stats:
    """Return the stats of a row, whose turns earned these rewards; with an outcome it is its role's last."""
    turns = [{"turn": number, "role": role, "reward": reward} for number, reward in enumerate(rewards)]
    stats: Stats = {"valid": True, "turns": turns, "conversation": {"score": 5.0}, **details}
    if outcome is not None:
        session = {"role": role, "outcome": outcome, "outside": [], "trained": TRAINED, "roots": 2, "roles": BOTH}
        stats["session"] = {**session, **details.get("session", {})}
    return stats


def game(uid: str, number: int, white: float, black: float) -> dict[RowKey, Stats]:
    """Return the rows of a game, the outcomes of which are given: two of white, one of black."""
    rows = [row("white", [0.0, 0.25]), row("white", [0.0], white), row("black", [0.0], black)]
    return {
        RowKey(uid, str(number), str(at)): {**own, "conversation": {**own["conversation"], "row": at, "rows": 3}}
        for at, own in enumerate(rows)
    }


def test_a_game_in_atif_has_its_roles(tmp_path: Path) -> None:
    write_games(tmp_path, {"u": [1.0]})
    source = RunSource(Records(tmp_path))
    (record,) = source.records()
    found = trajectory(record, source)
    ours = found["extra"]["verl_multiturn"]
    assert (ours["roles"], ours["trained"]) == (["white", "black", "user"], ["white", "black"])
    assert (ours["score_roles"], ours["opponents"]) == ({"white": 1.0, "black": -1.0}, {})
    assert [row["role"] for row in ours["rows"]] == ["white", "black"]
    steps = [(step["source"], step.get("extra")) for step in found["steps"]]
    assert steps == [("user", None), ("agent", {"verl_multiturn": {"role": "black"}})]
    both = trajectory({**sample_record(), "trained": ["assistant", "user"]}, source)["extra"]["verl_multiturn"]
    assert (both["roles"], both["trained"], both["score_roles"]) == (["assistant", "user"], ["assistant", "user"], {})
    plain = trajectory(sample_record(), RunSource(Records(tmp_path)))
    assert "roles" not in plain["extra"]["verl_multiturn"]
    assert {*plain["extra"]["verl_multiturn"]["rows"][0]} & {"role"} == set()


def test_a_roles_reward_is_its_outcome_and_its_completions() -> None:
    (joined,) = conversations(game("u", 0, 1.0, -1.0))
    assert role_rewards(joined) == {"white": 1.25, "black": -1.0}
    assert earned(joined) == 0.25
    outside = [{"turn": 7, "parent": None, "reward": 0.5}]
    alone = row("white", [0.25], 1.0, session={"outside": outside})
    (joined,) = conversations({RowKey("u", "0", "0"): alone})
    assert role_rewards(joined) == {"white": 1.75}


def test_without_roles_it_is_the_conversations_score() -> None:
    (plain,) = conversations({RowKey("u", "0", "0"): {**row(None, [0.25], 1.0), "valid": True}})
    assert "roles" not in plain
    assert role_of(plain) is None
    assert rewards_by_role(plain) == {None: 5.0}
    assert earned(plain) == 5.0
    assert earned({**plain, "valid": False}) is None


def test_zero_sum_games_have_a_signal() -> None:
    stats = conversations(game("u", 0, 1.0, -1.0) | game("u", 1, -1.0, 1.0) | game("v", 0, 1.0, -1.0))
    (group,) = compared_groups(stats)  # v has one conversation
    assert have_signal(group)
    assert not have_signal([group[0], group[0]])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([{None: 1.0}, {None: 1.0}], False),
        ([{None: 0.1 + 0.2}, {None: 0.3}], False),
        ([{None: 1.0}, {None: 0.0}], True),
        ([{"a": 1.0}, {"b": 0.0}], False),
        ([{"a": 1.0, "b": 1.0}, {"b": 0.0}], True),
        ([{"a": 1.0}], False),
        ([], False),
    ],
)
def test_a_signal_is_a_difference_within_a_role(rewards: list[dict[str | None, float]], expected: bool) -> None:
    assert have_signal(rewards) is expected


def test_metrics_of_roles() -> None:
    silent_game = {RowKey("u", "1", "0"): row("white", [0.0], 0.5, session={"roles": WHITE})}
    invalid = {RowKey("u", "2", "0"): {**row("white", [0.0], 9.0), "valid": False}}
    stats = conversations(game("u", 0, 1.0, -1.0) | silent_game | invalid)
    assert of_roles(stats) == {
        "role/black/conversations": 1,
        "role/black/silent": 1,
        "role/black/turns/mean": 1.0,
        "role/black/turns/max": 1,
        "role/black/score/mean": -1.0,
        "role/white/conversations": 3,
        "role/white/silent": 0,
        "role/white/turns/mean": 5 / 3,
        "role/white/turns/max": 3,
        "role/white/score/mean": 0.875,
    }
    assert trained_roles(stats) == ["black", "white"]
    assert [each["turns"] for each in silent(stats, "black")] == [[{"turn": 0, "role": "white", "reward": 0.0}]]


def test_there_are_none_without_roles() -> None:
    plain = conversations({RowKey("u", "0", "0"): row(None, [0.0], 1.0, session={"trained": []})})
    assert of_roles(plain) == {}
    assert trained_roles([{"valid": True}]) == []


def test_who_is_right_is_the_first_roles() -> None:
    """The reward's `acc` decides, which is that of the first trained role: sums of zero-sum games are all the same."""
    stats = conversations(game("u", 0, 1.0, -1.0) | game("u", 1, -1.0, 1.0))
    for each, acc in zip(stats, (1.25, -0.75), strict=True):
        each["reported"] = {"acc": acc}
    assert passed_shares(stats, ScoreRange())["pass@1"] == 0.5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run: a group in which both sides won once, and one in which white won both."""
    write_games(tmp_path, {"differs": [1.0, -1.0], "same": [1.0, 1.0]})
    return tmp_path


def printed(document: dict[str, Any]) -> str:
    file = StringIO()
    print_document(document, Console(width=200, file=file))
    return file.getvalue()


def test_the_join_has_the_reward_of_each_role(folder: Path) -> None:
    rewards = rewards_of(Records(folder))
    assert rewards["differs-1"].score == 0.0
    assert rewards["differs-1"].by_role == {"white": -1.0, "black": 1.0}
    assert rewards["differs-1"]._replace(score=None).by_role == {}
    assert Reward(score=0.5).by_role == {None: 0.5}


def test_a_row_without_a_score_leaves_no_reward(tmp_path: Path) -> None:
    rows = joined_games("u", [1.0])
    rows[1].score = None
    (found,) = rewards_in(table_of(rows)).to_pylist()
    assert (found["score"], found["roles"]) == (None, None)


def test_a_strangers_roles_are_data() -> None:
    for text in ("[1]", "3", '{"a": "x", "b": 1e999}', "{"):
        assert set(by_role(1.0, text)) <= {None, "a", "b"}
    assert by_role(1.0, '{"a": "x", "b": 2}') == {"b": 2.0}


def test_steps_and_groups_in_documents(folder: Path) -> None:
    shown = ShowDocuments(folder)
    (step,) = shown.run()["steps"]
    assert (step["groups"], step["equal_groups"], step["score"]) == (2, 1, 0.0)
    (part,) = shown.step(1)["parts"]
    assert part["groups"][0] == {
        "uid": "differs", "equal": False, "scores": [0.0, 0.0], "untrained": {}, "mean": None, "std": None,
        "roles": {
            "black": {"mean": 0.0, "std": 1.0, "scores": [-1.0, 1.0]},
            "white": {"mean": 0.0, "std": 1.0, "scores": [1.0, -1.0]},
        },
    }  # fmt: skip
    assert part["groups"][1]["equal"]
    lines = [line.split() for line in printed(shown.step(1)).splitlines()]
    assert ["group", "equal", "black", "white", "not", "trained"] in lines
    assert ["differs", "-1", "1", "1", "-1"] in lines
    assert ["same", "yes", "-1", "-1", "1", "1"] in lines


def test_a_group_and_a_conversation_in_documents(folder: Path) -> None:
    shown = ShowDocuments(folder)
    group = shown.group("same")
    assert group["roles"]["white"] == {"mean": 1.0, "std": 1.0, "scores": [1.0, 1.0]}
    assert shown.group("differs")["conversations"][1]["roles"] == {
        "black": {"score": 1.0, "advantage": 1.0}, "white": {"score": -1.0, "advantage": -1.0}
    }  # fmt: skip
    text = printed(shown.group("differs"))
    assert "group differs of step 1: black: mean 0, std 1; white: mean 0, std 1" in text
    assert "black score" in text
    talk = shown.conversation("differs-1")
    assert [row["role"] for row in talk["joined"]] == ["white", "black"]
    assert "row 1, role black: score 1" in printed(talk)
    documents = Documents([folder])
    documents.refresh()
    found = documents.record("differs-0")
    assert found is not None
    assert found["row"]["roles"] == {
        "black": {"score": -1.0, "advantage": -1.0}, "white": {"score": 1.0, "advantage": 1.0}
    }  # fmt: skip


def test_nothing_is_new_where_there_are_no_roles(tmp_path: Path) -> None:
    sample_run(tmp_path, steps=1, groups=1, size=2)
    shown = ShowDocuments(tmp_path)
    (part,) = [part for part in shown.step(1)["parts"] if part["event"] == "step"]
    assert "roles" not in part["groups"][0]
    uid = part["groups"][0]["uid"]
    group = shown.group(uid)
    assert "roles" not in group
    assert "roles" not in group["conversations"][0]
    documents = Documents([tmp_path])
    documents.refresh()
    found = documents.record(group["conversations"][0]["request_id"])
    assert found is not None
    assert "roles" not in found["row"]
    assert "roles" not in documents.meta()["columns"]


def explained(folder: Path) -> dict[str, str]:
    return {found.symptom: found.kind for found in explain(Records(folder))}


def test_explain_asks_each_role(tmp_path: Path) -> None:
    """Without roles the sums of these games, all 0, are groups that are all wrong."""
    write_games(tmp_path / "differ", {f"g{at}": [1.0, -1.0, 1.0] for at in range(12)})
    found = {each.symptom: each for each in explain(Records(tmp_path / "differ"))}
    assert not {"groups_wrong", "groups_right", "advantages_contradict"} & found.keys()
    # A third of the tokens are the user's, who is not trained: that is no loss, and is said.
    assert (found["in_no_row"].kind, found["in_no_row"].evidence["tokens"]) == ("note", {"not_trained_role": 72})
    assert found["in_no_row"].remedy == "nothing, if proxy.train leaves their role out on purpose"
    write_games(tmp_path / "same", {f"g{at}": [-1.0, -1.0, -1.0] for at in range(12)})
    assert explained(tmp_path / "same")["groups_wrong"] == "alarm"


def test_explain_compares_advantages_with_the_scores_of_their_role(tmp_path: Path) -> None:
    folder = tmp_path / "turned"
    write_games(folder, {f"g{at}": [1.0, -1.0, 1.0] for at in range(12)})
    (path,) = (folder / "join").iterdir()
    table = pq.read_table(path)
    values = [[-each for each in row] for row in table["advantages"].to_pylist()]
    at = table.schema.get_field_index("advantages")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type)), path)
    assert explained(folder)["advantages_contradict"] == "alarm"


def test_converted_runs_have_the_roles(folder: Path, tmp_path: Path) -> None:
    source = RunSource(Records(folder))
    write_perfetto(source, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    whole = [event for event in events if event.get("cat") == "conversation" and event["ph"] == "b"]
    assert whole[1]["args"]["scores"] == {"white": -1.0, "black": 1.0}
    write_otel(source, tmp_path / "otel.jsonl")
    first = json.loads((tmp_path / "otel.jsonl").read_text().splitlines()[0])
    spans = first["resourceSpans"][0]["scopeSpans"][0]["spans"]
    scores = {each["key"]: each["value"] for each in spans[0]["attributes"] if ".score" in each["key"]}
    assert scores == {
        "verl_multiturn.score": {"doubleValue": 0.0},
        "verl_multiturn.score.white": {"doubleValue": 1.0},
        "verl_multiturn.score.black": {"doubleValue": -1.0},
    }
    write_parquet(source, tmp_path / "scout")
    rows = pq.read_table(tmp_path / "scout" / "transcripts.parquet").to_pylist()
    assert json.loads(rows[0]["score_roles"]) == {"white": 1.0, "black": -1.0}


def test_spans_of_completions_have_the_role(tmp_path: Path) -> None:
    """A live trace, OTLP and Perfetto have it at each completion, and nothing where there are no roles."""
    record = sample_game("u", 0, 1.0)
    times = [
        {"kind": "generation", "name": "", "turn": at, "start": BEGAN + at, "end": BEGAN + at + 1} for at in range(3)
    ]
    plain = sample_record(request_id="plain", uid="plain", timeline=times[:2])
    (tmp_path / "records.jsonl").write_bytes(line_of({**record, "timeline": times}) + line_of(plain))
    source = RunSource(Records(tmp_path))
    write_perfetto(source, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spoken = [event["args"].get("role") for event in events if event.get("cat") == "generation" and event["ph"] == "b"]
    assert spoken == ["white", "user", "black", None, None]
    write_otel(source, tmp_path / "otel.jsonl")
    said = []
    for line in (tmp_path / "otel.jsonl").read_text().splitlines():
        for span in json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            found = {each["key"]: each["value"] for each in span["attributes"]}
            if span["name"].startswith("chat"):
                said.append(found.get("verl_multiturn.role", {}).get("stringValue"))
    assert said == ["white", "user", "black", None, None]


async def test_a_live_trace_has_the_role_of_each_turn() -> None:
    for roles, expected in ((Roles(("white", "black"), ("white",)), ["white", "black"]), (None, [None, None])):
        agent = Agent(make_run(turns("a", "b"), roles=roles))
        await agent.ask([user("x")], model="white")
        await agent.ask([user("y")], model="black")
        agent.session.end()
        await agent.session.closed()
        outcome = agent.session.outcome(StopReason.FINISHED)
        outcome.session = SessionReport(2, {}, rewards={} if roles is None else {"white": 1.0, "black": -1.0})
        root = trace_of(Life("r", "u", row={}, outcome=outcome, generations=agent.session.receipts()))
        assert [turn.attributes.get("role") for turn in root.children] == expected
        assert root.outputs.get("rewards") == (None if roles is None else {"white": 1.0, "black": -1.0})
