"""Hidden files with twins: which literals are expected, and the fate of the names of parametrized tests."""

from __future__ import annotations

import random
import re

import pytest

from verl_multiturn.verdicts.hidden_file import HiddenFile, candidates, changed
from verl_multiturn.verdicts.task import PytestVerdict

HEAD = "import pytest\nfrom calc import f, g\n"


def twins(source: str, names: list[str]) -> tuple[HiddenFile, dict[str, int]]:
    """Return a file whose tests may all be twins, and which of them can."""
    full = [f"t.py::{name}" for name in names]
    found = candidates("t.py", HEAD + source, full, frozenset())
    verdict = PytestVerdict(
        kind="pytest", files={"t.py": HEAD + source}, tests=tuple(full), twins=tuple(found), canaries=8
    )
    return HiddenFile.of("t.py", HEAD + source, verdict, frozenset()), found


PARAMETRIZED = [
    ('@pytest.mark.parametrize("x, y", [(2, 74), (3, 86)])', ["2-74", "3-86"]),
    ('@pytest.mark.parametrize("x,y", ((2, 74), (3, 86)))', ["2-74", "3-86"]),
    ('@pytest.mark.parametrize(("x", "y"), [(2, 74), [3, 86]])', ["2-74", "3-86"]),
    ('@pytest.mark.parametrize(["x", "y"], [pytest.param(2, 74), (3, 86)])', ["2-74", "3-86"]),
    ('@pytest.mark.parametrize("x, y", [pytest.param(2, 74, id="two"), (3, 86)])', ["two", "3-86"]),
    ('@pytest.mark.parametrize("x, y", [(2, 74), (3, 86)], ids=["two it is", None])', ["two it is", "3-86"]),
    ('@pytest.mark.parametrize("x, y", [([2], 74), (None, 86)])', ["x0-74", "None-86"]),
    ('@pytest.mark.parametrize("x, y", [(2, 74), (3, 86)], ids=["no", "no"])', ["no0", "no1"]),
    ('@pytest.mark.parametrize("y", [74, 86])\n@pytest.mark.parametrize("x", [2])', ["2-74", "2-86"]),
]


@pytest.mark.parametrize(("decorators", "ids"), PARAMETRIZED)
def test_each_row_has_a_lot_and_its_id_says_nothing(decorators: str, ids: list[str]) -> None:
    names = [f"test_it[{each}]" for each in ids]
    hidden, found = twins(f"{decorators}\ndef test_it(x, y):\n    assert f(x) == y\n", names)
    assert set(found) == {f"t.py::{name}" for name in names}
    new = [hidden.names[f"t.py::{name}"] for name in names]
    assert all(re.fullmatch(r"t\.py::test_it\[[01](-[01])?\]", name) for name in new)
    assert len(set(new)) == len(hidden.parts) == 2
    for is_twin in ([False, False], [True, False], [False, True], [True, True]):
        text = hidden.write(random.Random(1), is_twin)
        values = [int(each) for each in re.findall(r"\b\d\d\b", text)]
        assert [value != own for value, own in zip(values, [74, 86], strict=True)] == is_twin
        assert "two" not in text


@pytest.mark.parametrize(
    "source",
    [
        '@pytest.mark.parametrize("x, y", [(2, 74)])\ndef test_it(x, y):\n    assert f(y) == y\n',
        '@pytest.mark.parametrize("x, y", ROWS)\ndef test_it(x, y):\n    assert f(x) == y\n',
        '@pytest.mark.parametrize("x, y", [(2, 74)], indirect=True)\ndef test_it(x, y):\n    assert f(x) == y\n',
        '@pytest.mark.parametrize("x, y", [(2, 74)], ids=str)\ndef test_it(x, y):\n    assert f(x) == y\n',
        "@pytest.fixture(params=[1])\ndef z(): pass\n\n"
        '@pytest.mark.parametrize("x, y", [(3, 74)])\ndef test_it(z, x, y):\n    assert f(x) == y\n',
        "Y = 74\ndef test_it():\n    assert f(2) == Y\ndef test_more():\n    assert f(3) == Y\n",
        "def test_it():\n    y = 74\n    y = 75\n    assert f(2) == y\n",
    ],
)
def test_what_cannot_be_changed_alone_has_no_twin(source: str) -> None:
    assert twins(source, ["test_it[2-74]" if "parametrize" in source else "test_it"])[1] == {}


def test_rows_of_a_constant_and_of_a_class_are_read() -> None:
    source = (
        'ROWS = [(2, 74), (3, 86)]\n@pytest.mark.parametrize("x, y", ROWS)\ndef test_it(x, y):\n    assert f(x) == y\n'
    )
    assert len(twins(source, ["test_it[2-74]", "test_it[3-86]"])[1]) == 2
    source = '@pytest.mark.parametrize("x, y", [(2, 74)])\nclass TestIt:\n'
    source += "    def test_it(self, x, y):\n        assert f(x) == y\n"
    assert len(twins(source, ["TestIt::test_it[2-74]"])[1]) == 1


def test_one_value_of_a_test_changes_at_a_time() -> None:
    """Code that passes one assertion of a test knows that its value is true. That reveals little about the others."""
    hidden, found = twins("def test_it():\n    assert f(2) == 74\n    assert g(3) == 86\n", ["test_it"])
    assert found == {"t.py::test_it": 2}
    texts = [hidden.write(random.Random(seed), [True]) for seed in range(30)]
    assert {("== 74" in text, "== 86" in text) for text in texts} == {(True, False), (False, True)}
    assert "== 74" not in hidden.write(random.Random(1), [True], place=0)
    assert "== 86" not in hidden.write(random.Random(1), [True], place=1)


def test_values_that_may_not_be_reached_change_together() -> None:
    source = "def test_it():\n    for x in g():\n        assert f(x) == 74\n        assert f(-x) == 86\n"
    hidden, found = twins(source, ["test_it"])
    assert found == {"t.py::test_it": 1}
    text = hidden.write(random.Random(1), [True])
    assert "74" not in text
    assert "86" not in text


def test_no_comment_says_which_values_are_true() -> None:
    source = "def test_it():\n    # 74 is right\n    assert f(2) == 74  # seventy-four\n"
    assert "#" not in changed(HEAD + source, None)[0]
    assert "#" not in changed(HEAD + source, random.Random(0))[0]


def test_equal_values_of_a_test_change_together() -> None:
    """Else the one that differs would be the decoy."""
    source = "def test_f():\n    assert f(3, 8) == 685\n    assert f(8, 3) == 685\n    assert f(2, 9) == 959\n"
    file, found = twins(source, ["test_f"])
    assert found == {"t.py::test_f": 2}
    for place in range(2):
        values = re.findall(r"== (\d+)", file.write(random.Random(place), [True], place))
        assert values[0] == values[1]
        assert (values[0] == "685") != (values[2] == "959")


@pytest.mark.parametrize(
    "values", [(375, 548, 721), (721, 548, 375), (137, 274, 548)], ids=["equal steps", "downwards", "equal factors"]
)
def test_a_row_of_numbers_in_one_test_has_no_twin(values: tuple[int, ...]) -> None:
    """One that changes would show beside the others."""
    source = "def test_f():\n" + "".join(f"    assert f({at}) == {value}\n" for at, value in enumerate(values, 2))
    assert not twins(source, ["test_f"])[1]
