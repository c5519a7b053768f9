"""Readers of benchmarks: an entry as its set publishes it becomes a question and the truth that its reward needs."""

from __future__ import annotations

import base64
import binascii
import functools
import importlib.util
import json
import pickletools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.benchmarks.protocol import EvaluationProtocol
from verl_multiturn.rewards.answers import last_boxed
from verl_multiturn.rows.files import READERS, read_rows
from verl_multiturn.runs.data import Row, make_row

Entry = Mapping[str, Any]
_MOST_BYTES = 1 << 30
"""Bytes of a problem's tests after they are unpacked."""
_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_AROUND = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"})


class Problem(NamedTuple):
    """A problem of a benchmark."""

    question: str
    truth: Any
    """As its reward needs it."""
    form: str = ""
    """Which of the protocol's prompts it takes; empty: the only one."""
    starter: str = ""
    """Code that the answer begins with."""


class LeftOut(Exception):
    """A problem that the reward cannot judge. Its text is the reason."""


@functools.cache
def _recipe(name: str) -> ModuleType:
    """Import another recipe's `prepare_data.py`, and return the module."""
    path = Path(__file__).resolve().parents[2] / name / "prepare_data.py"
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def competition(entry: Entry) -> Problem:
    """Return a problem of AIME or MATH-500, whose answer is a column of its own."""
    return Problem(*_recipe("torl").problem_of(entry))


def grade_school(entry: Entry) -> Problem:
    """Return a problem of GSM8K, whose answer ends in `#### 42`."""
    made = _recipe("gsm8k_multiturn").row(dict(entry), tool=False)
    return Problem(entry["question"], made["reward_model"]["ground_truth"])


def contest_program(entry: Entry) -> Problem:
    """Return a problem of LiveCodeBench with its public and its private tests.

    Raises:
        ConfigError: Its tests are in no known form, or of two kinds.
    """
    tests = [*_tests(entry, "public_test_cases"), *_tests(entry, "private_test_cases")]
    kinds = sorted({str(test.get("testtype")) for test in tests})
    truth: dict[str, Any] = {key: [test[key[:-1]] for test in tests] for key in ("inputs", "outputs")}
    if kinds == ["functional"]:
        truth["fn_name"] = json.loads(entry["metadata"])["func_name"]
        return Problem(entry["question_content"], truth, "function", entry["starter_code"])
    if kinds != ["stdin"]:
        raise ConfigError(f"its tests are of the kinds {kinds}; expected ['stdin'] or ['functional']")
    return Problem(entry["question_content"], truth, "stdin")


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
    parts = [f"# {entry['title']}", entry["description"]]
    parts += [f"## {name}\n{entry[key]}" for name, key in (("Input", "input_format"), ("Output", "output_format"))]
    for example in entry["examples"] or []:
        parts.append(f"Example input:\n{example['input']}\nExample output:\n{example['output']}")
    tests = entry["official_tests"]
    truth = {"inputs": [test["input"] for test in tests], "outputs": [test["output"] for test in tests]}
    return Problem("\n\n".join(part for part in parts if part), truth)


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
        found = [(code.name, argument) for code, argument, _ in pickletools.genops(pickled)]
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ConfigError(f"packed tests that cannot be read: {error}; fetch the file again") from None
    texts = [argument for name, argument in found if name in _TEXTS]
    if others := sorted({name for name, _ in found} - _TEXTS - _AROUND):
        raise ConfigError(f"packed tests with the pickle opcodes {others}, which are never run; expected one text")
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
        ConfigError: It has none of the files, they lie in several folders, or a column is missing.
    """
    path = Path(source).expanduser()
    files = [path] if path.is_file() else _files(path, protocol.split)
    if not files:
        raise ConfigError(f"--rows {source!r} has no such file; {protocol.needed(name)}")
    if len({file.parent for file in files}) > 1:
        raise ConfigError(
            f"--rows {source!r} has the files in several folders: {', '.join(map(str, files))}; name one of them"
        )
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
    name = re.compile(rf"(?:{'|'.join(map(re.escape, stems))})(?:-\d+-of-\d+)?")
    found = (path for suffix in READERS for path in folder.rglob(f"*{suffix}"))
    return sorted(path for path in found if name.fullmatch(path.stem))


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
        except (KeyError, TypeError, ValueError) as error:  # a value of another kind than its set has
            raise ConfigError(f"{name}, row {number}: {error!r}; fetch the file again") from None
        else:
            rows.append(make_row(name, prompt_of(protocol, problem), problem.truth, ability=protocol.reward))
    return rows, left_out


def prompt_of(protocol: EvaluationProtocol, problem: Problem) -> str:
    """Return the user's message of a problem."""
    prompt = protocol.prompt[problem.form] if isinstance(protocol.prompt, dict) else str(protocol.prompt)
    before, _, after = prompt.partition("{question}")
    return f"{before}{problem.question}{after.replace('{starter}', problem.starter)}"
