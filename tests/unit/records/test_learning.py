"""Which recorded conversations are learned from."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.role_samples import joined_games, sample_game, write_games
from tests.support.sample_records import START, joined_row, sample_record, sample_run, sample_session, unproven_record
from verl_multiturn import CertificateError, ConfigError
from verl_multiturn.records import schema
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.learning import RecordLoader, SelectionRule, check_vocabulary, choose
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import joined_rewards
from verl_multiturn.records.rows import columns
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.run_file import digest_of_vocabulary


def folder_of(tmp_path: Path, records: list[dict[str, Any]], scores: list[float | None] | None = None) -> Path:
    """Write a folder with records in one plain file, and their join; a score of None is a row without one."""
    import pyarrow as pa

    lines = [json.dumps(orjson.loads(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY))) for record in records]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    given = scores or [float(record["number"] == 0) for record in records]
    rows = [joined_row(each, score=score) for each, score in zip(records, given, strict=True)]
    joins.write(tmp_path, joins.name_of(False, 1, START), pa.Table.from_pylist(rows, schema.JOINED))
    return tmp_path


def evaluated(number: int, row: int = 0, model: str = "aaaa", **changes: Any) -> dict[str, Any]:
    """Return a record of an evaluation."""
    name, digest = f"{model}-{row}-{number}", f"{row:016x}"
    return sample_record(
        request_id=name, uid=str(row), number=number, validation=True, row={"number": row, "digest": digest},
        model=model, **changes,
    )  # fmt: skip


def test_the_good_ones_of_a_run_are_chosen_and_the_rest_counted(tmp_path: Path) -> None:
    sample_run(tmp_path / "records")
    found = choose([tmp_path], SelectionRule(min_score=1.0))
    assert [(each.request_id, each.score, each.trained) for each in found.conversations] == [
        (f"{START}-t1-0-0", 1.0, (7,)),
        (f"{START}-t1-1-0", 1.0, (7,)),
        (f"{START}-t2-0-0", 1.0, (7,)),
        (f"{START}-t2-1-0", 1.0, (7,)),
    ]
    assert found.left_out == {"of a trainer's validation": 2, "with a reward below 1.0": 12}
    assert found.told() == (
        "4 of 18 conversations are learned from; left out: 2 of a trainer's validation, 12 with a reward below 1.0"
    )
    assert found.faults == ()


def test_a_row_gives_its_best_conversations_up_to_a_number(tmp_path: Path) -> None:
    records = [evaluated(number, row) for row in (0, 1) for number in range(4)]
    folder = folder_of(tmp_path, records, [0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 0.0, 1.0])
    found = choose([folder], SelectionRule(per_row=2))
    assert [[each.number for each in group] for group in found.groups] == [[1, 3], [0, 3]]
    assert found.left_out == {"beyond 2 of their row": 4}


def test_of_a_game_the_rows_of_the_winning_role_are_learned_from(tmp_path: Path) -> None:
    """Both scores add up to 0; the text of the user, a role that was not trained, is in no row."""
    write_games(tmp_path, {"u": [1.0, -1.0]})
    won = choose([tmp_path], SelectionRule(min_score=1.0)).conversations
    assert [(each.number, each.trained, each.score) for each in won] == [(0, (2, 0), 1.0), (1, (0, 2), 1.0)]
    assert won[0].of_rows == (("white", 1.0), ("black", -1.0))
    every = choose([tmp_path], SelectionRule()).conversations
    assert [each.trained for each in every] == [(2, 2), (2, 2)]
    white = choose([tmp_path], SelectionRule(min_score=1.0, roles=("white",)))
    assert [(each.number, each.trained) for each in white.conversations] == [(0, (2, 0))]
    assert white.left_out == {"with a reward below 1.0": 1}
    with pytest.raises(ConfigError, match=r"2 of other roles than \['user'\]"):
        choose([tmp_path], SelectionRule(roles=("user",)))


def test_an_opponents_text_is_not_learned_from(tmp_path: Path) -> None:
    record = sample_game("u", 0, 1.0)
    first = record["session"]["requests"][0]
    answered = {**first, "role": "black", "opponent": "step 4", "said": [{"role": "assistant", "content": "b"}]}
    record["session"]["requests"].append({**answered, "generations": []})
    record["session"]["opponents"] = {"black": "step 4"}
    (tmp_path / "a.jsonl").write_bytes(line_of(record))
    joins.write(tmp_path, joins.name_of(False, 1, START), joins.table_of(joined_games("u", [1.0])))
    (found,) = choose([tmp_path], SelectionRule()).conversations
    taken = RecordLoader().take(found.pointer)
    learned = [columns(row) for row in taken["rows"]]
    spoken = [ids for held in learned for ids, mask in zip(held["ids"], held["mask"], strict=True) if mask]
    assert spoken == [21, 2, 61, 2]  # white's and black's own, and neither the user's nor the opponent's


def test_roles_do_not_go_with_groups() -> None:
    with pytest.raises(ConfigError, match=r"roles=\['white'\]: a trainer that compares groups learns from"):
        SelectionRule(group=2, roles=("white",))


def test_groups_are_whole_and_of_one_size(tmp_path: Path) -> None:
    records = [evaluated(number, row) for row, count in ((0, 3), (1, 1), (2, 2)) for number in range(count)]
    found = choose([folder_of(tmp_path, records)], SelectionRule(group=2))
    assert [[each.request_id for each in group] for group in found.groups] == [
        ["aaaa-0-0", "aaaa-0-1"],
        ["aaaa-2-0", "aaaa-2-1"],
    ]
    assert found.left_out == {"in groups of fewer than 2": 1, "beyond 2 of their row": 1}


def test_another_models_conversations_are_not_learned_from(tmp_path: Path) -> None:
    records = [evaluated(0, 0, "aaaa"), evaluated(0, 0, "bbbb"), sample_record(request_id="of-a-trainer")]
    folder = folder_of(tmp_path, records)
    found = choose([folder], SelectionRule(models=("bbbb",)))
    assert [each.models for each in found.conversations] == [("bbbb",)]
    assert found.left_out == {"of another model": 2}
    with pytest.raises(
        ConfigError, match=r"nothing is left to learn from: 0 of 3 .*3 of another model; models=\['c'\]"
    ):
        choose([folder], SelectionRule(models=("c",)))


def live(number: int, task: str, models: list[str], **changes: Any) -> dict[str, Any]:
    """Return the record of a gateway's session whose turns were sampled by the deployments 3 and 4."""
    asked = {**sample_session()["session"], "task": task, "user": "somebody", "reward": None, "requests": []}
    name = f"live-{task}-{number}"
    return sample_record(
        request_id=name, uid=task, number=number, step=0, loop="gateway", model=models, session=asked, **changes
    )


