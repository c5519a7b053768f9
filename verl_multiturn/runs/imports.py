"""The import of a user's own code before a run needs it, in a process of its own.

verl imports such code minutes later, in its workers. In the process that starts the run, an import could do harm: it
may take a GPU's memory, start Ray, set variables that all workers inherit, or end the process.

Invariants:
- nothing that the code does at its import stays: its process, with its children, is ended;
- code whose import does not end is not refused, since it may load a model.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.describe import describe, did_you_mean, place_of, show
from verl_multiturn.errors import MultiTurnError

LONGEST_S = 120.0
"""Seconds after which the imports of a run are no longer waited for."""
PACKAGE = "pkg://"
"""Beginning of a place that is a module's dotted name, in verl's notation."""
POLICY_LOSS = "policy loss"
"""Kind of a name that the module's import has to register in verl, and need not have itself."""
_LOSSES = ("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY")
REWARD = "reward"
"""The kind of a reward function in the place of `compute_score`, which verl's reward managers call."""
ROUTE = "route"
"""The kind of a reward that a route names: `place` is its name."""
ADVANTAGES = "advantages"
"""The kind of a function of advantages."""
_FILE = "file://"
_COMMAND = [sys.executable, "-c", "from verl_multiturn.runs.imports import answer; answer()"]
_REMEDY = "install what it imports, set PYTHONPATH, or mend the file"


@dataclass(frozen=True)
class Code:
    """A piece of code that a setting names."""

    where: str
    """The setting that names the file or module, with its value, for errors."""
    place: str
    """Path of a Python file, or `pkg://` and the dotted name of a module."""
    called: str = ""
    """The setting that gives the name within the file or module, with its value, for errors."""
    name: str | None = None
    """Name within the file or module; None: the import alone counts."""
    kind: str = ""
    """The kind of object of that name: `class`, `function`, `REWARD`, `POLICY_LOSS`, or "" for anything. `ADVANTAGES`
    and `ROUTE`: `place` names it, too.
    """
    options: str = ""
    """The setting that gives the function keywords of its own."""
    keywords: Sequence[str] | Mapping[str, Any] = ()
    """Names of the keywords; for `ADVANTAGES` with their values."""


def import_problem(codes: Sequence[Code], variables: Mapping[str, str]) -> str:
    """Import pieces of code one after the other in a process of its own.

    Args:
        codes: The pieces of code.
        variables: Environment variables that the run's workers have beside those of this process.

    Returns:
        The fault of the first one that cannot be used; "" without one.
    """
    if not codes:
        return ""
    # Files, since a process that the code leaves behind would keep pipes open.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as asked,
        tempfile.TemporaryFile("w+", encoding="utf-8") as told,
        tempfile.TemporaryFile() as log,
    ):
        path = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
        json.dump({"path": path, "codes": [astuple(code) for code in codes]}, asked)
        asked.seek(0)
        child = subprocess.Popen(
            _COMMAND,
            stdin=asked,
            stdout=told,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **variables},
        )
        try:
            status: int | None = child.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        told.seek(0)
        answers = [json.loads(line) for line in told]
        if problem := next(filter(None, answers), ""):
            return str(problem)
        if len(answers) == len(codes):
            return ""
        at = codes[len(answers)].where
        if status is None:
            print(
                f"verl-multiturn: {at}: its import takes longer than {LONGEST_S:g} s; it goes unchecked",
                file=sys.stderr,
            )
            return ""
        how = f"ended with exit status {status}" if status >= 0 else f"was killed by signal {-status}"
        return f"{at}: cannot be imported (its process {how}{_last_line(log)}); {_REMEDY}"


def _last_line(log: Any) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1].strip()[:300]}" if lines else ""


def answer() -> None:
    """Write for each piece of code on standard input a line of JSON to standard output: "", or its fault.

    This is the whole life of the process that `import_problem` starts.
    """
    asked = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # the code's own output is not an answer
        sys.path[:] = asked["path"]
        for code in asked["codes"]:
            answers.write(json.dumps(_problem(Code(*code))) + "\n")
            answers.flush()
    os._exit(0)  # threads of the code may never end


