"""The certificate of a teacher's columns: the answer about exactly the row's tokens, or a violation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.samples import Sample, padding_row
from tests.unit.certificate.test_certificate import PROMPT, RESPONSE, foreign, literal
from verl_multiturn.certificate.check import verify
from verl_multiturn.certificate.receipts import Receipts, as_unrewarded, teacher_digest, with_teacher

TOKENS = np.array([*PROMPT, *RESPONSE])


def answer(width: int, seed: int = 0) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 99, (len(TOKENS), width)).astype(np.int32)
    return ids, -3 - draw.random((len(TOKENS), width)).astype(np.float32)


def taught(width: int = 1) -> Sample:
    sample, columns = literal(), answer(width)
    receipts = with_teacher(sample.receipts.to_bytes(), teacher_digest(TOKENS, *columns))
    return Sample(replace(sample.row, teacher=columns), Receipts.from_bytes(receipts))


def found(row: Any, receipts: Receipts) -> list[str]:
    return [violation.what for violation in verify(row, receipts)]


def with_entry(column: Any, at: int, value: float) -> Any:
    changed = column.copy()
    changed[at, 0] = value
    return changed


@pytest.mark.parametrize("width", [1, 4])
def test_the_answer_about_the_row_is_honest(width: int) -> None:
    sample = taught(width)
    assert found(sample.row, sample.receipts) == []
    both = Receipts.from_bytes(as_unrewarded(sample.receipts.to_bytes()))
    assert (both.unrewarded, both.teacher) == (True, sample.receipts.teacher), "one mark does not remove another"


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("at", [0, len(PROMPT) + 3, len(TOKENS) - 1], ids=["prompt", "observation", "end"])
def test_one_changed_number_is_caught_wherever_it_is(width: int, at: int) -> None:
    sample = taught(width)
    ids, logprobs = sample.row.teacher or ()
    other = "the teacher's columns are not the answer that was given about the row's tokens"
    for columns in ((with_entry(ids, at, 7 + ids[at, 0]), logprobs),
                    (ids, with_entry(logprobs, at, np.nextafter(logprobs[at, 0], np.float32(0)))),
                    (np.roll(ids, 1, 0), np.roll(logprobs, 1, 0)),
                    answer(width, seed=1)):  # fmt: skip
        assert found(replace(sample.row, teacher=columns), sample.receipts) == [other]
    for value in (np.nan, -np.inf, np.inf, 0.5, -1e6):
        columns = ids, with_entry(logprobs, at, value)
        assert "teacher_logprobs is [" in found(replace(sample.row, teacher=columns), sample.receipts)[0]


def test_the_columns_of_another_row_of_the_same_length_are_caught() -> None:
    sample, other = taught(), foreign()
    moved = replace(other.row, teacher=sample.row.teacher)
    told = Receipts.from_bytes(with_teacher(other.receipts.to_bytes(), sample.receipts.teacher))
    said = "the teacher's columns are not the answer that was given about the row's tokens"
    assert found(moved, told)[-1] == said
    digest = teacher_digest(np.concatenate([PROMPT, other.row.response_ids]), *(sample.row.teacher or ()))
    own = Receipts.from_bytes(with_teacher(other.receipts.to_bytes(), digest))
    assert said not in found(moved, own)


def test_columns_of_another_length_and_columns_of_nobody_are_caught() -> None:
    sample = taught(2)
    ids, logprobs = sample.row.teacher or ()
    for columns in ((ids[:-1], logprobs), (ids, logprobs[:-1]), (ids, logprobs[:, :1]), (ids[:, 0], logprobs)):
        (said,) = found(replace(sample.row, teacher=columns), sample.receipts)
        assert f"expected {len(TOKENS)} rows" in said
    assert found(sample.row, literal().receipts) == ["its receipts know of no teacher's answer"]


def test_a_padding_row_has_verls_filling_and_no_answer() -> None:
    row, nothing = padding_row(literal().row), Receipts("", [])
    ids, zeros = np.full((128, 3), 7, np.int32), np.zeros((128, 3), np.float32)
    assert found(replace(row, teacher=(ids, zeros)), nothing) == []
    for columns in ((ids + 1, zeros), (ids, zeros - 1)):
        said = ["it is tagged as the trainer's filling, and has a teacher's answer"]
        assert found(replace(row, teacher=columns), nothing) == said


def test_a_text_that_is_none_is_no_receipt() -> None:
    with pytest.raises(ValueError, match="teacher is 5, expected a text"):
        Receipts.from_bytes(with_teacher(literal().receipts.to_bytes(), 5))  # type: ignore[arg-type]
