"""Safe text about other people's objects: errors, return values, data.

The `__str__` and `__repr__` of such an object are somebody's code: they may raise, return an endless text, or name an
address in memory. Every message that names such an object is written with these functions.

Invariants:
- nothing is raised, whatever the object does;
- the text is bounded, and the same in every process (but for the order of a set whose items cannot be sorted).
"""

from __future__ import annotations

import difflib
import inspect
import re
import reprlib
import sysconfig
import traceback
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

_LONGEST = 1_000_000
_MOST_MEANT = 3
_SURE = 0.9  # of difflib's ratio: a letter more or less in a word of some length
_ADDRESS = re.compile(
    r" at 0x[0-9a-fA-F]+(?=[>,;: \])}])| with id=[0-9]{6,}(?=>)|, started (?:daemon )?[0-9]{9,}(?=\)>)"
)
_MARKS = (" at 0x", " with id=", ", started ")
_OPENED = re.compile(r"<(?=[A-Za-z_])|(?<![-=])>")
"""Beginning and end of a `repr`; the arrows of a signature or of a message close none."""
_LONGEST_REPR = 400
"""Characters of a `repr` before its address."""
_PACKAGE, _PYTHON = str(Path(__file__).parent), sysconfig.get_path("stdlib")
_INSTALLED = "site-packages"
_UNSHOWN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Categories of Unicode that a terminal or a page does not show, or obeys.

`HIDDEN` of the viewer's page (`observe/view/static/lib.js`) is the same rule.
"""
_IGNORED = (0x034F, (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), 0x2800, 0x3164, (0xFE00, 0xFE0F), 0xFFA0,
            (0xE0100, 0xE01EF))  # fmt: skip
"""Letters and marks that nothing is drawn for: Unicode's Default_Ignorable_Code_Point of other categories; U+2800."""
_BLANK = frozenset(
    chr(each) for one in _IGNORED for each in ([one] if isinstance(one, int) else range(one[0], one[1] + 1))
)
_SELECTORS = "\ufe0e\ufe0f"
"""Behind a symbol they choose whether it is drawn as a picture."""


def message_of(error: BaseException) -> str:
    """Return the message of an error, without addresses in memory; "" for an error without a message."""
    try:
        # Not `str(error)` alone: it may return a subclass of `str` with methods of its own.
        text = str.__str__(str(error))
    except BaseException as broken:  # whatever `__str__` does
        return f"its message cannot be read: {_name_of(broken)}"
    return without_addresses(text[:_LONGEST])


def without_addresses(text: str) -> str:
    """Return a text without the addresses in memory that Python writes into the `repr` of an object.

    Example: `<function <lambda> at 0x7f0c2e5d4a40>` becomes `<function <lambda>>`. An address that is not part of such
    a `repr` stays, as in `a fault at 0x401000`.
    """
    if not any(mark in text for mark in _MARKS):
        return text

    def instead(found: re.Match[str]) -> str:
        depth = 0
        for mark in _OPENED.finditer(text, max(0, found.start() - _LONGEST_REPR), found.start()):
            depth = depth + 1 if mark[0] == "<" else max(0, depth - 1)
        return "" if depth else found[0]

    return _ADDRESS.sub(instead, text)


def type_name(value: object) -> str:
    """Return the name of a value's class with its module, as in `torch.Tensor`; one of Python's has its name alone."""
    try:
        kind = type(value)
        return str.__str__(f"{kind.__module__}.{kind.__qualname__}").removeprefix("builtins.")
    except BaseException:  # a metaclass may raise
        return "object"


def describe(error: BaseException) -> str:
    """Return an error's type and message, as in `KeyError: 'a'`."""
    message = message_of(error)
    return f"{_name_of(error)}: {message}" if message else _name_of(error)


def place_of(error: BaseException) -> str:
    """Return the file and line of an author's code where an error was raised, as in ` (maze.py:12)`; "" if in none.

    Code of this package and of Python does not count. Installed packages count where no file of the author's own does.
    """
    return place_among([(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)])


def place_among(found: Sequence[tuple[str, int | None]]) -> str:
    """Return the innermost file and line of an author's code, in the words of `place_of`.

    Args:
        found: File and line of each frame, the outermost first.
    """
    frames = [frame for frame in found if not frame[0].startswith("<frozen ")]  # Python's own import
    installed = [frame for frame in frames if _INSTALLED in frame[0] and not frame[0].startswith(_PACKAGE)]
    own = [frame for frame in frames if _INSTALLED not in frame[0] and not frame[0].startswith((_PACKAGE, _PYTHON))]
    name, line = (own or installed or [("", 0)])[-1]
    return f" ({Path(name).name}:{line})" if name else ""


