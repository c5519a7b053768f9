"""Mathematics and reasoning_gym: verifiers of other packages, in processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import math_verify
import psutil
import pytest
import pytest_asyncio
import reasoning_gym

from tests.conftest import until
from tests.scoring import (
    FAILED,
    NO_ANSWER,
    OUTAGE,
    RIGHT,
    TIMED_OUT,
    UNJUDGEABLE,
    WRONG,
    Numbers,
    children,
    late,
    score,
)
from verl_multiturn import ConfigError
from verl_multiturn.processes.pool import WorkerEndedError, WorkerPool
from verl_multiturn.rewards import aclose

WORKER = "verify_worker"


# The tests share verifying processes: each takes a second to start.
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def alone() -> None:
    """Close the processes of the tests before."""
    await aclose()
    assert not children(WORKER)


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="module")
async def _closed() -> AsyncIterator[None]:
    yield
    await aclose()
    assert not children(WORKER)


MATH: list[tuple[str, str, Numbers]] = [
    (r"so \boxed{\frac{1}{2}}.", "1/2", RIGHT),
    (r"\boxed{0.5}", r"\frac12", RIGHT),
    (r"\boxed{1} no, \boxed{0.5}", r"$\frac12$", RIGHT),
    (r"\boxed{0.5}", r"\boxed{\frac12}", RIGHT),
    (r"\boxed{x = 5}", "5", RIGHT),
    (r"<think>\boxed{6}</think>\boxed{5}", "5", RIGHT),
    (r"\boxed{0.5} no, \boxed{1}", "1/2", WRONG),
    (r"\boxed{0.51}", "1/2", WRONG),
    (r"\boxed{\text{no idea}}", "1/2", WRONG),
    (r"\boxed{}}}", "5", NO_ANSWER),
    (r"\boxed{5", "5", NO_ANSWER),
    (r"\boxed{\boxed{5}", "5", NO_ANSWER),
    (r"\boxed{6 \boxed{5}", "5", NO_ANSWER),
    (r"\boxed{\boxed{5}}", "5", RIGHT),
    (r"\boxed{x=\boxed{5}}", "5", RIGHT),
    (r"\boxed{\text{not }\boxed{5}}", "5", WRONG),
    (r"\boxed{6 \\ 5}", "5", WRONG),
    (r"\boxed{6 \\ 5}", r"6 \\ 5", RIGHT),
    (r"\boxed{\neq 5}", "5", WRONG),
    (r"\boxed{x \neq 3}", "x != 3", RIGHT),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", RIGHT),
    (r"\boxed{" + "{" * 500, "5", NO_ANSWER),
    ("5", "5", NO_ANSWER),
    (r"<think>\boxed{5}", "5", NO_ANSWER),
    (r"\boxed{" + "1+" * 10_000 + "1}", "10001", WRONG),
    (r"\boxed{" + "9" * 900 + "}", "5", WRONG),
    ("\\boxed{\x00\ud800}", "5", WRONG),
    (r"\boxed{__import__('os').abort()}", "5", WRONG),
]


# Cases with `ignore_signs`.
SIGNS: list[tuple[str, str, Numbers]] = [
    (r"\boxed{5.}", "5", RIGHT),
    (r"\boxed{90°}", "90", RIGHT),
    (r"\boxed{90}", r"90^{\circ}", RIGHT),
    (r"\boxed{10\%}", "10", RIGHT),
    (r"\boxed{10}", r"10\%", RIGHT),
    (r"\boxed{10\%}", "0.1", WRONG),
    (r"\boxed{.}", "5", WRONG),
    (r"\boxed{°}", r"\%", WRONG),
    (r"\boxed{$}", r"\%", WRONG),
    (r"\boxed{\%}", r"\%", RIGHT),
]


async def test_signs_may_be_ignored() -> None:
    for text, truth, expected in SIGNS:
        assert await score("math_dapo", text, truth, math={"ignore_signs": True}) == expected, text
    assert await score("math_dapo", r"\boxed{5.}", "5") == WRONG


async def test_mathematics() -> None:
    for text, truth, expected in MATH:
        assert await score("math_dapo", text, truth) == expected, text


@pytest.mark.parametrize("answer", ["2^{2^{2^{2^{2^2}}}}", "(10^9)!", "{" * 400 + "1" + "}" * 400])
async def test_an_answer_that_takes_for_ever_is_counted(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {"math": {"format_weight": 0.5}}
    assert await late(score("math_dapo", rf"\boxed{{{answer}}}", "1", **options)) == TIMED_OUT
    assert await score("math_dapo", r"\boxed{1}", "1", **options) == RIGHT, "it still works"


PAIRS = [
    ("1/2", "0.5"),
    (r"\frac12", "1/3"),
    ("[1,2)", "[1, 2)"),
    ("[1,2)", "(1, 2)"),
    (r"(-\infty, 3]", r"(-\infty,3]"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("1,2", "2,1"),
    (r"[1,2] \cup [3,4]", r"[3,4]\cup[1,2]"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("x^2+2x+1", "(x-1)^2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\text{east}", "East"),
    (r"10\%", r"10\%"),
    (r"10\%", "0.1"),
    ("1{,}000", "1000"),
    (r"90^\circ", "90"),
    ("x > 3", "3 < x"),
    ("1+2i", "2i+1"),
    (r"\pi", "3.14"),
    ("B", r"\text{(B)}"),
]


async def test_the_wrapper_says_what_math_verify_says() -> None:
    def directly(gold: str, answer: str) -> bool:
        boxed = [math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
        return bool(math_verify.verify(*boxed, timeout_seconds=None))

    expected = {pair: directly(*pair) for pair in PAIRS}
    assert set(expected.values()) == {True, False}
    found = {pair: (await score("math_dapo", rf"\boxed{{{pair[1]}}}", pair[0]))[0] == 1.0 for pair in PAIRS}
    assert found == expected


@pytest.mark.parametrize("truth", ["", "  ", None, [1], {"a": 1}])
async def test_mathematics_needs_an_answer(truth: Any) -> None:
    with pytest.raises(ConfigError, match=r"ground_truth of 'math_dapo': expected an answer"):
        await score("math_dapo", r"\boxed{1}", truth)


async def test_many_at_once_share_few_processes(alone: None) -> None:
    # This process is as large as a reward worker of verl may be: a new process inherits that peak.
    large = bytearray(os.urandom(1)) * (1300 * 2**20)
    options = {"math": {"processes": 2}}
    scores = [score("math_dapo", rf"\boxed{{{i}}}", str(i - i % 2), **options) for i in range(100)]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(children(WORKER)))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    assert await asyncio.gather(*scores) == [RIGHT if i % 2 == 0 else WRONG for i in range(100)]
    watching.cancel()
    assert most <= 2
    assert len(children(WORKER)) == 2, "they are kept"
    assert len(large) == 1300 * 2**20


async def test_a_process_that_dies_twice_with_one_answer_is_a_failure_and_replaced(
    alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"math": {"processes": 1, "timeout_s": 60.0, "format_weight": 0.5}}
    assert await score("math_dapo", r"\boxed{1}", "1", **options) == RIGHT
    scoring = asyncio.create_task(score("math_dapo", r"\boxed{2^{2^{2^{2^{2^2}}}}}", "1", **options))
    (first,) = children(WORKER)
    used_s = sum(psutil.Process(first).cpu_times()[:2])
    await until(lambda: sum(psutil.Process(first).cpu_times()[:2]) > used_s + 0.1)  # it is at work
    os.kill(first, signal.SIGKILL)
    await until(lambda: bool(children(WORKER) - {first}))
    (second,) = children(WORKER) - {first}
    os.kill(second, signal.SIGKILL)
    assert await scoring == FAILED
    assert await score("math_dapo", r"\boxed{1}", "1", **options) == RIGHT
    assert not children(WORKER) & {first, second}


def ending(monkeypatch: pytest.MonkeyPatch, *deaths: bool) -> list[Any]:
    """Let processes die at the first questions as listed, and answer the others; return their questions."""
    asked: list[Any] = []
    ask, left = WorkerPool.ask, list(deaths)

    async def mortal(self: WorkerPool, request: Any) -> Any:
        asked.append(request)
        if left and left.pop(0):
            raise WorkerEndedError("the worker process ended")
        return await ask(self, request)

    monkeypatch.setattr(WorkerPool, "ask", mortal)
    return asked


@pytest.mark.parametrize(
    ("deaths", "result"),
    [([True], RIGHT), ([True, True], FAILED), ([True, True, True], OUTAGE)],
    ids=["killed once", "with this answer alone", "always"],
)
async def test_a_process_that_is_lost_is_no_fault_of_the_answer(
    monkeypatch: pytest.MonkeyPatch, deaths: list[bool], result: Numbers
) -> None:
    asked = ending(monkeypatch, *deaths)
    options = {"math": {"processes": 1, "timeout_s": 60.0}}
    assert await score("math_dapo", r"\boxed{0.5}", r"\frac{1}{2}", **options) == result
    assert [request["answer"] for request in asked] == ["0.5", "0.5", *[r"\frac{1}{2}"] * (len(deaths) > 1)]


@pytest.mark.parametrize(("fails", "result"), [("1 2", UNJUDGEABLE), ("1", FAILED)], ids=["both", "the answer alone"])
async def test_a_ground_truth_that_cannot_be_judged_is_no_fault_of_the_answer(
    monkeypatch: pytest.MonkeyPatch, fails: str, result: Numbers
) -> None:
    async def ask(self: WorkerPool, request: Any) -> Any:
        return {"error": "it cannot be read"} if request["answer"] in fails else {"value": 1.0}

    monkeypatch.setattr(WorkerPool, "ask", ask)
    assert await score("math_dapo", r"\boxed{1}", "2") == result


async def test_a_cancelled_score_leaves_no_process(alone: None) -> None:
    options = {"math": {"processes": 1, "timeout_s": 60.0}}
    scoring = asyncio.create_task(score("math_dapo", r"\boxed{2^{2^{2^{2^{2^2}}}}}", "1", **options))
    await until(lambda: children(WORKER))
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert not children(WORKER)


def entry_of(dataset: str, **config: Any) -> dict[str, Any]:
    entry: dict[str, Any] = reasoning_gym.create_dataset(dataset, seed=7, size=1, **config)[0]
    return entry


async def test_reasoning_gym() -> None:
    entry = entry_of("countdown")
    truth = json.dumps(entry)
    table: dict[str, Numbers] = {
        f"<answer>{entry['answer']}</answer>": RIGHT,
        f"First.\nAnswer: {entry['answer']}": RIGHT,
        f"answer: 1\nAnswer: 2 <answer>{entry['answer']}</answer>": RIGHT,
        f"<answer>0 + {entry['answer']}</answer>": WRONG,
        f"<answer>{entry['metadata']['target']}</answer>": WRONG,
        "<answer>1 +</answer>": WRONG,
        f"<answer>{'1+' * 50_000}1</answer>": WRONG,
        "<answer></answer>": NO_ANSWER,
        "Answer:": NO_ANSWER,
        entry["answer"]: NO_ANSWER,
        f"<think><answer>{entry['answer']}</answer>": NO_ANSWER,
    }
    for text, expected in table.items():
        assert await score("reasoning_gym/countdown", text, truth) == expected, text


# countdown passes its answers to `parse_expr`, n_queens to `eval`.
CODE = [
    "exec('import os; os._exit(0)')",
    "__import__('os').system('touch {path}')",
    "open('{path}', 'w')",
    "eval('1')",
    "(lambda: exec('1'))()",
    "[x for x in ().__class__.__base__.__subclasses__()]",
    "globals()",
    "getattr(1, 'real')",
    "lambdify(x, 'exec(1)')",
    "sympify('exec(1)')",
    "preview(x)",
    "S('exec(1)')",
    "N('__import__(1)')",
    "Function('__import__(\"os\").abort')(2)",
    "Function('exit')(2).evalf()",
    "Symbol('exit(1)') + Function('exec')(1)",
]


async def test_code_in_an_answer_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "made"
    for dataset in ("countdown", "n_queens", "simple_integration", "spiral_matrix"):
        truth = json.dumps(entry_of(dataset))
        for code in CODE:
            text = f"<answer>{code.format(path=path)}</answer>"
            assert (await score(f"reasoning_gym/{dataset}", text, truth))[0] == 0.0, code
        assert await score(f"reasoning_gym/{dataset}", f"Answer: {json.loads(truth)['answer']}", truth) == RIGHT
    assert not path.exists()


async def test_a_formula_in_an_answer_is_evaluated() -> None:
    entry = entry_of("countdown")
    numbers, target = [2, 3], 6
    truth = {"answer": "2*3", "metadata": {**entry["metadata"], "numbers": numbers, "target": target}}
    for formula in ("3*2", "(2)*(3)", "Abs(-2)*3", "sqrt(2)*3*sqrt(2)/sqrt(1)"):
        expected = RIGHT if "sqrt" not in formula else WRONG  # it uses other numbers
        assert await score("reasoning_gym/countdown", f"Answer: {formula}", truth) == expected, formula


NAMES = [
    "rearc",
    "basic_arithmetic",
    "chain_sum",
    "maze",
    "polynomial_multiplication",
    "sudoku",
    "word_ladder",
    "zebra_puzzles",
]


async def test_the_wrapper_says_what_reasoning_gym_says() -> None:
    options = {"reasoning_gym": {"partial_credit": True}}
    for name in NAMES:
        dataset = reasoning_gym.create_dataset(name, seed=11, size=2)
        entry = dataset[0]
        assert await score(f"reasoning_gym/{name}", f"<answer>{entry['answer']}</answer>", json.dumps(entry)) == RIGHT
        for answer in (str(entry["answer"]), str(dataset[1]["answer"]), "42", "x y"):
            found = await score(f"reasoning_gym/{name}", f"<answer>{answer}</answer>", json.dumps(entry), **options)
            assert found[0] == pytest.approx(dataset.score_answer(answer.strip(), entry)), (name, answer)


@pytest.mark.parametrize(
    ("dataset", "gold", "right", "wrong"),
    [
        ("game_of_life_halting", "False", ["False", "false."], ["True", "x", "not False"]),
        ("game_of_life_halting", "True", ["True", "`true`"], ["False", "maybe", "True or False"]),
        ("gsm_symbolic", "5", ["5", "$5", "It is 5."], ["-5", "not 5", "6 or 5", "5 or 6", "minus 5", "It is -5"]),
        ("gsm_symbolic", "-5", [], ["5", "not -5"]),
        ("knights_knaves", "Zoey is a knave, and Riley is a knight.",
         ["Riley is a knight, and Zoey is a knave"], ["not Zoey is a knave, and Riley is a knight."]),
    ],
)  # fmt: skip
async def test_an_answer_that_is_taken_back_is_none(
    dataset: str, gold: str, right: list[str], wrong: list[str]
) -> None:
    for options in ({}, {"reasoning_gym": {"partial_credit": True}}):
        for answer, expected in [*((each, RIGHT) for each in right), *((each, WRONG) for each in wrong)]:
            found = await score(f"reasoning_gym/{dataset}", f"<answer>{answer}</answer>", {"answer": gold}, **options)
            assert found[1] == expected[1], answer
            assert (found[0] == 1.0) == (expected == RIGHT), answer


async def test_partial_credit_is_an_option() -> None:
    truth = json.dumps(entry_of("countdown"))
    options = {"reasoning_gym": {"partial_credit": True}}
    found = await score("reasoning_gym/countdown", "Answer: 1", truth, **options)
    assert found == (0.05, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)


async def test_the_dataset_is_the_entrys_or_the_data_sources() -> None:
    assert (
        await score("reasoning_gym/mixed", "Answer: 5", {"answer": "5", "metadata": {"source_dataset": "chain_sum"}})
        == RIGHT
    )
    assert await score("reasoning_gym/chain_sum", "Answer: 5", "5") == RIGHT
    assert await score("reasoning_gym/chain_sum", "Answer: 6", 5) == WRONG
    with pytest.raises(ConfigError, match="no dataset 'no_such'"):
        await score("reasoning_gym/no_such", "Answer: 5", "5")
    with pytest.raises(ConfigError, match="expected an 'answer'"):
        await score("reasoning_gym/chain_sum", "Answer: 5", {"metadata": {}})


async def test_a_verifier_that_raises_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    truth = json.dumps(entry_of("prime_factorization"))
    assert await score("reasoning_gym/prime_factorization", "Answer: two", truth) == FAILED


async def test_a_verifier_that_takes_for_ever_is_counted() -> None:
    truth = json.dumps(entry_of("countdown"))
    assert await late(score("reasoning_gym/countdown", "Answer: 9**9**9**9", truth)) == TIMED_OUT


async def test_a_package_that_is_not_there(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        await score("reasoning_gym/chain_sum", "Answer: 5", "5")
