"""Expected values of tests, each beside its decoy: made by many kinds of functions, and read from real tests."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import statistics
import textwrap
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from verl_multiturn.verdicts.assertion_literals import decoys_of, expected_in
from verl_multiturn.verdicts.common_words import COMMON_WORDS
from verl_multiturn.verdicts.decoys import EXACT, Decoys, Tolerance
from verl_multiturn.verdicts.subject import Subject

Pair = tuple[object, object, Subject]
KINDS = ("whole number", "float", "approx", "text", "bytes", "list", "dictionary", "truth")
_NEAR = Tolerance(1e-6, 1e-12)
_MOST_OF_A_FILE = 12
_LARGEST_FILE = 60_000
_MOST_FILES = 700
_TREE = frozenset(
    f"def return value result parse total label format count add {' '.join(sorted(COMMON_WORDS)[::5])}".split()
)


def kind_of(value: object, tolerance: Tolerance = EXACT) -> str:
    """Return the kind of an expected value; an empty text for one that has none.

    Args:
        value: The value.
        tolerance: How near to it is enough.
    """
    if tolerance != EXACT:
        return "approx"
    kinds: Mapping[str, str] = {
        **{"bool": "truth", "int": "whole number", "float": "float", "str": "text", "bytes": "bytes"},
        **{"list": "list", "tuple": "list", "set": "list", "dict": "dictionary"},
    }
    return kinds.get(type(value).__name__, "")


def made_pairs(kind: str, count: int, seed: int) -> tuple[list[Pair], float]:
    """Return values that functions give, with their decoys, and the share of values that have none.

    Args:
        kind: One of `KINDS`.
        count: How many.
        seed: Of the draw.
    """
    return _first(_made(kind, random.Random(f"{kind} {seed}")), count, seed)


def read_pairs(count: int, seed: int, folders: Sequence[Path]) -> dict[str, tuple[list[Pair], float]]:
    """Return values that real tests expect, by kind, as `made_pairs`.

    Args:
        count: How many of each kind, as far as there are so many.
        seed: Of the draw.
        folders: Where the tests lie.
    """
    files = sorted(
        path for folder in folders for path in folder.rglob("test_*.py") if path.stat().st_size < _LARGEST_FILE
    )
    random.Random(seed).shuffle(files)
    draw = random.Random(seed)
    found: dict[str, list[Pair]] = {kind: [] for kind in KINDS}
    without = Counter[str]()
    for path in files[:_MOST_FILES]:
        expected = expected_in(path.read_text(encoding="utf-8", errors="replace"))
        if expected is None:
            continue
        counts: Counter[str] = Counter()

        def is_wanted(value: object, tolerance: Tolerance, counts: Counter[str] = counts) -> bool:
            kind = kind_of(value, tolerance)
            counts[kind] += 1
            return bool(kind) and counts[kind] <= _MOST_OF_A_FILE and len(found[kind]) < count

        for part in expected.parts:
            part.places[:] = [place for place in part.places if is_wanted(place.value, place.tolerance)]
        for part, some in zip(expected.parts, decoys_of(expected, _TREE), strict=True):
            for place, decoys in zip(part.places, some, strict=True):
                kind = kind_of(place.value, place.tolerance)
                if decoys.exist:
                    found[kind].append((place.value, decoys.one(draw), decoys.subject))
                else:
                    without[kind] += 1
        if all(len(some) >= count for some in found.values()):
            break
    return {kind: (some[:count], without[kind] / max(1, without[kind] + len(some))) for kind, some in found.items()}


def _first(values: Iterator[tuple[object, Subject, Tolerance]], count: int, seed: int) -> tuple[list[Pair], float]:
    draw = random.Random(seed)
    pairs: list[Pair] = []
    without = 0
    for value, subject, tolerance in values:
        decoys = Decoys(value, subject, tolerance)
        if decoys.exist:
            pairs.append((value, decoys.one(draw), subject))
        else:
            without += 1
        if len(pairs) == count or without > 40 * count:
            break
    return pairs, without / max(1, without + len(pairs))


def _made(kind: str, draw: random.Random) -> Iterator[tuple[object, Subject, Tolerance]]:
    tolerance = _NEAR if kind == "approx" else EXACT
    makers = [*_MAKERS["float" if kind == "approx" else kind]]
    beside: list[str] = []  # values in other tests of the file
    while True:
        arguments, value = draw.choice(makers)(draw)
        if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
            continue
        known = tuple(arguments)
        yield value, Subject(known, frozenset(draw.sample(beside, min(len(beside), 12))), _TREE), tolerance
        beside = [*beside[-60:], repr(value), *(repr(each) for each in known)]


def _numbers(draw: random.Random, least: int = 2, most: int = 7) -> list[int]:
    return [
        draw.choice([draw.randint(0, 9), draw.randint(0, 30), draw.randint(-20, 200)])
        for _ in range(draw.randint(least, most))
    ]


def _floats(draw: random.Random) -> list[float]:
    return [round(draw.uniform(0, 20), draw.choice([1, 1, 2, 3])) for _ in range(draw.randint(2, 5))]


def _word(draw: random.Random) -> str:
    return draw.choice(_ALL_WORDS)


def _words(draw: random.Random) -> list[str]:
    return [_word(draw) for _ in range(draw.randint(2, 5))]


_ALL_WORDS = sorted(word for word in COMMON_WORDS if len(word) > 2)


def _word_of(number: int) -> str:
    return _ALL_WORDS[number * 37 % len(_ALL_WORDS)]


def _word_for(numbers: Sequence[int], place: int) -> str:
    """Return a word that all of the numbers choose: the few words of small ones begin with early letters."""
    return _ALL_WORDS[zlib.crc32(repr((numbers, place)).encode()) % len(_ALL_WORDS)]


_Maker = Callable[[random.Random], tuple[Sequence[object], object]]


def _of(make: Callable[[random.Random], object], *functions: Callable[..., object]) -> list[_Maker]:
    def maker(function: Callable[..., object]) -> _Maker:
        def made(draw: random.Random) -> tuple[Sequence[object], object]:
            argument = make(draw)
            return [argument], function(argument)

        return made

    return [maker(function) for function in functions]


def _of_two(make: Callable[[random.Random], object], *functions: Callable[..., object]) -> list[_Maker]:
    def maker(function: Callable[..., object]) -> _Maker:
        def made(draw: random.Random) -> tuple[Sequence[object], object]:
            a, b = make(draw), make(draw)
            return [a, b], function(a, b)

        return made

    return [maker(function) for function in functions]


def _one(draw: random.Random) -> int:
    return draw.choice([draw.randint(1, 9), draw.randint(1, 40), draw.randint(10, 400)])


def _many(draw: random.Random) -> int:
    """Return one of so many numbers that a few words do not make most of the values."""
    return draw.randint(1, 3000)


def _decimal(draw: random.Random) -> float:
    return round(draw.uniform(0.1, 30), draw.choice([1, 2, 3]))


def _phrase(draw: random.Random) -> str:
    return draw.choice([" ", " ", "_", "-", ", "]).join(_words(draw))


def _counts(text: str) -> dict[str, int]:
    return dict(Counter(text.replace(" ", "")))


_MAKERS: Mapping[str, Sequence[_Maker]] = {
    "whole number": [
        *_of(
            _numbers,
            sum,
            len,
            max,
            min,
            lambda x: max(x) - min(x),
            lambda x: len(set(x)),
            math.prod,
            lambda x: x[-1],
            lambda x: sum(each % 2 for each in x),
            lambda x: sum(a * b for a, b in pairwise(x)),
            lambda x: sum(each * each for each in x),
            lambda x: sorted(x)[len(x) // 2],
            lambda x: x.index(max(x)),
            lambda x: sum(x[::2]),
            lambda x: sum(abs(each) for each in x),
        ),
        *_of_two(
            _one,
            lambda a, b: a + b,
            lambda a, b: a * b,
            lambda a, b: a - b,
            lambda a, b: a // b,
            math.gcd,
            math.lcm,
            lambda a, b: a % b,
            lambda a, b: a * 10 + b,
            lambda a, b: a**2 + b**2,
            lambda a, b: 3 * a + b,
        ),
        *_of(
            _one,
            lambda a: a * a,
            lambda a: 2 * a + 1,
            lambda a: a.bit_length(),
            lambda a: sum(map(int, str(a))),
            lambda a: int(str(a)[::-1]),
            lambda a: a * (a + 1) // 2,
            lambda a: len(str(a)),
            lambda a: math.isqrt(a),
            lambda a: 60 * a,
            lambda a: a % 7,
            lambda a: a ^ 5,
            lambda a: sum(a % n == 0 for n in range(1, a + 1)),
        ),
        *_of(
            _phrase,
            len,
            lambda x: x.count("e"),
            lambda x: len(re.split(r"\W", x)),
            lambda x: sum(map(ord, x)) % 97,
            lambda x: x.find("a"),
            lambda x: max(map(len, x.split(" "))),
        ),
    ],
    "float": [
        *_of(
            _floats,
            lambda x: round(sum(x), 3),
            statistics.fmean,
            statistics.median,
            max,
            statistics.pstdev,
            lambda x: round(statistics.fmean(x), 2),
            lambda x: round(x[0] * x[1], 2),
            lambda x: x[0] / (1 + x[1]),
            lambda x: math.hypot(*x),
            lambda x: round(statistics.pstdev(x), 3),
            lambda x: round(max(x) - min(x), 2),
            lambda x: min(x) / (1 + max(x)),
        ),
        *_of(
            _one,
            math.sqrt,
            math.log,
            lambda a: a / 7,
            lambda a: a / 100,
            lambda a: a * math.pi,
            math.sin,
            lambda a: round(a * 1.19, 2),
            lambda a: round(a * 9 / 5 + 32, 1),
            lambda a: a * 0.3,
            lambda a: 1 / (a + 2),
            lambda a: float(3 * a),
            lambda a: round(math.exp(-a / 9), 4),
            lambda a: a / 1000,
            lambda a: round(a**1.5, 2),
        ),
        *_of_two(
            _decimal,
            lambda a, b: round(a + b, 3),
            lambda a, b: round(a * b, 2),
            lambda a, b: round(a / b, 3),
            lambda a, b: a * b,
            lambda a, b: round(100 * a / (a + b), 1),
            lambda a, b: abs(a - b),
        ),
    ],
    "text": [
        *_of(
            _phrase,
            str.upper,
            str.title,
            lambda x: x[::-1],
            lambda x: x.replace("e", "3"),
            lambda x: f"<{x}>",
            lambda x: f"no such {_word_of(len(x))}: {x}",
            lambda x: x.split(" ")[0],
            lambda x: "-".join(x.split(" ")),
            lambda x: x[:5],
            lambda x: f"{x}!",
            lambda x: " ".join(sorted(x.split(" "))),
            lambda x: x.center(30, "*"),
            lambda x: x + ".txt",
            lambda x: textwrap.shorten(x, 12),
            lambda x: re.sub("[aeiou]", "", x),
            lambda x: x.swapcase(),
            lambda x: repr(x),
            lambda x: "".join(each[0] for each in x.split(" ") if each),
            lambda x: f"{x.title()}!",
        ),
        *_of(
            _one,
            hex,
            bin,
            str,
            lambda a: f"{a:05d}",
            lambda a: f"{a}%",
            lambda a: f"${a * 19}.00",
            lambda a: chr(96 + a % 26 + 1),
            lambda a: f"{a * 37 // 60}:{a * 37 % 60:02d}",
            lambda a: f"{a} of {a * 3}",
            lambda a: f"v{a}.{a % 7}.{a % 3}",
            lambda a: f"2{a:03d}-0{a % 9 + 1}-1{a % 10}",
        ),
        *_of(
            _many,
            lambda a: _word_of(a * 3),
            lambda a: f"{_word_of(a)} {_word_of(a * 3)}",
            lambda a: f"{_word_of(a * 2)}: {_word_of(a)} is not {_word_of(a * 3)}",
            lambda a: f"{_word_of(a)}_{a % 7}",
        ),
        *_of(
            _numbers,
            str,
            lambda x: ",".join(map(str, x)),
            lambda x: f"{sum(x)} in {len(x)}",
            lambda x: json.dumps({"sum": sum(x)}),
        ),
    ],
    "bytes": [
        *_of(
            _phrase,
            str.encode,
            lambda x: x.upper().encode(),
            lambda x: base64.b64encode(x.encode())[:12],
            lambda x: x[:4].encode(),
            lambda x: f"{len(x)}:{x}".encode(),
            lambda x: x.replace("a", "b").encode(),
            lambda x: x[::-1].encode(),
        ),
        *_of(
            _one,
            lambda a: hex(a * 991).encode(),
            lambda a: str(a * 17).encode(),
        ),
        *_of(
            _many,
            lambda a: _word_of(a * 3).encode(),
            lambda a: f"{_word_of(a)}={a}".encode(),
            lambda a: f"{_word_of(a + 5).upper()} /{_word_of(a * 2)}/{a}".encode(),
        ),
    ],
    "list": [
        *_of(
            _numbers,
            sorted,
            lambda x: sorted(set(x)),
            lambda x: x[::-1],
            lambda x: [each for each in x if each > 9],
            lambda x: [each * 2 for each in x],
            lambda x: [each % 5 for each in x],
            lambda x: x[:2],
            lambda x: (min(x), max(x)),
            lambda x: [each * each for each in x],
            lambda x: [sum(x[: n + 1]) for n in range(len(x))],
            lambda x: list(enumerate(x)),
            lambda x: [x[n : n + 2] for n in range(0, len(x), 2)],
            lambda x: (len(x), sum(x)),
            lambda x: [n for n, e in enumerate(x) if e > 9],
            lambda x: {each % 7 for each in x},
            lambda x: [each + 1 for each in x],
            lambda x: [str(each) for each in x],
        ),
        *_of(
            _phrase,
            lambda x: x.split(" "),
            lambda x: sorted(x.split(" ")),
            lambda x: [len(each) for each in x.split(" ")],
            lambda x: list(x[:4]),
            lambda x: [each.upper() for each in x.split(" ")],
            lambda x: [ord(each) - 96 for each in x[:4]],
        ),
        *_of(
            _one,
            lambda a: [a, a * 3 % 17, a * 7 % 23],
            lambda a: list(divmod(a, 7)),
            lambda a: [int(each) for each in str(a * 37)],
            lambda a: [n for n in range(1, a + 1) if a % n == 0][:9],
            lambda a: (a * 5 % 31, a * 11 % 41),
            lambda a: [[a % 7, a % 5], [a % 3, a % 11]],
            lambda a: [a * 0.5, a * 0.7],
        ),
        *_of(_many, lambda a: [_word_of(a), _word_of(a * 3)]),
    ],
    "dictionary": [
        *_of(
            _phrase,
            _counts,
            lambda x: {each: len(each) for each in x.split(" ")},
            lambda x: {each: each[::-1] for each in x.split(" ")},
            lambda x: {each[0]: each for each in x.split(" ") if each},
        ),
        *_of(
            _numbers,
            lambda x: dict(enumerate(x)),
            lambda x: {each: each * each for each in x[:3]},
            lambda x: {_word_for(x, 1): sum(x), _word_for(x, 2): max(x)},
            lambda x: {_word_for(x, 1): round(statistics.fmean(x), 2), _word_for(x, 2): len(x)},
            lambda x: {_word_for(x, 1): [e for e in x if e % 2 == 0], _word_for(x, 2): [e for e in x if e % 2]},
        ),
        *_of(
            _many,
            lambda a: {_word_of(a): a * 7 % 101, _word_of(a * 2): a * 13 % 97},
            lambda a: {_word_of(a * 3): _word_of(a * 5), _word_of(a * 7): _word_of(a * 11)},
            lambda a: {_word_of(a * 5): [a % 5, a * 3 % 17], _word_of(a * 11): _word_of(a)},
            lambda a: {_word_of(a * 13): a % 2 == 0, _word_of(a): 100 + a},
        ),
    ],
    "truth": [
        *_of(_one, lambda a: a % 2 == 0, lambda a: a % 4 > 1),
        *_of(_phrase, lambda x: x < "m", lambda x: len(x) % 2 == 1),
    ],
}
