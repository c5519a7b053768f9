"""List the properties that distinguish a value: its form, its relation to values near it, its kind.

A decoy is taken for a value only if it has the same features. So a program that goes by one of them cannot find which
of the two is true. `FEATURES` is the whole list; other properties are not promised.
"""

from __future__ import annotations

import keyword
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import date
from functools import lru_cache, partial
from itertools import pairwise
from operator import mul

from verl_multiturn.verdicts.common_words import COMMON_WORDS
from verl_multiturn.verdicts.subject import TOKENS, Subject, as_text, flat

_FULL_DIGITS = 13
"""Decimals from which on a float is one that was computed, not one that was chosen."""
_NEAR = 1e-9
_BIGRAM_STEP = 0.4
_BOUNDS = (1, 12, 23, 28, 31, 59, 100, 255, 1899, 2100, 65535)
"""Where numbers in texts stop to be a month, an hour, a day, a minute, a share, a byte, a year, a port."""
GROUPS = tuple(
    frozenset(some.split())
    for some in (
        "a an the this that these those of to by at on up so no he it its we you i my our his her be was are has had "
        "but with than then if only no such very all any each every out over per via",
        "red green blue black white yellow grey gray orange purple pink brown cyan magenta",
        "mon tue wed thu fri sat sun monday tuesday wednesday thursday friday saturday sunday",
        "jan feb mar apr may jun jul aug sep oct nov dec january february march april june july august september "
        "october november december",
        "zero one two three four five six seven eight nine ten twenty thirty forty fifty hundred",
        "yes no off ok",
        "py txt json csv md toml yaml yml html htm xml png jpg gif js css so gz zip tar ini cfg log rst pdf",
        "http https ftp file git ssh com org net edu io www",
    )
)
"""Words that no other word can replace."""


def features(value: object, subject: Subject) -> tuple[Hashable, ...]:
    """Return all features of a value. A value with the same ones can take its place.

    Args:
        value: The value.
        subject: Values that it may be compared with.
    """
    return tuple(feature(value, subject) for feature in FEATURES)


def shape(value: object, _: Subject) -> Hashable:
    """Return its type, its length, and those of its parts."""
    if isinstance(value, Mapping):
        return type(value).__name__, tuple((shape(key, _), shape(each, _)) for key, each in value.items())
    if isinstance(value, Set):
        return type(value).__name__, len(value), tuple(sorted(type(each).__name__ for each in value))
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(shape(each, _) for each in value)
    if isinstance(value, str | bytes):
        return type(value).__name__, len(value)
    return type(value).__name__, 0


def number_form(value: object, _: Subject) -> Hashable:
    """Return the sign, the digits, the decimals, the exponent and the roundness of each number."""
    parts = (
        (each.real, each.imag) if isinstance(each, complex) else (each,)
        for each in flat(value)
        if isinstance(each, int | float | complex)
    )
    return tuple(_form(number) for some in parts for number in some)


def _form(value: float) -> Hashable:
    if isinstance(value, bool):
        return ()
    if isinstance(value, int):
        digits = str(abs(value))
        if len(digits) == 1:
            return value >= 0, 1
        return value > 0, len(digits), len(digits) - len(digits.rstrip("0")), digits[-1] == "5", value % 2
    whole, _, exponent = repr(abs(value)).partition("e")
    before, _, after = whole.partition(".")
    decimals = len(after)
    halves = abs(value) * 4 % 1 == 0, abs(value) % 1 == 0
    is_small = len(before) == 1 and after == "0"
    return math.copysign(1, value), is_small or before == "0", len(before), decimals, exponent, halves, after[:1] == "0"


def number_kind(value: object, _: Subject) -> Hashable:
    """Return of each number with two digits or more whether it is a prime, a square, a power, a palindrome."""
    return tuple(_kind(each) for each in flat(value) if isinstance(each, int | float) and not isinstance(each, bool))


