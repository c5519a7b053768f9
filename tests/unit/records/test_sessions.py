"""A gateway's sessions: their lines, rewards, fates, joins and the removal of old files."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.gateway_samples import BEGAN, START, GatewaySamples
from tests.support.sample_records import sample_record
from verl_multiturn.errors import CertificateError
from verl_multiturn.records.index.index import Index
from verl_multiturn.records.read.fates import fates_of
from verl_multiturn.records.read.learning import SelectionRule, choose
from verl_multiturn.records.read.lines import fitted
from verl_multiturn.records.read.origin import models_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import rewards_of
from verl_multiturn.records.read.sessions import RewardLine, SessionIndex, reward_of_session
from verl_multiturn.records.schema import Record
from verl_multiturn.records.write.locks import LOCK, HeldError, hold
from verl_multiturn.records.write.old_files import remove_old
from verl_multiturn.records.write.session_joins import join_sessions


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def line(at: float, reward: float, generation: int | None = None, id: str | None = None, file: str = "a") -> RewardLine:
    return RewardLine(at, file, 0, generation, reward, id)


def score(*lines: RewardLine) -> float | None:
    found = reward_of_session(lines)
    return None if found is None else found.score


def shown(folder: Path) -> dict[str, tuple[float | None, str]]:
    """Return score and fate of each conversation, as the index has them, and see that fates_of has the same."""
    index = Index(Records(folder))
    index.refresh()
    rows = index.table.select(["request_id", "score", "fate"]).to_pylist()
    assert {row["request_id"]: row["fate"] for row in rows} == {
        each.request_id: each.fate for each in fates_of(Records(folder))
    }
    return {row["request_id"]: (row["score"], row["fate"]) for row in rows}


def test_without_a_line_there_is_no_reward() -> None:
    assert score() is None


def test_the_last_reward_without_an_id_counts() -> None:
    assert score(line(2.0, 0.5), line(1.0, 1.0)) == 0.5


def test_rewards_with_ids_count_once_each_and_add_up() -> None:
    assert score(line(1, 0.5, id="a"), line(2, 0.75, id="a"), line(3, 0.25, id="b"), line(0, 0.125)) == 0.875


def test_the_same_id_counts_for_each_target() -> None:
    assert score(line(1, 0.5, id="a"), line(2, 0.25, 0, id="a"), line(3, 0.125, 1)) == 0.875


def test_the_order_of_reading_changes_nothing() -> None:
    lines = [line(at, at / 8, at % 3 or None, "x" if at % 2 else None, file=f"f{at % 4}") for at in range(16)]
    expected = score(*lines)
    for seed in range(20):
        random.Random(seed).shuffle(lines)
        assert score(*lines) == expected


def test_all_readers_have_the_reward_of_the_lines(tmp_path: Path) -> None:
    made = GatewaySamples(tmp_path)
    for number, name in enumerate(("s0", "s1", "s2")):
        made.begin(name, number=number)
        made.end(name, number=number)
    made.write("reward", "s0", reward=0.25)
    made.write("reward", "s0", reward=1.0, at=BEGAN + 9)
    made.write("reward", "s1", generation=1, reward=0.5, id="judge")
    made.close()
    assert shown(tmp_path) == {"s0": (1.0, "collected"), "s1": (0.5, "collected"), "s2": (None, "collected")}
    assert {name: each.score for name, each in rewards_of(Records(tmp_path)).items()} == {"s0": 1.0, "s1": 0.5}
    assert rewards_of(Records(tmp_path))["s1"].parts == {"completion_score": 0.5}
    assert [each.score for each in choose([tmp_path], SelectionRule(min_score=0.75)).conversations] == [1.0]
    assert Records(tmp_path).faults == []


def test_an_index_follows_rewards_that_come_later(tmp_path: Path) -> None:
    made = GatewaySamples(tmp_path)
    made.begin("s0")
    made.end("s0")
    made.close()
    index = Index(Records(tmp_path))
    index.refresh()
    made.write("reward", "s0", reward=0.5)
    assert index.refresh()
    assert index.table["score"].to_pylist() == [0.5]
    assert not index.refresh()
    assert index.save() == ""
    made.write("reward", "s0", reward=0.75)
    kept = Index(Records(tmp_path))
    kept.refresh()
    assert kept.table["score"].to_pylist() == [0.75]


def test_a_join_is_made_at_a_rotation_and_the_lines_win(tmp_path: Path) -> None:
    made = GatewaySamples(tmp_path)
    made.begin("s0")
    record = made.end("s0")
    made.write("reward", "s0", reward=0.5)
    made.write("reward", "s0", generation=0, reward=0.25)
    made.close()
    made.rotate()
    assert join_sessions(tmp_path, START) == len(record["rows"])
    table = pq.read_table(tmp_path / "join" / f"step-000000-{START}.parquet")
    assert sum(table["score"].to_pylist()) == 0.75
    assert shown(tmp_path) == {"s0": (0.75, "collected")}
    made.write("reward", "s0", reward=0.0, at=BEGAN + 9)
    made.close()
    assert shown(tmp_path) == {"s0": (0.25, "collected")}
    assert rewards_of(Records(tmp_path))["s0"].score == 0.25


def test_a_join_leaves_out_files_that_are_written(tmp_path: Path) -> None:
    made = GatewaySamples(tmp_path)
    made.begin("s0")
    made.end("s0")
    made.close()
    with hold(made.file, alone=True):
        assert join_sessions(tmp_path, START) == 0
    assert join_sessions(tmp_path, START) == 2


def test_each_session_has_one_fate(tmp_path: Path) -> None:
    made = GatewaySamples(tmp_path)
    for number, name in enumerate(("ended", "dropped", "killed", "running")):
        made.begin(name, number=number)
    made.end("ended")
    made.write("end", "dropped", why="dropped: the disk is full")
    made.write("start", "unheard", task_id="t", number=4)  # a kill came before its line
    made.close()
    with hold(made.file, alone=True):
        assert {name for name, (_, fate) in shown(tmp_path).items() if fate == "open"} == {
            "killed", "running", "unheard"
        }  # fmt: skip
        GatewaySamples(tmp_path, "20261126T111500_5f3a01").close()
        assert shown(tmp_path)["killed"] == (None, "open")  # two gateways on one folder
    fates = {name: fate for name, (_, fate) in shown(tmp_path).items()}
    assert fates == {
        "ended": "collected", "dropped": "dropped", "killed": "lost", "running": "lost", "unheard": "lost"
    }  # fmt: skip
    assert next(each.why for each in fates_of(Records(tmp_path)) if each.fate == "dropped") == "the disk is full"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected a JSON object"),
        ('{"event": "reward", "at": 1, "session_id": "s"}', "reward is None"),
        ('{"event": "reward", "at": 1, "session_id": "s", "reward": "nan"}', "reward"),
        ('{"event": "reward", "at": 1, "session_id": "s", "reward": 1e300}', "2^970"),
        ('{"event": "reward", "at": 1, "session_id": "s", "reward": 1, "generation": -1}', "generation"),
        ('{"event": "reward", "at": 1e12, "session_id": "s", "reward": 1}', "at is"),
        ('{"event": "start", "at": 1, "session_id": "s"}', "no task_id"),
        ('{"event": "leap", "at": 1, "session_id": "s"}', "event"),
        ('{"event": "rew', "torn"),
    ],
)
def test_a_strange_line_costs_itself_alone(tmp_path: Path, text: str, said: str) -> None:
    made = GatewaySamples(tmp_path)
    made.begin("s0")
    made.file.write_bytes(made.file.read_bytes() + text.encode() + b"\n")
    made.write("reward", "s0", reward=0.5)
    made.close()
    records = Records(tmp_path)
    assert records.sessions()["s0"].reward == 0.5
    (fault,) = records.faults
    assert "a line is left out" in fault
    assert said in fault


def test_a_line_under_way_is_read_when_it_is_whole(tmp_path: Path) -> None:
    made = GatewaySamples(tmp_path)
    made.begin("s0")
    index = SessionIndex(tmp_path)
    index.refresh()
    text = json.dumps({"event": "reward", "at": BEGAN, "session_id": "s0", "reward": 0.5}).encode()
    with made.file.open("ab") as file:
        file.write(text[:20])
        file.flush()
        assert index.refresh() == set()
        file.write(text[20:] + b"\n")
    assert index.refresh() == {"s0"}
    assert index.sessions["s0"].reward == 0.5
    assert index.faults == {}
    made.close()


def test_an_index_knows_sessions_of_other_gateways_by_their_keys(tmp_path: Path) -> None:
    one, other = GatewaySamples(tmp_path), GatewaySamples(tmp_path, "20261126T111500_5f3a01")
    one.begin("s0", user="ann")
    index = SessionIndex(tmp_path)
    index.refresh()
    other.begin("s1", user="bob")
    index.refresh()
    key = index.sessions["s1"].key
    assert key is not None
    found = index.by_key(key)
    assert found is not None
    assert (found.session_id, found.user) == ("s1", "bob")
    assert index.by_key("0" * 64) is None
    one.close()
    other.close()


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder, other = GatewaySamples(tmp_path / "a"), GatewaySamples(tmp_path / "b")
    other.begin("s1")
    (tmp_path / "a" / "x.sessions.jsonl").symlink_to(other.file)
    records = Records(tmp_path / "a")
    assert records.sessions() == {}
    assert any("leads out" in fault for fault in records.faults)
    folder.close()
    other.close()


def test_old_files_go_whole(tmp_path: Path) -> None:
    made = GatewaySamples(tmp_path)
    made.begin("old")
    made.end("old")
    made.write("reward", "old", reward=1.0)
    made.close()
    made.rotate()
    made.begin("young", at=1000)
    made.end("young")
    made.close()
    join_sessions(tmp_path, START)
    found = remove_old(tmp_path, BEGAN + 500)
    assert found.sessions == {"old"}
    assert {name.rpartition(".")[2] for name in found.files} == {"gz", "jsonl"}
    assert shown(tmp_path) == {"young": (None, "collected")}
    assert Records(tmp_path).faults == []
    remove_old(tmp_path, BEGAN + 2000)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
    assert list((tmp_path / "join").iterdir()) == []


def test_a_session_with_a_younger_reward_stays(tmp_path: Path) -> None:
    made = GatewaySamples(tmp_path)
    made.begin("s0")
    made.end("s0")
    made.close()
    made.rotate()
    made.write("reward", "s0", reward=1.0, at=BEGAN + 1000)
    made.close()
    assert remove_old(tmp_path, BEGAN + 500).files == []
    assert shown(tmp_path) == {"s0": (1.0, "collected")}


def test_late_rewards_do_not_keep_old_files_for_ever(tmp_path: Path) -> None:
    made = GatewaySamples(tmp_path)
    for day in range(4):  # each day a reward of the day before comes
        made.begin(f"s{day}", at=day * 100)
        made.end(f"s{day}")
        made.write("end", f"s{day}", at=BEGAN + day * 100)
        if day:
            made.write("reward", f"s{day - 1}", reward=1.0, at=BEGAN + day * 100)
        made.close()
        if day < 3:
            made.rotate()
    with hold(made.file, alone=True):
        assert remove_old(tmp_path, BEGAN + 100).files == []
        assert remove_old(tmp_path, BEGAN + 150).sessions == {"s0"}
        assert remove_old(tmp_path, BEGAN + 250).sessions == {"s1"}
        assert shown(tmp_path) == {"s2": (1.0, "collected"), "s3": (None, "collected")}


def test_files_of_a_gateway_that_runs_stay(tmp_path: Path) -> None:
    made = GatewaySamples(tmp_path)
    made.begin("s0")
    made.close()
    with hold(made.file, alone=True):
        assert remove_old(tmp_path, BEGAN + 500).files == []


def test_one_gateway_does_not_keep_another_out(tmp_path: Path) -> None:
    one, other = hold(tmp_path / LOCK, alone=False), hold(tmp_path / LOCK, alone=False)
    with one, other, pytest.raises(HeldError, match="a gateway is running there; stop it"):
        hold(tmp_path / LOCK, alone=True)
    with hold(tmp_path / LOCK, alone=True), pytest.raises(HeldError, match=r"sessions forget. is at work"):
        hold(tmp_path / LOCK, alone=False)


def test_a_record_names_the_models_of_its_trained_tokens() -> None:
    record = fitted(Record, sample_record())
    (row,) = record["rows"]
    versions = {version for _, mask, version, *_ in row["runs"] if mask}
    assert versions == {3, 4}
    assert models_of({**record, "model": ["a", "b", "c", "d", "e"]}) == ["d", "e"]
    assert models_of({**record, "model": "one"}) == ["one"]
    assert models_of({**record, "model": None}) == []
    with pytest.raises(CertificateError, match="weight version 3, and the record names 2 models"):
        models_of({**record, "model": ["a", "b"]})


def test_records_without_the_new_entries_are_read() -> None:
    record = sample_record()
    for generation in record["generations"]:
        generation.pop("completion", None)
    assert [each["completion"] for each in fitted(Record, record)["generations"]] == [None, None]
