"""`Subject`: the values that a program may compare an expected value with."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

TOKENS = re.compile(r"[A-Za-z]+|\d+|\s+|[^A-Za-z\d\s]")
_MOST_ITEMS = 100
_MOST_SIZE = 1e15


@dataclass(frozen=True, eq=False)
class Subject:
    """Hold the values that a program may compare an expected one with.

    Attributes:
        arguments: The literals of the calls on the other side of the assertion.
        elsewhere: The literals of the rest of the test file, by `repr`, and its words in small letters.
        words: Words and numbers of the row's own tree, in small letters.
    """

    arguments: tuple[object, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()

    @cached_property
    def items(self) -> tuple[object, ...]:
        """Return the single values of the arguments."""
        return tuple(flat(self.arguments))[:_MOST_ITEMS]

    @cached_property
    def shown(self) -> frozenset[str]:
        """Return them by `repr`."""
        return frozenset(map(repr, self.items))

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Return the texts among them, in small letters."""
        return tuple(as_text(each).lower() for each in self.items if isinstance(each, str | bytes))[:10]

    @cached_property
    def argument_words(self) -> frozenset[str]:
        """Return their words and numbers."""
        words = {token for text in self.texts for token in TOKENS.findall(text) if token.isalnum()}
        return frozenset(words | {repr(each) for each in self.items if isinstance(each, int)})

    @cached_property
    def lists(self) -> tuple[tuple[object, ...], ...]:
        """Return the lists among the arguments, each flat."""
        found = (tuple(flat(each)) for each in self.arguments if isinstance(each, list | tuple | Set | Mapping))
        return tuple(each[:_MOST_ITEMS] for each in found)[:5]

    @cached_property
    def marks(self) -> tuple[float, ...]:
        """Return the least, the middle, the largest of the numbers of the arguments, their sum and their product."""
        numbers = self._numbers()
        if not numbers:
            return ()
        found = [min(numbers), statistics.fmean(numbers), max(numbers), sum(numbers)]
        return tuple(found + ([math.prod(numbers)] if len(numbers) < 15 else []))

    @cached_property
    def plain(self) -> frozenset[float]:
        """Return the numbers that one usual step makes of all arguments: a sum, a length, a product, a mean."""
        found: set[float] = set()
        numbers = self._numbers()
        for some in (numbers, *self.lists):
            found |= _of_list([each for each in some if isinstance(each, int | float) and abs(each) < _MOST_SIZE])
        sized = (each for each in self.arguments if isinstance(each, str | bytes | list | tuple | Set | Mapping))
        found |= {float(len(each)) for each in sized}
        found |= {float(len(text.split())) for text in self.texts}
        if len(numbers) == 2:
            found |= {numbers[0] - numbers[1], numbers[0] / (numbers[1] or 1)}
        return frozenset(found)

    @cached_property
    def results(self) -> frozenset[float]:
        """Return these, and the numbers that a less usual step makes of one or two arguments."""
        found = set(self.plain)
        for text in self.texts:
            found |= {float(len(set(text))), float(sum(each in "aeiou" for each in text))}
            found |= {float(sum(map(str.isdigit, text))), float(sum(map(str.isalpha, text)))}
        numbers = self._numbers()
        for a in numbers[:6]:
            found |= {a + 1, a - 1, 2 * a, a / 2, a * a, -a, abs(a)}
            for b in numbers[:6]:
                found |= _of_pair(a, b)
        return frozenset(each for each in found if math.isfinite(each))

    def _numbers(self) -> list[float]:
        numbers = [each for each in self.items if isinstance(each, int | float) and not isinstance(each, bool)]
        return [each for each in numbers if abs(each) < _MOST_SIZE]


def _of_list(numbers: Sequence[float]) -> set[float]:
    if not numbers:
        return set()
    sizes = [sum(numbers), min(numbers), max(numbers), max(numbers) - min(numbers), len(numbers), len(set(numbers))]
    sizes += [statistics.fmean(numbers), statistics.median(numbers), numbers[0], numbers[-1]]
    if len(numbers) < 15:
        sizes.append(math.prod(numbers))
    return set(sizes)


def _of_pair(a: float, b: float) -> set[float]:
    found = {a + b, a - b, a * b}
    makers: list[Callable[[], float]] = [lambda: a / b, lambda: a // b, lambda: a % b]
    if abs(a) < 1000 and 0 <= b < 10:
        makers.append(lambda: a**b)
    if isinstance(a, int) and isinstance(b, int):
        makers += [lambda: math.gcd(a, b), lambda: math.lcm(a, b)]
    for make in makers:
        try:
            found.add(make())
        except (ArithmeticError, ValueError):
            continue
    return {each for each in found if isinstance(each, int | float)}


def flat(value: object) -> Iterator[object]:
    """Yield the single values of a value.

    Args:
        value: Any value that a literal can have.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from flat(key)
            yield from flat(each)
    elif isinstance(value, list | tuple | Set):
        for each in sorted(value, key=repr) if isinstance(value, Set) else value:
            yield from flat(each)
    else:
        yield value


def as_text(value: str | bytes) -> str:
    """Return a text, or bytes as one.

    Args:
        value: The text or the bytes.
    """
    return value if isinstance(value, str) else value.decode("latin-1")
