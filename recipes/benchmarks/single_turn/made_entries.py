"""Ten made entries for each benchmark, in the form of its set, with a right and a wrong answer to each."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple


class MadeEntry(NamedTuple):
    """An entry that no set has."""

    entry: dict[str, Any]
    right: str
    """An answer of a model that is right."""
    wrong: str


_COUNT = 10
# Each MATH-500 form once: the answer in its column, another way to write it, and a wrong one.
_MATHEMATICS = (
    (r"\frac{3}{4}", "0.75", r"\frac{4}{3}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \frac{\pi}{2})", r"(3, \pi)"),
    (r"2\sqrt{3}", r"\sqrt{12}", r"3\sqrt{2}"),
    ("x^2+1", "1+x^2", "x^2-1"),
    ("(-1,2]", "(-1, 2]", "[-1,2]"),
    (r"\{1,2,3\}", r"\{3,2,1\}", r"\{1,2\}"),
    ("10101", "10101", "10110"),
    (r"\frac{\pi}{6}", r"\pi/6", r"\frac{\pi}{3}"),
    (r"\text{Evelyn}", r"\text{Evelyn}", r"\text{Angela}"),
    ("-5", "-5", "5"),
)
_GRADE_SCHOOL = ("18", "3", "70,000", "540", "-20", "64", "260", "1.5", "45", "1,234,567")
_CONTEST_DAYS = ("2024-08-01", "2024-08-17", "2024-09-30", "2024-10-01", "2024-11-05") * 2


def made_entries(name: str) -> list[MadeEntry]:
    """Return ten made entries of a benchmark; the smoke run and `benchmarks.eval_sets` call it.

    Args:
        name: Name of a benchmark of `readers.PROBLEM_READERS`.
    """
    made = {
        "aime24": lambda number: _competition(number, with_solution=True),
        "aime25": lambda number: _competition(number, with_solution=False),
        "math500": _mathematics,
        "gsm8k": _grade_school,
        "livecodebench_v5": _contest_program,
        "codeforces": _codeforces,
    }
    return [made[name](number) for number in range(_COUNT)]


def _competition(number: int, *, with_solution: bool) -> MadeEntry:
    base, exponent = 7 + 2 * number, 31 + number
    answer = pow(base, exponent, 1000)
    entry: dict[str, Any] = {
        "id": str(number),
        "problem": f"Find the remainder when ${base}^{{{exponent}}}$ is divided by $1000$.",
        "answer": answer,
    }
    solution = f"Squaring again and again leaves \\boxed{{{answer:03d}}}."
    if with_solution:
        entry |= {"solution": solution, "answer": str(answer), "url": "", "year": "2024"}
    return MadeEntry(entry, solution, f"It is \\boxed{{{(answer + 1) % 1000}}}.")


def _mathematics(number: int) -> MadeEntry:
    answer, same, other = _MATHEMATICS[number]
    entry = {
        "problem": f"Which value has the letter $a_{number}$, if $a_{number} = {answer}$?",
        "solution": f"It is given as $\\boxed{{{answer}}}$.",
        "answer": answer,
        "subject": "Algebra",
        "level": 1 + number % 5,
        "unique_id": f"test/algebra/{number}.json",
    }
    return MadeEntry(entry, f"So it is \\boxed{{{same}}}.", f"So it is \\boxed{{{other}}}.")


def _grade_school(number: int) -> MadeEntry:
    total = _GRADE_SCHOOL[number]
    entry = {
        "question": f"A box holds {total} pens less one, and one more comes in. How many pens are in it?",
        "answer": f"With one more there are <<{total}={total}>>{total} pens.\n#### {total}",
    }
    return MadeEntry(entry, entry["answer"], f"There are {total} pens less one.\n#### {total}1")


def _contest_program(number: int) -> MadeEntry:
    """Return a problem for standard input or, where the number is odd, one with starter code as LeetCode's."""
    step = number + 2
    if number % 2:
        right = (
            f"class Solution:\n    def scaledSum(self, nums: List[int], base: int) -> int:\n"
            f"        return {step} * sum(nums) + base"
        )
        tests = [
            {"input": f"{json.dumps(nums)}\n{base}", "output": json.dumps(step * sum(nums) + base)}
            for nums, base in (([1, 2, 3], 1), ([], 0), ([-5, 5], -7))
        ]
        starter, kind, metadata = right.partition("        return")[0], "functional", {"func_name": "scaledSum"}
    else:
        right = f"n = int(input())\nprint(*[{step} * int(word) for word in input().split()][:n])"
        tests = [
            {"input": f"{len(nums)}\n{' '.join(map(str, nums))}\n", "output": " ".join(str(step * n) for n in nums)}
            for nums in ([1, 2, 3], [10], [-4, 0])
        ]
        starter, kind, metadata = "", "stdin", {}
    tests = [{**test, "testtype": kind} for test in tests]
    private = json.dumps(tests[1:])
    entry = {
        "question_title": f"scaled {number}",
        "question_content": f"Multiply by {step}, as the examples show.",
        "platform": "leetcode" if number % 2 else "atcoder",
        "question_id": f"made{number}",
        "contest_id": "made",
        "contest_date": f"{_CONTEST_DAYS[number]}T00:00:00",
        "starter_code": starter,
        "difficulty": "easy",
        "public_test_cases": json.dumps(tests[:1]),
        "private_test_cases": private if number < 2 else packed_text(private),
        "metadata": json.dumps(metadata),
    }
    return MadeEntry(entry, _block(right), _block(right.replace(f"{step} *", f"{step + 1} *")))


def packed_text(text: str) -> str:
    """Return a text as LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


def _codeforces(number: int) -> MadeEntry:
    step = number + 3
    right = f"a, b = map(int, input().split())\nprint(a * {step} + b)"
    tests = [{"input": f"{a} {b}\r\n", "output": f"{a * step + b}\r\n"} for a, b in ((1, 2), (0, 0), (-3, 5))]
    entry = {
        "id": f"0/{number}",
        "title": f"Sum {number}",
        "description": f"Print the first number times {step}, plus the second one.",
        "input_format": "Two whole numbers.",
        "output_format": "One number.",
        "interaction_format": None,
        "note": None,
        "examples": tests[:1],
        "official_tests": tests,
        "official_tests_complete": True,
        "input_mode": "stdio",
        "generated_checker": None,
        "time_limit": 2.0,
        "memory_limit": 256.0,
    }
    return MadeEntry(entry, _block(right), _block(right.replace("+ b", "- b - 1")))


def _block(program: str) -> str:
    return f"The program:\n```python\n{program}\n```"


def answers(made: Sequence[MadeEntry]) -> dict[str, list[str]]:
    """Return the right, the wrong and the empty answers to made entries, in their order."""
    return {
        "reference": [each.right for each in made],
        "wrong": [each.wrong for each in made],
        "empty": [""] * len(made),
    }
