"""The certificate catches every corruption and stays silent on hard honest conversations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.long.tokens import certificate
from verl_multiturn import StopReason

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.fixture(scope="module")
def rolled() -> Any:
    from tests.long.tokens import honest

    return honest.roll(540, "run-")


def test_hard_conversations_raise_no_alarm(rolled: Any) -> None:
    from tests.long.tokens import honest

    alarms, padding = honest.false_alarms(rolled)
    assert alarms == []
    assert padding == -(-len(rolled) // honest.PER_BATCH)
    found = honest.kinds(rolled)
    # Sessions of agents are played, and their rows certified, in test_proxy_forest.py; outages in test_outages.py.
    agents = {StopReason.AGENT_ERROR, StopReason.AGENT_FAILED, StopReason.NO_COMPLETION}
    elsewhere = {*agents, StopReason.OUTAGE, StopReason.UNJUDGED}
    assert set(map(str, set(StopReason) - elsewhere)) <= set(found)
    assert all(count > 0 for count in found.values()), found


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("response_mask", lambda old: 1 - old),
        ("rollout_log_probs", lambda old: old - 0.25),
        ("rollout_versions", lambda old: old + 1),
        ("responses", lambda old: old + 1),
    ],
)
def test_a_hard_conversation_that_was_changed_raises_one(
    rolled: Any, column: str, change: Callable[[Any], Any]
) -> None:
    from dataclasses import replace

    from tests.long.tokens import honest

    valid = [each for each in rolled if each.record["valid"]][:100]
    changed = [replace(each, fields={**each.fields, column: change(each.fields[column])}) for each in valid]
    assert len(honest.false_alarms(changed)[0]) == len(changed) == 100


def a_run(folder: Path, rolled: Any, rows: int, unverified: int = 0) -> Path:
    """Write the files that a quickstart leaves behind for these conversations."""
    records = [json.dumps(each.record) for each in rolled if each.record["valid"]]
    (folder / "trajectories.jsonl").write_text("\n".join(records), encoding="utf-8")
    logged = {"rows": rows, "unverified": unverified, "violations": 0, "seconds": 0.1}
    data = {"timing_s/step": 10.0, **{certificate.PREFIX + name: value for name, value in logged.items()}}
    steps = [{"step": 0, "data": {}}, {"step": 1, "data": data}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)), encoding="utf-8")
    return folder


LITTLE = {"least": 36, "most": 3, "conversations": 30}


def test_all_corruptions_are_caught_and_nothing_honest_alarms(rolled: Any, tmp_path: Path) -> None:
    valid = [each for each in rolled if each.record["valid"]]
    figures = certificate.run(a_run(tmp_path, rolled, rows=len(valid)), **LITTLE)
    caught = ["corruptions", "caught", "caught_in_parts"]
    assert list(figures) == [
        *caught,
        *(f"conversation_{name}" for name in caught),
        *("honest", "honest_of_several_rows", "false_alarms", "step_share"),
    ]
    assert figures["conversation_corruptions"] == figures["conversation_caught"] >= 10
    assert (figures["honest"], figures["false_alarms"]) == (len(valid) + 45, 0)


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_so_it_is_in_a_real_run(tmp_path: Path) -> None:
    certificate.run_quickstart(tmp_path, steps=10)
    figures = certificate.run(tmp_path)
    assert figures["caught"] == figures["corruptions"] > 0
    assert figures["conversation_caught"] == figures["conversation_corruptions"] > 0
    assert figures["honest"] >= 2400
    assert figures["false_alarms"] == 0


@pytest.mark.parametrize(("missing", "unverified"), [(1, 0), (0, 1), (None, 0)])
def test_a_run_whose_trainer_did_not_verify_its_rows_proves_nothing(
    rolled: Any,
    missing: int | None,
    unverified: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    valid = sum(each.record["valid"] for each in rolled)
    folder = a_run(tmp_path, rolled, valid - missing if missing is not None else 0, unverified)
    if missing is None:  # no certificate at all
        (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(SystemExit, match=f"{unverified} unverified, where {valid} .* proves nothing") as ended:
        certificate.run(folder, **LITTLE)
    assert isinstance(ended.value.code, str)  # a message, printed with exit status 1
    assert "{" not in capsys.readouterr().out
