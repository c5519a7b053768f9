"""Rules by which a program may decide which of two expected values is the true one.

A rule gives a value, seen beside the call's arguments, a number. Its user takes the value with the larger one for true,
or the one with the smaller one.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import pairwise

from verl_multiturn.verdicts.common_words import COMMON_WORDS
from verl_multiturn.verdicts.subject import TOKENS, Subject, as_text, flat

Rule = Callable[[object, Subject], float]


def numbers(value: object) -> list[float]:
    """Return the finite numbers of a value."""
    return [float(each) for each in flat(value) if isinstance(each, int | float) and abs(each) < 1e300]


def text(value: object) -> str:
    """Return the texts of a value."""
    return " ".join(as_text(each) for each in flat(value) if isinstance(each, str | bytes))


def items(value: object) -> list[str]:
    """Return the parts of a list, as they are shown."""
    if isinstance(value, Mapping):
        return [repr(each) for each in value.values()]
    return [repr(each) for each in value] if isinstance(value, list | tuple | Set) else []


def known(subject: Subject) -> list[float]:
    """Return the numbers of the arguments."""
    return numbers(list(subject.items))


def _sorted(value: object) -> float:
    for some in (numbers(value), items(value)):
        if len(some) > 1:
            return float(some == sorted(some)) - float(some == sorted(some, reverse=True))
    return 0.0


def _some(function: Callable[[list[float]], float]) -> Rule:
    def rule(value: object, _: Subject) -> float:
        found = numbers(value)
        try:
            return function(found) if found else 0.0
        except (ValueError, ArithmeticError):
            return 0.0

    return rule


def _near(function: Callable[[list[float]], float]) -> Rule:
    """Return a rule that measures how near a value is to results from the arguments."""

    def rule(value: object, subject: Subject) -> float:
        own, given = numbers(value), known(subject)
        try:
            return -abs(own[0] - function(given)) if own and given else 0.0
        except (ValueError, ArithmeticError):
            return 0.0

    return rule


def _equals(function: Callable[[list[float]], float]) -> Rule:
    near = _near(function)
    return lambda value, subject: float(bool(known(subject)) and bool(numbers(value)) and near(value, subject) > -1e-9)


def _of_text(function: Callable[[str], float]) -> Rule:
    return lambda value, _: function(text(value))


def _beside(function: Callable[[str, str], float]) -> Rule:
    return lambda value, subject: sum(function(text(value).lower(), each) for each in subject.texts)


def _entropy(shown: str) -> float:
    return -sum(n / len(shown) * math.log(n / len(shown)) for n in Counter(shown).values()) if shown else 0.0


_BIGRAMS = Counter(a + b for word in COMMON_WORDS for a, b in pairwise(word))


def _bigrams(shown: str) -> float:
    own = [a + b for a, b in pairwise(shown.lower())]
    return statistics.fmean(math.log(1 + _BIGRAMS[each]) for each in own) if own else 0.0


def _is_prime(size: float) -> bool:
    return size == int(size) and 1 < size < 10**7 and all(size % each for each in range(2, math.isqrt(int(size)) + 1))


def _zeros(value: object) -> int:
    return sum(repr(each).replace(".0", "").endswith("0") for each in flat(value) if isinstance(each, int | float))


def _overlap(value: object, subject: Subject) -> float:
    return float(sum(repr(each) in subject.shown for each in flat(value)))


def _counted(value: object, subject: Subject) -> float:
    own = Counter(repr(each) for each in flat(value))
    return float(any(own == Counter(map(repr, some)) for some in subject.lists))


def _old_float(value: object, _: Subject) -> float:
    """Return whether the value could be `x + k (1 + |x|)` of a short x: as decoys once were."""
    own = numbers(value)
    if not own:
        return 0.0
    found = 0
    for step in range(-5, 6):
        if step:
            for sign in (-1, 1):
                other = (own[0] - step) / (1 + sign * step) if 1 + sign * step else math.inf
                found += len(repr(round(other, 12))) < len(repr(own[0]))
    return float(found)


_WEIGHT = {word: len(word) for word in COMMON_WORDS}
RULES: Mapping[str, Rule] = {
    # Sizes of numbers.
    "larger": _some(lambda some: some[0]),
    "larger_size": _some(lambda some: abs(some[0])),
    "larger_sum": _some(sum),
    "larger_last": _some(lambda some: some[-1]),
    "larger_least": _some(min),
    "larger_most": _some(max),
    "larger_spread": _some(lambda some: max(some) - min(some)),
    "larger_product": _some(lambda some: sum(math.log(1 + abs(each)) for each in some)),
    # Digits.
    "last_digit": _some(lambda some: abs(some[0]) % 10),
    "first_digit": _some(lambda some: float(repr(abs(some[0])).lstrip("0.")[:1] or 0)),
    "odd": _some(lambda some: sum(each % 2 == 1 for each in some)),
    "by_three": _some(lambda some: sum(each % 3 == 0 for each in some)),
    "by_five": _some(lambda some: sum(each % 5 == 0 for each in some)),
    "by_ten": _some(lambda some: sum(each % 10 == 0 for each in some)),
    "round": lambda value, _: float(_zeros(value)),
    "half": _some(lambda some: sum(each * 2 % 1 == 0 for each in some)),
    "quarter": _some(lambda some: sum(each * 8 % 1 == 0 for each in some)),
    "whole": _some(lambda some: sum(each % 1 == 0 for each in some)),
    "sum_of_digits": lambda value, _: float(
        sum(int(each) for each in repr(value) if each.isdigit() and each.isascii())
    ),
    "repeated_digits": lambda value, _: float(len(repr(value)) - len(set(repr(value)))),
    "positive": _some(lambda some: sum(each > 0 for each in some)),
    # Kinds of numbers.
    "prime": _some(lambda some: sum(_is_prime(abs(each)) for each in some)),
    "square": _some(lambda some: sum(abs(each) ** 0.5 % 1 == 0 for each in some)),
    "power_of_two": _some(lambda some: sum(each > 0 and math.log2(each) % 1 == 0 for each in some)),
    "square_is_whole": _some(lambda some: -min(abs(each * each - round(each * each)) for each in some)),
    "exp_is_whole": _some(lambda some: -min(abs(math.exp(each) - round(math.exp(each))) for each in some)),
    "ratio_is_short": _some(lambda some: -min(abs(some[0] * n - round(some[0] * n)) for n in range(1, 20))),
    "near_pi": _some(lambda some: -abs(some[0] / math.pi - round(some[0] / math.pi))),
    "old_float": _old_float,
    # Results from the arguments.
    "equals_sum": _equals(sum),
    "equals_length": _equals(lambda some: len(some)),
    "equals_most": _equals(max),
    "equals_least": _equals(min),
    "equals_product": _equals(math.prod),
    "equals_mean": _equals(statistics.fmean),
    "equals_median": _equals(statistics.median),
    "equals_difference": _equals(lambda some: some[0] - some[-1]),
    "equals_quotient": _equals(lambda some: some[0] / some[-1]),
    "equals_square": _equals(lambda some: some[0] ** 2),
    "equals_double": _equals(lambda some: 2 * some[0]),
    "equals_next": _equals(lambda some: some[0] + 1),
    "equals_length_of_text": lambda value, subject: float(value in [len(each) for each in subject.texts]),
    "equals_length_of_list": lambda value, subject: float(value in [len(each) for each in subject.lists]),
    "near_sum": _near(sum),
    "near_mean": _near(statistics.fmean),
    "near_most": _near(max),
    "near_product": _near(math.prod),
    "divides": lambda value, subject: float(
        sum(own % each == 0 for own in numbers(value)[:1] for each in known(subject) if each)
    ),
    "a_result": lambda value, subject: float(sum(each in subject.results for each in numbers(value))),
    "an_argument": _overlap,
    "same_items": _counted,
    "same_sum": lambda value, subject: float(
        any(abs(sum(numbers(value)) - sum(numbers(each))) < 1e-9 for each in subject.lists)
    ),
    "part_of_an_argument": lambda value, subject: float(
        any(not Counter(map(repr, flat(value))) - Counter(map(repr, each)) for each in subject.lists)
    ),
    # Lists.
    "sorted": lambda value, _: _sorted(value),
    "unique": lambda value, _: float(len(set(items(value))) - len(items(value))),
    "even_steps": _some(lambda some: -len({round(b - a, 9) for a, b in pairwise(some)})),
    "steps": _some(lambda some: -sum(abs(b - a) for a, b in pairwise(some))),
    "palindrome": lambda value, _: float(items(value) == items(value)[::-1] and text(value) == text(value)[::-1]),
    "sum_is_round": _some(lambda some: float(sum(some) % 10 == 0)),
    "sum_is_one": _some(lambda some: float(abs(sum(some) - 1) < 1e-9)),
    "same_parity": _some(lambda some: float(len({each % 2 for each in some}) == 1)),
    # Texts.
    "longer": lambda value, _: float(len(repr(value))),
    "english_words": _of_text(lambda own: sum(_WEIGHT.get(each.lower(), 0) for each in TOKENS.findall(own))),
    "bigrams": _of_text(_bigrams),
    "vowels": _of_text(lambda own: sum(each in "aeiou" for each in own.lower())),
    "capitals": _of_text(lambda own: sum(map(str.isupper, own))),
    "digits": _of_text(lambda own: sum(map(str.isdigit, own))),
    "spaces": _of_text(lambda own: own.count(" ")),
    "ends_as_the_old": _of_text(lambda own: -float(own[-1:] in "aeinost")),
    "last_letter": _of_text(lambda own: float(ord(own[-1])) if own else 0.0),
    "first_letter": _of_text(lambda own: float(ord(own[0])) if own else 0.0),
    "early_letters": _of_text(lambda own: -sum(map(ord, own)) / (len(own) or 1)),
    "entropy": _of_text(_entropy),
    "sorted_letters": _of_text(lambda own: float("".join(sorted(own)) == own)),
    "dots": _of_text(lambda own: own.count(".")),
    "commas": _of_text(lambda own: own.count(",")),
    "colons": _of_text(lambda own: own.count(":")),
    "dashes": _of_text(lambda own: own.count("-")),
    "underscores": _of_text(lambda own: own.count("_")),
    "slashes": _of_text(lambda own: own.count("/")),
    "round_brackets": _of_text(lambda own: own.count("(") + own.count(")")),
    "brackets_match": _of_text(lambda own: -sum(abs(own.count(a) - own.count(b)) for a, b in ("()", "[]", "{}", "<>"))),
    "quotes_match": _of_text(lambda own: -(own.count("'") % 2) - own.count('"') % 2),
    "one_separator": _of_text(lambda own: -float(len({each for each in own if not each.isalnum()}))),
    "letter_of_argument": _beside(lambda own, given: sum(each in given for each in own)),
    "in_argument": _beside(lambda own, given: float(own in given or given in own)),
    "starts_as_argument": _beside(lambda own, given: float(own[:1] == given[:1])),
    "ends_as_argument": _beside(lambda own, given: float(own[-1:] == given[-1:])),
    "reversed_argument": _beside(lambda own, given: float(own == given[::-1])),
    "same_letters": _beside(lambda own, given: float(sorted(own) == sorted(given))),
    "words_of_argument": _beside(lambda own, given: len(set(TOKENS.findall(own)) & set(TOKENS.findall(given)))),
    # Near values.
    "in_the_tree": lambda value, subject: float(
        sum(each.lower() in subject.words for each in TOKENS.findall(text(value) or repr(value)) if not each.isspace())
    ),
    "elsewhere": lambda value, subject: float(sum(repr(each) in subject.elsewhere for each in flat(value))),
    "elsewhere_as_a_whole": lambda value, subject: float(repr(value) in subject.elsewhere),
    "words_elsewhere": lambda value, subject: float(
        sum(each.lower() in subject.elsewhere for each in TOKENS.findall(text(value)))
    ),
    "alphabetical": lambda value, _: float(sum(a <= b for a, b in pairwise(repr(value)))),
    "compressed": lambda value, _: -float(len(zlib.compress(repr(value).encode()))),
    "hash": lambda value, _: float(zlib.crc32(repr(value).encode()) % 1000),
}


def told_apart(pairs: Sequence[tuple[object, object, Subject]], rules: Mapping[str, Rule] = RULES) -> tuple[float, str]:
    """Return in which share of pairs the best of the rules names the true one, and the rule.

    Args:
        pairs: The true value, its decoy, and the values to compare them with.
        rules: The rules.
    """
    best = (0.5, "-")
    for name, rule in rules.items():
        ranks = [(rule(true, subject), rule(decoy, subject)) for true, decoy, subject in pairs]
        share = sum(0.5 if true == decoy else float(true > decoy) for true, decoy in ranks) / len(pairs)
        best = max(best, (share, name), (1 - share, f"not {name}"))
    return best