@lru_cache(maxsize=65536)
def _kind(value: float) -> Hashable:
    if isinstance(value, int):
        size = abs(value)
        if size < 10:
            return ()
        text = str(size)
        root = math.isqrt(size)
        return (
            root * root == size,
            round(size ** (1 / 3)) ** 3 == size if size < 10**15 else False,
            size & (size - 1) == 0,
            (size + 1) & size == 0,
            text == text[::-1],
            text[:2] in ("0x", "0b", "0o"),
            len(set(text)) == 1,
            len(text) > 2 and (text in "0123456789" or text in "9876543210"),
            1900 <= size <= 2100,
            size < 10**6 and all(size % each for each in range(2, root + 1)),
        )
    if not math.isfinite(value) or len(repr(value).partition(".")[2]) < _FULL_DIGITS:
        return ()
    return tuple(name for name, (to, _) in INVERTED.items() if _is_whole(to, value))


INVERTED: Mapping[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "square": (lambda x: x * x, lambda y: math.copysign(abs(y) ** 0.5, y)),
    "exp": (lambda x: math.exp(x) if x < 20 else 0.5, lambda y: math.log(y)),
    "exp10": (lambda x: 10**x if x < 10 else 0.5, lambda y: math.log10(y)),
    "exp2": (lambda x: 2**x if x < 30 else 0.5, lambda y: math.log2(y)),
    "pi": (lambda x: x / math.pi, lambda y: y * math.pi),
    "log": (lambda x: math.log(x) if x > 0 else 0.5, lambda y: math.exp(y) if y < 50 else math.inf),
    "tenths": (lambda x: x * 1000, lambda y: y / 1000),
    "cube": (lambda x: x**3, lambda y: math.copysign(abs(y) ** (1 / 3), y)),
    **{f"ratio{n}": (partial(mul, n), partial(mul, 1 / n)) for n in (3, 6, 7, 9, 11, 12, 13, 14, 15, 18, 21, 90)},
}
"""Functions that make a whole number of a float that was computed from one, each with its inverse."""


def _is_whole(to: Callable[[float], float], value: float) -> bool:
    try:
        found = to(value)
    except (OverflowError, ValueError):
        return False
    return 0.5 < abs(found) < 10**6 and abs(found - round(found)) < _NEAR * max(1.0, abs(found))


def divisors(value: object, subject: Subject) -> Hashable:
    """Return by which numbers of the arguments a whole number can be divided."""
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) < 10:
        return ()
    numbers = [each for each in subject.items if isinstance(each, int) and abs(each) > 1]
    return tuple(value % each == 0 for each in numbers[:20])


def text_form(value: object, _: Subject) -> Hashable:
    """Return the classes of the characters, the case, and which characters are the same, of each text."""
    return tuple(_text_form(each) for each in flat(value) if isinstance(each, str | bytes))


@lru_cache(maxsize=65536)
def _text_form(text: str | bytes) -> Hashable:
    text = as_text(text)
    tokens = TOKENS.findall(text)
    beside = zip(tokens, ["", *tokens], [*tokens[1:], ""], strict=False)
    return (
        tuple(
            _bracket(*some) or _token_form(some[0], some[1][-1:].isdigit() or some[2][:1].isdigit()) for some in beside
        ),
        _brackets(text),
        "</" in text and text,
        tuple(_is_date(*found) for found in re.findall(r"(\d{4})-(\d\d)-(\d\d)", text)),
        tuple(set(word) <= _HEX for word in re.findall(r"\w+", text.lower())),
        text == text[::-1],
        _equal_places([token.lower() for token in tokens]),
        sorted(tokens) == tokens,
        "".join(sorted(text)) == text,
        len(set(text)) == len(text),
    )


_HEX = frozenset("0123456789abcdef")


OPENING, CLOSING = "<[{(", ">]})"
"""Signs that can take each other's place around a word."""


def _bracket(token: str, before: str, after: str) -> str:
    """Return the kind of a bracket around a word; an empty text for another token."""
    if token in OPENING and after[:1].isalpha() and not before[-1:].isalnum():
        return OPENING
    return CLOSING if token in CLOSING and before[-1:].isalpha() and not after[:1].isalnum() else ""


