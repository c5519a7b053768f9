"""Decoys: values that nothing tells from the true ones. `benchmarks.workspace_attacks` draws ten times as many."""

from __future__ import annotations

import math
import random

import pytest

from tests.support.telling_rules import RULES, told_apart
from tests.support.value_pairs import KINDS, made_pairs
from verl_multiturn.workspaces.decoys import EXACT, Decoys, Tolerance
from verl_multiturn.workspaces.features import features
from verl_multiturn.workspaces.subject import Subject


def decoys(
    value: object, *arguments: object, tolerance: Tolerance = EXACT, elsewhere: tuple[str, ...] = ()
) -> list[object]:
    found = Decoys(value, Subject(arguments, frozenset(elsewhere)), tolerance)
    draw = random.Random(0)
    return [found.one(draw) for _ in range(20)] if found.exist else []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_rule_names_the_true_one(kind: str) -> None:
    pairs, _ = made_pairs(kind, 200, 1)
    share, rule = told_apart(pairs)
    assert len(RULES) >= 60
    assert len(pairs) == 200
    assert share <= 0.64, rule


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        (84, (5,)),
        (5, (2, 3)),
        (-17, ()),
        (2**0.5, (2,)),
        (8.85, (5,)),
        ("no such word: 3", (3,)),
        (b"size=111", (3,)),
        ("2024-01-02", ()),
        ([12, 5, 1], (4,)),
        ((8, 28), (6,)),
        ({"id": 59, "page": 7}, (4,)),
        (True, (3,)),
    ],
)
def test_a_decoy_is_another_value_with_the_same_features(value: object, arguments: tuple[object, ...]) -> None:
    found = decoys(value, *arguments)
    assert found
    subject = Subject(arguments)
    for other in found:
        assert other != value
        assert type(other) is type(value)
        assert features(other, subject) == features(value, subject)


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        (None, ()),
        ("", ()),
        ([], ()),
        ({}, ()),
        (math.inf, ()),
        ([1, 2, 3], ([3, 1, 2],)),  # sorted
        ([2, 1, 3], ([3, 1, 2],)),  # reversed
        ("cba", ("abc",)),
        ("HELLO WORLD", ("hello world",)),
        ("hello", ("  hello ",)),
        (["alpha", "beta"], ("beta alpha",)),
        (12, (3, 4)),  # a product that no other short calculation gives
        ("x" * 3000, ()),
    ],
)
def test_what_a_subject_gives_away_has_no_decoy(value: object, arguments: tuple[object, ...]) -> None:
    assert decoys(value, *arguments) == []


def test_a_decoy_is_farther_than_any_tolerance() -> None:
    for tolerance in (Tolerance(1e-6, 1e-12), Tolerance(0.01, 0.0), Tolerance(0.0, 0.1)):
        found = decoys(8.85, 5, tolerance=tolerance)
        assert found
        assert all(isinstance(other, float) for other in found)
        assert all(
            abs(other - 8.85) > max(tolerance.relative * 8.85, tolerance.absolute)
            for other in found
            if isinstance(other, float)
        )
    assert decoys(8.85, 5, tolerance=Tolerance(10.0, 0.0)) == []


def test_whether_a_value_has_a_decoy_does_not_depend_on_chance() -> None:
    for value in (84, 8.85, "no such word: 3", [12, 5, 1]):
        assert len({Decoys(value, Subject((3,))).exist for _ in range(5)}) == 1


def test_a_value_that_stands_elsewhere_in_the_file_has_a_decoy_that_does() -> None:
    elsewhere = ("84", "62", "94", "38")
    assert set(decoys(84, elsewhere=elsewhere)) <= {62, 94, 38}
    assert not {62, 94, 38}.intersection(decoys(86, elsewhere=elsewhere))
