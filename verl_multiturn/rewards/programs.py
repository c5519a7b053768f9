"""The reward for programs, which runs them against tests in the sandbox of the `python` tool.

The program is the last ```python block. Tests are pairs of standard input and output, or code with assertions.

The program cannot forge a result:
- an expected output never enters a sandbox. The program's output is compared outside;
- a test with assertions runs in another sandbox than the program, and gets the values of its calls from outside
  (`verdicts/calls.py`).

So tests reach a program only by calling its functions. They do not see its classes, its variables, or changes that it
makes to its arguments.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import builtins
import functools
import importlib
import json
import math
import re
from decimal import Decimal
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.answers import last_block
from verl_multiturn.rewards.resources import shared
from verl_multiturn.rewards.score import RewardOptions, Score, Solution
from verl_multiturn.sandbox.launch import check
from verl_multiturn.sandbox.sandbox import Sandbox
from verl_multiturn.sandbox.settings import SandboxSettings
from verl_multiturn.syntax import parse_module
from verl_multiturn.verdicts.calls import CallJudge, CallTally, expect_done, fits_a_cell, is_late
from verl_multiturn.verdicts.program_cells import encode, handed_over

_MOST_CHARACTERS = 50_000
"""Most characters of a program."""
_MOST_BYTES = 90_000
"""Most bytes of a program, so that it fits into a cell with the imports that it forgot."""
_CHUNK_BYTES = 48_000
_OUTPUT_CHARACTERS = 4_000_000
_NUMBER = re.compile(r"[+-]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:[eE][+-]?\d{1,3})?", re.ASCII)
# When two modules export the same name, the later module wins. A module's own name wins over an exported name.
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "typing"),
)


class CodeOptions(RewardOptions):
    """Options of the reward `code`."""

    partial_credit: bool = False
    """True: the score is the share of tests that passed. False: it is 1 when all passed, else 0."""

    timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds for one test, or for one call of the program in a test."""

    total_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds for all tests of a program."""

    memory_mb: int = Field(default=512, ge=16)
    """Memory of the sandbox in which the program runs, in megabytes."""

    packages: bool = False
    """Allow programs and tests to import the installed packages."""

    isolation: Literal["bwrap", "subprocess"] = "bwrap"
    """Isolation of the sandbox, as for the `python` tool."""

    processes: int = Field(default=4, gt=0)
    """Programs that run at once in each of verl's reward workers; further ones wait."""