def _problem(code: Code) -> str:
    if code.kind == ADVANTAGES:
        from verl_multiturn.advantages.function import load_function

        try:
            function = load_function(code.place, code.keywords if isinstance(code.keywords, Mapping) else {})
            if function.has_state:
                function.state()
        except MultiTurnError as error:
            return str(error)
        return ""
    if code.kind == ROUTE:
        from verl_multiturn.rewards.contract import load_route

        try:
            load_route(code.place, code.where)
        except MultiTurnError as error:
            return str(error)
        return ""
    try:
        module = _import(code.place)
    except (Exception, SystemExit) as error:  # the code may raise anything
        return f"{code.where}: cannot be imported ({describe(error)}{place_of(error)}); {_REMEDY}"
    if code.name is None:
        return ""
    if code.kind == POLICY_LOSS:
        return _loss_problem(code)
    if not hasattr(module, code.name):
        hint = did_you_mean(code.name, vars(module)) or "correct the name, or define it there"
        return f"{code.called}: {code.place.removeprefix(PACKAGE)!r} has no {code.name!r}; {hint}"
    found = getattr(module, code.name)
    kind = "function" if code.kind == REWARD else code.kind
    fits = {"class": isinstance(found, type), "function": callable(found)}.get(kind, True)
    if not fits:
        return f"{code.called}: expected a {kind}, got {show(found, 100)}; name a {kind}"
    return _keyword_problem(found, code.options, code.keywords) or _call_problem(found, code)


def _call_problem(function: Any, code: Code) -> str:
    """Return why verl cannot call a reward function; "" where it can, and for any other kind of object."""
    if code.kind != REWARD:
        return ""
    from verl_multiturn.rewards.contract import call_problem

    problem = call_problem(function, code.keywords)
    return f"{code.called}: {problem}" if problem else ""


def _loss_problem(code: Code) -> str:
    """Return that the import of a module registers no policy loss of the name, and the nearest one; "" if it does."""
    with contextlib.suppress(ImportError):  # the author's module has imported it already, as a rule
        importlib.import_module(_LOSSES[0])
    registered = getattr(sys.modules.get(_LOSSES[0]), _LOSSES[1], {})
    if code.name in registered:
        return ""
    hint = did_you_mean(str(code.name), registered) or "register it there with verl's register_policy_loss"
    return f"{code.called}: neither verl nor {code.place.removeprefix(PACKAGE)!r} registers it; {hint}"


def _keyword_problem(function: Any, options: str, keywords: Iterable[str]) -> str:
    """Return which keyword a reward function does not take, and which it takes; "" where it takes all.

    Args:
        function: The author's function, which verl calls with keywords of its own, too.
        options: The setting that gives the keywords, for the message.
        keywords: The keywords.
    """
    try:
        # A decorator may take keywords that the function within it does not.
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except Exception:  # a builtin does not show its parameters, and an author's object may refuse in any way
        return ""
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return ""
    taken = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    wrong = next((keyword for keyword in keywords if keyword not in taken), None)
    if wrong is None:
        return ""
    from verl_multiturn.rewards.contract import KEYWORDS

    own = [name for name in taken if name not in KEYWORDS]
    hint = did_you_mean(wrong, own) or "correct the name, or leave it out"
    known = ", ".join(own or taken) or "no keyword"
    return f"{options}.{wrong}: the reward function takes {known}, and not {wrong!r}; {hint}"


def _import(place: str) -> Any:
    """Import a file or a module as verl's `load_module` does."""
    if place.startswith(PACKAGE):
        return importlib.import_module(place.removeprefix(PACKAGE).replace("/", "."))
    path = Path(place.removeprefix(_FILE))
    spec = importlib.util.spec_from_file_location("custom_module", path)
    if spec is None or spec.loader is None:
        raise ImportError("no Python file; its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