def place_of_function(function: Any) -> str:
    """Return the file and line at which an author's function or method begins, in the words of `place_of`."""
    try:
        code = inspect.unwrap(function).__code__
    except Exception:  # a callable object, or one whose attributes raise
        return ""
    return place_among([(code.co_filename, code.co_firstlineno)]) if isinstance(code, CodeType) else ""


def show(value: object, most_characters: int = 200) -> str:
    """Return the `repr` of a value, cut to `most_characters`. A large container shows only its first items."""
    return without_addresses(_short.repr(value)[:_LONGEST])[:most_characters]


def printable(text: str) -> str:
    r"""Return a text that is shown as it is: hidden and control characters become `\x1b`. Line ends and tabs stay.

    A selector of an emoji's form stays behind its symbol; one alone, or a second one, may carry a hidden text.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter if _is_shown(letter) or (letter in _SELECTORS and _is_symbol(text[at - 1 : at])) else _escaped(letter)
        for at, letter in enumerate(text)
    )


def one_line(text: str) -> str:
    r"""Return a text as `printable` does, in one line: a line end becomes `\n`, which a file's name may hold, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _is_shown(letter: str) -> bool:
    if letter.isascii():
        return letter in "\n\t" or letter.isprintable()
    return letter not in _BLANK and unicodedata.category(letter) not in _UNSHOWN


def _is_symbol(letter: str) -> bool:
    return letter != "" and unicodedata.category(letter) == "So"


def _escaped(letter: str) -> str:
    number = ord(letter)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class _Short(reprlib.Repr):
    """A `repr` that reads little more of a value than is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 8
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = 50
        self.maxarray = self.maxstring = self.maxlong = self.maxother = 2_000

    def repr_bytes(self, value: bytes, level: int) -> str:
        """Return the `repr` of the first bytes."""
        return repr(value[: self.maxstring])

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        """Return the first items of a dictionary, in their own order."""
        if level <= 0 and value:
            return "{...}"
        items = islice(value.items(), self.maxdict)
        pieces = [f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}" for key, item in items]
        return "{" + ", ".join([*pieces, "..."] if len(value) > self.maxdict else pieces) + "}"

    def repr1(self, value: Any, level: int) -> str:
        """Return the `repr` of a value or of a part of one. Where that raises, return a text that names the error."""
        try:
            return str.__str__(super().repr1(value, level))
        except BaseException as broken:  # whatever `__repr__` does
            return f"<{_name_of(value)} whose repr raises {_name_of(broken)}>"

    def repr_instance(self, value: Any, level: int) -> str:
        """Return the author's own `repr` of an object."""
        return repr(value)


_short = _Short()


def _name_of(value: object) -> str:
    try:
        return str.__str__(type(value).__name__)
    except BaseException:  # a metaclass may raise
        return "object"


def unbound(signature: inspect.Signature, positional: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why a function cannot be called with arguments; "" where it can. Whoever binds a row's kwargs calls it.

    Of a misspelt keyword Python names the parameter that is missing alone. This names the keyword, too.

    Args:
        signature: That of the function.
        positional: The positional arguments.
        kwargs: The keyword arguments.
    """
    try:
        signature.bind(*positional, **kwargs)
    except TypeError as error:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [name for name, each in signature.parameters.items() if each.kind in kinds]
        other = [name for name in kwargs if name not in named]
        if any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()) or not other:
            return str(error)
        hint = did_you_mean(str(other[0]), named[len(positional) :])
        named_one = str(error) if show(other[0]) in str(error) else f"{error}; it takes no {show(other[0])}"
        return f"{named_one} ({hint})" if hint else named_one
    return ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question whether a known word was meant; empty if none is like the given one.

    Example: `did_you_mean("gsm8k", ["torl", "gsm8k_multiturn"]) == "did you mean 'gsm8k_multiturn'?"`. After a word
    that is nearly the same come those of which the given one is a part, since a word that looks like it may be its
    opposite: `async` means `colocate_async` or `separate_async`, and not `sync`.

    Args:
        word: An unknown word.
        known: All known words.
    """
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=_SURE)
    near = near or [each for each in known if word and each.startswith(f"{word}_")][:1]
    near = near or [each for each in known if word in each.split("_")][:_MOST_MEANT]
    near = near or difflib.get_close_matches(word, known, n=1)
    near = near or [each for each in known if word and each.startswith(word)][:1]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""
