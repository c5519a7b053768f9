"""Rows are in their prompt, or refused: some of each kind, and all of them."""

import logging
from functools import cache
from typing import Any

import pytest

from tests.long.tokens.row_cases import written_cases
from tests.long.tokens.row_oracle import faults
from tests.long.tokens.row_parts import Case
from tests.long.tokens.row_storage import STORES, stored_cases
from tests.long.tokens.row_words import words_of
from tests.long.tokens.rows import VERDICTS, all_cases, judge, report, summary, try_rows
from tests.support.families import names
from verl_multiturn.errors import ConfigError

pytestmark = pytest.mark.stack

SCHEMA: dict[str, Any] = {"type": "function", "function": {"name": "tool_zq9x", "description": "Look zq8x up."}}
CALL = {"id": "c", "function": {"name": "look", "arguments": '{"city": "zq3x", "n": null}'}}
ROW = [
    {"role": "system", "content": "Be zq1x."},
    {"role": "user", "content": [{"type": "text", "text": "Ask zq2x"}, {"type": "text", "text": " and zq7x."}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "It is zq4x."},
]
PROMPT = (
    "<|im_start|>system\nBe zq1x.\n# Tools tool_zq9x: Look zq8x up.<|im_end|>\n"
    "<|im_start|>user\nAsk zq2x and zq7x.<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"city": "zq3x", "n": null}}\n</tool_call>'
    "<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\nIt is zq4x.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


@cache
def short_cases() -> list[Case]:
    """Return few cases of each kind."""
    return all_cases(short=True)


def found(prompt: str) -> list[str]:
    """Return the oracle's findings in a prompt of the row above, without the parts that it quotes."""
    words = words_of(ROW, "qwen2.5")
    marks = [f"zq{number}x" for number in (1, 2, 3, 4, 7)]
    return [fault.split(" (…")[0] for fault in faults(prompt, "qwen2.5", "hermes", words, [SCHEMA], marks, "")]


def test_a_row_says_its_texts_and_calls_in_order() -> None:
    assert [(each.where, each.value) for each in words_of(ROW, "qwen2.5")] == [
        ("message 0, content", "Be zq1x."),
        ("message 1, content", "Ask zq2x"),
        ("message 1, content", " and zq7x."),
        ("message 2, call 0, name", "look"),
        ("message 2, call 0, arguments", {"city": "zq3x", "n": None}),
        ("message 3, content", "It is zq4x."),
    ]


def test_the_oracle_passes_what_is_right() -> None:
    assert found(PROMPT) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("Be zq1x.", "", "message 0, content: 'Be zq1x.' is not in the prompt"),
        (" and zq7x.", "", "message 1, content: 'and zq7x.' is not in the prompt"),
        ("It is zq4x.", "It is", "message 3, content: 'It is zq4x.' is not in the prompt"),
        ("It is zq4x.", "It is zq4x. It is zq4x.", "'It is zq4x.': said 1 times, shown 2 times"),
        ("<|im_start|>system", "<|im_start|>user", "message 0, content: stands in a turn of 'user'"),
        ("<tool_response>", "", "message 3, content: stands in a turn of 'user'"),
        ("Ask zq2x and zq7x.", "and zq7x. Ask zq2x", "message 1, content: 'and zq7x.' stands before what was said"),
        ("Look zq8x up.", "", "tool 'tool_zq9x': its description 'Look zq8x up.' is not in the prompt"),
        ("zq7x.<", "zq7x. zq0x<", "words of another row: "),
        ("<|im_start|>assistant\n", "", "the end: the prompt ends in a turn of 'tool'"),
        ("Ask zq2x and", "[{'type': 'text', 'text': 'Ask zq2x'}] and", "another form: "),
        ("It is zq4x.", "It is zq4x. None", "a null that was not said: "),
    ],
)  # fmt: skip
def test_the_oracle_finds(old: str, new: str, fault: str) -> None:
    before, _, after = PROMPT.rpartition(old)
    faulty = before + new + after
    assert [each for each in found(faulty) if each.startswith(fault)]


@pytest.mark.parametrize(
    "shown",
    [
        '"{\\"city\\": \\"zq3x\\", \\"n\\": null}"',  # encoded twice
        '{"city": "zq3x"}',
        '{"city": "zq3x", "n": null, "other": 1}',
        '{"n": null, "city": "zq3x"}',
        '""',
        "{}",
    ],
)
def test_the_oracle_compares_arguments(shown: str) -> None:
    before, _, after = PROMPT.partition('{"city": "zq3x", "n": null}')
    assert [each for each in found(before + shown + after) if each.startswith("message 2, call 0, arguments: ")]


def test_a_row_counts_by_what_became_of_it() -> None:
    case = Case("user", "text", [{"role": "user", "content": "Ask zq1x."}])
    shown = "<|im_start|>user\nAsk zq1x.<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    assert judge("qwen2.5", case, system + shown).counts_as == "shown"
    assert judge("qwen2.5", case, shown.replace("zq1x", "zq1")).counts_as == "lost"
    assert judge("qwen2.5", case, shown.replace("user", "system")).counts_as == "silent"
    assert judge("qwen2.5", case, ConfigError("data row 7: message 0 is …")).counts_as == "honest_refused"
    assert judge("qwen2.5", case, TypeError("…")).counts_as == "lost"
    odd = Case("user", "number", [{"role": "user", "content": 3}], honest=False)
    assert judge("qwen2.5", odd, ConfigError("data row 7: message 0 is …")).counts_as == "refused"
    assert judge("qwen2.5", odd, ConfigError("it cannot be rendered")).counts_as == "lost"
    wrong = Case("ends", "answer", [{"role": "assistant", "content": "Ask zq1x."}], refused=True)
    assert judge("qwen2.5", wrong, shown.replace("user", "assistant", 1)).counts_as == "silent"


def test_files_give_rows_the_keys_of_other_rows() -> None:
    calls = [case for case in written_cases() if case.name == "arguments, mapping: nested"]
    stored = {case.role.partition("(")[2]: case.stored for case in stored_cases(calls)}
    (other,) = set(stored) - {"parquet)"}
    assert other.rstrip(")") in STORES
    arguments = stored["parquet)"][1]["tool_calls"][0]["function"]["arguments"]
    assert arguments["zq0x"] is None
    assert arguments["opts"]["zq00x"] is None
    forms = {case.role.partition("(")[2].rstrip(")") for case in all_cases()}
    assert set(STORES) <= forms


def test_the_report_names_what_went_wrong() -> None:
    case = Case("user", "text", [{"role": "user", "content": "Ask zq1x."}])
    verdicts = [judge("qwen2.5", case, "<|im_start|>assistant\n")]
    assert summary(verdicts) == {
        "families": 1, "cases": 1, "shown": 0, "refused": 0, "lost": 1, "silent": 0, "honest_refused": 0,
    }  # fmt: skip
    text = report(verdicts)
    assert "| user | 0+0 ! 1/0/0 |" in text
    assert "- user: text: 1 (all families)\n  - qwen2.5: message 0, content: 'Ask zq1x.' is not in the prompt" in text


@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", names())
def test_all_that_a_row_says_is_shown_or_it_is_refused(
    name: str, is_short: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="verl_multiturn")  # the engine fails in each conversation
    verdicts = try_rows([name], short_cases() if is_short else all_cases())
    wrong = [each for each in verdicts if each.counts_as in VERDICTS[2:]]
    assert [f"{each.case.name}: {each.counts_as}: {each.why[:300]}" for each in wrong] == []
    assert len(verdicts) >= 80