def _brackets(text: str) -> Hashable:
    """Return which brackets have a partner."""
    opened: list[str] = []
    found = []
    for sign in text:
        if sign in OPENING:
            opened.append(sign)
        elif sign in CLOSING:
            found.append(bool(opened) and opened.pop() == OPENING[CLOSING.index(sign)])
    return tuple(found), len(opened)


def _is_date(*parts: str) -> bool:
    try:
        return date(*map(int, parts)) is not None
    except ValueError:
        return False


@lru_cache(maxsize=4096)
def groups_of(word: str) -> Hashable:
    """Return the places of the groups that a word is in.

    Args:
        word: The word, in small letters.
    """
    return tuple(place for place, group in enumerate(GROUPS) if word in group)


def _token_form(token: str, is_beside_digit: bool) -> Hashable:
    if token.isspace():
        return token
    if token.isascii() and token.isdecimal():
        return (
            "digits",
            len(token),
            len(token) - len(token.lstrip("0")),
            len(token) - len(token.rstrip("0")),
            _kind(int(token)),
            bisect_left(_BOUNDS, int(token)),
            set(token) <= {"0", "1"},
        )
    if token.isascii() and token.isalpha():
        case = "".join("A" if each.isupper() else "a" for each in token)
        small = token.lower()
        if (len(token) == 1 and is_beside_digit) or keyword.iskeyword(token) or small in ("true", "false", "null"):
            return token
        groups = groups_of(small)
        if groups or small in COMMON_WORDS:
            return case, "word", groups
        codes = [ord(each) for each in token.lower()]
        steps = {after - before for before, after in pairwise(codes)}
        return case, _equal_places(token.lower()), steps == {1}, sum(each in "aeiou" for each in token.lower())
    return token


def bigrams(value: object, _: Subject) -> Hashable:
    """Return how usual the pairs of letters of words that are not common ones are in English, in steps."""
    return tuple(round(_usual(as_text(each)) / _BIGRAM_STEP) for each in flat(value) if isinstance(each, str | bytes))


@lru_cache(maxsize=1)
def _pairs() -> Counter[str]:
    return Counter(a + b for word in COMMON_WORDS for a, b in zip(f" {word}", f"{word} ", strict=True))


@lru_cache(maxsize=65536)
def _usual(text: str) -> float:
    words = [word for word in re.findall("[a-z]+", text.lower()) if word not in COMMON_WORDS]
    pairs = [a + b for word in words for a, b in zip(f" {word}", f"{word} ", strict=True)]
    return sum(math.log(1 + _pairs()[pair]) for pair in pairs) / len(pairs) if pairs else 0.0


def known_words(value: object, subject: Subject) -> Hashable:
    """Return how many words and numbers of each text are in the arguments, in the file, and in the row's tree."""
    found = []
    for text in (as_text(each) for each in flat(value) if isinstance(each, str | bytes)):
        words = [token.lower() for token in TOKENS.findall(text) if token.isalnum()]
        found.append(
            (
                sum(word in subject.argument_words for word in words),
                sum(word in subject.elsewhere for word in words),
                sum(word in subject.words for word in words if len(word) > 1),
            )
        )
    return tuple(found)


def text_relations(value: object, subject: Subject) -> Hashable:
    """Return how each text is related to each text of the arguments: equal but for case, reversed, a part, a start."""
    found = []
    for text in (as_text(each).lower() for each in flat(value) if isinstance(each, str | bytes)):
        for other in subject.texts:
            found.append(
                (
                    text == other,
                    text == other[::-1],
                    other in text,
                    text in other,
                    text[:1] == other[:1],
                    text[-1:] == other[-1:],
                    sorted(text) == sorted(other),
                    set(text) <= set(other),
                    "".join(filter(str.isalnum, text)) == "".join(filter(str.isalnum, other)),
                )
            )
    return tuple(found)


