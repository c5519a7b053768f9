"""Decoys: values that look like the true ones. `benchmarks.workspace_attacks` draws ten times as many."""

from __future__ import annotations

import ast
import math
import random
import re
from dataclasses import replace

import pytest

from tests.support.further_rules import EVERY_RULE
from tests.support.telling_rules import told_apart
from tests.support.value_pairs import KINDS, made_pairs
from verl_multiturn.verdicts.assertion_literals import LiteralPlace, _is_row, _of_approx, _of_places
from verl_multiturn.verdicts.decoys import EXACT, Decoys, Tolerance
from verl_multiturn.verdicts.features import features
from verl_multiturn.verdicts.subject import Subject


def decoys(
    value: object, *arguments: object, tolerance: Tolerance = EXACT, elsewhere: tuple[str, ...] = ()
) -> list[object]:
    found = Decoys(value, Subject(arguments, frozenset(elsewhere)), tolerance)
    draw = random.Random(0)
    return [found.one(draw) for _ in range(20)] if found.exist else []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_rule_names_the_true_one(kind: str) -> None:
    pairs, _ = made_pairs(kind, 100, 1)
    share, rule = told_apart(pairs, EVERY_RULE)
    assert len(EVERY_RULE) >= 200
    assert len(pairs) == 100
    # A coin reaches 0.72 in 1 of 150,000 cases, so the best of 450 rules and their opposites does in 1 of 300.
    assert share < 0.72, rule


def test_the_rules_name_a_value_that_another_one_was_made_from() -> None:
    draw = random.Random(0)

    def moved(value: object) -> object:
        if isinstance(value, float):
            return value + draw.choice([-3, -1, 2, 4]) * (1 + abs(value))
        assert isinstance(value, str)
        return value[:-1] if draw.random() < 0.5 else value + draw.choice("aeinost")

    for kind, least in (("float", 0.85), ("text", 0.65)):
        pairs = [(true, moved(true), subject) for true, _, subject in made_pairs(kind, 60, 2)[0]]
        assert told_apart(pairs, EVERY_RULE)[0] > least


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


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ("2024-05-31", r"(19|20)\d\d-(01|03|05|07|08)-31"),
        ("17:53", r"(1[3-9]|2[0-3]):[345]\d"),
        ("$38.00", r"\$[3-5]\d\.00"),
        ("v5.4.3", r"v\d\.\d\.\d"),
        ("192.168.0.12", r"1\d\d\.[12]\d\d\.0\.1[0-2]"),
        ("#ff8800", r"#ff[1-9][1-9]00"),
        ("0x34", r"0x[345]\d"),
        ("12.5 is not less!", r"1\d\.\d is not \w{4}!"),
        (2024, r"(19|20)\d\d"),
    ],
)
def test_a_decoy_has_the_form_of_what_it_stands_for(value: object, form: str) -> None:
    found = decoys(value)
    assert found
    for other in found:
        assert re.fullmatch(form, str(other)), other


def test_a_number_too_large_for_a_float_has_a_decoy() -> None:
    assert all(len(str(other)) == 401 for other in decoys(10**400 + 7))


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


def test_numbers_beyond_a_float_are_in_no_row() -> None:
    values = [10**400, 10**401, 10**402]
    places = [LiteralPlace(ast.Constant(value), value, (index,), EXACT, True) for index, value in enumerate(values)]
    assert not _is_row(places)
    assert _is_row([replace(place, value=float(index)) for index, place in enumerate(places)])


@pytest.mark.parametrize(
    "said", ["approx(1, rel=1{0})", "approx(1, abs=1{0})", "approx(1, rel=1e999)", "same(x, 1, places=-400)",
             "same(x, 1, delta=1{0})"],
)  # fmt: skip
def test_a_tolerance_beyond_a_float_is_not_known(said: str) -> None:
    call = ast.parse(said.format("0" * 400), mode="eval").body
    assert isinstance(call, ast.Call)
    assert (_of_approx if said.startswith("approx") else _of_places)(call) is None


def test_places_are_a_power_of_ten() -> None:
    call = ast.parse("same(x, 1, places=3)", mode="eval").body
    assert isinstance(call, ast.Call)
    assert _of_places(call) == Tolerance(0.0, 1e-3)