DEPLOYED = ["m0", "m1", "m2", "m3", "m4"]
"""The deployments of a gateway, in order; `live` uses the last two."""


def live_folder(folder: Path, records: list[dict[str, Any]], rewards: list[tuple[str, float, str | None]]) -> Path:
    """Write a gateway's folder: records, and lines of their sessions with `rewards` as session, reward and id."""
    (folder / "a.jsonl").write_bytes(b"".join(line_of(record) for record in records))
    lines: list[dict[str, Any]] = []
    for each in records:
        named = {"session_id": each["request_id"], "at": 1.0}
        begun = {"task_id": each["uid"], "user": "somebody", "number": each["number"]}
        lines += [{"event": "start", **named, **begun}, {"event": "end", **named, "why": "ended"}]
    given = [
        {"event": "reward", "session_id": name, "at": 2.0 + place, "reward": reward, "id": key}
        for place, (name, reward, key) in enumerate(rewards)
    ]
    (folder / "a.sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines + given))
    return folder


def test_of_a_gateway_the_rewards_of_sessions_choose_and_a_doubled_one_counts_once(tmp_path: Path) -> None:
    records = [live(number, "t", DEPLOYED) for number in range(4)]
    names = [each["request_id"] for each in records]
    rewards = [(names[0], 0.5, "thumb"), (names[0], 0.5, "thumb"), (names[1], 0.0, None), (names[1], 1.0, None)]
    folder = live_folder(tmp_path, records, [*rewards, (names[2], 0.25, None)])
    found = choose([folder], SelectionRule(min_score=0.5))
    assert [(each.request_id, each.score) for each in found.conversations] == [(names[0], 0.5), (names[1], 1.0)]
    assert found.left_out == {"with a reward below 0.5": 1, "without a reward": 1}
    line = found.conversations[1].lineage(3, 0)
    assert (line["request_id"], line["uid"], line["models"], line["reward"]) == (names[1], "t", ["m3", "m4"], 1.0)
    assert "somebody" not in json.dumps([each.lineage(0, 0) for each in found.conversations])


def test_a_session_is_learned_from_if_all_its_trained_tokens_are_of_named_models(tmp_path: Path) -> None:
    one = live(1, "t", [*DEPLOYED[:3], "m4", "m4"])
    records = [live(0, "t", DEPLOYED), one]
    folder = live_folder(tmp_path, records, [(each["request_id"], 1.0, None) for each in records])
    for models, chosen in ((("m4",), [1]), (("m3", "m4"), [0, 1]), (("m4", "m3", "x"), [0, 1])):
        assert [each.number for each in choose([folder], SelectionRule(models=models)).conversations] == chosen
    with pytest.raises(ConfigError, match="2 of another model"):  # of which no token is
        choose([folder], SelectionRule(models=("m0", "m1", "m2")))


def test_staleness_counts_the_models_that_follow(tmp_path: Path) -> None:
    old, newer, newest = (live(number, "t", ["", "", "", name, name]) for number, name in enumerate("abc"))
    folder = live_folder(tmp_path, [old, newer, newest], [(f"live-t-{number}", 1.0, None) for number in range(3)])
    order = ("a", "b", "c")
    for staleness, chosen in ((0, [2]), (1, [1, 2]), (2, [0, 1, 2]), (9, [0, 1, 2]), (None, [0, 1, 2])):
        found = choose([folder], SelectionRule(models=order, staleness=staleness))
        assert [each.number for each in found.conversations] == chosen
    assert choose([folder], SelectionRule(models=order, staleness=0)).left_out == {
        "of a model that more than 0 follow": 2
    }
    assert choose([folder], SelectionRule(models=("b", "c"), staleness=0)).left_out == {
        "of another model": 1, "of a model that more than 0 follow": 1,
    }  # fmt: skip


def test_a_task_is_a_group_whichever_models_it_was_asked_of(tmp_path: Path) -> None:
    """The first ones of a task that was asked more often, and none of one that was asked too seldom."""
    asked = [("often", number) for number in range(5)] + [("seldom", 0)] + [("twice", 0), ("twice", 1)]
    records = [live(number, task, [*DEPLOYED[:3], *(f"{number}",) * 2]) for task, number in asked]
    rewards = [(each["request_id"], float(each["number"] % 2), None) for each in records]
    found = choose([live_folder(tmp_path, records, rewards)], SelectionRule(group=2))
    assert [[(each.uid, each.models, each.score) for each in group] for group in found.groups] == [
        [("often", ("0",), 0.0), ("often", ("1",), 1.0)],
        [("twice", ("0",), 0.0), ("twice", ("1",), 1.0)],
    ]
    assert found.left_out == {"in groups of fewer than 2": 1, "beyond 2 of their row": 3}


def test_a_version_that_names_no_model_is_a_fault(tmp_path: Path) -> None:
    records = [live(0, "t", DEPLOYED), live(1, "t", DEPLOYED[:4])]
    found = choose([live_folder(tmp_path, records, [("live-t-0", 1.0, None)])], SelectionRule())
    assert found.left_out == {"whose tokens are not those of the engine": 1}
    assert "weight version 4, and the record names 4 models" in found.faults[0]


def test_tokens_that_an_endpoint_does_not_prove_are_not_learned_from(tmp_path: Path) -> None:
    unproven = unproven_record(request_id="of-an-endpoint", validation=True, row={"number": 0, "digest": "0"})
    assert verify_record(unproven).violations == []  # they are the ones written down
    found = choose([folder_of(tmp_path, [unproven, evaluated(1)], [1.0, 1.0])], SelectionRule())
    assert [each.number for each in found.conversations] == [1]
    assert found.left_out == {"of an endpoint, which proves no tokens": 1}


def test_what_says_nothing_is_left_out(tmp_path: Path) -> None:
    invalid = evaluated(1, valid=False, stop_reason="engine_error")
    shown = evaluated(2)
    shown["rows"][0]["images"] = [{"digest": "00", "size": [1, 1]}]
    records = [evaluated(0), invalid, shown, evaluated(3), evaluated(4)]
    folder = folder_of(tmp_path, records, [1.0, 0.0, 1.0, None, 1.0])
    assert choose([folder], SelectionRule()).left_out == {
        "invalid": 1,
        "with images, which records do not hold": 1,
        "without a reward": 1,
    }


def test_a_reward_that_is_no_number_is_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [evaluated(number) for number in range(3)], [float("nan"), float("inf"), 1.0])
    found = choose([folder], SelectionRule(min_score=0.5))
    assert [each.score for each in found.conversations] == [1.0]
    assert found.left_out == {"without a reward": 2}


