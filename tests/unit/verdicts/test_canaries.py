"""Tests that must fail: our own, and twins of the row's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.workspace_attacks import FILES, TESTS, VERDICTS, task
from verl_multiturn.verdicts.canaries import SuiteLayout, changed, lay_out, lots, shared
from verl_multiturn.verdicts.changes import WorkChanges
from verl_multiturn.verdicts.judge import Tree, judged_outcomes
from verl_multiturn.verdicts.task import PytestVerdict, read_task

TREE = {path: text.encode() for path, text in FILES.items()}
ALL = [*VERDICTS["pytest"]["tests"], "tests/test_ops.py::test_label"]


def verdict(**more: object) -> PytestVerdict:
    found = read_task(task("pytest", verdict={**VERDICTS["pytest"], **more}), "row").verdict
    assert isinstance(found, PytestVerdict)
    return found


def ends(source: str) -> dict[str, bool]:
    """Return which functions of a test file pass."""
    names: dict[str, Any] = {}
    exec(source, names)
    found = {}
    for name in [name for name in names if name.startswith("test")]:
        try:
            names[name]()
            found[name] = True
        except AssertionError:
            found[name] = False
    return found


@pytest.mark.parametrize("seed", range(30))
def test_half_of_our_own_tests_fail_when_they_run(seed: int) -> None:
    layout = lay_out(verdict(canaries=20), TREE, random.Random(seed))
    own = {name: layout.passes[name] for name in layout.canaries}
    assert sorted(own.values()) == [False] * 10 + [True] * 10
    ran: dict[str, bool] = {}
    for path in {name.partition("::")[0] for name in own}:
        assert path not in TREE
        ran |= {f"{path}::{name}": passed for name, passed in ends(layout.files[path]).items()}
    assert ran == own


def test_a_run_has_the_true_values_or_the_decoys_of_each_test_by_a_lot_of_its_own() -> None:
    seen = set()
    for seed in range(100):
        layout = lay_out(verdict(twins=ALL), TREE, random.Random(seed))
        assert set(layout.files) - {name.partition("::")[0] for name in layout.canaries} == {"tests/test_ops.py"}
        for name in ALL:
            function = name.partition("::")[2]
            wanted = {"test_add": "== 5\n", "test_total": "== 7\n", "test_label": "== '<a>'\n"}[function]
            body = layout.files["tests/test_ops.py"].partition(f"def {function}(")[2].partition("def ")[0]
            assert (wanted in f"{body}\n") == layout.passes[layout.names[name]]
        assert layout.passes["tests/test_visible.py::test_label"]
        seen.add(tuple(layout.passes[name] for name in ALL))
    assert len(seen) == 8


def test_a_test_is_true_in_one_run_and_a_twin_in_the_other() -> None:
    kept: Counter[tuple[bool, bool]] = Counter()
    for seed in range(400):
        first, second = (lots(seed, second) for second in (False, True))
        drawn = [(first(is_kept), second(is_kept)) for is_kept in (False, False, True)]
        assert all(a != b for a, b in drawn[:2])
        kept[drawn[2]] += 1
    assert 150 < kept[False, False] < 250  # code can find out a lot from the tests that pass before the repair
    assert 60 < kept[True, False] < 140
    assert kept[True, True] == 0


def test_the_values_of_a_kept_test_name_those_of_another_one_in_one_case_of_four() -> None:
    right = 0
    for seed in range(2000):
        first, second = (lots(seed, second) for second in (False, True))
        right += all(lot(True) == lot(False) for lot in (first, second))
    assert 400 < right < 600


def test_what_an_agent_adds_to_the_tree_says_nothing() -> None:
    """Words of the tree decide whether there are decoys, so they are those of the row's own."""
    judged = read_task(task("pytest"), "row")
    tree = Tree.of(judged, WorkChanges({"calc/more.py": b"every other word"}))
    assert "calc/more.py" not in tree.own
    assert "calc/more.py" in tree.files


