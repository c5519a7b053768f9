"""The recipe of `eval --benchmark`: readers of the sets' own forms, their rows, and their rewards."""

import base64
import json
import pickle
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.long.task_sets.eval_sets import module, scores
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.benchmarks.protocol import read_protocol
from verl_multiturn.rewards import aclose

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def readers() -> ModuleType:
    return module("readers")


@pytest.fixture(scope="module")
def made() -> ModuleType:
    return module("made_entries")


@pytest.fixture
async def _closed() -> AsyncIterator[None]:
    yield
    await aclose()


def row_of(readers: ModuleType, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    (row,), left_out = readers.rows_of(name, read_protocol(name), [entry])
    assert not left_out
    return dict(row)


def test_a_problem_of_a_competition(readers: ModuleType) -> None:
    row = row_of(readers, "aime25", {"problem": "Find $b$ in \\{1, 2\\}.", "answer": 70, "id": "0"})
    asked = "Please reason step by step, and put your final answer within \\boxed{}."
    assert row["prompt"] == [{"role": "user", "content": f"Find $b$ in \\{{1, 2\\}}.\n{asked}"}]
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("aime25", "70")


def test_a_question_with_a_placeholder_in_it_stays_as_it_is(readers: ModuleType) -> None:
    row = row_of(readers, "math500", {"problem": "Is {starter} or {question} right?", "answer": "1"})
    assert row["prompt"][0]["content"].startswith("Is {starter} or {question} right?\nPlease reason")


def test_a_problem_of_grade_school(readers: ModuleType) -> None:
    row = row_of(readers, "gsm8k", {"question": "How many?", "answer": "1 + 1 = <<1+1=2>>2\n#### 1,002"})
    assert row["prompt"][0]["content"] == (
        'How many? Let\'s think step by step and output the final answer after "####".'
    )
    assert row["reward_model"]["ground_truth"] == "1002"
    with pytest.raises(ConfigError, match=r"gsm8k, row 0: a row of the source is .*expected a `question`"):
        row_of(readers, "gsm8k", {"question": "How many?", "answer": "two"})


def test_programs_for_standard_input_and_of_a_class(readers: ModuleType, made: ModuleType) -> None:
    stdin, function = (
        row_of(readers, "livecodebench_v5", made.made_entries("livecodebench_v5")[n].entry) for n in (2, 3)
    )
    assert json.loads(stdin["reward_model"]["ground_truth"]) == {
        "inputs": ["3\n1 2 3\n", "1\n10\n", "2\n-4 0\n"],
        "outputs": ["4 8 12", "40", "-16 0"],
    }
    assert "reads the inputs" in stdin["prompt"][0]["content"]
    assert json.loads(function["reward_model"]["ground_truth"]) == {
        "inputs": ["[1, 2, 3]\n1", "[]\n0", "[-5, 5]\n-7"],
        "outputs": ["31", "0", "-7"],
        "fn_name": "scaledSum",
    }
    assert "```python\nclass Solution:\n    def scaledSum(" in function["prompt"][0]["content"]


class Evil:
    """A pickle of a stranger, which touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def packed(pickled: bytes) -> str:
    return base64.b64encode(zlib.compress(pickled)).decode()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_packed_text_is_read_in_each_form_of_pickles_that_the_set_may_have(
    protocol: int, readers: ModuleType
) -> None:
    text = packed(pickle.dumps('[{"input": "ä"}]', protocol=protocol))
    if protocol == 0:  # as text with escapes, which Python 3 has not written by itself since 3.0
        with pytest.raises(ConfigError, match=r"pickle opcode 'UNICODE', which is never run"):
            readers.pickled_text(text)
    else:
        assert readers.pickled_text(text) == '[{"input": "ä"}]'


def test_a_pickle_that_calls_something_is_refused_and_not_run(readers: ModuleType, tmp_path: Path) -> None:
    evil = packed(pickle.dumps(Evil(tmp_path / "touched")))
    with pytest.raises(ConfigError, match=r"pickle opcode '\w+', which is never run; expected one text"):
        readers.pickled_text(evil)
    assert not (tmp_path / "touched").exists()
    pickle.loads(zlib.decompress(base64.b64decode(evil)))  # the control
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no base64!", "packed tests that cannot be read"),
        (base64.b64encode(b"not packed").decode(), "packed tests that cannot be read"),
        (packed(pickle.dumps(7)), "pickle opcode 'BININT1'"),
        (packed(pickle.dumps(("a", "b"))), "pickle opcode 'TUPLE2'"),
        (packed(b"\x80\x04" + b"\x94" * 15 + b"N."), "packed tests of more than 16 pickle opcodes"),
        (packed(b"\x80\x04."), "packed tests with 0 texts"),
        (packed(pickle.dumps("[]")[:-1]), "packed tests that cannot be read"),
    ],
)
def test_packed_tests_in_no_known_form(text: str, problem: str, readers: ModuleType) -> None:
    with pytest.raises(ConfigError, match=problem):
        readers.pickled_text(text)


def test_packed_tests_may_not_fill_the_memory(readers: ModuleType) -> None:
    with (
        mock.patch.object(readers, "_MOST_BYTES", 1000),
        pytest.raises(ConfigError, match="packed tests of more than 1000 bytes"),
    ):
        readers.pickled_text(packed(pickle.dumps("a" * 2000)))


def test_opcodes_of_a_packed_text_are_not_collected(readers: ModuleType) -> None:
    text = packed(b"\x80\x04" + b"\x94" * 1_000_000 + b".")  # two kilobytes of a file
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"^packed tests of more than 16 pickle opcodes; expected one text$"):
            readers.pickled_text(text)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("livecodebench_v5", {"public_test_cases": "[" * 200_000}, "RecursionError"),
        ("livecodebench_v5", {"question_content": None}, "question_content: expected a text, got None"),
        ("livecodebench_v5", {"starter_code": None}, "starter_code: expected a text, got None"),
        ("livecodebench_v5", {"metadata": "[]"}, "TypeError"),
        (
            "livecodebench_v5",
            {"public_test_cases": '[{"input": 5, "output": "", "testtype": "functional"}]'},
            "inputs of its tests: expected texts, got 5",
        ),
        ("codeforces", {"title": None}, "title: expected a text, got None"),
        ("codeforces", {"input_format": ["x"]}, r"input_format: expected a text, got \['x'\]"),
        ("codeforces", {"official_tests": [{"input": "1", "output": None}]}, "outputs of its tests: expected texts"),
        ("codeforces", {"official_tests": [["1", "2"]]}, "TypeError"),
        ("aime24", {"problem": ["x"]}, r"problem: expected a text, got \['x'\]"),
        ("aime24", {"answer": ["4"]}, r"answer: expected a text, got \['4'\]"),
        ("aime25", {"answer": True}, "answer: expected a text, got True"),
        ("math500", {"answer": None}, "answer: expected a text, got None"),
        ("gsm8k", {"question": None}, "question: expected a text, got None"),
        ("gsm8k", {"answer": None}, "."),
    ],
)
def test_a_row_of_other_values_than_its_set_has_is_named(
    name: str, change: dict[str, Any], problem: str, readers: ModuleType, made: ModuleType
) -> None:
    right, other = made.made_entries(name)[1].entry, {**made.made_entries(name)[1].entry, **change}
    with pytest.raises(ConfigError, match=f"{name}, row 1: .*{problem}"):
        readers.rows_of(name, read_protocol(name), [right, other])


def test_problems_outside_of_the_window_are_left_out(readers: ModuleType, made: ModuleType) -> None:
    entry = made.made_entries("livecodebench_v5")[0].entry
    days = ["2024-07-31", "2024-08-01", "2025-02-01", "2025-02-02"]
    entries = [{**entry, "contest_date": f"{day}T00:00:00"} for day in days]
    rows, left_out = readers.rows_of("livecodebench_v5", read_protocol("livecodebench_v5"), entries)
    assert (len(rows), left_out) == (2, {"outside of the window": 2})


def test_problems_of_codeforces_that_cannot_be_scored_are_counted(readers: ModuleType, made: ModuleType) -> None:
    entry = made.made_entries("codeforces")[0].entry
    changes: list[dict[str, Any]] = [
        {},
        {"interaction_format": "Ask."},
        {"input_mode": "file"},
        {"generated_checker": "import sys"},
        {"official_tests_complete": False},
        {"official_tests": []},
    ]
    rows, left_out = readers.rows_of("codeforces", read_protocol("codeforces"), [{**entry, **each} for each in changes])
    assert left_out == {
        "interactive": 1,
        "reads a file": 1,
        "several answers are right, which a checker decides": 1,
        "its tests are cut": 2,
    }
    (row,) = rows
    assert row["prompt"][0]["content"].startswith(
        "# Sum 0\n\nPrint the first number times 3, plus the second one.\n\n## Input\nTwo whole numbers.\n\n## Output\n"
        "One number.\n\nExample input:\n1 2\r\n\nExample output:\n5\r\n"
    )


def write(path: Path, entries: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def test_files_are_found_by_the_names_of_the_set(readers: ModuleType, tmp_path: Path) -> None:
    entry = {"question": "How many?", "answer": "#### 2"}
    parts = tmp_path / "main"
    parts.mkdir()
    for number in range(2):
        table = pa.Table.from_pylist([{**entry, "question": str(number)}])
        pyarrow.parquet.write_table(table, parts / f"test-0000{number}-of-00002.parquet")
    write(parts / "train.jsonl", [entry])
    protocol = read_protocol("gsm8k")
    found = readers.read_entries("gsm8k", protocol, str(tmp_path))
    assert [each["question"] for each in found] == ["0", "1"]
    write(tmp_path / "socratic" / "test.jsonl", [entry])
    with pytest.raises(ConfigError, match=r"has the files in several folders: .*; name one of them"):
        readers.read_entries("gsm8k", protocol, str(tmp_path))
    assert len(readers.read_entries("gsm8k", protocol, str(tmp_path / "socratic" / "test.jsonl"))) == 1


@pytest.mark.parametrize(
    ("names", "rows", "problem"),
    [
        (["test4.jsonl"], "", r"expected test5 in one form, got \[\]"),
        (
            ["test4.jsonl", "test5.jsonl", "test4.json"],
            "",
            "expected test4 in one form, got .'test4.json', 'test4.jsonl'",
        ),
        (
            ["test4.jsonl", "test5-00000-of-00009.jsonl"],
            "",
            "expected all 00009 parts of test5, got .'test5-00000-of-0",
        ),
        (["test4.jsonl", "test5.jsonl", "test5-00000-of-00001.jsonl"], "", "expected test5 in one form"),
        (["test4.jsonl"], "test4.jsonl", "is one file; livecodebench_v5 has test4 and test5: name their folder"),
    ],
)
def test_a_set_of_which_a_part_is_missing_or_there_twice_is_refused(
    names: list[str], rows: str, problem: str, readers: ModuleType, made: ModuleType, tmp_path: Path
) -> None:
    for name in names:
        write(tmp_path / name, [made.made_entries("livecodebench_v5")[0].entry])
    with pytest.raises(ConfigError, match=problem):
        readers.read_entries("livecodebench_v5", read_protocol("livecodebench_v5"), str(tmp_path / rows))


def test_one_part_of_a_file_is_refused(readers: ModuleType, made: ModuleType, tmp_path: Path) -> None:
    part = tmp_path / "test-00001-of-00002.jsonl"
    write(part, [made.made_entries("codeforces")[0].entry])
    with pytest.raises(ConfigError, match=r"expected all 00002 parts of test, got ..test-00001-of-00002\.jsonl"):
        readers.read_entries("codeforces", read_protocol("codeforces"), str(part))


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (None, r"has no such file; --benchmark math500 needs its rows, .*fetch test of HuggingFaceH4/MATH-500"),
        ([{"problem": "1"}], r"row 0 lacks the columns \['answer'\], and has \['problem'\]; --benchmark math500 needs"),
    ],
)
def test_what_is_missing_is_named(
    entries: list[dict[str, Any]] | None, problem: str, readers: ModuleType, tmp_path: Path
) -> None:
    if entries is not None:
        write(tmp_path / "test.jsonl", entries)
    with pytest.raises(ConfigError, match=problem):
        readers.read_entries("math500", read_protocol("math500"), str(tmp_path))


@pytest.mark.usefixtures("_closed")
@pytest.mark.parametrize(
    ("name", "numbers"), [("gsm8k", range(10)), ("livecodebench_v5", (2, 3)), ("codeforces", (0,))]
)
async def test_right_answers_are_paid_and_nothing_else(
    name: str, numbers: Any, readers: ModuleType, made: ModuleType
) -> None:
    entries = [made.made_entries(name)[number] for number in numbers]
    rows, _ = readers.rows_of(name, read_protocol(name), [each.entry for each in entries])
    found = {kind: await scores(rows, said) for kind, said in made.answers(entries).items()}
    size = len(entries)
    assert found == {"reference": [1.0] * size, "wrong": [0.0] * size, "empty": [0.0] * size}
