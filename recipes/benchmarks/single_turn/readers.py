"""Readers of benchmarks: an entry as its set publishes it becomes a question and the truth that its reward needs."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.benchmarks.protocol import EvaluationProtocol
from verl_multiturn.rewards.answers import last_boxed
from verl_multiturn.rows.files import READERS, read_rows
from verl_multiturn.runs.data import Row, make_row

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "common"))

from other_recipe import recipe  # found by the line above

Entry = Mapping[str, Any]
_MOST_BYTES = 1 << 28
"""Bytes of a problem's tests after they are unpacked."""
_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_AROUND = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"})
_MOST_OPCODES = 16
_PART = re.compile(r"(?P<stem>.+?)(?:-(?P<number>\d+)-of-(?P<count>\d+))?")
"""The stem of a file: `test`, or `test-00000-of-00002` of two parts."""


class Problem(NamedTuple):
    """A problem of a benchmark."""

    question: str
    truth: Any
    """Ground truth, in the form that its reward needs."""
    form: str = ""
    """Which of the protocol's prompts it takes; empty: the only one."""
    starter: str = ""
    """Code that the answer begins with."""


class LeftOut(Exception):
    """A problem that the reward cannot judge. Its text is the reason."""


def competition(entry: Entry) -> Problem:
    """Return a problem of AIME or MATH-500, whose answer is a column of its own: a text or a whole number."""
    _text(entry, "problem")
    if not isinstance(entry["answer"], int) or isinstance(entry["answer"], bool):
        _text(entry, "answer")
    return Problem(*recipe("torl").problem_of(entry))


def grade_school(entry: Entry) -> Problem:
    """Return a problem of GSM8K, whose answer ends in `#### 42`."""
    question = _text(entry, "question")
    made = recipe("gsm8k_multiturn").row(dict(entry), tool=False)
    return Problem(question, made["reward_model"]["ground_truth"])


def contest_program(entry: Entry) -> Problem:
    """Return a problem of LiveCodeBench with its public and its private tests.

    Raises:
        ConfigError: Its tests are in no known form, or of two kinds.
    """
    tests = [*_tests(entry, "public_test_cases"), *_tests(entry, "private_test_cases")]
    kinds = sorted({str(test.get("testtype")) for test in tests})
    truth = _truth(tests)
    question = _text(entry, "question_content")
    if kinds == ["functional"]:
        truth["fn_name"] = _text(json.loads(entry["metadata"]), "func_name")
        return Problem(question, truth, "function", _text(entry, "starter_code"))
    if kinds != ["stdin"]:
        raise ConfigError(f"its tests are of the kinds {kinds}; expected ['stdin'] or ['functional']")
    return Problem(question, truth, "stdin")


def codeforces(entry: Entry) -> Problem:
    """Return a problem of open-r1/codeforces with its official tests.

    Raises:
        LeftOut: It needs a checker, an interactor or a file, or its tests are not whole.
    """
    if entry["interaction_format"]:
        raise LeftOut("interactive")
    if entry["input_mode"] != "stdio":
        raise LeftOut("reads a file")
    if entry["generated_checker"]:
        raise LeftOut("several answers are right, which a checker decides")
    if not entry["official_tests"] or not entry["official_tests_complete"]:
        raise LeftOut("its tests are cut")
    parts = [f"# {_text(entry, 'title')}", _text(entry, "description")]
    for name, key in (("Input", "input_format"), ("Output", "output_format")):
        parts += [f"## {name}\n{_text(entry, key)}"] if entry[key] else []  # a problem may have no such section
    examples = _truth(entry["examples"] or [])
    for given, printed in zip(examples["inputs"], examples["outputs"], strict=True):
        parts.append(f"Example input:\n{given}\nExample output:\n{printed}")
    return Problem("\n\n".join(parts), _truth(entry["official_tests"]))


PROBLEM_READERS: dict[str, Callable[[Entry], Problem]] = {
    "aime24": competition,
    "aime25": competition,
    "math500": competition,
    "gsm8k": grade_school,
    "livecodebench_v5": contest_program,
    "codeforces": codeforces,
}
"""The reader of each benchmark."""


def _boxed(entry: Entry) -> str | None:
    text = entry.get("solution")
    return text if isinstance(text, str) and last_boxed(text) else None


SOLUTIONS: dict[str, Callable[[Entry], str | None]] = {
    "aime24": _boxed,
    "math500": _boxed,
    "gsm8k": lambda entry: entry["answer"],
}
"""For sets with solutions: an entry's own one, as an answer of a model; None where it has none that is in a box."""


def _text(entry: Entry, column: str) -> str:
    """Return the text in a column, which is not empty."""
    value = entry[column]
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{column}: expected a text, got {show(value, 100)}; fetch the file again")
    return value


