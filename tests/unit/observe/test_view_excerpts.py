"""The beginning of a question and of an answer, and the unknown parts of a step's groups."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.sample_records import sample_record, sample_run
from verl_multiturn.observe.documents.documents import Documents, excerpts_of


@pytest.mark.parametrize(
    ("messages", "asked", "question", "answer"),
    [
        ([{"role": "user", "content": "a  b\nc"}, {"role": "assistant", "content": "x"}], 1, "a b c", "x"),
        ([{"role": "user", "content": "first"}, {"role": "user", "content": "last"}], 2, "last", ""),
        ([{"role": "user", "content": [{"type": "text", "text": "block"}, {"type": "image"}]}], 1, "block", ""),
        ([{"role": "assistant", "content": "hello"}, {"role": "assistant", "content": None}], 1, "", ""),
        ([{"role": "user", "content": "q"}, {"role": "user", "content": "later"}], 1, "q", ""),
        ([{"role": "user", "content": "y" * 200}], 1, "y" * 119 + "…", ""),
    ],
)
def test_excerpts(messages: list[dict[str, Any]], asked: int, question: str, answer: str) -> None:
    record = sample_record(messages=messages, asked=asked)
    assert excerpts_of(record) == {"question": question, "answer": answer}


def test_a_conversation_without_a_record_has_none() -> None:
    assert excerpts_of(None) == {"question": "", "answer": ""}


def test_a_validation_without_groups_has_none_that_could_be_equal(tmp_path: Path) -> None:
    sample_run(tmp_path)
    documents = Documents([tmp_path])
    documents.refresh()
    (found,) = documents.run()["dirs"]
    by_kind = {each["event"] == "validation": each for each in found["steps"]}
    assert by_kind[False]["compared_groups"] >= 1
    names = ("groups", "compared_groups", "equal_groups", "all_right")
    assert [by_kind[True][name] for name in names] == [2, 0, 0, 0]
    assert documents.meta()["runs"][0]["name"] == "sums"
