"""Every conversation that began has exactly one fate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.sample_records import sample_run
from verl_multiturn.records.read.fates import Fate, count, fates, fates_of, start_of
from verl_multiturn.records.read.joins import JoinedRow, name_of, table_of, write
from verl_multiturn.records.read.records import Records

A, B = "20261126T101500_aaaaaa", "20261126T111500_bbbbbb"


def line(event: str, request_id: str = "r", uid: str = "u", start: str = A, **more: Any) -> dict[str, Any]:
    made = {"event": event, "request_id": request_id, "uid": uid, "number": 0, "step": 5, "at": 1.0}
    return {**made, "file": f"{start}-host-1-00", **more}


def step(
    number: int = 6, event: str = "step", start: str = A, join: str | None = "there", **more: Any
) -> dict[str, Any]:
    return {"event": event, "start": start, "step": number, "join": join, **more}


def row(request_id: str = "r", number: int = 6, trained: int = 3, start: str = A, **more: Any) -> dict[str, Any]:
    made = {"request_id": request_id, "uid": "u", "number": 0, "row": 0, "validation": False, "step": number}
    return {**made, "trained": trained, "untrained": None, "start": start, **more}


BEGUN = [line("begin"), line("end", at=2.0)]
END = {"event": "end", "start": A, "at": 9.0}


def only(lines: Sequence[Any], *args: Any) -> Fate:
    (found,) = fates(lines, *args)
    assert (found.request_id, found.uid, found.number, found.begun) == ("r", "u", 0, 5)
    return found


def said(found: Fate) -> tuple[str, int | None, str]:
    return found.fate, found.step, found.why


@pytest.mark.parametrize("cause", ["no_signal", "zero_advantage"])
def test_what_a_filter_took_out_of_the_update_is_spared(cause: str) -> None:
    assert said(only(BEGUN, [step()], [row(trained=0, untrained=cause)])) == ("spared", 6, cause)
    # Some rows of a conversation may stay: nothing trainable is missing.
    found = only(BEGUN, [step()], [row(trained=0, untrained=cause), row(row=1)])
    assert (said(found), found.partly) == (("trained", 6, ""), False)
    found = only(BEGUN, [step()], [row(trained=0, untrained=cause), row(row=1, untrained="too_old")])
    assert (said(found), found.partly) == (("trained", 6, "too_old"), True)


def test_trained_wholly_or_partly() -> None:
    whole = only(BEGUN, [step()], [row()])
    assert (said(whole), whole.partly, whole.undone) == (("trained", 6, ""), False, False)
    some = only(BEGUN, [step()], [row(untrained="too_old")])
    assert (said(some), some.partly) == (("trained", 6, "too_old"), True)
    # A later row holds nothing that was sampled; another one was rejected.
    rows = [row(), row(row=1, trained=0, untrained="unsampled")]
    assert not only(BEGUN, [step()], rows).partly
    assert only(BEGUN, [step()], [*rows, row(row=2, trained=0, untrained="rejected")]).partly


@pytest.mark.parametrize("cause", ["void", "invalid", "outage", "reward_outage", "too_old", "skipped_update"])
def test_in_a_batch_and_not_trained(cause: str) -> None:
    assert said(only(BEGUN, [step()], [row(trained=0, untrained=cause)])) == ("untrained", 6, cause)


def test_nothing_was_sampled() -> None:
    assert said(only(BEGUN, [step()], [row(trained=0)])) == ("untrained", 6, "unsampled")


def test_validated() -> None:
    lines = [{**each, "validation": True} for each in BEGUN]
    assert said(only(lines, [step(5, "validation")], [row(number=5, trained=0, validation=True)])) == (
        "validated", 5, ""
    )  # fmt: skip
    # The disk was full when the validation's join was to be written.
    assert said(only(lines, [step(5, "validation", join=None)])) == ("validated", 5, "")
    # It did not end, and the validation is over: its worker died again and again.
    assert said(only(lines[:1], [step(5, "validation")]))[0] == "lost"


@pytest.mark.parametrize("what", ["evicted", "filtered", "discarded", "failed"])
def test_what_became_of_its_group(what: str) -> None:
    assert said(only(BEGUN, [step(**{what: ["u"]})])) == (what, 6, "")


def test_a_group_that_was_given_up_after_its_worker_had_died() -> None:
    assert said(only(BEGUN[:1], [step(failed=["u"])])) == ("lost", 6, "its worker died, and its group was given up")


def test_rerolled_whether_it_had_ended_or_was_cancelled() -> None:
    steps = [step(rerolled={"u": "new"})]
    assert said(only(BEGUN, steps)) == ("rerolled", 6, "begun anew as new")
    cancelled = [BEGUN[0], line("cancel", why="cancelled")]
    assert said(only(cancelled, steps)) == ("rerolled", 6, "begun anew as new")
    # Its siblings were cut before: that one had its fate already.
    assert said(only([BEGUN[0], line("cancel", why="cut")], steps)) == ("cut", None, "")


def test_cancelled_and_killed() -> None:
    assert said(only([BEGUN[0], line("cancel", why="cancelled")])) == ("cancelled", None, "cancelled")
    assert said(only([BEGUN[0], line("cancel", why="killed")])) == ("lost", None, "its process was ended")


def test_cut_when_it_ended_in_the_moment_in_which_its_siblings_were_enough() -> None:
    sibling = [line("begin", "s", number=1), line("end", "s", number=1)]
    found = fates([*BEGUN, *sibling], [step()], [row("s", 6)])
    assert [said(each) for each in found] == [("cut", 6, "it ended when enough siblings had"), ("trained", 6, "")]


def test_raised_and_its_siblings() -> None:
    lines = [BEGUN[0], line("raise", why="ConfigError: x"), line("begin", "s", number=1), line("end", "s", number=1)]
    found = {each.request_id: said(each) for each in fates(lines, [step(failed=["u"])])}
    assert found == {"r": ("raised", 6, "ConfigError: x"), "s": ("failed", 6, "")}
    # The trainer `sync` takes the rows of a failed group.
    found = {each.request_id: said(each) for each in fates(lines, [step()], [row("s")])}
    assert found == {"r": ("raised", None, "ConfigError: x"), "s": ("trained", 6, "")}


def test_begun_again_after_its_worker_had_died() -> None:
    again = [line("begin", "again", at=3.0), line("end", "again", at=4.0)]
    found = fates([*BEGUN, *again], [step()], [row("again")])
    assert [said(each) for each in found] == [
        ("lost", None, "its group was begun again as again"),
        ("trained", 6, ""),
    ]


def test_lost_with_its_process() -> None:
    assert said(only(BEGUN[:1], [step(), END])) == ("lost", None, "it was running at the run's end")
    assert said(only(BEGUN, [step(), END])) == ("lost", None, "it had ended at the run's end")
    # No line states that the first start ended: it was killed.
    later = step(7, start=B)
    assert said(only(BEGUN, [step(), later])) == ("lost", None, "it had ended at its process's end")


def test_open() -> None:
    assert said(only(BEGUN[:1], [step()])) == ("open", None, "it is running")
    assert said(only(BEGUN, [step()])) == ("open", None, "it has ended, and waits to be trained")


def test_what_cannot_be_known() -> None:
    assert said(only(BEGUN, [step(join=None)])) == ("unknown", None, "the join of step 6 is not there")
    assert said(only(BEGUN)) == ("unknown", None, "no join is there")
    # A conversation that did not end cannot have been trained.
    assert said(only(BEGUN[:1])) == ("open", None, "it is running")


def test_a_join_alone() -> None:
    (found,) = fates([], [], [row(number=6)])
    assert found == Fate("r", "u", 0, False, 6, "trained", 6)


def test_a_step_that_was_done_again() -> None:
    steps = [step(5), step(6), step(5, start=B), step(6, start=B)]
    # The same rows came with the checkpoint: they count for the later start.
    rows = [row(number=6, trained=3), row(number=5, trained=0, untrained="void", start=B)]
    found = only(BEGUN, steps, rows)
    assert (said(found), found.undone) == (("untrained", 5, "void"), False)
    # These were trained by the first start alone, in a step that is undone.
    found = only(BEGUN, steps, [row(number=6)])
    assert (said(found), found.undone) == (("trained", 6, ""), True)
    found = only(BEGUN, steps, [row(number=4)])
    assert (said(found), found.undone) == (("trained", 4, ""), False)


def test_the_run_file_of_a_later_start_says_where_it_went_on() -> None:
    runs = [{"start": A, "resumed_from": None}, {"start": B, "resumed_from": 4}]
    assert only(BEGUN, [step(6)], [row(number=6)], runs).undone


def test_a_group_that_a_later_start_took_over_with_the_checkpoint() -> None:
    assert said(only(BEGUN, [step(5), step(6, start=B, evicted=["u"])])) == ("evicted", 6, "")


def test_all_counts_add_up_to_what_began() -> None:
    lines = [line("begin", f"r{i}", f"u{i}", at=float(i)) for i in range(8)]
    lines += [line("end", f"r{i}", f"u{i}", at=10.0 + i) for i in range(4)]
    lines += [line("cancel", "r4", "u4", why="cut"), line("raise", "r5", "u5", why="x")]
    lines.append(line("begin", "v", "uv", validation=True))
    steps = [step(evicted=["u1"], filtered=["u2"])]
    found = fates(lines, steps, [row("r0", uid="u0")])
    assert len(found) == 9
    assert count(found) == {
        "trained": 1, "evicted": 1, "filtered": 1, "cut": 1, "raised": 1, "open": 4,
    }  # fmt: skip
    assert count(found, validation=True) == {"open": 1}
    assert sum(count(found).values()) == len({each["request_id"] for each in lines})


def test_a_folder(tmp_path: Path) -> None:
    sample_run(tmp_path, steps=2, groups=2, size=4)
    found = fates_of(Records(tmp_path))
    assert count(found) == {"trained": 16, "validated": 2, "cut": 1, "raised": 1}


def test_a_folder_with_a_torn_join(tmp_path: Path) -> None:
    write(tmp_path, name_of(False, 6, A), table_of([JoinedRow("r", "u", 0, 0, False, 6, trained=2)]))
    (tmp_path / "join" / name_of(False, 7, A)).write_bytes(b"PAR1")
    assert count(fates_of(Records(tmp_path))) == {"trained": 1}


def test_the_start_of_a_worker_s_files() -> None:
    assert start_of(f"{A}-host-1-00", []) == A
    assert start_of("old-start-host-1-00", ["old-start", A]) == "old-start"
