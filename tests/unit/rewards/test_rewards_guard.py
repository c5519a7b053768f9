"""Code that runs while an answer is verified: SymPy's own code may run, code from an answer may not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from verl_multiturn.rewards import verifiers

WORKER = verifiers._WORKER
# Audit hooks cannot be removed, so the guard is tried in a process of its own.
HARNESS = """
import importlib.util, json, sys

spec = importlib.util.spec_from_file_location("verify_worker", sys.argv[1])
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)

import collections, dataclasses, sympy, sympy.polys.monomials
from sympy.abc import k, x

def globals_of(name):
    return {**vars(sys.modules[name]), "x": exec}

def run(case):
    exec(compile(case, "/a/library.py", "exec"), globals())
    return 0.0

def caught(case):
    try:
        return run(case)
    except ValueError:
        return 0.0

print(json.dumps([
    worker._answer(lambda request: {"value": caught(request)}, json.dumps(case).encode(), 2**30)
    for case in json.loads(sys.argv[2])
]))
"""
WRONG = {"value": 0.0}
NO_VERDICT = {"error": "code that a library made was refused, so that there is no verdict"}


FORGED = [
    # The code that evaluates a text chooses its globals; the text itself calls `exec` under a name of one letter.
    "eval('x(\"import os\")', {'__name__': 'collections', 'x': exec})",
    "eval('x(\"import os\")', {'__name__': 'sympy.polys.monomials', 'x': exec})",
    "eval('x(\"import os\")', vars(sys.modules['sympy.polys.monomials']), {'x': exec})",
    "eval('x(\"import os\")', vars(sys.modules['sympy.utilities.lambdify']), {'x': exec})",
    "eval('x(\"import os\")', {'__name__': '_frozen_importlib', 'x': exec})",
    "eval('x(\"import os\")', globals_of('_frozen_importlib'))",
    "eval('x(\"import os\")', vars(sys.modules['_frozen_importlib']), {'x': exec})",
    "sys.modules['mine'] = type(sys)('mine'); eval('x(\"import os\")', vars(sys.modules['mine']), {'x': exec})",
    # `lambdify` writes a function's name unchanged into the code that it makes.
    "sympy.lambdify(x, sympy.Function('__import__(\"os\").getpid')(x))",
    "sympy.lambdify(x, sympy.Function('exit')(x))",
    "sympy.lambdify(x, sympy.Function('numpy.load')(x))",
    "sympy.lambdify(x, '__import__(\"os\")')",
    "exec(compile('import os', '<lambdifygenerated-1>', 'exec'))",
    # Other file names than that of a text.
    "exec(compile('import os', '<mine>', 'exec'))",
    "exec(compile('import os', '', 'exec'))",
    "__import__('subprocess').run(['true'])",
    "__import__('os').system('true')",
    "__import__('socket').socket()",
]


OF_A_LIBRARY = [
    "sympy.polys.monomials.MonomialOps(3).mul()",
    "sympy.lambdify(x, sympy.sin(x) + sympy.gamma(x) / 2)(1)",
    "sympy.lambdify(x, sympy.exp(x) * sympy.pi, 'math')(1)",
    "sympy.lambdify(x, sympy.Piecewise((1, x < 0), (sympy.sqrt(x), True)), 'mpmath')(1)",
    "sympy.Sum(1 / k**3, (k, 1, sympy.oo)).evalf()",
    "sympy.rootof(x**5 - x - 1, 0).evalf()",
    "sympy.solve_univariate_inequality(x**3 - 2 * x + 1 < 0, x)",
    "sympy.polys.ring_series.rs_series(sympy.sin(x), x, 3)",
    "collections.namedtuple('A', 'a b')",
    "dataclasses.make_dataclass('A', ['a'])",
    "sympy.parse_expr('2*sin(x)')",
    "import wave",
]


IN_AN_ANSWER = [
    f"eval(compile('eval(\"globals()\")', '/a/file.py', 'eval'), {{'__name__': '{evaluator}'}})"
    for evaluator in ("reasoning_gym.games.n_queens", "sympy.parsing.sympy_parser")
]

MUCH = "bytearray(900 * 2**20)"


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Return the worker's answer to each case.

    The worker's verifier runs the case as code, and counts a ValueError, which the guard raises, as a wrong answer.
    """
    cases = [*FORGED, *OF_A_LIBRARY, *IN_AN_ANSWER, MUCH]
    command = [sys.executable, "-c", HARNESS, str(WORKER), json.dumps(cases)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return dict(zip(cases, json.loads(ran.stdout.splitlines()[-1]), strict=True))


def test_no_frame_that_an_answer_controls_passes_for_a_library(answers: dict[str, Any]) -> None:
    assert {case: answers[case] for case in FORGED} == dict.fromkeys(FORGED, NO_VERDICT)


def test_what_libraries_write_for_themselves_runs(answers: dict[str, Any]) -> None:
    assert {case: answers[case] for case in OF_A_LIBRARY} == dict.fromkeys(OF_A_LIBRARY, WRONG)


def test_code_in_an_answer_is_a_wrong_answer(answers: dict[str, Any]) -> None:
    assert {case: answers[case] for case in IN_AN_ANSWER} == dict.fromkeys(IN_AN_ANSWER, WRONG)


def test_an_answer_that_took_nearly_all_memory_is_not_called_wrong(answers: dict[str, Any]) -> None:
    assert answers[MUCH] == {"error": "the memory was all but used up, so that there is no verdict", "worn": True}
