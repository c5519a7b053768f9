"""Problems for `--smoke`, in the forms of all data sets, each with a program that solves it."""

from __future__ import annotations

import json
from typing import Any

FORMS = ("taco", "primeintellect", "lcbv5", "lcbv5", "codeforces")
_TRAIN = 8
_ALL = 12
_NUMBERS = (3, 7, 12, 40)


def made_entries() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the rows of both splits, each with the name of the data set that it has the form of."""
    made = [made_entry(number) for number in range(_ALL)]
    return {"train": made[:_TRAIN], "test": made[_TRAIN:]}


def made_entry(number: int) -> tuple[str, dict[str, Any]]:
    """Return a problem as a row of a data set, and the name of that set.

    Args:
        number: Number of the problem, which chooses the form and the task.
    """
    factor, form = number + 2, number % len(FORMS)
    of_input = (
        f"Read two numbers from one line. Print the first one plus {factor} times the second one.",
        f"a, b = map(int, input().split())\nprint(a + {factor} * b)",
        [(f"{a} {b}\n", f"{a + factor * b}\n") for a, b in zip(_NUMBERS, _NUMBERS[::-1], strict=True)],
    )
    of_calls = (
        f"Return each of the numbers plus {factor}.",
        f"def plus(numbers):\n    return [n + {factor} for n in numbers]",
        [([list(_NUMBERS[: n + 1])], [x + factor for x in _NUMBERS[: n + 1]]) for n in range(4)],
    )
    method = f"class Solution:\n    def plus(self, numbers):\n        return [n + {factor} for n in numbers]"
    text, program, pairs = of_calls if form in (1, 3) else of_input
    entry: dict[str, Any] = {"problem": text}
    if FORMS[form] == "taco":
        entry["tests"] = {"inputs": [given for given, _ in pairs], "outputs": [value for _, value in pairs]}
    elif FORMS[form] == "primeintellect":
        kind = {"type": "function_call", "fn_name": "plus"}
        entry["tests"] = [{**kind, "input": given, "output": [value]} for given, value in pairs]
        entry["problem"] = (
            f"Solve the following coding problem using the programming language python:\n\n{text}\n\n"
            "Now solve the problem and return the code."
        )
    elif form == 3:  # a method of LiveCodeBench
        program, entry["starter_code"] = method, "class Solution:\n    def plus(self, numbers):"
        entry["metadata"] = {"func_name": "plus"}
        entry["tests"] = [
            {"input": "\n".join(map(json.dumps, given)), "output": json.dumps(value), "testtype": "functional"}
            for given, value in pairs
        ]
    else:
        kind = {"testtype": "stdin"} if FORMS[form] == "lcbv5" else {}
        entry |= {"metadata": {"func_name": None}, "starter_code": ""}
        entry["tests"] = [{"input": given, "output": printed, **kind} for given, printed in pairs]
    entry["tests"] = json.dumps(entry["tests"])
    return FORMS[form], entry | {"demonstration": [f"The program:\n```python\n{program}\n```"]}