CHANGED = [
    ("assert add(2, 3) == 5", True),
    ("assert 5 == add(2, 3)", True),
    ("assert add(2, 3) == pytest.approx(0.37, rel=1e-3)", True),
    ("assert add(2, 3) == [1, {'a': -2}]", True),
    ("assert add(2, 3) == ''", False),  # there is one text of no letters
    ("assert add(2, 3) == 'cat'", True),
    ("assert add(2, 3) == b'x'", True),
    ("assert add(2, 3) == None", False),
    ("assert add(2, 3) is None", False),
    ("assert add(2, 3) is True", True),
    ("assert add(2, 3) == [3, 2]", False),  # the arguments in one of two orders
    ("assert add(2, 3) + 'abc' == 'cba'", False),
    ("assert add(2, 3) + 'abc' == 'ABC'", False),
    ("assert add(2, 3) == 17 and g(2) == 5", True),
    ("self.assertAlmostEqual(add(2, 3), 4.25, places=3)", True),
    ("self.assertAlmostEqual(add(2, 3), 4.25, places=known)", False),
    ("assert add(2, 3) == pytest.approx(4.25, abs=known)", False),
    ("x = 17\n    assert add(2, 3) == x", True),
    ("x = 17\n    assert add(2, 3) + x == x", False),  # it is an argument, too
    ("x = add(2, 3)\n    assert x == 17", True),
    ("assert add(2, 3) != 17", False),
    ("self.assertEqual(add(2, 3), 'five')", True),
    ("assert add(2, 3) == [17] + [known]", True),
    ("assert add(2, 3) == f'five {2}'", True),
    ("assert add(2, 3) == known[0]", False),  # an index: another one may give the same
    ("assert add(2, 3) == known[:2]", False),
    ("assert add(2, 3) == (5 if known else 6)", False),
    ("assert add(2, 3) == 2 * known", False),
    ("assert add(2, 3) == (known >= 5)", False),
    ("assert add(2, 3)", False),
    ("assert add(2, 3) == add(3, 2)", False),
    ("assert add(2, 3) in (4, 5)", False),
    ("add(2, 3) == 5", False),
]


@pytest.mark.parametrize(("line", "is_changed"), CHANGED)
def test_a_twin_expects_something_else_of_the_same_call(line: str, is_changed: bool) -> None:
    source = f"def test_it(self=None):\n    {line}\n\ndef helper():\n    assert 1 == 2\n"
    same, names = changed(source, None)
    assert names == ({"test_it"} if is_changed else set())
    for seed in range(20):
        other, _ = changed(source, random.Random(seed))
        assert (other != same) == is_changed
        assert "assert 1 == 2" in other
        assert "add(2, 3)" in other


@pytest.mark.parametrize(
    "value", ["3e6", "1.5e20", "1e999", "-0.0", "3 + 4j", "pytest.approx(10**6)", "pytest.approx(1234567)"]
)
def test_another_number_is_neither_the_same_nor_near(value: str) -> None:
    source = f"import pytest\n\ndef test_it():\n    assert {value.replace('pytest.approx', '')} == {value}\n"
    assert ends(changed(source, None)[0]) == {"test_it": True}
    for seed in range(50):
        other, names = changed(source, random.Random(seed))
        assert ends(other) == {"test_it": not names}


def test_a_test_that_others_use_is_shared() -> None:
    files = {
        "tests/test_a.py": (
            "class TestBase:\n"
            "    def test_a(self): pass\n"
            "    def test_b(self): self.test_c()\n"
            "    def test_c(self): pass\n"
            "class TestMore(TestBase):\n    def test_d(self): super(TestMore, self).helper()\n"
            "def test_e(): test_f()\n"
            "def test_f(): pass\n"
            "def test_g(): test_g\n"
        ),
        "tests/test_b.py": "from tests.test_a import test_e\n\ndef test_h(): pass\n",
        "tests/test_broken.py": "def test_(: pass",
    }
    assert shared(files) == {"TestBase::test_a", "TestBase::test_b", "TestBase::test_c", "test_e", "test_f"}


def test_tests_of_classes_are_named_as_pytest_names_them() -> None:
    source = "class TestSums:\n    def test_add(self):\n        assert add(2, 3) == 17\n"
    assert changed(source, None)[1] == {"TestSums::test_add"}
    assert changed("def test_(: pass", None) == ("def test_(: pass", set())


def outcomes(layout: SuiteLayout) -> dict[str, str]:
    return {name: "passed" if must_pass else "failed" for name, must_pass in layout.passes.items()}


def test_exactly_what_has_to_pass_must_pass() -> None:
    asked = verdict(twins=ALL)
    layout = lay_out(asked, TREE, random.Random(1), lambda is_kept: is_kept)
    right = outcomes(layout)
    assert judged_outcomes(asked, layout, right) == (1.0, "")
    true = "tests/test_ops.py::test_add"
    wrong: list[tuple[Mapping[str, str], str]] = [
        ({**right, true: "failed"}, "tests/test_ops.py::test_add is failed"),
        ({**right, true: "skipped"}, "tests/test_ops.py::test_add is skipped"),
        ({name: each for name, each in right.items() if name != true}, "tests/test_ops.py::test_add is not found"),
        (dict.fromkeys(right, "passed"), "a test passes whatever it expects"),
    ]
    for found, why in wrong:
        assert judged_outcomes(asked, layout, found) == (0.0, why)


def test_the_hidden_tests_are_those_of_the_row() -> None:
    layout = lay_out(verdict(), TREE, random.Random(2))
    assert layout.files["tests/test_ops.py"] == TESTS
    assert {name for name, must_pass in layout.passes.items() if must_pass} - layout.canaries == {
        *VERDICTS["pytest"]["tests"],
        *VERDICTS["pytest"]["kept"],
    }
