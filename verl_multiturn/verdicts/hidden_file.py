"""`HiddenFile`: a hidden test file whose tests can be twins."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from verl_multiturn.verdicts.assertion_literals import ExpectedPart, ExpectedValues, decoys_of, expected_in
from verl_multiturn.verdicts.decoys import Decoys
from verl_multiturn.verdicts.parameters import test_ids
from verl_multiturn.verdicts.task import PytestVerdict

_MOST_CHARACTERS = 2_000_000
_MOST_PLACES = 8


@dataclass(frozen=True)
class TwinPart:
    """Name the tests of a file that share one lot.

    Attributes:
        index: Its number in the file.
        names: The row's names of its tests.
    """

    index: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class HiddenFile:
    """A hidden test file.

    Attributes:
        source: Its text.
        words: Words and numbers of the row's tree.
        parts: Its parts, each with its own lot.
        names: The names that the tests of parametrized functions get, by those in the row.
        hidden: The functions whose ids are numbered.
    """

    source: str
    words: frozenset[str]
    parts: Sequence[TwinPart]
    names: Mapping[str, str]
    hidden: frozenset[str]

    @classmethod
    def of(cls, path: str, source: str, verdict: PytestVerdict, words: frozenset[str]) -> HiddenFile:
        """Return a file with the parts that may be twins: those all of whose tests the verdict names as such.

        Args:
            path: Its path.
            source: Its text.
            verdict: The verdict.
            words: Words and numbers of the row's tree.
        """
        wanted = {name.partition("::")[2]: name for name in verdict.twins if name.partition("::")[0] == path}
        listed = [name.partition("::")[2] for name in (*verdict.tests, *verdict.kept) if name.startswith(f"{path}::")]
        expected = expected_in(source) if wanted else None
        if expected is None:
            return cls(source, words, (), {}, frozenset())
        parts: list[TwinPart] = []
        names: dict[str, str] = {}
        hidden: set[str] = set()
        decoys = _decoys(source, words)
        for index, part in enumerate(expected.parts):
            own = _tests_of(expected, part, listed)
            if own and own.keys() <= wanted.keys() and any(each.exist for each in decoys[index]):
                parts.append(TwinPart(index, tuple(wanted[each] for each in own)))
                hidden.add(part.function)
        for function in hidden & expected.marks.keys():
            known = _by_id(expected, function)
            names |= {f"{path}::{name}": f"{path}::{known[name]}" for name in listed if name in known}
        return cls(source, words, parts, names, frozenset(hidden))

    def write(self, draw: random.Random, twinned: Sequence[bool], place: int | None = None) -> str:
        """Return the text of the file in which some tests are twins.

        Args:
            draw: Draws the values.
            twinned: Which of `parts` are.
            place: Which expected value of each one changes; None: it is drawn.
        """
        expected = expected_in(self.source)
        assert expected is not None
        decoys = _decoys(self.source, self.words)
        for part, is_twin in zip(self.parts, twinned, strict=True):
            if is_twin:
                _change(expected.parts[part.index], decoys[part.index], draw, place)
        return _written(expected, self.hidden)


def candidates(path: str, source: str, names: Collection[str], words: frozenset[str]) -> dict[str, int]:
    """Return which tests of a file may have a twin, and how many of their values can be changed.

    Args:
        path: Its path.
        source: Its text.
        names: The row's names of tests.
        words: Words and numbers of the row's tree.
    """
    listed = [name.partition("::")[2] for name in names if name.startswith(f"{path}::")]
    expected = expected_in(source)
    found: dict[str, int] = {}
    if expected is None:
        return found
    for part, decoys in zip(expected.parts, _decoys(source, words), strict=True):
        if count := len(_choices(part, decoys)):
            found |= dict.fromkeys((f"{path}::{name}" for name in _tests_of(expected, part, listed)), count)
    return found


def changed(source: str, draw: random.Random | None, words: frozenset[str] = frozenset()) -> tuple[str, set[str]]:
    """Return a test file whose tests are all twins, and the names of those that can be.

    Args:
        source: The file.
        draw: Draws the values; None: the values stay, and the file is only written in the same form.
        words: Words and numbers of the row's tree.
    """
    expected = expected_in(source)
    if expected is None:
        return source, set()
    names = set()
    for part, decoys in zip(expected.parts, _decoys(source, words), strict=True):
        if any(each.exist for each in decoys):
            names.add(part.function)
            if draw is not None:
                _change(part, decoys, draw, None)
    return _written(expected, frozenset(names)), names


def function_of(name: str) -> str:
    """Return the name of a test without its file and its parameters.

    Args:
        name: Its name, as pytest has it.
    """
    return name.partition("::")[2].partition("[")[0]


def words_of(tree: Mapping[str, bytes], hidden: Collection[str] = ()) -> frozenset[str]:
    """Return the words and numbers of a tree, in small letters.

    Args:
        tree: Its files.
        hidden: Paths of hidden files. Where one lies in the tree, too, all that it expects could be read there, and
            its words would leave no decoy.
    """
    found: set[str] = set()
    left = _MOST_CHARACTERS
    for path in sorted(tree.keys() - set(hidden)):
        if left > 0 and path.endswith((".py", ".md", ".rst", ".txt", ".json", ".toml", ".cfg", ".yaml", ".yml")):
            text = tree[path][:left].decode("utf-8", "replace").lower()
            left -= len(text)
            found.update(re.findall(r"[a-z]+|\d+", text))
    return frozenset(found)


@lru_cache(maxsize=128)
def _decoys(source: str, words: frozenset[str]) -> list[list[Decoys]]:
    expected = expected_in(source)
    return [] if expected is None else decoys_of(expected, words)


def _choices(part: ExpectedPart, decoys: Sequence[Decoys]) -> list[list[int]]:
    """Return the values of a part that change together.

    One of those that a test which passes has compared with: a value beside it, which code knows to be true, then
    reveals little of it. Where there is none of these, all of them. Equal ones always change together.
    """
    known = [index for index, each in enumerate(decoys) if each.exist]
    equal: dict[int, list[int]] = {}
    for index in known:
        equal.setdefault(id(decoys[index]), []).append(index)
    certain = [some for some in equal.values() if any(part.places[index].is_certain for index in some)][:_MOST_PLACES]
    return certain or ([known] if known else [])


def _change(part: ExpectedPart, decoys: Sequence[Decoys], draw: random.Random, place: int | None) -> None:
    choices = _choices(part, decoys)
    values: dict[int, object] = {}
    for index in draw.choice(choices) if place is None else choices[place % len(choices)]:
        if id(decoys[index]) not in values:
            values[id(decoys[index])] = decoys[index].one(draw)
        other = ast.parse(repr(values[id(decoys[index])]), mode="eval").body
        node = part.places[index].node
        node.__class__ = other.__class__
        node.__dict__.clear()
        node.__dict__.update(other.__dict__)


def _written(expected: ExpectedValues, hidden: frozenset[str]) -> str:
    for function in expected.marks.keys() & hidden:
        for mark in expected.marks[function]:
            mark.hide_ids()
    return ast.unparse(expected.tree)


def _tests_of(expected: ExpectedValues, part: ExpectedPart, listed: Sequence[str]) -> dict[str, None]:
    """Return those of the row's tests in a file that a part has; none where one of them has an unknown name."""
    own = [name for name in listed if name.partition("[")[0] == part.function]
    if part.mark is None:
        return dict.fromkeys(own)
    marks = expected.marks[part.function]
    ids = {f"{part.function}[{each}]": rows for rows, each in test_ids(marks, False)}
    if not all(name in ids for name in own):
        return {}
    return dict.fromkeys(name for name in own if ids[name][part.mark] == part.row)


def _by_id(expected: ExpectedValues, function: str) -> dict[str, str]:
    marks = expected.marks[function]
    old, new = ([f"{function}[{each}]" for _, each in test_ids(marks, hidden)] for hidden in (False, True))
    return dict(zip(old, new, strict=True))
