"""The process that runs the verifiers of `math_verify` and `reasoning_gym`.

It is started as `python -I -S verify_worker.py SETTINGS`; see `processes/pool.py`.

Both packages give the text of a model to SymPy, which may never come to an end with it. reasoning_gym evaluates some
answers as Python: with `eval`, or with SymPy's `parse_expr`, which calls `eval`. SymPy also generates code of its own:
for the monomials of a polynomial, and in `lambdify`. So:
- code that is evaluated from text may use only the names in `_NAMES` and single letters. Numbers, lists and formulas
  pass. An audit hook looks at the code before it runs;
- code that a library generates for itself may run when the library's own file runs it (`_GENERATORS`), or while a
  module is imported. The code that `lambdify` makes of a formula may also use the mathematical functions of SymPy's
  printers;
- other code is refused. Where reasoning_gym evaluates an answer, the answer is then wrong. Anywhere else the verifier
  then cannot judge;
- while an answer is scored, no process is started, no socket is opened, and no file is written;
- memory is limited, and a process that has grown is replaced. The parent kills a process that is late.
"""

import contextlib
import functools
import importlib
import json
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

# Names in the code that parse_expr runs (`from sympy import *`, then the code of a formula), and functions that an
# answer may use.
_NAME_TEXT = """
Integer Float Rational Symbol Function Add Mul Pow Abs abs Min Max sign sqrt cbrt root exp log ln sin cos tan cot sec
csc asin acos atan acot asec acsc sinh cosh tanh coth asinh acosh atanh acoth erf erfi erfc Si Ci Ei li gamma factorial
binomial floor ceiling pi oo zoo nan Tuple Eq Ne Lt Le Gt Ge Not And Or sympy
"""
_NAMES = frozenset(_NAME_TEXT.split())
# Modules that make functions and classes from texts of their own. From an answer, only counts of variables and names
# that they have checked go into these texts.
_GENERATORS = frozenset({"collections", "dataclasses", "sympy.polys.monomials", "sympy.polys.ring_series"})
# The module that turns a formula into a function. The formula's own names are in the code of that function.
_LAMBDIFY = "sympy.utilities.lambdify"
# The tables of functions and constants that SymPy's printers know, by module.
_TABLES = {
    "sympy.printing.pycode": (
        "_known_functions",
        "_known_functions_math",
        "_known_functions_mpmath",
        "_known_constants_math",
        "_known_constants_mpmath",
    ),
    "sympy.printing.numpy": ("_known_functions_numpy", "_known_functions_scipy_special", "_known_constants_numpy"),
}
# Further names that the printers write: modules, types of numbers, and functions for piecewise definitions.
_PRINTED_TEXT = """
_lambdifygenerated math cmath mpmath numpy scipy numpy.linalg scipy.special special mpf mpc mpi iv inf nan abs min max
sum prod range complex select less less_equal greater greater_equal equal not_equal logical_and logical_or logical_not
"""
# Beginnings of the names of modules that evaluate answers.
_EVALUATORS = ("reasoning_gym.", "sympy.parsing.")
_FORBIDDEN = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "socket.__new__"}
)

# Globals of Python's import system. Code that runs below it runs for a module that is being imported.
_IMPORT_SYSTEM = vars(sys.modules["_frozen_importlib"])

Score = Callable[[dict[str, Any]], dict[str, Any]]


class _Guard:
    """An audit hook that can be switched on and off, since Python cannot remove one.

    Attributes:
        refused: Kind of the refused code. `answer`: code in an answer that was evaluated. `library`: unknown code, or a
            forbidden action, of a library. Empty when nothing was refused.
    """

    def __init__(self) -> None:
        self._is_on = False
        self.refused = ""
        sys.addaudithook(self._look)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self._is_on, self.refused = True, ""
        try:
            yield
        finally:
            self._is_on = False

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on or (event != "exec" and event not in _FORBIDDEN):
            return
        frame = sys._getframe(1)
        if event == "exec":
            if _is_harmless(arguments[0], _NAMES) or _is_of_library(frame, arguments[0]):
                return
            module = str(frame.f_globals.get("__name__"))
            self.refused = "answer" if module.startswith(_EVALUATORS) else self.refused or "library"
        else:
            self.refused = self.refused or "library"
        raise ValueError("an answer may not run code")


def _is_harmless(code: object, names: frozenset[str]) -> bool:
    """Return whether code comes from a file, or uses only these names and single letters."""
    if not isinstance(code, CodeType) or not _is_text(code):
        return True  # the code of a module that is imported
    if not all(name in names or (len(name) == 1 and name.isalpha()) for name in {*code.co_names, *code.co_freevars}):
        return False
    return all(_is_harmless(constant, names) for constant in code.co_consts if isinstance(constant, CodeType))


def _is_text(code: CodeType) -> bool:
    """Return whether code was made from text: instead of a path it has `<string>`, `<lambdifygenerated-1>` or the like.

    No function that an answer may use can give its code a path.
    """
    path = code.co_filename
    return not path or (path.startswith("<") and not path.startswith("<frozen "))


