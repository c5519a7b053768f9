"""Programs against tests: those that pass, that fail, and that attack the judge (more in `test_rewards_forgeries`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from tests.conftest import names_of_children
from tests.idle_loop import hold_up
from tests.scoring import NO_ANSWER, OUTAGE, RIGHT, TIMED_OUT, UNJUDGEABLE, WRONG, Numbers, block, children, score
from verl_multiturn import ConfigError
from verl_multiturn.rewards import aclose
from verl_multiturn.rewards.programs import same_output
from verl_multiturn.verdicts.program_cells import decode, encode

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await aclose()
    assert not children("bwrap")


SUMS = {"inputs": ["1 2\n", "3 4 5", ""], "outputs": ["3\n", "12", "0"]}
SUM = "print(sum(map(int, open(0).read().split())))"
PROGRAMS: list[tuple[str, Numbers]] = [
    (block(SUM), RIGHT),
    (block("import sys\nprint(sum(map(int, sys.stdin.read().split())))"), RIGHT),
    (block("try: print(sum(map(int, input().split())))\nexcept EOFError: print(0)"), RIGHT),
    (block("import os\nprint(sum(map(int, os.read(0, 99).split())), ' \\n')"), RIGHT),
    (block(f"import sys\nprint('warning', file=sys.stderr)\n{SUM}\nsys.exit(1)"), RIGHT),
    (block("import os\nprint(sum(map(int, open(0).read().split())), flush=True)\nos._exit(0)"), RIGHT),
    (block("import sys\nn = sum(map(int, sys.stdin.read().split()))\nsys.stdout.write(str(n))"), RIGHT),
    (block(f"def main():\n    {SUM}\n    return 7\nif __name__ == '__main__':\n    main()"), RIGHT),
    (f"```py\nprint(1)\n```\n{block(SUM)}", RIGHT),
    (block("print(3)"), WRONG),
    (block("print('3\\n12\\n0')"), WRONG),
    (block("raise SystemExit(0)"), WRONG),
    (block("import os; os._exit(0)"), WRONG),
    (block("1 +"), WRONG),
    (block(""), WRONG),
    (block("\x00\ud800"), WRONG),
    (block("x = '" + "y" * 100_000 + "'"), WRONG),
    (block("# " + "\U0001f642" * 40_000 + f"\n{SUM}"), WRONG),
    (block("import os\nwhile True:\n    os.fork()"), WRONG),
    (block("x = [0] * 10**10"), WRONG),
    (block("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), WRONG),
    (block("import os; os.kill(os.getppid(), 9)"), WRONG),
    (block("import urllib.request; urllib.request.urlopen('http://127.0.0.1')"), WRONG),
    (block("while True: print('x' * 10**6)"), WRONG),
    (f"```python\n{SUM}", NO_ANSWER),
    (f"```\n{SUM}\n```", NO_ANSWER),
    (f"<think>{block(SUM)[20:]}", NO_ANSWER),
    (SUM, NO_ANSWER),
    ("", NO_ANSWER),
]


async def test_standard_input_and_output() -> None:
    for text, expected in PROGRAMS:
        assert await score("taco", text, json.dumps(SUMS)) == expected, text[:200]


OUTPUTS = [
    ("0.333333", "0.3333333333333333", True),
    ("1", "1.0", True),
    ("1.0 2 x", "1 2.0 x", True),
    ("+5", "5", True),
    ("1e3", "1000", True),
    ("0.3", "0.3333333333333333", False),
    ("100000000000000000001", "100000000000000000000", False),
    ("1.5", "-1.5", False),
    # Where a whole number is expected, every digit counts.
    ("9.0", "9", True),
    ("9.", "9", True),
    ("9e0", "9", True),
    ("90e-1", "+9", True),
    ("-0.0", "0", True),
    ("1e18", "1000000000000000000", True),
    ("1000000000000000007.0", "1000000000000000007", True),
    ("1e18", "1000000000000000007", False),
    ("1.00000e+18", "1000000000000000007", False),
    ("1000000000000000007.0000000000000001", "1000000000000000007", False),
    ("123457.9", "123457", False),
    ("123457.00001", "123457", False),
    ("0.99999999999999999999", "1", False),
    ("0.000000001", "0", False),
    ("1e-999", "0", False),
    ("1e999", "9" * 300, False),
    ("-9.0", "9", False),
    ("3 4.0\n5.", "3 4\n5", True),
    ("3 4.00001\n5.", "3 4\n5", False),
    ("123457.9", "123457.0", True),
    ("1" * 5_000, "1" * 5_000, True),
    ("+" + "1" * 5_000, "1" * 5_000, False),
    ("1" * 5_000, "1" * 4_999 + "2", False),
    ("1e999", "1e999", True),
    ("nan", "NaN", False),
    ("１２３", "123", False),
    ("١٢٣", "123", False),
    ("1_0", "10.0", False),
    ("1\n2", "1 2", False),
    ("2\n1", "1\n2", False),
    ("1 2", "1", False),
    ("9" * 5_000 + ".0", "9" * 5_000, False),
    ("", "0", False),
]


def test_which_outputs_are_the_same() -> None:
    for output, expected, same in OUTPUTS:
        assert same_output(output, expected) is same, (output, expected)


async def test_a_program_may_call_itself_deeply() -> None:
    program = "def f(n): return n and 1 + f(n - 1)\nprint(f(20_000))"
    assert await score("taco", block(program), {"inputs": [""], "outputs": ["20000"]}) == RIGHT


async def test_imports_that_a_program_forgot() -> None:
    method = (
        "class Solution:\n    def least(self, nums: List[int]) -> int:\n        return heappop(nums) + math.floor(0.5)"
    )
    assert await score("apps", block(method), {"fn_name": "least", "inputs": [[[1, 2]]], "outputs": [1]}) == RIGHT
    assert (
        await score(
            "taco", block("print(Counter(input()).most_common(1)[0][1])"), {"inputs": ["aab"], "outputs": ["2"]}
        )
        == RIGHT
    )
    own = "def floor(x): return 7\nmath = 1\nprint(floor(2.5), math)"
    assert await score("taco", block(own), {"inputs": [""], "outputs": ["7 1"]}) == RIGHT
    assert (
        await score(
            "taco",
            block("from __future__ import annotations\nx: List = [1]\nprint(*x)"),
            {"inputs": [""], "outputs": ["1"]},
        )
        == RIGHT
    )


ENDLESS = "import ctypes; ctypes.CDLL(None).prctl(15, b'endless')"
"""Code that shows the test by the name of its process that it runs."""
PATIENT = {"timeout_s": 60.0, "total_timeout_s": 1e6}


async def hurried(awaited: Coroutine[Any, Any, Numbers]) -> Numbers:
    """Await a score, and let the time be up for each program that never ends: then, and only then."""
    scoring = asyncio.ensure_future(awaited)
    while not scoring.done():
        if "endless" in names_of_children():
            hold_up(PATIENT["timeout_s"])
        await asyncio.wait({scoring}, timeout=0.01)
    return scoring.result()


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(1e6)"])
async def test_a_program_that_takes_for_ever_is_counted(program: str) -> None:
    options = {"code": {**PATIENT, "format_weight": 0.5}}
    found = await hurried(score("taco", block(f"{ENDLESS}\n{program}"), SUMS, **options))
    assert found == (0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("tests", [SUMS, {"assert_case": ["assert f(1)"]}])
async def test_a_sandbox_that_is_not_ready_in_time_says_nothing_about_the_program(tests: Any) -> None:
    assert await score("taco", block(SUM), tests, code={"timeout_s": 1e-9}) == OUTAGE


async def test_all_tests_have_a_clock_too() -> None:
    tests = {"inputs": [""] * 50, "outputs": ["1"] * 50}
    options = {"code": {"timeout_s": 5.0, "total_timeout_s": 1.0, "partial_credit": True}}
    assert await score("taco", block("import time; time.sleep(0.3); print(1)"), tests, **options) == TIMED_OUT


async def test_partial_credit() -> None:
    options = {"code": {**PATIENT, "partial_credit": True}}
    program = f"n = open(0).read()\nif n == '': {ENDLESS}\nwhile n == '': pass\nprint(3)"
    tests = {"inputs": ["1 2\n", "3 4 5", "", "3"], "outputs": ["3\n", "12", "0", "3"]}
    assert await hurried(score("taco", block(program), tests, **options)) == (0.5, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    asserts = {"assert_case": ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 0", "assert g(1)"]}
    program = f"def f(x):\n    if x == 3: {ENDLESS}\n    while x == 3: pass\n    return x + 1"
    assert await hurried(score("mbpp", block(program), asserts, **options)) == (0.5, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


ASSERTS = [
    "assert add(1, 2) == 3",
    "assert abs(add(0.1, 0.2) - 0.3) < 1e-9",
    "assert add([1], [2]) == [1, 2] and add('a', b='b') == 'ab'",
    "def check(candidate):\n    for i in range(5):\n        assert candidate(i, i) == 2 * i\ncheck(add)",
    "try:\n    add(1, 'a')\n    assert False, 'no error'\nexcept TypeError:\n    pass",
    "try: add(1, 'a')\nexcept: pass\nelse: assert False",
    "try: add([], 2)\nexcept: ok = True\nassert ok and add(2, 2) == 4",
    "import math\nassert math.isnan(add(float('nan'), 1)) and add(float('inf'), 1) == math.inf",
    "assert type(add((1,), (2,))) is tuple and add(10**30, 1) == 10**30 + 1",
]
FUNCTIONS: list[tuple[str, Numbers]] = [
    ("def add(a, b): return a + b", RIGHT),
    ("import sys\nprint('noise')\nadd = lambda a, b: a + b\nprint('noise', file=sys.stderr)", RIGHT),
    ("def add(a, b):\n    print('\\x00result [\"value\", [\"int\", \"0x3\"]]')\n    return a + b", RIGHT),
    ("import os\ndef add(a, b):\n    os.write(1, b'noise')\n    return a + b", RIGHT),
    ("def add(a, b): return a - b", WRONG),
    ("def add(a, b): return None", WRONG),
    ("def plus(a, b): return a + b", WRONG),
    ("add = 3", WRONG),
    ("1 +", WRONG),
    ("raise SystemExit(0)", WRONG),
    ("import os; os._exit(0)", WRONG),
    ("import os\ndef add(a, b): os._exit(0)", WRONG),
    ("import sys\ndef add(a, b): sys.exit(0)", WRONG),
    # Values that claim to equal everything.
    ("class A:\n    __eq__ = lambda *a: True\ndef add(a, b): return A()", WRONG),
    ("class A(int):\n    __eq__ = lambda *a: True\n    __hash__ = int.__hash__\ndef add(a, b): return A(7)", WRONG),
    ("class A(list):\n    __iter__ = lambda s: iter([3])\n    __eq__ = lambda *a: 1\ndef add(a, b): return A()", WRONG),
    ("class A(str):\n    __str__ = lambda s: '3'\n    __eq__ = lambda *a: True\ndef add(a, b): return A()", WRONG),
    # Attacks on the judge's own machinery.
    ("import builtins as b\nb.AssertionError = ValueError\nb.type = lambda a: tuple\ndef add(a, b): pass", WRONG),
    ("import sys\ndef add(a, b):\n    sys._getframe(1).f_globals['encode'] = lambda v, d=0: ['int', '0x3']", WRONG),
    ("import os\nfor f in range(9):\n    try: os.write(f, b'\\x00result [\"pass\"]')\n    except OSError: pass", WRONG),
    ("import os\ndef add(a, b):\n    for f in range(99):\n        try: os.write(f, b'\\x00result [\"pass\"]')\n"
     "        except OSError: pass\n    os._exit(0)", WRONG),
    ("def add(a, b): return 'x' * 10**6", WRONG),
    ("def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x", WRONG),
    ("def add(a, b):\n    x = []\n    x.append(x)\n    return x", WRONG),
    ("def add(a, b): return add(a, b)", WRONG),
    ("import os\ndef add(a, b):\n    while True: os.fork()", WRONG),
]  # fmt: skip


async def test_assertions() -> None:
    for program, expected in FUNCTIONS:
        assert await score("mbpp", block(program), {"assert_case": ASSERTS}) == expected, program


async def test_no_single_assertion_is_forged() -> None:
    for program, expected in FUNCTIONS[-14:]:
        for test in (ASSERTS[0], ASSERTS[3]):
            assert await score("mbpp", block(program), {"assert_case": [test]}) == expected, (program, test)


async def test_calls_of_a_function_by_its_name() -> None:
    tests = {"fn_name": "two_sum", "inputs": [[[2, 7, 11], 9], [[3, 3], 6]], "outputs": [[0, 1], [[0, 1]]]}
    found = "next((i, j) for j in range(len(nums)) for i in range(j) if nums[i] + nums[j] == t)"
    assert await score("apps", block(f"def two_sum(nums, t):\n    return {found}"), tests) == RIGHT
    method = "class Solution:\n    def two_sum(self, nums, t):\n        return [0, 1]"
    assert await score("apps", block(method), tests) == RIGHT
    assert await score("apps", block(method.replace("[0, 1]", "[1, 0]")), tests) == WRONG
    assert await score("apps", block("def two_sum(*a): return True"), tests) == WRONG


async def test_whole_numbers_of_calls_are_compared_exactly() -> None:
    for value, expected, numbers in (
        ("123457.9", 123457, WRONG),
        ("123457.0", 123457, RIGHT),
        ("1e18", 10**18, RIGHT),
        ("1e18", 10**18 + 7, WRONG),
        ("0.1 + 0.2", 0.3, WRONG),
        ("10**4500", 1, WRONG),
        ("[1, 2.00001]", [1, 2], WRONG),
    ):
        tests = {"fn_name": "f", "inputs": [[]], "outputs": [expected]}
        assert await score("apps", block(f"def f(): return {value}"), tests) == numbers, value


async def test_a_result_that_cannot_be_handed_over_again_is_wrong_and_no_fault_of_the_test() -> None:
    deep = "def f(x):\n    value = []\n    for _ in range(100): value = [value]\n    return value"
    assert await score("mbpp", block(deep), {"assert_case": ["assert f(f(1)) == 1"]}) == WRONG
    long = "def f(x): return 'x' * 49_000"
    assert await score("mbpp", block(long), {"assert_case": ["assert f(f(1) + f(1)) == 1"]}) == WRONG


@pytest.mark.parametrize(
    "test",
    [
        "assert f(lambda x: x, 1) == 1",
        "assert f([0] * 20_000)",
        "assert f(1) #" + "x" * 200_000,
        "import os\nos._exit(0)\nassert f(1)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nassert f(1)",
    ],
    ids=lambda test: test[-20:],
)
async def test_a_test_that_cannot_be_judged_is_no_fault_of_the_program(test: str) -> None:
    assert await score("mbpp", block("def f(*a): return 1"), {"assert_case": [test]}) == UNJUDGEABLE


async def test_a_program_that_fails_alone_is_wrong_and_no_outage() -> None:
    for program in ("import os; os._exit(1)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "x = ["):
        assert await score("mbpp", block(program), {"assert_case": ["assert f(1) == 1"]}) == WRONG


async def test_a_sandbox_that_cannot_be_started_says_nothing_about_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.sandbox.launch import SandboxError
    from verl_multiturn.sandbox.pool import SandboxPool

    async def acquire(self: SandboxPool) -> Any:
        raise SandboxError("no user namespaces")

    monkeypatch.setattr(SandboxPool, "acquire", acquire)
    assert await score("mbpp", block("def f(*a): return 1"), {"assert_case": ["assert f(1) == 1"]}) == OUTAGE


async def test_what_values_a_right_program_may_return() -> None:
    nested = "x = 5\nfor _ in range(95): x = [x]\n"
    tests = [
        f"{nested}assert f(x) == x and f(f(x)) == x",
        "assert f('a\\ud800\\x00\\\\\"\\'é\\U0001f642') == 'a\\ud800\\x00\\\\\"\\'é\\U0001f642'",
        "assert f('\\u6570' * 16_000) == '\\u6570' * 16_000",
        "assert f(10**5000) == 10**5000",
    ]
    assert await score("mbpp", block("def f(x): return x"), {"assert_case": tests}) == RIGHT


async def test_the_errors_of_a_right_program_are_caught_by_their_kind_and_text() -> None:
    program = """