def places(value: object, subject: Subject) -> Hashable:
    """Return of each single value whether it is an argument, made of them, elsewhere in the file, or in the tree."""
    whole = [repr(value) in subject.elsewhere, any(_same(value, each) for each in subject.arguments)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        whole.append(_is_of(value, subject.plain))
    found: list[Hashable] = [tuple(whole)]
    for each in flat(value):
        if each is None or isinstance(each, bool):
            continue
        is_number = isinstance(each, int | float)
        found.append(
            (
                repr(each) in subject.shown,
                is_number and _is_of(each, subject.results),
                is_number and _is_of(each, subject.plain),
                repr(each) in subject.elsewhere,
                repr(each).strip("'").lower() in subject.words,
            )
        )
    return tuple(found)


def _is_of(value: object, results: frozenset[float]) -> bool:
    if not isinstance(value, float):
        return value in results
    decimals = len(repr(value).partition(".")[2]) if "e" not in repr(value) else 20
    return any(round(each, decimals) == value for each in results)


def rank(value: object, subject: Subject) -> Hashable:
    """Return where a float lies between the numbers of the arguments, their sum and their product, and how near."""
    if not isinstance(value, float) or not math.isfinite(value):
        return ()
    near = [(math.frexp(value - each)[1] + 1) // 3 for each in subject.marks[1:3]]  # eight times as near is another one
    return tuple(value > each for each in subject.marks), tuple(near)


def order(value: object, _: Subject) -> Hashable:
    """Return of each list whether it is sorted, reversed, a palindrome, without repeats, of even steps, of one sign."""
    return tuple(_order(each) for each in _sequences(value))


def _order(items: Sequence[object]) -> Hashable:
    try:
        up = [before <= after for before, after in pairwise(items)]  # type: ignore[operator]
    except TypeError:
        up = []
    numbers = [each for each in items if isinstance(each, int | float) and abs(each) < 1e300]
    steps = {round(after - before, 9) for before, after in pairwise(numbers)}
    lengths = [len(each) for each in items if isinstance(each, str | bytes | list | tuple)]
    return (
        all(up),
        not any(up),
        list(items) == list(reversed(items)),
        _equal_places([repr(each) for each in items]),
        len(steps) == 1,
        round(math.log2(1 + min(1e9, max(numbers) - min(numbers)))) if len(numbers) > 1 else 0,
        lengths == sorted(lengths),
        lengths == sorted(lengths, reverse=True),
        round(sum(numbers), 9) in (0, 1),
    )


def subsets(value: object, subject: Subject) -> Hashable:
    """Return how each list is related to each list of the arguments: of its items, in its order, all of them, its sum.

    A list of other lists is also related by the items of these.
    """
    found: list[Hashable] = []
    for items in (list(flat(each)) for each in _sequences(value)):
        shown = [repr(each) for each in items]
        for other in subject.lists:
            known = [repr(each) for each in other]
            found.append(
                (
                    sum(each in known for each in shown),
                    Counter(shown) == Counter(known),
                    not Counter(shown) - Counter(known),
                    set(shown) == set(known),
                    _is_part(shown, known),
                    shown == known[::-1],
                    sum(a == b for a, b in zip(shown, known, strict=False)),
                    _total(items) == _total(other),
                )
            )
    return tuple(found)


def _total(items: Sequence[object]) -> float | None:
    numbers = [each for each in items if isinstance(each, int | float) and abs(each) < 1e300]
    return round(sum(numbers), 9) if numbers else None


def _is_part(shown: Sequence[str], known: Sequence[str]) -> bool:
    rest = iter(known)
    return all(each in rest for each in shown)


FEATURES: tuple[Callable[[object, Subject], Hashable], ...] = (
    shape,
    number_form,
    number_kind,
    divisors,
    text_form,
    bigrams,
    known_words,
    text_relations,
    places,
    rank,
    order,
    subsets,
)
"""All that a value and its decoy have in common."""


def _equal_places(items: Iterable[str]) -> tuple[int, ...]:
    seen: dict[str, int] = {}
    return tuple(seen.setdefault(each, len(seen)) for each in items)


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other


def _sequences(value: object) -> Iterator[Sequence[object]]:
    if isinstance(value, Mapping):
        yield list(value)
        yield list(value.values())
        for each in value.values():
            yield from _sequences(each)
    elif isinstance(value, Set):
        yield sorted(value, key=repr)
    elif isinstance(value, list | tuple):
        yield value
        for each in value:
            yield from _sequences(each)
