"""Decoys: other values that could as well be the expected ones.

A value is proposed by a rule that leads back as easily, and taken if all of its `features` are those of the true one.
Both are the same from either side, so nothing shows whether a value or its decoy is true. Where nothing else has the
same features, such as `True`, `0`, or the sorted items of an argument, there is no decoy.
"""

from __future__ import annotations

import ast
import contextlib
import math
import random
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from verl_multiturn.verdicts.common_words import COMMON_WORDS
from verl_multiturn.verdicts.features import CLOSING, FEATURES, GROUPS, INVERTED, OPENING, features, groups_of
from verl_multiturn.verdicts.subject import TOKENS, Subject, as_text, flat

_STEPS = 30
_MOST_WALKS = 6
_LATER_WALKS = 12
_MOST_SHARE = 0.58
_MOST_CHARACTERS = 2000
_MOST_VALUES = 60
_COMPUTED = 14
"""Characters of a float from which on it was computed."""
_OFTEN = (24, 25, 14, 9, 6, 5, 4, 3, 3, 3)
"""How often the numbers from 0 to 9 are expected in tests. A decoy that is rarer than the true one shows it."""
_LETTERS = Counter(letter for word in COMMON_WORDS for letter in word) + Counter("abcdefghijklmnopqrstuvwxyz")
"""How often letters are in words, likewise."""
_NAMES = {"a": 8, "b": 6, "c": 5, "d": 3, "e": 2, "f": 2, "x": 4, "y": 2, "(": 2, ")": 2, "[": 2, "]": 2}
"""How often single letters and brackets are; others are 1."""
_DECREASE, _DECREASE_OF_FLOATS = 0.8, 0.4
"""How fast larger numbers become rarer, as a power of their digits."""


@dataclass(frozen=True)
class Tolerance:
    """How far from an expected number another one still equals it.

    Attributes:
        relative: A share of the number.
        absolute: A distance.
    """

    relative: float = 0.0
    absolute: float = 0.0


EXACT = Tolerance()


class Decoys:
    """Decoys of one expected value.

    They are found by some steps from value to value, each as probable as the one back (Metropolis and Hastings), among
    those with the same features. So the pair of the first and the last one looks the same from either side.

    Args:
        value: The value.
        subject: Values that it may be compared with.
        tolerance: How far from it another one still equals it.

    Attributes:
        subject: Values that it may be compared with.
        exist: Whether there are any. A decoy has decoys, too, so that is not a clue.
    """

    def __init__(self, value: object, subject: Subject, tolerance: Tolerance = EXACT) -> None:
        self._value = value
        self.subject = subject
        self._tolerance = tolerance
        self._features: tuple[object, ...] = ()
        self._known: object = value
        self._chances: dict[object, float] = {}
        self.exist = False
        if len(repr(value)) > _MOST_CHARACTERS or sum(1 for _ in flat(value)) > _MOST_VALUES:
            return
        self._features = features(value, subject)
        if _is_small(value):
            self._chances = self._of_small()
            self.exist = bool(self._chances)
            return
        draw = random.Random(0)
        for _ in range(_MOST_WALKS):
            self._known = self._walk(draw)
            if self._differs(self._known):
                self.exist = True
                break

    def one(self, draw: random.Random) -> object:
        """Return a decoy.

        Args:
            draw: Where all that is random comes from.
        """
        if self._chances:
            return draw.choices(list(self._chances), list(self._chances.values()))[0]
        for _ in range(_LATER_WALKS):
            other = self._walk(draw)
            if self._differs(other) and Decoys(other, self.subject, self._tolerance).exist:
                return other
        return self._known

    def _walk(self, draw: random.Random) -> object:
        at = self._value
        for _ in range(_STEPS):
            other = _propose(at, self.subject, draw)
            if other == at or ((ratio := _weight(other) - _weight(at)) < 0 and draw.random() > math.exp(ratio)):
                continue
            # One feature after the other, the cheap ones first: most proposals fail at the first.
            if all(feature(other, self.subject) == own for feature, own in zip(FEATURES, self._features, strict=True)):
                at = other
        return at

    def _of_small(self) -> dict[object, float]:
        """Return the chances of the numbers of one digit.

        There are so few of them, and some are expected so often, that a decoy would be the rarer one. So with shares p
        they are drawn by a, for which a (1 - a) is as p. One that has far more than a half has no decoy, and is none.
        """
        kind, sign = type(self._value), -1 if _is_negative(self._value) else 1
        others = [kind(sign * each) for each in range(10) if each or sign > 0]  # type: ignore[call-arg]
        others = [each for each in others if features(each, self.subject) == self._features]
        shares = {each: _OFTEN[abs(int(repr(each).removesuffix(".0")))] for each in others}
        while shares and max(shares.values()) > _MOST_SHARE * sum(shares.values()):
            del shares[max(shares, key=lambda each: shares[each])]
        if self._value not in shares:
            return {}
        total = sum(shares.values())
        chances = {each: share / total for each, share in shares.items()}
        for _ in range(60):
            chances = {each: shares[each] / total / (1 - min(chance, 0.95)) for each, chance in chances.items()}
            whole = sum(chances.values())
            chances = {each: chance / whole for each, chance in chances.items()}
        return {each: chance for each, chance in chances.items() if self._differs(each)}

    def _differs(self, other: object) -> bool:
        return _differs(self._value, other, self._tolerance)