def test_what_is_too_long_is_left_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [evaluated(0), evaluated(1)])
    with pytest.raises(ConfigError, match="2 too long"):
        choose([folder], SelectionRule(max_length=9))


@pytest.mark.parametrize("what", ["id", "prompt", "mask", "logprob", "version", "score"])
def test_a_changed_record_is_not_learned_from(tmp_path: Path, what: str) -> None:
    changed = evaluated(1)
    row = changed["rows"][0]
    if what == "id":
        row["ids"][6] += 1
    elif what == "prompt":
        row["ids"][2] += 1
    elif what == "mask":
        row["runs"][1][1] = 0
    elif what == "logprob":
        row["logprobs"][0] -= 0.001
    elif what == "version":
        row["runs"][1][2] += 1
    found = choose([folder_of(tmp_path, [evaluated(0), changed], [1.0, 1.0])], SelectionRule())
    if what == "score":  # nothing was changed
        assert len(found.conversations) == 2
        return
    assert [each.number for each in found.conversations] == [0]
    assert found.left_out == {"whose tokens are not those of the engine": 1}
    assert len(found.faults) == 1
    assert "a.jsonl, offset " in found.faults[0]


def test_a_torn_file_costs_what_is_torn(tmp_path: Path) -> None:
    sample_run(tmp_path)
    [path] = tmp_path.glob("*.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="nothing is left to learn from"):
        choose([tmp_path], SelectionRule())
    with path.open("wb") as file:
        file.write(gzip.compress(orjson.dumps(sample_record(request_id=f"{START}-t1-0-0")) + b"\n"))
        file.write(b"torn")
    found = choose([tmp_path], SelectionRule())
    assert len(found.conversations) == 1
    assert any("cannot be read" in fault for fault in found.faults)


def test_a_record_is_verified_when_it_is_taken(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [evaluated(0), evaluated(1)])
    pointers = [each.pointer for each in choose([folder], SelectionRule()).conversations]
    assert RecordLoader().take(pointers[1])["request_id"] == "aaaa-0-1"
    path = folder / "a.jsonl"
    path.write_text(path.read_text().replace("-1.5", "-1.4"))
    with pytest.raises(CertificateError, match="is not what the engine returned"):
        RecordLoader().take(pointers[1])
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"'aaaa-0-1' is not in .* any more"):
        RecordLoader().take(pointers[1])