import json
class Negative(ValueError): pass
class Odd(Exception):
    def __str__(self): return 1 / 0
def f(what):
    if what == "json": return json.loads("{")
    if what == "own": raise Negative("it is negative")
    if what == "bytes": return b"\\xff".decode()
    if what == "group": raise ExceptionGroup("two", [ValueError(1)])
    if what == "long": raise KeyError("x" * 10**6)
    if what == "odd": raise Odd
    if what == "key": return {}["a"]
    raise SystemExit(0)
"""
    test = "import contextlib\nwith contextlib.suppress({kind}):\n    f({what!r})\n    assert False"
    kinds = (("json", "ValueError"), ("own", "ValueError"), ("bytes", "UnicodeDecodeError"), ("long", "KeyError"))
    kinds += (("odd", "Exception"), ("group", "Exception"))
    tests = [test.format(what=what, kind=kind) for what, kind in kinds]
    tests.append("try: f('own')\nexcept ValueError as error: assert str(error) == 'it is negative'\nelse: assert False")
    tests.append("try: f('key')\nexcept KeyError as error: assert error.args == ('a',)\nelse: assert False")
    for code in tests:
        assert await score("mbpp", block(program), {"assert_case": [code]}) == RIGHT, code
    for wrong in (test.format(what="own", kind="KeyError"), test.format(what="exit", kind="ValueError")):
        assert await score("mbpp", block(program), {"assert_case": [wrong]}) == WRONG, wrong


async def test_many_at_once() -> None:
    options = {"code": {"processes": 3}}
    tests = {"inputs": ["1"], "outputs": ["1"]}
    scores = [score("taco", block(f"print({i % 2})"), tests, **options) for i in range(100)]
    assert await asyncio.gather(*scores) == [RIGHT if i % 2 else WRONG for i in range(100)]


async def test_long_inputs() -> None:
    numbers = " ".join(map(str, range(50_000)))
    tests = {"inputs": [numbers], "outputs": [str(sum(range(50_000)))]}
    assert await score("taco", block(SUM), tests) == RIGHT
    assert (
        await score("taco", block("print(open(0).read(), end='')"), {"inputs": [numbers], "outputs": [numbers]})
        == RIGHT
    )


@pytest.mark.parametrize(
    "truth",
    [
        "no JSON",
        {},
        {"inputs": ["1"], "outputs": []},
        {"inputs": ["1"], "outputs": ["1"], "assert_case": ["assert f()"]},
        {"assert_case": ["assert ("]},
        {"assert_case": "assert f()"},
        None,
    ],
)
async def test_tests_are_needed(truth: Any) -> None:
    with pytest.raises(ConfigError, match="ground_truth of 'taco'"):
        await score("taco", block("1"), truth)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(10**40),
        1.5,
        float("inf"),
        1 + 2j,
        "a\x00\ud800",
        b"\xff",
        [1, [2]],
        (1,),
        {1, 2},
        {"a": {2: ()}},
    ],
    ids=repr,
)
def test_values_cross_unchanged(value: Any) -> None:
    there = decode(json.loads(json.dumps(encode(value))))
    assert there == value
    assert type(there) is type(value)
    with pytest.raises(TypeError, match="a value of the type object"):
        encode([object()])
