"""Output of `verl-multiturn explain` on records: made by hand here; `tests/long/observe` has whole runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.support.sample_records import BEGAN, joined_row, sample_record, sample_run, sample_session
from verl_multiturn.cli.main import app
from verl_multiturn.observe.explain import agents
from verl_multiturn.observe.explain.explanation import explain
from verl_multiturn.observe.explain.facts import CallFacts, read_facts
from verl_multiturn.observe.explain.finding import SYMPTOMS
from verl_multiturn.records import schema
from verl_multiturn.records.read.joins import JoinName
from verl_multiturn.records.read.records import Records


class Held:
    """Records that a test holds in memory."""

    def __init__(self, records: list[dict[str, Any]], rows: list[dict[str, Any]] | None = None, **more: Any) -> None:
        self._records, self._rows, self._more = records, rows or [], more
        self.runs: list[dict[str, Any]] = more.get("runs", [])
        self.evaluations: set[str] = set()
        self.has_trainer = True

    def records(self) -> list[dict[str, Any]]:
        return self._records

    def lines(self) -> list[dict[str, Any]]:
        return self._more.get("lines", [])

    def steps(self) -> list[dict[str, Any]]:
        return self._more.get("steps", [])

    def joined(self) -> pa.Table:
        return pa.Table.from_pylist(self._rows, schema.JOINED)

    def joins(self, columns: Any) -> Iterator[tuple[JoinName, pa.Table]]:
        yield JoinName(False, 1, "start"), self.joined()

    def sessions(self) -> dict[str, Any]:
        return {}


def kinds(records: Any) -> dict[str, str]:
    return {each.symptom: each.kind for each in explain(records)}


def test_facts_of_a_conversation() -> None:
    record = sample_record()
    row = joined_row(record, untrained="too_old", untrained_tokens=[0, 2], trained=5)
    row["old_log_probs"] = [each - 0.5 for each in row["old_log_probs"]]
    facts = read_facts(Held([record], [row]))
    (talk,) = facts.training
    assert (talk.request_id, talk.uid, talk.step, talk.row, talk.source) == ("r-0", "group-0", 1, "sums:7", "sums")
    assert (talk.answer, talk.marked, talk.truth) == ("839", True, "839")
    assert talk.calls == [CallFacts("calculator", "ok", 0.0, 0.5)]
    assert (talk.attempts, talk.identical, talk.generated, talk.unplaced) == (1, 1, 7, {})
    assert (talk.score, talk.parts, talk.advantage) == (1.0, {"acc": 1.0}, 1.5)
    assert (talk.sampled, talk.trained, talk.too_old, talk.untrained) == (7, 5, 2, "too_old")
    assert talk.parts_s == {"engine": 2.0, "tool calculator": 0.5, "other": 0.5}
    assert {key: (sums.count, round(sums.signed / sums.count, 6)) for key, sums in facts.drift.items()} == {
        (1, 0, 3): (4, -0.5),
        (1, 1, 4): (3, -0.5),
    }
    assert (facts.entropy[1].count, facts.entropy[1].absolute) == (7, 7 * 0.25)


def test_facts_of_a_session() -> None:
    facts = read_facts(Held([sample_session()]))
    (talk,) = facts.training
    assert (talk.agent_end, talk.unplaced, talk.generated, talk.joined) == ("returned", {"undelivered": 2}, 6, False)


def test_sessions_in_which_only_opponents_spoke_have_a_remedy_of_their_own() -> None:
    records = [
        sample_session(request_id=f"s-{number}", number=number, stop_reason="no_completion", valid=False, rows=[])
        for number in range(40)
    ]
    (finding,) = agents.find(read_facts(Held(records)))
    assert (finding.kind, finding.said) == ("alarm", "100 % of the agents' sessions failed, most: no_completion")
    assert finding.remedy.startswith("let a trained role begin")


def test_a_conversation_with_several_rows_has_the_sum_of_their_scores() -> None:
    record = sample_session()
    rows = [joined_row(record, score=score, row=row, advantages=[0.5, 0.5]) for row, score in enumerate((0.0, 1.0))]
    (talk,) = read_facts(Held([record], rows)).training
    assert (talk.score, talk.advantage) == (1.0, 0.5)


def test_without_a_join_the_score_is_that_of_its_line() -> None:
    line = {"event": "score", "request_id": "r-0", "at": BEGAN + 9.0, "score": 0.5}
    (talk,) = read_facts(Held([sample_record()], lines=[line])).training
    assert talk.score == 0.5
    assert talk.parts_s == {"engine": 2.0, "tool calculator": 0.5, "other": 0.5, "reward": 6.0}


@pytest.mark.parametrize(
    ("said", "answer", "marked"),
    [
        ("Answer: 42.", "42", True),
        ("It is \\boxed{7}", "7", True),
        ("first #### 3", "3", True),
        ("I think\n12", "12", False),
        ("<answer>Paris</answer>", "paris</answer>", True),
        ("the answer is\n\n B ", "b", True),
        ("Answer:", "answer:", True),
        ("", "", False),
    ],
)
def test_answers_are_what_follows_the_last_mark(said: str, answer: str, marked: bool) -> None:
    record = sample_record(messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": said}])
    (talk,) = read_facts(Held([record])).training
    assert (talk.answer, talk.marked) == (answer, marked)


def test_an_empty_folder_is_unknown_and_not_fine(tmp_path: Path) -> None:
    assert kinds(Records(tmp_path)) == dict.fromkeys(SYMPTOMS, "unknown")


def test_what_was_not_recorded_is_unknown() -> None:
    records = [
        sample_record(request_id=f"{uid}-{number}", uid=str(uid), number=number, timeline=[], calls=[], generations=[])
        for uid in range(8)
        for number in range(4)
    ]
    assert kinds(Held(records)) == {
        "groups_wrong": "unknown",
        "groups_right": "unknown",
        "validation_behind": "unknown",
        "entropy": "unknown",
        "drift": "unknown",
        "stale": "unknown",
        "rerolled": "unknown",
        "evicted": "unknown",
        "groups_failed": "unknown",
        "rows_unused": "unknown",
        "stragglers": "unknown",
        "reward_drowned": "unknown",
        "advantages_contradict": "unknown",
    }


@pytest.mark.parametrize("validation", [False, True])
def test_rewards_that_broke_come_before_tasks_that_are_too_hard(validation: bool) -> None:
    records, rows = [], []
    for number in range(32):
        record = sample_record(request_id=f"r-{number}", uid=f"group-{number // 2}", validation=validation)
        broke = {"failed": 1.0, "timed_out": 0.0} if number % 4 else {"failed": 0.0, "timed_out": 1.0}
        records.append(record)
        rows.append(
            joined_row(record, score=0.0, parts=json.dumps({"acc": 0.0, "outage": 0.0, "unjudgeable": 0.0, **broke}))
        )
    found = explain(Held(records, rows))
    order = [each.symptom for each in found if each.kind == "alarm"]
    assert order[0] == "rewards_fail"
    assert ("groups_wrong" in order) is not validation
    assert found[0].said.startswith("the reward of 32 conversations (100 %) broke (24) or was late (8): each scores 0")
    assert found[0].evidence["by_source"] == {"sums": 32}
    left_out = {"failed": 1.0, "timed_out": 0.0, "outage": 1.0, "unjudgeable": 0.0}
    for parts in (left_out, {"failed": 2.0, "timed_out": 0.0}):  # the second is a count of an author's own
        assert "rewards_fail" not in kinds(Held(records, [row | {"parts": json.dumps(parts)} for row in rows]))


def test_in_bypass_mode_the_drift_is_unknown() -> None:
    record = sample_record()
    row = joined_row(record, old_log_probs=[float(each) for each in record["rows"][0]["logprobs"]])
    (found,) = [each for each in explain(Held([record], [row])) if each.symptom == "drift"]
    assert (found.kind, found.said) == (
        "unknown",
        "the trainer's log-probabilities are the engine's own (bypass mode), so they cannot be compared",
    )


def test_a_conversation_that_ended_and_then_raised_counts_once() -> None:
    ids = [f"r-{number}" for number in range(4)]
    lines = [{"event": "end", "request_id": each} for each in ids] + [{"event": "raise", "request_id": ids[0]}]
    (finding,) = [each for each in explain(Held([sample_record()], lines=lines)) if each.symptom == "raised"]
    assert finding.evidence == {"raised": 1, "share": 0.25}


def test_conversations_that_raised_and_that_left_no_record_are_named() -> None:
    lines = [{"event": event, "request_id": f"{event}-{number}"} for event in ("raise", "drop") for number in range(4)]
    lines += [{"event": "end", "request_id": f"end-{number}"} for number in range(12)]
    found = {each.symptom: each for each in explain(Held([sample_record()], lines=lines))}
    assert (found["raised"].kind, found["raised"].requests) == ("alarm", ("raise-0", "raise-1", "raise-2"))
    assert found["raised"].evidence == {"raised": 4, "share": 0.2}
    assert (found["unrecorded"].kind, found["unrecorded"].evidence) == ("unknown", {"dropped": 4, "recorded": 12})


def test_a_run_is_explained_at_the_command_line(tmp_path: Path) -> None:
    sample_run(tmp_path / "records")
    shown = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert json.loads(shown.stdout.splitlines()[-1]) == {"alarm": 1, "note": 0, "unknown": 2, "symptoms": ["raised"]}
    assert shown.exit_code == 1
    told = json.loads(CliRunner().invoke(app, ["explain", str(tmp_path), "--json"]).stdout)
    assert [(each["symptom"], each["kind"]) for each in told["findings"]] == [
        ("raised", "alarm"),  # one of 19
        ("drift", "unknown"),
        ("validation_behind", "unknown"),
    ]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["explain", str(tmp_path / "none")])
    assert (shown.exit_code, "none" in shown.stderr) == (2, True)


def test_hostile_texts_do_not_reach_the_terminal(tmp_path: Path) -> None:
    hostile = "\u202e\x1b[2J\x00</script>[red]"
    record = sample_record(request_id=hostile, uid="a")
    lines = [{"event": "raise", "request_id": hostile, "at": 0.0}]
    folder = tmp_path / "records"
    sample_run(folder)
    (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "b.lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pq.write_table(pa.Table.from_pylist([joined_row(record)], schema.JOINED), folder / "join" / "step-9-x.parquet")
    shown = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert shown.exit_code == 1
    assert not {"\u202e", "\x1b", "\x00"} & set(shown.stdout)
    told = json.loads(CliRunner().invoke(app, ["explain", str(tmp_path), "--json"]).stdout)
    assert hostile in told["findings"][0]["requests"]


def test_nothing_is_said_to_be_fine_where_all_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").touch()
    shown = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert shown.exit_code == 0
    assert "no symptom was found" not in shown.stdout
    assert f"unknown: {SYMPTOMS[0]}: no conversation was recorded\n" in shown.stdout
