"""Rules that look for forms, and for calculations, that the drawing of decoys may lack."""

from __future__ import annotations

import ast
import base64
import binascii
import calendar
import ipaddress
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, datetime, time
from itertools import pairwise
from urllib.parse import unquote

from tests.support.telling_rules import RULES, Rule, items, known, numbers, text
from verl_multiturn.verdicts.subject import Subject, flat

_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm", "1234567890")
_ROMAN = re.compile(r"M{0,3}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})")
_COLOURS = ["red", "green", "blue", "black", "white", "yellow", "grey", "gray", "orange", "purple"]
_WEEK = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_MONTHS = [each.lower() for each in calendar.month_abbr[1:]]


def _found(pattern: str, is_valid: Callable[..., object] | None = None) -> Rule:
    """Return a rule that counts the valid texts of a form, less the invalid."""

    def rule(value: object, _: Subject) -> float:
        total = 0.0
        for found in re.finditer(pattern, text(value) or repr(value)):
            try:
                total += 1 if is_valid is None or is_valid(*found.groups()) else -1
            except (ValueError, SyntaxError, binascii.Error, ArithmeticError):
                total -= 1
        return total

    return rule


def _reads(function: Callable[[str], object]) -> Rule:
    """Return a rule that returns whether the text is one that a function reads."""

    def rule(value: object, _: Subject) -> float:
        with suppress(ValueError, SyntaxError, binascii.Error, TypeError, MemoryError, RecursionError):
            return 1.0 + bool(function(text(value)))
        return 0.0

    return rule


def _share(value: object, function: Callable[[str], bool]) -> float:
    own = text(value)
    return sum(map(function, own)) / len(own) if own else 0.0


def _modulo(by: int) -> Rule:
    """Return a rule that returns whether a value has a rest that an argument has."""

    def rule(value: object, subject: Subject) -> float:
        rests = {each % by for each in known(subject)[:1]}
        return float(sum(each % by in rests for each in numbers(value)[:1]))

    return rule


def _step_is_round(value: object, subject: Subject) -> float:
    return float(sum(abs(own - each) % 10 == 0 for own in numbers(value)[:1] for each in known(subject)))


def _short_ratio(value: object, subject: Subject) -> float:
    ratios = [own / each for own in numbers(value)[:1] for each in known(subject) if each]
    return float(sum(abs(ratio * 12 - round(ratio * 12)) < 1e-9 for ratio in ratios))


def _same_place(value: object, subject: Subject) -> float:
    own = items(value)
    return float(sum(a == b for some in subject.lists for a, b in zip(own, map(repr, some), strict=False)))


def _as_long(value: object, subject: Subject) -> float:
    return float(sum(len(some) == len(items(value)) for some in subject.lists))


def _joined(value: object, subject: Subject) -> float:
    shown = [str(each) for each in flat(list(subject.items))]
    own = text(value) or str(value)
    return float(sum(a + mark + b in own for a in shown[:9] for b in shown[:9] for mark in ("", " ", "-", "_", ",")))


def _decimals(number: float) -> int:
    return len(repr(number).partition(".")[2])


def _digits_of_arguments(value: object, subject: Subject) -> float:
    return -float(sum((Counter(repr(value)) - Counter("".join(sorted(subject.shown)))).values()))


def _pointwise(function: Callable[[float, float], float]) -> Rule:
    """Return a rule that counts numbers that are a calculation with the argument's at the same place."""

    def rule(value: object, subject: Subject) -> float:
        found = 0
        for some in subject.lists:
            steps = [function(a, b) for a, b in zip(numbers(value), numbers(some), strict=False) if b]
            found = max(found, *Counter(round(each, 6) for each in steps).values(), 0) if steps else found
        return float(found)

    return rule


def _luhn(value: object, _: Subject) -> float:
    digits = [int(each) for each in repr(value) if each in "0123456789"][::-1]
    total = sum(each if place % 2 == 0 else sum(divmod(2 * each, 10)) for place, each in enumerate(digits))
    return float(bool(digits) and total % 10 == 0)


def _threes(value: object) -> list[tuple[float, float, float]]:
    own = numbers(value)
    return list(zip(own, own[1:], own[2:], strict=False))


def _keys(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, Mapping) else []


