"""The task of this recipe: a small module in which one of three functions is wrong, and a test that names it.

Only this module defines how a repository is made, worded and scored. The warm start, the data set and the agent all use
it. Nothing of a repository is in the prompt: which function is wrong can be found by running the test alone.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DATA_SOURCE = "repair"
MODULE, TEST = "shop.py", "test_shop.py"
TESTS = f"python {TEST}"
"""Command that runs the test."""
SYSTEM_PROMPT = "You repair code. Say one command a turn, in a bash block. When the code is right, say: Done."
QUESTION = f"A function of {MODULE} is wrong. Its test is {TEST}."


@dataclass(frozen=True)
class Function:
    """A function that a repository may have.

    Attributes:
        first, second: Names of its parameters.
        right, wrong: Its operator, and the one of its mistake.
    """

    first: str
    second: str
    right: str
    wrong: str


FUNCTIONS = {
    "area": Function("width", "height", "*", "+"),
    "change": Function("paid", "price", "-", "+"),
    "cost": Function("price", "number", "*", "-"),
    "left": Function("stock", "sold", "-", "*"),
    "rest": Function("number", "box", "%", "-"),
    "share": Function("money", "people", "//", "*"),
    "total": Function("one", "other", "+", "-"),
    "full": Function("number", "box", "//", "+"),
}
"""Functions by name. A repository has three of them."""
_OF_A_REPOSITORY = 3
_HIDDEN = ((31, 7), (90, 11))
"""Arguments of the hidden calls of each function."""
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


@dataclass(frozen=True)
class Repository:
    """A repository: its functions in their order, and the one that is wrong."""

    names: tuple[str, ...]
    wrong: str
    inputs: tuple[int, int]
    """Arguments of the test's calls."""

    def module(self) -> str:
        """Return the text of the module, with its mistake."""
        return "\n\n".join(_text(name, FUNCTIONS[name], is_wrong=name == self.wrong) for name in self.names) + "\n"

    def test(self) -> str:
        """Return the text of the test, which prints a line for each function that is wrong."""
        expected = {name: value_of(name, *self.inputs) for name in self.names}
        return (
            f"import {MODULE.removesuffix('.py')} as module\n\n"
            "status = 0\n"
            f"for name, value in {expected!r}.items():\n"
            f"    found = getattr(module, name)(*{self.inputs!r})\n"
            "    if found != value:\n"
            '        print(f"FAILED {name}: {found}, not {value}")\n'
            "        status = 1\n"
            "raise SystemExit(status)\n"
        )

    def complaint(self) -> str:
        """Return the test's output while the repository is not repaired."""
        function, value = FUNCTIONS[self.wrong], value_of(self.wrong, *self.inputs)
        return f"FAILED {self.wrong}: {_OPERATORS[function.wrong](*self.inputs)}, not {value}"


def _text(name: str, function: Function, is_wrong: bool) -> str:
    sign = function.wrong if is_wrong else function.right
    head = f"def {name}({function.first}, {function.second}):"
    return f"{head}\n    return {function.first} {sign} {function.second}"


def value_of(name: str, first: int, second: int) -> int:
    """Return the value that a function should have."""
    return _OPERATORS[FUNCTIONS[name].right](first, second)


def repair_of(name: str) -> str:
    """Return the command that repairs a function; it changes nothing where the function is right."""
    function = FUNCTIONS[name]
    wrong, right = function.wrong.replace("*", r"\*"), function.right.replace("/", r"\/")
    return f"sed -i '/def {name}/{{n;s/ {wrong} / {right} /}}' {MODULE}"


def make_repositories(size: int, seed: int) -> list[Repository]:
    """Make repositories.

    Args:
        size: Number of repositories.
        seed: Seed of the random draws.
    """
    rng = random.Random(seed)
    made = []
    for _ in range(size):
        names = tuple(rng.sample(sorted(FUNCTIONS), _OF_A_REPOSITORY))
        # The first is larger than twice the second, so that no mistake gives the right value by chance.
        second = rng.randint(3, 9)
        made.append(Repository(names, rng.choice(names), (rng.randint(2 * second + 1, 40), second)))
    return made


def shown(output: str, exit_code: int | None) -> str:
    """Return the model's view of a command.

    Args:
        output: The output of the command.
        exit_code: Its exit code; None: it was stopped.
    """
    return f"{output.strip()}\nexit code {exit_code}".strip()


def make_messages() -> list[dict[str, str]]:
    """Return the messages that a session begins with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": QUESTION}]


def task_of(repository: Repository) -> Any:
    """Return the repository as a `Task`, whose hidden calls compare values outside of the workspace.

    Args:
        repository: The repository.
    """
    from verl_multiturn.verdicts.task import CallsVerdict, Task  # the warm start needs neither

    calls = [(name, first, second) for name in repository.names for first, second in _HIDDEN]
    return Task(
        name=f"{'-'.join(repository.names)}-{repository.wrong}",
        files={MODULE: repository.module(), TEST: repository.test()},
        allowed=(MODULE,),
        timeout_s=20,
        verdict=CallsVerdict(
            kind="calls",
            functions={name: f"{MODULE.removesuffix('.py')}:{name}" for name in repository.names},
            tests=tuple(f"assert {name}({one}, {two}) == {value_of(name, one, two)}" for name, one, two in calls),
        ),
    )