def test_a_session_has_the_tokens_of_each_of_its_rows(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [sample_session()], [1.0])
    [found] = choose([folder], SelectionRule()).conversations
    assert found.trained == (2, 2)
    assert found.lineage(7, 1) == {
        "row": 7, "index": 1, "request_id": "s-0", "file": str(folder / "a.jsonl"), "offset": 0, "place": 0,
        "models": [], "reward": 1.0, "data_row": None, "uid": "group-s", "number": 0, "step": 1,
    }  # fmt: skip


def test_the_last_join_of_a_conversation_counts_and_rows_add_up(tmp_path: Path) -> None:
    import pyarrow as pa

    record = sample_record()
    for start, scores in (("a", [1.0, 1.0]), ("b", [0.5, 0.25])):
        rows = [joined_row(record, row=row, score=score) for row, score in enumerate(scores)]
        joins.write(tmp_path, joins.name_of(False, 1, start), pa.Table.from_pylist(rows, schema.JOINED))
    assert {key: each.score for key, each in joined_rewards(Records(tmp_path)).items()} == {"r-0": 0.75}


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ({"group": 1}, "groups of 1: a group of one has no baseline"),
        ({"group": 2, "min_score": 1.0}, "min_score=1.0 and per_row=None leave parts of a group out"),
        ({"per_row": 0}, "per_row=0 leaves no conversation of a row; name 1 or more"),
        ({"per_row": -1}, "per_row=-1 leaves no conversation"),
        ({"staleness": 1}, "staleness=1 with models=None: it is the number of models that may follow"),
        ({"staleness": -1, "models": ("a",)}, r"staleness=-1 with models=\['a'\]"),
        ({"min_score": float("nan")}, "min_score=nan: no reward is below it"),
    ],
)
def test_a_choice_that_says_nothing_is_refused(choice: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        SelectionRule(**choice)


def test_records_must_be_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no records are named"):
        choose([], SelectionRule())
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("one", "two"):
        folder_of(tmp_path / name, [evaluated(0)])
    with pytest.raises(ConfigError, match=r"'aaaa-0-0' is in .*one.* and in .*two"):
        choose([tmp_path / "one", tmp_path / "two"], SelectionRule())
    with pytest.raises(ConfigError, match=r"'aaaa-0-0' is in .*one.* twice, and would be learned from twice"):
        choose([tmp_path / "one", tmp_path / "one"], SelectionRule(group=2))


def test_a_record_that_is_twice_in_its_folder_is_learned_from_once(tmp_path: Path) -> None:
    path = folder_of(tmp_path, [evaluated(0)]) / "a.jsonl"
    once = choose([tmp_path], SelectionRule())
    path.write_text(path.read_text() * 2)
    shutil.copy(path, path.with_name("b.jsonl"))
    chosen = choose([tmp_path], SelectionRule())
    assert chosen.groups == once.groups
    assert [fault.partition(": ")[2] for fault in chosen.faults] == [
        "a conversation is left out, that of request 'aaaa-0-0' first: it has them twice",
        f"a conversation is left out, that of request 'aaaa-0-0' first: '{path.with_name('a.jsonl')}' has them, too",
    ]


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "b": 1}
    sample_run(tmp_path)
    with pytest.raises(
        ConfigError, match="the tokenizer of 'mine' is another than the run's; name records of this model"
    ):
        check_vocabulary([tmp_path], vocabulary, "mine")
    [run] = tmp_path.glob("run-*.json")
    run.write_text(
        json.dumps({**json.loads(run.read_text()), "tokenizer": {"digest": digest_of_vocabulary(vocabulary)}})
    )
    check_vocabulary([tmp_path], vocabulary, "mine")
    run.unlink()
    with pytest.raises(ConfigError, match=r"no run-.*json says which tokenizer"):
        check_vocabulary([tmp_path], vocabulary, "mine")
