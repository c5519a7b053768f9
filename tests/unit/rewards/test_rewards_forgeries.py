"""Programs that try to speak for the judge: texts that look like a verdict, and answers in place of its own code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.scoring import RIGHT, WRONG, Numbers, block, children, score
from verl_multiturn.rewards import aclose

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await aclose()
    assert not children("bwrap")


MARK = '\x00result ["pass"]\n'
"""A verdict as text: the judge's former line in the output of a test, where programs could write it too."""
_ERROR = f"type('M', (type,), {{'__name__': {MARK!r}}})('E', (Exception,), {{}})"
"""An error of the program whose type has the verdict for a name."""
# Name, code of a test, a right program, a wrong program that tries to be right.
FORGERIES: list[tuple[str, str, str, str]] = [
    (
        "an error that ends the test's loop",
        "def check(n): return make(n) == n + 1\nassert all(map(check, [1, 2, 3]))",
        "def make(n): return n + 1",
        "def make(n): raise StopIteration",
    ),
    (
        "a printed verdict, and the test's process ends",
        "import os\nr = make(5)\nprint(r[0], flush=True)\nr[1] == 5 or os._exit(0)",
        "def make(n): return ('', n)",
        f"def make(n): return ({MARK!r}, 4)",
    ),
    (
        "parts of a verdict, joined by print",
        "import os\nr = make(5)\nprint(*r[:3], sep='', flush=True)\nr[3] == 5 or os._exit(0)",
        "def make(n): return ('', '', '', n)",
        "def make(n): return ('\\0re', 'sult [\"pa', 'ss\"]', 4)",
    ),
    (
        "parts of a verdict, joined by the test",
        "import os\nr = make(5)\nprint(''.join(r[:2]), flush=True)\nr[2] == 5 or os._exit(0)",
        "def make(n): return ('', '', n)",
        "def make(n): return ('\\0result ', '[\"pass\"]', 4)",
    ),
    (
        "a verdict behind control codes of a terminal",
        "import os\nr = make(5)\nprint('got', r[0], flush=True)\nr[1] == 5 or os._exit(0)",
        "def make(n): return ('', n)",
        f"def make(n): return ('\\x1b[2K\\r' + {MARK!r}, 4)",
    ),
    (
        "a verdict on descriptors",
        "import os\nr = make(5)\nfor fd in (1, 2): os.write(fd, r[0].encode())\nr[1] == 5 or os._exit(0)",
        "def make(n): return ('', n)",
        f"def make(n): return ({MARK!r}, 4)",
    ),
    (
        "a verdict on a descriptor that the program chooses",
        "import os\nr = make(5)\ntry: os.write(r[0], r[1])\nexcept OSError: pass\nassert r[2] == 5",
        "def make(n): return (99, b'', n)",
        "def make(n): return (3, bytes(16) + b'[\"pass\"]', 4)",
    ),
    (
        "a verdict into a file that the program chooses",
        "import os\nr = make(5)\ntry: open(r[0], 'w').write(r[1])\nexcept OSError: pass\nassert r[2] == 5",
        "def make(n): return ('/dev/null', '', n)",
        f"def make(n): return ('/proc/self/fd/3', {MARK!r}, 4)",
    ),
    (
        "more verdicts than a cell may print",
        "r = make(5)\nprint(r[0] * r[1])\nassert r[1] == 5",
        "def make(n): return ('', n)",
        f"def make(n): return ({MARK!r} + ' ' * 40_000, 1000)",
    ),
    (
        "a verdict in the name of an error",
        "import os\ntry: make(0)\nexcept Exception as error: print(error, flush=True)\nmake(5) == 5 or os._exit(0)",
        "def make(n):\n    if n == 0: raise ValueError\n    return n",
        f"def make(n):\n    if n == 0: raise {_ERROR}\n    return 4",
    ),
    (
        "a thread that goes on printing",
        "import threading\nr = make(5)\n"
        "def work():\n    while True: print(r[0], flush=True)\n"
        "threading.Thread(target=work, daemon=True).start()\nassert r[1] == 5",
        "def make(n): return ('', n)",
        f"def make(n): return ({MARK!r}, 4)",
    ),
    (
        "a test that catches everything",
        "import os\nr = make(5)\ntry: assert r[1] == 5\nexcept BaseException:\n    print(r[0], flush=True)\n"
        "    os._exit(0)",
        "def make(n): return ('', n)",
        f"def make(n): return ({MARK!r}, 4)",
    ),
    (
        "memory that is used up",
        "r = make(5)\nprint(r[0], flush=True)\nassert len(bytearray(r[1])) == 5",
        "def make(n): return ('', n)",
        f"def make(n): return ({MARK!r}, 10**15)",
    ),
    (
        "a recursion without end",
        "def down(n): return n and down(n - 1)\nr = make(5)\nprint(r[0], flush=True)\nassert down(r[1]) + r[1] == 5",
        "def make(n): return ('', n)",
        f"def make(n): return ({MARK!r}, 10**9)",
    ),
    *(
        (
            f"a test that ends with {end}",
            f"import signal, sys\nr = make(5)\nprint(r[0], flush=True)\nr[1] == 5 or {end}",
            "def make(n): return ('', n)",
            f"def make(n): return ({MARK!r}, 4)",
        )
        for end in ("sys.exit(0)", "signal.raise_signal(signal.SIGINT)", "signal.raise_signal(signal.SIGKILL)")
    ),
    *(
        (
            f"{error}, raised by the program",
            "r = make(5)\nassert r == 5",
            "def make(n): return n",
            f"def make(n): raise {error}({MARK!r})",
        )
        for error in ("MemoryError", "RecursionError", "KeyboardInterrupt", "SystemExit", "GeneratorExit")
    ),
]


