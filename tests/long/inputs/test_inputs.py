"""Inputs as people have them: some of each subject, all of them, and the counts."""

from __future__ import annotations

import pytest

from tests.long.inputs import inputs
from tests.long.inputs.input_cases import Case, Right, Seen, accept, models, outage, refuse, try_case
from verl_multiturn import ConfigError, OutageError

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("is_short", "least", "left_out"),
    [(True, 40, {"signals"}), pytest.param(False, 200, set(), marks=pytest.mark.long)],
)
async def test_each_input_is_used_or_refused_by_name(is_short: bool, least: int, left_out: set[str]) -> None:
    cases = inputs.all_cases()
    tried = await inputs.try_all(inputs.short_form(cases) if is_short else cases)
    assert inputs.wrong_of(tried) == []
    assert len(tried) >= least
    assert {each.case.subject for each in tried} == set(inputs.SUBJECTS) - left_out


def test_there_are_inputs_of_each_subject() -> None:
    cases = inputs.all_cases()
    assert len(cases) >= 200
    assert {case.subject for case in cases} == set(inputs.SUBJECTS)
    assert len({(case.subject, case.given) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    ("seen", "right", "counted"),
    [
        (Seen("accepted", 1), accept(1), "right"),
        (Seen("accepted", 1.0), accept(1), "silent"),
        (Seen("accepted", "1"), accept(1), "silent"),
        (Seen("accepted"), refuse(), "silent"),
        (Seen("model"), outage(), "silent"),
        (Seen("refused"), accept(), "wrong_status"),
        (Seen("refused", status=1), refuse(), "wrong_status"),
        (Seen("refused", status=1), refuse(status=1), "right"),
        (Seen("accepted", status=1), accept(), "wrong_status"),
        (Seen("refused", sentence="x='a'"), refuse("x", "'b'"), "unnamed"),
        (Seen("refused", sentence="http://u:secret@x"), refuse("x"), "unnamed"),
        (Seen("model", sentence="<ast.BinOp object at 0x7f00aa11bb22>"), models(), "silent"),
        (Seen("invalid"), Right("invalid"), "right"),
    ],
)
def test_what_is_counted(seen: Seen, right: Right, counted: str) -> None:
    from tests.long.inputs.input_cases import count

    assert count(seen, right) == counted


@pytest.mark.parametrize(
    ("error", "right", "counted"),
    [
        (ConfigError("x is wrong; mend it"), refuse("x"), "right"),
        (OutageError("x is away"), outage("x"), "right"),
        (KeyError("x"), refuse("x"), "tracebacks"),
        (SystemExit(2), refuse(), "tracebacks"),
    ],
)
async def test_errors_that_are_none_of_ours_are_counted(error: BaseException, right: Right, counted: str) -> None:
    async def door() -> Seen:
        raise error

    assert (await try_case(Case("parameters", "x", door, right))).counted == counted


async def test_a_traceback_in_the_output_is_counted_and_the_table_has_each_input() -> None:
    async def door() -> Seen:
        return Seen("refused", sentence="Traceback (most recent call last):\n | x", status=2)

    tried = await try_case(Case("parameters", "a | b", door, refuse()))
    assert tried.counted == "tracebacks"
    assert inputs.table_of([tried]).splitlines()[2:] == [
        "| parameters | a \\| b | refused | refused | 2 | Traceback (most recent call last): \\| x | tracebacks |"
    ]
    assert inputs.summary_of([tried], 1.0) == {
        "inputs": 1,
        "silent": 0,
        "tracebacks": 1,
        "wrong_status": 0,
        "unnamed": 0,
        "by_subject": {"parameters": 1},
        "seconds": 1.0,
    }