class _Tests(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    inputs: list[Any] = []
    outputs: list[Any] = []
    fn_name: str | None = None
    assert_case: list[str] = []


class _TestJudge(CallJudge):
    """Sandboxes of one event loop."""

    def __init__(self, options: CodeOptions) -> None:
        settings = SandboxSettings.model_validate(
            {
                "isolation": options.isolation,
                "timeout_s": options.timeout_s,
                "cpu_s": max(1, round(options.timeout_s + 0.5)),
                "memory_mb": options.memory_mb,
                "packages": options.packages,
                "output_characters": _OUTPUT_CHARACTERS,
                "pool": 2,
            }
        )
        check(settings)
        super().__init__(settings)
        self.slots = asyncio.Semaphore(options.processes)


async def reward(solution: Solution, ground_truth: Any, options: CodeOptions) -> Score:
    """Score a program by the tests that it passes.

    A program that is late with a test has failed that test, and the score's `timed_out` is 1.

    Args:
        solution: The conversation; the program is in its answer.
        ground_truth: One of these, or JSON text of it:
            `{"inputs": [...], "outputs": [...]}` with texts for standard input and output;
            the same with `fn_name` (as in APPS and TACO), where each input is the list of a call's arguments, and each
            output the call's value;
            `{"assert_case": [...]}` with the code of each test.
        options: Options of this reward.

    Raises:
        ConfigError: The ground truth holds no tests, or the sandbox does not work on this machine.
        TimeoutError: All tests together took longer than `total_timeout_s`.
        UnjudgedError: A test passes the program a value that cannot be sent to another sandbox, or cannot be scored.
        OutageError: A sandbox could not be started (`SandboxError`) or prepared.
    """
    tests = _read(ground_truth, solution.data_source)
    program = last_block(solution.answer, ("python", "py", "python3"))
    if program is None:
        return Score()
    if len(repr(program)) > _MOST_CHARACTERS or len(repr(program).encode("utf-8", "replace")) > _MOST_BYTES:
        return Score.of(False)
    judge = shared(("code", options), lambda: _TestJudge(options))
    tally = CallTally()
    async with judge.slots, asyncio.timeout(options.total_timeout_s):
        if tests.inputs and tests.fn_name is None:
            count = len(tests.inputs)
            await _run_pairs(judge, program, tests, tally, not options.partial_credit)
        else:
            codes = tests.assert_case or _call_tests(tests)
            count = len(codes)
            first = f"define({program!r}, {forgotten_imports(program)!r})"
            await judge.run_tests(codes, lambda runner: _define(runner, first), tally, not options.partial_credit)
    right = tally.passed == count
    value = tally.passed / count if options.partial_credit else float(right)
    return Score(value, float(right), format=1.0, answered=1.0, timed_out=float(tally.late))


async def _run_pairs(judge: _TestJudge, program: str, tests: _Tests, tally: CallTally, all_or_nothing: bool) -> None:
    forgotten = forgotten_imports(program)
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        sandbox = await judge.sandbox()
        try:
            await _upload(sandbox, _as_text(given))
            result = await sandbox.run(f"run_program({program!r}, {forgotten!r})")
        finally:
            sandbox.kill()
        tally.late = tally.late or is_late(result)
        # A program that exits after it has printed everything is right as well.
        ended = result.stopped is None or result.stopped.startswith("the Python process ended")
        if ended and same_output(result.output, _as_text(expected)):
            tally.passed += 1
        elif all_or_nothing:
            return


async def _define(runner: Sandbox, cell: str) -> None:
    await runner.run(cell)


async def _upload(sandbox: Sandbox, text: str) -> None:
    data = text.encode("utf-8", "replace")
    for start in range(0, len(data), _CHUNK_BYTES):
        chunk = base64.b64encode(data[start : start + _CHUNK_BYTES])
        code = f"import base64\nwith open('.stdin', 'ab') as f: _ = f.write(base64.b64decode({chunk!r}))"
        expect_done(await sandbox.run(code))


def same_output(output: str, expected: str) -> bool:
    """Return whether a program printed the expected output.

    The lines must be the same, or have the same words on each line. Numbers are compared by value: where the expected
    one is written as a whole number, exactly (9.0 is 9, and 8.99999 is not); elsewhere they may differ by 1e-5 of the
    expected one, as in verl's `prime_code` (0.333333 is 1/3, and 1 is 1.0). Blanks at the end of a line, and empty
    lines at the end, do not count.
    """
    printed, wanted = _lines(output), _lines(expected)
    if printed == wanted:
        return True
    return len(printed) == len(wanted) and all(map(_same_words, printed, wanted))


def _same_words(line: str, expected: str) -> bool:
    words, wanted = line.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    if expected.lstrip("+-").isdigit():  # a count: Decimal holds every digit of both words
        return Decimal(word) == Decimal(expected)
    return math.isclose(float(word), float(expected), rel_tol=1e-5, abs_tol=1e-8)


def forgotten_imports(program: str) -> str:
    """Return import statements for the names of common standard modules that a program uses (`List`, `heapq`).

    verl's `prime_code` imports all these modules for each program. The statements run before the program, so that its
    own imports and definitions replace them.
    """
    try:
        named = {node.id for node in ast.walk(parse_module(program)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""  # such a program does not run anyway
    return "\n".join(_exports()[name] for name in sorted(named) if name in _exports())


@functools.cache
def _exports() -> dict[str, str]:
    """Return for each importable name the statement that imports it."""
    lines: dict[str, str] = {}
    for module in _MODULES:
        exported = importlib.import_module(module)
        public = getattr(exported, "__all__", [name for name in vars(exported) if not name.startswith("_")])
        lines |= {name: f"from {module} import {name}" for name in public if not hasattr(builtins, name)}
    return lines | {module: f"import {module}" for module in _MODULES}


def _lines(output: str) -> list[str]:
    """Return the lines without blanks at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]


def _as_text(value: Any) -> str:
    """Return a text; some inputs in APPS are lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def unfit_tests(ground_truth: Any, data_source: str) -> dict[int, str]:
    """Return the tests that this reward cannot run, by their indexes, with the reason of each.

    For scripts that make rows: a row with such a test has no verdict. A call's arguments and value are sent from one
    sandbox to the other, which takes packets of a limited size; standard input has no such limit.

    Example: `{2: "a call with too long arguments or value"}`.

    Args:
        ground_truth: As for `reward`.
        data_source: Of the row, for errors.

    Raises:
        ConfigError: The ground truth holds no tests.
    """
    tests = _read(ground_truth, data_source)
    if tests.inputs and tests.fn_name is None:
        long = [len(_as_text(expected)) > _OUTPUT_CHARACTERS for expected in tests.outputs]
        return {index: "an output that is too long" for index, is_long in enumerate(long) if is_long}
    if tests.fn_name is None:
        return {i: "code that is too long" for i, code in enumerate(tests.assert_case) if not fits_a_cell(code, [])}
    unfit = {}
    for index, (code, (arguments, value)) in enumerate(zip(_call_tests(tests), _calls(tests), strict=True)):
        try:
            request = handed_over(["call", tests.fn_name, encode(arguments), encode({})])
            result = handed_over(["value", encode(value)])
        except TypeError:  # nested too deeply
            request = result = b""
        if not (request and result and fits_a_cell(code, [result.decode("utf-8")])):
            unfit[index] = "a call with too long arguments or value"
    return unfit


def _calls(tests: _Tests) -> list[tuple[list[Any], Any]]:
    """Return the arguments and the expected value of each call.

    PRIME's data have the arguments as JSON text, one on each line, and the value as JSON text too.
    """
    return [
        ([json.loads(line) for line in arguments.split("\n")], json.loads(value))
        if isinstance(arguments, str)
        else (list(arguments), value)
        for arguments, value in zip(tests.inputs, tests.outputs, strict=True)
    ]


def _call_tests(tests: _Tests) -> list[str]:
    """Return the code of tests that call the function `fn_name`; APPS wraps some expected values in a list."""
    return [
        f"value = {tests.fn_name}(*{arguments!r})\nassert same(value, {value!r}) or same([value], {value!r})"
        for arguments, value in _calls(tests)
    ]


def _read(ground_truth: Any, data_source: str) -> _Tests:
    try:
        raw = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        tests = _Tests.model_validate(raw)
        for code in _call_tests(tests) if tests.fn_name else tests.assert_case:
            compile(code, "<test>", "exec")
    except (ValidationError, ValueError, TypeError, SyntaxError) as error:
        raise ConfigError(f"ground_truth of {data_source!r}: no tests: {error}; mend the row") from None
    if len(tests.inputs) != len(tests.outputs) or bool(tests.inputs) == bool(tests.assert_case):
        raise ConfigError(
            f"ground_truth of {data_source!r}: expected as many 'inputs' as 'outputs', or 'assert_case', got "
            f"{len(tests.inputs)}, {len(tests.outputs)} and {len(tests.assert_case)} of them"
        )
    return tests