async def test_no_verdict_is_forged() -> None:
    async def judged(test: str, program: str) -> Numbers:
        return await score("mbpp", block(program), {"assert_case": [test]}, code={"timeout_s": 60})

    for name, test, right, wrong in FORGERIES:
        honest, forged = await asyncio.gather(judged(test, right), judged(test, wrong))
        assert (honest, forged) == (RIGHT, WRONG), name


_NONCE = """
import os, sys, time
def answer(data):
    frame, found = sys._getframe(), set()
    while frame := frame.f_back:
        found |= {value[:16] for value in frame.f_locals.values() if isinstance(value, bytes) and len(value) > 16}
    for nonce in found: os.write(3, nonce + data)
    time.sleep(1000)
"""
"""Code of a program that answers in place of the judge's own code in its sandbox, and then sleeps."""
# Answers of a program's own sandbox that are not values, or that hold a text of the judge alone.
ANSWERS = [
    b"",
    b"\xff",
    b"null",
    b"3",
    b'["pass"]',
    b'["fail"]',
    b'["unsuitable", "me"]',
    b'["call", "add", ["list", []], ["dict", []]]',
    b'["value"]',
    b'["value", ["int", "0x3"], 1]',
    b'["value", null]',
    b'["value", ["int", 3]]',
    b'["value", ["str", "' + b"x" * 100_000 + b'"]]',
    b'["value", ["code", "x"]]',
    b'["value", ["constant", 1e999]]',
    b'["value", ["constant", NaN]]',
    b'["value", ["constant", ' + b"9" * 5_000 + b"]]",
    b'["value", ["dict", [[["list", []], ["int", "0x3"]]]]]',
    b"[" * 900 + b"]" * 900,
    b'["value", ' + b"[" * 20_000 + b"]" * 20_000 + b"]",
    b'["error", "Pending"]',
    b'["error", "SystemExit"]',
    b'["error", 7]',
    b'["error", ["a"]]',
    b'["late"]',
]


async def test_what_a_program_answers_is_its_value_and_nothing_else() -> None:
    async def judged(answer: bytes) -> Numbers:
        program = f"{_NONCE}\ndef add(a, b): answer({answer!r})"
        return await score("mbpp", block(program), {"assert_case": ["assert add(1, 2) == 3"]}, code={"timeout_s": 60})

    assert await judged(b'["value", ["int", "0x3"]]') == RIGHT  # it does answer, and it might have returned 3
    found = await asyncio.gather(*map(judged, ANSWERS))
    assert dict(zip(ANSWERS, found, strict=True)) == dict.fromkeys(ANSWERS, WRONG)


async def test_a_sandbox_that_was_stopped_has_no_answer() -> None:
    async def judged(test: str, program: str) -> Numbers:
        return await score("mbpp", block(program), {"assert_case": [test]}, code={"timeout_s": 10})

    answer = '\x00result ["value", ["int", "0x3"]]'
    add = (
        f"import os, time\ndef add(a, b):\n    print({answer!r}, flush=True)\n    for f in range(99):\n"
        f"        try: os.write(f, {answer!r}.encode())\n        except OSError: pass\n    "
    )
    found = await asyncio.gather(
        judged("assert add(1, 2) == 3", f"{add}os._exit(0)"),
        judged("assert add(1, 2) == 3", f"{add}time.sleep(1000)"),
        judged(  # not the program is late, but the test, which works on the program's result
            "import time\nr = make(5)\nprint(r[0], flush=True)\ntime.sleep(r[1])\nassert r[1] == 0",
            f"def make(n): return ({MARK!r}, 1000)",
        ),
    )
    late = (0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    assert list(found) == [WRONG, late, late]