def _is_small(value: object) -> bool:
    return re.fullmatch(r"-?\d(\.0)?", repr(value)) is not None


def _is_negative(value: object) -> bool:
    return repr(value).startswith("-")


def _weight(value: object) -> float:
    """Return the logarithm of how often a value is expected in tests, beside others with the same features."""
    return sum(_weight_of(each) for each in flat(value))


@lru_cache(maxsize=65536)
def _weight_of(value: object) -> float:
    if isinstance(value, str | bytes):
        return sum(_weight_of_token(token) for token in TOKENS.findall(as_text(value)))
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        return 0.0
    if abs(value) < 10 and value == int(value):
        return math.log(_OFTEN[abs(int(value))])
    digits = repr(abs(value)).partition("e")[0].replace(".", "").strip("0")
    if len(digits) == 1:
        return math.log(_OFTEN[int(digits)])
    return -(_DECREASE_OF_FLOATS if isinstance(value, float) else _DECREASE) * math.log(int(digits[:4]))


def _weight_of_token(token: str) -> float:
    if token.isascii() and token.isdecimal():
        return _weight_of(int(token)) if len(token) < 7 else 0.0
    if len(token) == 1:
        return math.log(_NAMES.get(token.lower(), 1))
    if token.isascii() and token.isalpha() and token.lower() not in COMMON_WORDS:
        return sum(math.log(_LETTERS[each]) for each in token.lower())
    return 0.0


def _differs(value: object, other: object, tolerance: Tolerance) -> bool:
    if value == other or repr(value) == repr(other):
        return False
    if tolerance == EXACT:
        return True
    pairs = zip(flat(value), flat(other), strict=False)
    numbers = [(a, b) for a, b in pairs if isinstance(a, int | float) and isinstance(b, int | float)]
    # Ten times as far: the comparison may add to the one side, and round.
    return any(abs(a - b) > 10 * max(tolerance.relative * max(abs(a), abs(b)), tolerance.absolute) for a, b in numbers)