def _truth(tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the inputs and the outputs of tests, all of which are texts."""
    truth = {key: [test[key[:-1]] for test in tests] for key in ("inputs", "outputs")}
    for key, values in truth.items():
        if others := [value for value in values if not isinstance(value, str)]:
            raise ConfigError(f"{key} of its tests: expected texts, got {show(others[0], 100)}; fetch the file again")
    return truth


def _tests(entry: Entry, column: str) -> list[dict[str, Any]]:
    """Return the tests in a column of LiveCodeBench: JSON, or JSON in a pickled, packed text."""
    value = entry[column]
    try:
        tests = json.loads(value)
    except ValueError:
        tests = json.loads(pickled_text(value))
    if not isinstance(tests, list) or not all(isinstance(each, dict) for each in tests):
        raise ConfigError(f"{column}: expected a list of tests, got {show(tests, 100)}")
    return tests


def pickled_text(packed: str) -> str:
    """Return the text that was pickled, packed by zlib and written in base64. Nothing of the pickle is run.

    The opcodes are only read, and any that does more than to hold one text is refused: a pickle of a stranger's may
    call anything.

    Raises:
        ConfigError: It is something else.
    """
    try:
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
        if unpacker.unconsumed_tail:
            raise ConfigError(f"packed tests of more than {_MOST_BYTES} bytes; check where the file is from")
        texts = []
        for number, (code, argument, _) in enumerate(pickletools.genops(pickled)):
            if number == _MOST_OPCODES:  # they are not collected: 1 GiB of them takes few bytes in the file
                raise ConfigError(f"packed tests of more than {_MOST_OPCODES} pickle opcodes; expected one text")
            if code.name in _TEXTS:
                texts.append(argument)
            elif code.name not in _AROUND:
                raise ConfigError(
                    f"packed tests with the pickle opcode {code.name!r}, which is never run; expected one text"
                )
    except ConfigError:  # a ValueError, too
        raise
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ConfigError(f"packed tests that cannot be read: {error}; fetch the file again") from None
    if len(texts) != 1:
        raise ConfigError(f"packed tests with {len(texts)} texts; expected one")
    return str(texts[0])


def read_entries(name: str, protocol: EvaluationProtocol, source: str) -> list[Entry]:
    """Read the entries of a benchmark from the file that a user fetched, or from a folder with its files.

    Args:
        name: Name of the benchmark.
        protocol: Its protocol.
        source: The file or the folder.

    Raises:
        ConfigError: It has not all of the files, one of them twice or in several folders, or a column is missing.
    """
    path = Path(source).expanduser()
    files = [path] if path.is_file() else _files(path, protocol.split)
    if path.is_file() and len(protocol.split) > 1:
        raise ConfigError(
            f"--rows {source!r} is one file; {name} has {' and '.join(protocol.split)}: name their folder"
        )
    if not files:
        raise ConfigError(f"--rows {source!r} has no such file; {protocol.needed(name)}")
    if len({file.parent for file in files}) > 1:
        raise ConfigError(
            f"--rows {source!r} has the files in several folders: {', '.join(map(str, files))}; name one of them"
        )
    for stem in [_part(path)["stem"]] if path.is_file() else protocol.split:
        _refuse_incomplete(source, stem, [file for file in files if _part(file)["stem"] == stem])
    entries = [entry for file in files for entry in read_rows(file, list(READERS))]
    for number, entry in enumerate(entries):
        there = {str(key).lower() for key in entry} if isinstance(entry, Mapping) else set()
        if lacking := [column for column in protocol.columns if column not in there]:
            raise ConfigError(
                f"--rows {source!r}: row {number} lacks the columns {lacking}, and has {sorted(there)}; "
                f"{protocol.needed(name)}"
            )
    return entries


def _files(folder: Path, stems: Sequence[str]) -> list[Path]:
    """Return the files of a split below a folder: `test.jsonl`, or parts such as `test-00000-of-00002.parquet`."""
    found = (path for suffix in READERS for path in folder.rglob(f"*{suffix}"))
    return sorted(path for path in found if _part(path)["stem"] in stems)


def _part(file: Path) -> dict[str, str | None]:
    """Return the `stem` of a file, and its `number` and their `count` where it is one of several parts."""
    found = _PART.fullmatch(file.stem)
    return found.groupdict() if found else {"stem": file.stem, "number": None, "count": None}


def _refuse_incomplete(source: str, stem: str | None, files: Sequence[Path]) -> None:
    """Refuse the files of one stem unless they are one file, or all parts of one form once."""
    names = [file.name for file in files]
    forms = {(file.suffix, _part(file)["count"]) for file in files}
    if len(forms) != 1:
        raise ConfigError(
            f"--rows {source!r}: expected {stem} in one form, got {names}; fetch it, or remove the others"
        )
    ((_, count),) = forms
    numbers = [int(_part(file)["number"] or 0) for file in files]
    if sorted(numbers) != list(range(int(count or 1))):
        raise ConfigError(f"--rows {source!r}: expected all {count} parts of {stem}, got {names}; fetch the others")


def rows_of(name: str, protocol: EvaluationProtocol, entries: Sequence[Entry]) -> tuple[list[Row], Counter[str]]:
    """Return the rows of a benchmark, and the number of other entries by the reason for which they are none.

    Args:
        name: Name of the benchmark, which is the `data_source` of its rows.
        protocol: Its protocol.
        entries: Entries as the set publishes them.

    Raises:
        ConfigError: An entry cannot be read.
    """
    rows, left_out = [], Counter[str]()
    for number, entry in enumerate(entries):
        try:
            day = str(entry["contest_date"])[:10] if protocol.window else ""
            if protocol.window and not protocol.window[0] <= day <= protocol.window[1]:
                raise LeftOut("outside of the window")
            problem = PROBLEM_READERS[name](entry)
        except LeftOut as reason:
            left_out[str(reason)] += 1
        except ConfigError as error:
            raise ConfigError(f"{name}, row {number}: {error}") from None
        # A value of another kind than its set has, or one that nests too deep to be read.
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{name}, row {number}: {error!r}; fetch the file again") from None
        else:
            rows.append(make_row(name, prompt_of(protocol, problem), problem.truth, ability=protocol.reward))
    return rows, left_out


def prompt_of(protocol: EvaluationProtocol, problem: Problem) -> str:
    """Return the user's message of a problem."""
    prompt = protocol.prompt[problem.form] if isinstance(protocol.prompt, dict) else str(protocol.prompt)
    before, _, after = prompt.partition("{question}")
    return f"{before}{problem.question}{after.replace('{starter}', problem.starter)}"