def _is_of_library(frame: FrameType, code: CodeType) -> bool:
    """Return whether a library made this code for itself, as `_GENERATORS` and `_LAMBDIFY` do, or at its import."""
    module = _module_of(frame)
    if module in _GENERATORS:
        return True
    if module == _LAMBDIFY:
        # `_import` runs import statements from a table of lambdify's own.
        return frame.f_code.co_name == "_import" or _is_harmless(code, _printed_names())
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_globals is _IMPORT_SYSTEM and not _is_text(caller.f_code):
            return True
        caller = caller.f_back
    return False


def _module_of(frame: FrameType) -> str:
    """Return the module in whose file the running code lies; empty for code that was made from text.

    The name in the globals proves nothing, since a caller of `eval` chooses the globals. So the globals must be the
    module's own, and the code must come from the module's file.
    """
    name = str(frame.f_globals.get("__name__"))
    module = sys.modules.get(name)
    is_own = module is not None and vars(module) is frame.f_globals and not _is_text(frame.f_code)
    return name if is_own and frame.f_code.co_filename == getattr(module, "__file__", None) else ""


@functools.cache
def _printed_names() -> frozenset[str]:
    """Return the names that a function made by `lambdify` may use."""
    names = {*_NAMES, *_PRINTED_TEXT.split()}
    for module, tables in _TABLES.items():
        for table in tables:
            for printed in getattr(importlib.import_module(module), table, {}).values():
                names.update(str(printed).split("."))
    return frozenset(names)


def _math() -> Score:
    """Return the scorer of `math_verify`, for requests `{"gold": …, "answer": …}` with the contents of two boxes."""
    from math_verify import (  # type: ignore[import-untyped]
        ExprExtractionConfig,
        LatexExtractionConfig,
        parse,
        verify,
    )

    # Its own time limits use signals and are switched off here. It would warn that somebody else has to watch the time.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def score(request: dict[str, Any]) -> dict[str, Any]:
        gold, answer = (parse(f"\\boxed{{{request[key]}}}", kinds, parsing_timeout=None) for key in ("gold", "answer"))
        if not gold:
            return {"error": f"math_verify cannot read the ground truth {request['gold']!r}"}
        return {"value": float(verify(gold, answer, timeout_seconds=None))}

    score({"gold": r"\frac{1}{2}", "answer": "0.5"})  # do the work of the first use now
    return score


def _gym() -> Score:
    """Return the scorer of `reasoning_gym`, for requests `{"dataset": …, "entry": …, "answer": …}`."""
    import reasoning_gym.factory  # type: ignore[import-untyped]

    verifiers: dict[str, Callable[..., float]] = {}

    def score(request: dict[str, Any]) -> dict[str, Any]:
        name = request["dataset"]
        if name not in verifiers:
            if name not in reasoning_gym.factory.DATASETS:
                return {"unknown": f"reasoning_gym has no dataset {name!r}"}
            verifiers[name] = reasoning_gym.factory.get_score_answer_fn(name)
        answer, entry = request["answer"], request["entry"]
        value = float(verifiers[name](answer, entry))
        if value < 1.0:
            # JSON has no tuples, but some verifiers compare with a tuple.
            with contextlib.suppress(Exception):
                value = max(value, float(verifiers[name](answer, _with_tuples(entry))))
        return {"value": value}

    return score


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


guard = _Guard()
_PACKAGES: dict[str, Callable[[], Score]] = {"math_verify": _math, "reasoning_gym": _gym}


def _answer(score: Score, line: bytes, max_memory_bytes: int) -> dict[str, Any]:
    try:
        with guard.on():
            answer = score(json.loads(line))
    except MemoryError:
        return {"error": "MemoryError", "worn": True}
    except Exception as error:  # a verifier may raise anything at a model's text; the parent counts it
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    if guard.refused == "answer":
        return {"value": 0.0}
    if answer.get("value") != 1.0:
        # A verifier may have caught the error of a refusal or of the memory limit, and called the answer wrong.
        if guard.refused:
            return {"error": "code that a library made was refused, so that there is no verdict"}
        if 4 * _peak_bytes() > 3 * max_memory_bytes:
            return {"error": "the memory was all but used up, so that there is no verdict", "worn": True}
    return answer


def _limit(kind: int, value: int) -> None:
    """Set a soft limit of this process; the hard limit stays, and counts if it is lower."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _resident_bytes() -> int:
    """Return the resident memory of this process; `ru_maxrss` would begin with the size of the parent process."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    """Return the largest address space that this process has had so far."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmPeak:")), 0)


def main() -> None:
    """Answer requests until the parent closes the socket."""
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each of its threads reserves address space
    _limit(resource.RLIMIT_AS, settings["max_memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    with socket.socket(fileno=os.dup(0)) as parent, parent.makefile("rwb") as stream:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)  # a library's output must not become an answer
        score = _PACKAGES[settings["package"]]()
        stream.write(b"{}\n")
        stream.flush()
        for line in stream:
            # If the parent dies during a request, only this CPU limit ends the process.
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + settings["timeout_s"]) + 5)
            answer = _answer(score, line, settings["max_memory_bytes"])
            if 2 * _resident_bytes() > settings["max_memory_bytes"]:
                answer["worn"] = True
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main()