def _propose(value: object, subject: Subject, draw: random.Random) -> object:
    """Return another value, by a rule that leads back from it with the same probability."""
    if isinstance(value, bool):
        return draw.random() < 0.5
    if isinstance(value, int | float | str | bytes) and draw.random() < 0.3:
        pool = _beside(subject, type(value).__name__)
        if pool:
            return draw.choice(pool)
    if isinstance(value, int):
        return _whole(value, draw)
    if isinstance(value, float):
        return _decimal(value, draw)
    if isinstance(value, complex):
        return complex(_decimal(value.real, draw), _decimal(value.imag, draw))
    if isinstance(value, str):
        return _text(value, subject, draw)
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeEncodeError):
            return _text(as_text(value), subject, draw).encode("latin-1")
        return value
    if isinstance(value, list | tuple):
        return type(value)(_items(value, subject, draw))
    if isinstance(value, Set):
        return type(value)(_items(sorted(value, key=repr), subject, draw))  # type: ignore[call-arg]
    if isinstance(value, Mapping):
        return _dictionary(value, subject, draw)
    return value


def _whole(value: int, draw: random.Random) -> int:
    digits = str(abs(value))
    kept = digits.rstrip("0") or "0"
    other = draw.randint(0, 9) if len(digits) == 1 else _significant(kept, draw)
    size = int(f"{other}{digits[len(kept) :]}")
    return -size if value < 0 else size


def _significant(digits: str, draw: random.Random) -> int:
    """Return other digits of the same number."""
    if len(digits) > 6:
        return int("".join(draw.choice("0123456789") if draw.random() < 0.5 else each for each in digits))
    kept = draw.randint(0, len(digits) - 1)  # the last digits may stay
    changed = len(digits) - kept
    other = draw.randint(int("1" + "0" * (changed - 1)), int("9" * changed))
    return int(f"{other}{digits[changed:]}")


def _decimal(value: float, draw: random.Random) -> float:
    if not math.isfinite(value):
        return value
    names = [name for name, (to, _) in INVERTED.items() if _whole_of(to, value) is not None]
    if names and draw.random() < 0.7 and len(repr(value)) > _COMPUTED:
        to, back = INVERTED[draw.choice(names)]
        with contextlib.suppress(ValueError, OverflowError):
            return back((_whole_of(to, value) or 0) + draw.choice([-1, 1]) * draw.randint(1, 9))
    text, mark, exponent = repr(abs(value)).partition("e")
    digits = text.replace(".0", "") if text.endswith(".0") else text.replace(".", "").lstrip("0")
    kept = digits.rstrip("0") or digits
    if len(kept) == 1:
        other = str(draw.randint(not text.endswith(".0") or len(digits) > 1, 9))
    else:
        other = str(_significant(kept, draw)).zfill(len(kept))
    other += "0" * (len(digits) - len(kept))
    decimals = 0 if text.endswith(".0") else len(text.partition(".")[2])
    other = other.zfill(decimals + 1)
    whole, after = (other[:-decimals], other[-decimals:]) if decimals else (other, "0")
    return math.copysign(float(f"{whole}.{after}{mark}{exponent}"), value)


def _whole_of(to: object, value: float) -> int | None:
    try:
        found = to(value)  # type: ignore[operator]
    except (OverflowError, ValueError):
        return None
    return round(found) if 0.5 < abs(found) < 10**6 and abs(found - round(found)) < 1e-9 * max(1, abs(found)) else None


def _text(value: str, subject: Subject, draw: random.Random) -> str:
    tokens = TOKENS.findall(value)
    solid = [place for place, token in enumerate(tokens) if token.isalnum() or token in OPENING + CLOSING]
    if not solid:
        return value
    if len(solid) > 1 and draw.random() < 0.15:
        a, b = draw.sample(solid, 2)
        tokens[a], tokens[b] = tokens[b], tokens[a]
        return "".join(tokens)
    instead: dict[str, str] = {}  # the same word gets the same other one
    for place in draw.sample(solid, draw.randint(1, min(4, len(solid)))):
        token = tokens[place]
        instead.setdefault(token, _token(token, subject, draw))
    for sign, other in list(instead.items()):  # and a bracket its own other one
        for some, partners in ((OPENING, CLOSING), (CLOSING, OPENING)):
            if sign in some:
                instead[partners[some.index(sign)]] = partners[some.index(other)]
    return "".join(instead.get(token, token) for token in tokens)