def _shifted(value: object, subject: Subject) -> float:
    """Return how many letters are those of an argument, moved by the same step in the alphabet."""
    steps = (Counter(ord(a) - ord(b) for a, b in zip(text(value), each, strict=False)) for each in subject.texts)
    return float(max((max(each.values(), default=0) for each in steps), default=0))


def _keyboard(value: object, _: Subject) -> float:
    own = text(value).lower()
    return float(sum(a + b in row or b + a in row for a, b in pairwise(own) for row in _KEYBOARD))


def _balanced(value: object, _: Subject) -> float:
    open_, own = list[str](), text(value)
    for sign in own:
        if sign in "([{<":
            open_.append(sign)
        elif sign in ")]}>" and (not open_ or open_.pop() != "([{<"[")]}>".index(sign)]):
            return -1.0
    return -float(bool(open_))


def _benford(value: object, _: Subject) -> float:
    firsts = [repr(abs(each)).lstrip("0.")[:1] for each in numbers(value)]
    return sum(math.log10(1 + 1 / int(each)) for each in firsts if each.isdecimal())


def _named(names: list[str]) -> Rule:
    return lambda value, _: float(sum(each in text(value).lower() for each in names))


FURTHER: Mapping[str, Rule] = {
    # Numbers beside the arguments.
    "step_is_round": _step_is_round,
    "short_ratio": _short_ratio,
    **{f"modulo_{by}": _modulo(by) for by in (3, 7, 9, 10, 16)},
    "digits_of_arguments": _digits_of_arguments,
    "below_most": lambda value, subject: float(
        bool(known(subject)) and sum(each <= max(known(subject)) for each in numbers(value))
    ),
    "above_least": lambda value, subject: float(
        bool(known(subject)) and sum(each >= min(known(subject)) for each in numbers(value))
    ),
    "as_many_digits": lambda value, subject: float(
        len(repr(value)) in {len(repr(each)) for each in flat(list(subject.items))}
    ),
    "decimals_of_arguments": lambda value, subject: -float(
        sum(
            _decimals(each) > max((_decimals(own) for own in known(subject)), default=0)
            for each in numbers(value)
        )
    ),
    "sum_of_two": lambda value, subject: float(
        any(own == a + b for own in numbers(value)[:1] for a in known(subject)[:9] for b in known(subject)[:9])
    ),
    "product_of_two": lambda value, subject: float(
        any(own == a * b for own in numbers(value)[:1] for a in known(subject)[:9] for b in known(subject)[:9])
    ),
    "below_length": lambda value, subject: float(
        sum(0 <= own < len(some) for own in numbers(value)[:1] for some in (*subject.lists, *subject.texts))
    ),
    # Kinds of numbers.
    "benford": _benford,
    "luhn": _luhn,
    "digit_sum_by_nine": lambda value, _: float(sum(each % 9 == 0 for each in numbers(value))),
    "by_seven": lambda value, _: float(sum(each % 7 == 0 for each in numbers(value))),
    "by_twelve": lambda value, _: float(sum(each % 12 == 0 for each in numbers(value))),
    "by_sixty": lambda value, _: float(sum(each % 60 == 0 for each in numbers(value))),
    "by_sixteen": lambda value, _: float(sum(each % 16 == 0 for each in numbers(value))),
    "byte": lambda value, _: float(sum(0 <= each < 256 for each in numbers(value))),
    "percent": lambda value, _: float(sum(0 <= each <= 100 for each in numbers(value))),
    "at_most_one": lambda value, _: float(sum(0 <= each <= 1 for each in numbers(value))),
    "year": lambda value, _: float(sum(1900 <= each <= 2100 for each in numbers(value))),
    "leap_year": lambda value, _: float(sum(each % 4 == 0 and 1900 <= each <= 2100 for each in numbers(value))),
    "triangular": lambda value, _: float(sum((8 * abs(each) + 1) ** 0.5 % 1 == 0 for each in numbers(value))),
    "cube": lambda value, _: float(sum(round(abs(each) ** (1 / 3)) ** 3 == abs(each) for each in numbers(value))),
    "fewer_bits": lambda value, _: -float(sum(int(abs(each)).bit_count() for each in numbers(value))),
    "digits_rise": lambda value, _: float(sum(a <= b for a, b in pairwise(filter(str.isdigit, repr(value))))),
    "digits_repeat": lambda value, _: float(sum(a == b for a, b in pairwise(filter(str.isdigit, repr(value))))),
    "digits_palindrome": lambda value, _: float(repr(value) == repr(value)[::-1]),
    "shorter_as_fraction": lambda value, _: -float(
        sum(min(abs(each * n - round(each * n)) > 1e-9 for n in range(1, 100)) for each in numbers(value))
    ),
    # Lists and dictionaries.
    "same_place": _same_place,
    "as_long": _as_long,
    "same_step_everywhere": _pointwise(lambda a, b: a - b),
    "same_ratio_everywhere": _pointwise(lambda a, b: a / b),
    "same_sum_everywhere": _pointwise(lambda a, b: a + b),
    "first_is_least": lambda value, _: float(bool(numbers(value)) and numbers(value)[0] == min(numbers(value))),
    "last_is_most": lambda value, _: float(bool(numbers(value)) and numbers(value)[-1] == max(numbers(value))),
    "first_in_argument": lambda value, subject: float(sum(each in subject.shown for each in items(value)[:1])),
    "last_in_argument": lambda value, subject: float(sum(each in subject.shown for each in items(value)[-1:])),
    "in_order_of_argument": lambda value, subject: -float(
        sum(
            [*map(repr, some)].index(a) > [*map(repr, some)].index(b)
            for some in subject.lists
            for a, b in pairwise(each for each in items(value) if each in [*map(repr, some)])
        )
    ),
    "running": lambda value, _: float(sum(a + b == c for a, b, c in _threes(value))),
    "rising_lengths": lambda value, _: float(sum(len(a) <= len(b) for a, b in pairwise(items(value)))),
    "same_lengths": lambda value, _: -float(len({*map(len, items(value))})),
    "alternates": lambda value, _: float(
        sum((b - a) * (c - b) < 0 for a, b, c in _threes(value))
    ),
    "keys_in_order": lambda value, _: float(_keys(value) == sorted(_keys(value))),
    "keys_of_one_letter": lambda value, _: -float(len({each[:1] for each in _keys(value)})),
    "keys_as_long": lambda value, _: -float(len({len(each) for each in _keys(value)})),
    "keys_in_argument": lambda value, subject: float(sum(repr(each) in subject.shown for each in _keys(value))),
    "key_starts_value": lambda value, _: float(
        isinstance(value, Mapping) and sum(str(k)[:1] == str(v)[:1] for k, v in value.items())
    ),
    "length_of_key": lambda value, _: float(
        isinstance(value, Mapping) and sum(len(str(k)) == v for k, v in value.items())
    ),
    "values_in_order": lambda value, _: float(
        isinstance(value, Mapping) and sum(a <= b for a, b in pairwise(map(repr, value.values())))
    ),
    "counts_in_argument": lambda value, subject: float(
        isinstance(value, Mapping)
        and sum(sum(str(k) in each for each in subject.shown) == v for k, v in value.items() if isinstance(v, int))
    ),
    # Forms of texts.
    "date": _found(r"(\d{4})-(\d\d)-(\d\d)", lambda y, m, d: date(int(y), int(m), int(d))),
    "date_of_slashes": _found(r"\b(\d\d?)/(\d\d?)/(\d{4})", lambda a, b, _: int(a) <= 31 and int(b) <= 31),
    "moment": _found(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)", datetime.fromisoformat),
    "time": _found(r"\b(\d\d):(\d\d)\b", lambda h, m: time(int(h), int(m))),
    "seconds": _found(r":(\d\d)\b", lambda s: int(s) < 60),
    "clock": _found(r"(\d+) ?[aApP][mM]\b", lambda h: 0 < int(h) < 13),
    "address": _found(r"\b(\d+\.\d+\.\d+\.\d+)\b", ipaddress.IPv4Address),
    "octets": _found(r"\b(\d+)\.(?=\d)", lambda n: int(n) < 256 and str(int(n)) == n),
    "port": _found(r":(\d+)\b", lambda n: 0 < int(n) < 65536),
    "version": _found(r"\b(\d+)\.(\d+)\.(\d+)", lambda a, b, c: int(a) < 30 and int(b) < 30 and int(c) < 30),
    "percent_sign": _found(r"(\d+)%", lambda n: int(n) <= 100),
    "escaped": _found(r"%(..)", lambda some: int(some, 16) < 128),
    "unquoted": lambda value, _: -float("�" in unquote(text(value))),
    "no_leading_zero": _found(r"(?<![\d.])(\d+)", lambda n: str(int(n)) == n),
    "hexadecimal": _found(r"\b([0-9a-fA-F]{6,})\b", None),
    "colour": _found(r"#(\w+)", lambda some: int(some, 16) >= 0),
    "hex_share": lambda value, _: _share(value, lambda each: each in "0123456789abcdefABCDEF"),
    "base64": _reads(lambda some: base64.b64decode(some, validate=True)),
    "base64_text": _reads(lambda some: base64.b64decode(some, validate=True).decode("ascii")),
    "json": _reads(json.loads),
    "python": _reads(lambda some: ast.parse(some)),
    "literal": _reads(ast.literal_eval),
    "regular_expression": lambda value, _: _compiles(text(value)),
    "utf_8": lambda value, _: float(isinstance(value, bytes) and "�" not in value.decode(errors="replace")),
    "identifier": lambda value, _: float(text(value).isidentifier()),
    "roman": lambda value, _: float(bool(text(value)) and _ROMAN.fullmatch(text(value)) is not None),
    "mail": _found(r"@([\w-]+)\.(com|org|net|de|io)\b"),
    "end_of_a_file": _found(r"\.(py|txt|json|csv|md|toml|yaml|html|png|jpg|js|so|gz|zip|ini|cfg|log)\b"),
    "scheme": _found(r"\b(https?|ftp|file|git|ssh)://"),
    "domain": _found(r"\.(com|org|net|io|edu)\b"),
    "colours": _named(_COLOURS),
    "months": _named(_MONTHS),
    "week": _named(_WEEK),
    "escapes": _found(r"\\[nrtx]"),
    "format": _found(r"%[sdrf]|\{\w*\}"),
    "tag": _found(r"<(\w+)[^>]*>.*</\1>"),
    "pairs_of_names": _found(r"\b(\w+)=(\w+)"),
    # Letters.
    "upper": lambda value, _: float(text(value).isupper()),
    "title": lambda value, _: float(text(value).istitle()),
    "plural": _found(r"s\b"),
    "tense": _found(r"(ed|ing|er|ly|tion)\b"),
    "article": _found(r"\b(the|a|an|is|of|to|in|and|not|no)\b"),
    "double_letters": lambda value, _: float(sum(a == b for a, b in pairwise(text(value)))),
    "same_letter_first": lambda value, _: -float(len({each[:1] for each in re.findall(r"\w+", text(value))})),
    "repeated_words": lambda value, _: -float(len(set(re.findall(r"\w+", text(value))))),
    "words_in_order": lambda value, _: float(sum(a <= b for a, b in pairwise(re.findall(r"\w+", text(value))))),
    "three_consonants": _found(r"[bcdfghjklmnpqrstvwxz]{4}"),
    "rare_letters": _found(r"[qxzj]"),
    "keyboard": _keyboard,
    "balanced": _balanced,
    "ends_like": lambda value, subject: float(sum(text(value)[-3:] == each[-3:] for each in subject.texts if each)),
    "starts_like": lambda value, subject: float(
        sum(text(value)[:3].lower() == each[:3] for each in subject.texts if each)
    ),
    "initials": lambda value, subject: float(
        sum(text(value).lower() == "".join(word[0] for word in re.findall(r"\w+", each)) for each in subject.texts)
    ),
    "as_long_as_text": lambda value, subject: float(sum(len(text(value)) == len(each) for each in subject.texts)),
    "shifted": _shifted,
    "joined": _joined,
    "number_of_argument": lambda value, subject: float(
        sum(any(each in some for some in subject.shown) for each in re.findall(r"\d+", text(value)))
    ),
    "sum_of_codes": lambda value, _: float(sum(map(ord, text(value))) % 256),
    "text_hash": lambda value, _: float(binascii.crc_hqx(repr(value).encode(), 0)),
}  # fmt: skip


def _compiles(shown: str) -> float:
    with suppress(re.error, OverflowError, RecursionError):
        re.compile(shown)
        return 1.0
    return 0.0


EVERY_RULE: Mapping[str, Rule] = {**RULES, **FURTHER}