def _token(token: str, subject: Subject, draw: random.Random) -> str:
    if token.isdigit():
        return "".join(each if draw.random() < 0.4 else draw.choice("0123456789") for each in token)
    if token.isascii() and token.isalpha():
        pool = _of_groups().get((len(token), groups_of(token.lower()))) or _vocabulary(
            subject.words, subject.elsewhere, subject.argument_words
        ).get(len(token), ())
        if len(token) > 1 and pool and draw.random() < 0.8:
            other = draw.choice(pool)
        else:
            other = "".join(each if draw.random() < 0.3 else _letter(each, draw) for each in token.lower())
        return "".join(new.upper() if old.isupper() else new for old, new in zip(token, other, strict=True))
    return draw.choice(next((kind for kind in (OPENING, CLOSING) if token in kind), token))


def _letter(letter: str, draw: random.Random) -> str:
    return draw.choice("aeiou" if letter in "aeiou" else "bcdfghjklmnpqrstvwxyz")


@lru_cache(maxsize=1)
def _of_groups() -> Mapping[tuple[int, object], Sequence[str]]:
    found: dict[tuple[int, object], list[str]] = {}
    for word in sorted(frozenset().union(*GROUPS)):
        found.setdefault((len(word), groups_of(word)), []).append(word)
    return found


@lru_cache(maxsize=64)
def _vocabulary(*some: Collection[str]) -> Mapping[int, Sequence[str]]:
    words = COMMON_WORDS.union(*some)
    found: dict[int, list[str]] = {}
    for word in sorted(words):
        if re.fullmatch("[a-z]+", word):
            found.setdefault(len(word), []).append(word)
    return found


@lru_cache(maxsize=256)
def _beside(subject: Subject, kind: str) -> Sequence[object]:
    """Return the values of a type that are near, or that a short calculation gives."""
    found: dict[str, object] = {repr(each): each for each in subject.items if type(each).__name__ == kind}
    if kind in ("int", "float"):
        for each in subject.results:
            value = int(each) if kind == "int" and each == int(each) else each
            if type(value).__name__ == kind:
                found[repr(value)] = value
    for shown in subject.elsewhere:
        if shown[:1] in "'\"-0123456789b" and len(shown) < 200:
            with contextlib.suppress(SyntaxError, ValueError):
                value = ast.literal_eval(shown)
                if type(value).__name__ == kind:
                    found[shown] = value
    return [found[shown] for shown in sorted(found)]


def _items(values: Sequence[object], subject: Subject, draw: random.Random) -> list[object]:
    items, chance = list(values), draw.random()
    if not items:
        return items
    if chance < 0.2:
        draw.shuffle(items)
        return items
    if chance < 0.4:  # other items of an argument, in its order
        lists = [each for each in subject.lists if len(each) >= len(items)]
        if lists and not any(isinstance(each, list | tuple | Set | Mapping) for each in items):
            some = draw.choice(lists)
            places = draw.sample(range(len(some)), len(items))
            return [some[place] for place in (sorted(places) if draw.random() < 0.8 else places)]
    if chance < 0.6 and all(type(each) is int for each in items):  # all of them by the same step
        step = draw.choice([-1, 1]) * draw.randint(1, 9)
        return [each + step for each in items]  # type: ignore[operator]
    changed = draw.sample(range(len(items)), draw.randint(1, len(items)))
    same: dict[str, object] = {}
    for place in changed:
        shown = repr(items[place])
        if shown not in same:
            same[shown] = _propose(items[place], subject, draw)
        items[place] = same[shown]
    return items


def _dictionary(value: Mapping[object, object], subject: Subject, draw: random.Random) -> dict[object, object]:
    keys, values = list(value), list(value.values())
    chance = draw.random()
    if chance < 0.7:
        values = _items(values, subject, draw)
    if chance > 0.5:
        keys = _items(keys, subject, draw)
    return dict(zip(keys, values, strict=True))
