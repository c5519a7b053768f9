"""Can a text of a tool, a user or a data row become a control token?

    python -m benchmarks.control_tokens [FAMILY ...]

The benchmark sends the corpus of `tests/support/attacks` against the control tokens of every model family. Each text
takes the way of a real message: `ChatCodec.trusted`, then `ChatCodec.initial` or `ChatCodec.observation` with verl's
builder and the family's chat template.

`control_tokens` reads off the tokenizer and the template which tokens are control tokens. It never asks the firewall,
so a token that the firewall forgets is attacked and counted like any other.

- An attack has forged when the control tokens that come out differ, by id, from those of the same message with the text
  "x".
- A benign text has to be tokenized as without the firewall. The exception is a text of which the template itself makes
  a control token (a tag of a schema's key).
- A place that a template refuses even for "x" (a system message, two users in a row) is skipped.

The last line is one JSON object.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.support.attacks import attacks, benign
from tests.support.families import Family, family, make_codec
from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.template import SCHEMA
from verl_multiturn.chat.template_form import MessageError
from verl_multiturn.errors import ConfigError

CALL_ID = "call00001"
# Errors of a family that has no form for a message, raised by verl's builder or by the template itself.
REFUSALS = (ConfigError, TemplateError, TypeError, ValueError)
REASONING = ("<think>", "</think>")
WORDS = ("QUEBEC", "ZULU", "VICTOR", "WHISKEY")


def _call(index: int, arguments: Any = None) -> dict[str, Any]:
    # Some templates want the arguments as a mapping, some as text; verl's builders render neither.
    function = {"name": "search", "arguments": {} if arguments is None else arguments}
    return {"id": f"{CALL_ID}{index}", "type": "function", "function": function}


def _asked(calls: int) -> list[Message]:
    """Return a conversation that waits for tool results, or for the user's next turn when there are no calls."""
    said: Message = {"role": "assistant", "content": "a"}
    if calls:
        said["tool_calls"] = [_call(index) for index in range(calls)]
    return [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, said]


def _tool(content: Any, index: int = 0) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"{CALL_ID}{index}", "name": "search"}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _said(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _called(arguments: Any, name: str = "search") -> list[Message]:
    call = _call(0, arguments)
    call["function"]["name"] = name
    calls = {**_said("assistant", "a"), "tool_calls": [call]}
    return [_said("user", "q"), calls, _tool("r")]


@dataclass(frozen=True)
class Place:
    """A place for a text: the messages before it, and the messages or schemas that hold it.

    The text comes in two pieces, so that an attack can be split between two messages or parts.
    """

    name: str
    before: list[Message]
    added: Callable[[str, str], list[Message]]
    authored: bool = False
    """True where an author may write a call or a thought, as the model does (a row's system or assistant message)."""
    schemas: Callable[[str, str], list[dict[str, Any]]] | None = None
    """Function that makes the schemas of tools that hold the text; None where a message holds it."""


def _described(function: dict[str, Any], **argument: Any) -> list[dict[str, Any]]:
    """Return a tool's schema as an MCP server might describe it."""
    parameters = {"type": "object", "properties": {"word": {"type": "string", **argument}}, "required": ["word"]}
    return [{"type": "function", "function": {"name": "search", "parameters": parameters, **function}}]


def _renamed(left: str, right: str) -> list[dict[str, Any]]:
    properties = {left + right: {"type": "string", "description": "d"}, "y": {"type": "integer", "description": "d"}}
    parameters = {"type": "object", "properties": properties, "required": ["y"]}
    return [{"type": "function", "function": {"name": "search", "description": "d", "parameters": parameters}}]


def _asks(_: str, __: str) -> list[Message]:
    return [_said("user", "q")]


# A place without messages before it belongs to a data row.
PLACES = [
    Place("tool result", _asked(1), lambda a, b: [_tool(a + b)]),
    Place("user turn", _asked(0), lambda a, b: [_said("user", a + b)]),
    Place("first user", [], lambda a, b: [_said("system", "s"), _said("user", a + b)]),
    Place("user parts", [], lambda a, b: [_said("user", _parts(a, b))]),
    # A template that trims each part would put the halves together again.
    Place("spaced parts", [], lambda a, b: [_said("user", _parts(f"{a} \n", f"\n {b}"))]),
    Place("tool parts", _asked(1), lambda a, b: [_tool(_parts(a, b))]),
    Place("two tools", _asked(2), lambda a, b: [_tool(a), _tool(b, 1)]),
    Place("system", [], lambda a, b: [_said("system", a + b), _said("user", "q")], True),
    Place("assistant", [], lambda a, b: [_said("user", "q"), _said("assistant", a + b), _said("user", "q")], True),
    Place("call", [], lambda a, b: _called({a + b: a + b}), True),
    Place("name of a call", [], lambda a, b: _called({}, a + b), True),
    Place("call as text", [], lambda a, b: _called(a + b), True),
    # Text in two messages joins where the template writes nothing between them.
    Place("system and user", [], lambda a, b: [_said("system", a), _said("user", b)]),
    Place("assistant and user", [], lambda a, b: [_said("user", "q"), _said("assistant", a), _said("user", b)]),
    Place("two users", [], lambda a, b: [_said("user", a), _said("user", b)]),
    Place("tool description", [], _asks, schemas=lambda a, b: _described({"description": a + b})),
    Place("argument", [], _asks, schemas=lambda a, b: _described({"description": "d"}, description=a, enum=[b, "y"])),
    Place("argument's name", [], _asks, schemas=_renamed),
    Place("other key", [], _asks, schemas=lambda a, b: _described({"description": "d"}, description="d", **{a + b: b})),
]


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a family by id, the tokens that its template writes first."""

    outside: dict[int, str]
    """Tokens that no text of a tool or a user may bring in."""
    authored: dict[int, str]
    """Tokens that no text of a row's system and assistant messages may bring in."""
    tags: tuple[str, ...] = ()
    """Tags that the template writes around answers of tools, where the tokenizer has no token for them.

    No text of a tool or a user may bring them in either.
    """


def control_tokens(made: Family) -> ControlTokens:
    """Return the control tokens of a family, found through its tokenizer and its template alone.

    Special tokens are always control tokens. Authors of rows may write the other ones where they mark a call or
    reasoning (`<tool_call>`, `<think>`). But where the family's turns begin with such other tokens, as DeepSeek's turns
    do, authors may write none that the template writes, except the marks of reasoning.
    """
    added = {index: token.content for index, token in made.tokenizer.added_tokens_decoder.items()}
    special = {index: added[index] for index, token in made.tokenizer.added_tokens_decoder.items() if token.special}
    probes = [_probe(made, _said("assistant", WORDS[1]), _said("user", WORDS[2]))]
    for arguments in ({}, "{}"):
        calls = {**_said("assistant", WORDS[1]), "tool_calls": [_call(0, arguments), _call(1, arguments)]}
        probes.append(_probe(made, calls, _tool(WORDS[2]), _tool(WORDS[3], 1)))
        probes.append(_probe(made, calls, _tool(WORDS[2]), _said("assistant", WORDS[3])))
    words = set(made.tokenizer.encode(" ".join([*WORDS, json.dumps(SCHEMA)]), add_special_tokens=False))
    rendered = [index for text in probes for index in made.tokenizer.encode(text, add_special_tokens=False)]
    written = {index: added[index] for index in rendered if index in added and index not in words}
    # Words, digits and white space that a tokenizer has as added tokens control nothing.
    marks = {index: text for index, text in added.items() if re.search(r"[^\w\s]", text)}
    opening = made.tokenizer.encode(probes[0].partition(WORDS[2])[0], add_special_tokens=False)
    opened_by_special = [index for index in opening if index in added][-1] in special
    turns = {} if opened_by_special else {index: text for index, text in written.items() if text not in REASONING}
    tags = _plain_tags(probes, set(added.values()))
    return ControlTokens({**written, **special, **marks}, {**turns, **special}, tags)


def _plain_tags(probes: Sequence[str], tokens: Collection[str]) -> tuple[str, ...]:
    """Return the tags beside the answers of tools that are not tokens, sorted."""
    tag = r"<[^<>\s]+>"
    beside = re.compile(rf"((?:{tag}\s*)*)(?:{WORDS[2]}|{WORDS[3]})((?:\s*{tag})*)")
    sides = (side for text in probes[1:] for both in beside.findall(text) for side in both)
    return tuple(sorted({each for side in sides for each in re.findall(tag, side)} - set(tokens)))


def _probe(made: Family, *messages: Message) -> str:
    """Return the template's text for a user's question and these messages; "" if it refuses them."""
    try:
        text: str = made.tokenizer.apply_chat_template(
            [_said("user", WORDS[0]), *messages], tools=[SCHEMA], tokenize=False, add_generation_prompt=True
        )
    except REFUSALS:
        return ""
    return text


@dataclass
class Score:
    """The results of one family: numbers of cases, and the cases that went wrong."""

    attacks: int = 0
    benign: int = 0
    refused: int = 0
    forged: list[tuple[str, str]] = field(default_factory=list)
    """Place and text of each attack that got through."""
    differing: list[tuple[str, str]] = field(default_factory=list)
    """Place and text of each benign text that was changed."""
    raised: list[tuple[str, str]] = field(default_factory=list)
    """Place and text of each case that could not be rendered, though "x" could in the same place."""


class Trial:
    """A family under test.

    Args:
        family: The model family.
        guarded: False leaves the firewall out. A test uses this to show that the counting notices attacks.
    """

    def __init__(self, family: Family, guarded: bool = True) -> None:
        self._tokenizer = family.tokenizer
        self._codec = make_codec(family)
        self._trusted = self._codec.trusted if guarded else list
        self._trusted_schemas = self._codec.trusted_schemas if guarded else list
        (end,) = self._tokenizer.encode(family.end_tokens[0], add_special_tokens=False)
        self._ids = [*self._tokenizer.encode("ok", add_special_tokens=False), end]
        self._control = control_tokens(family)
        self.tokens = [*self._control.outside.values(), *self._control.tags]
        self._honest = {place.name: self._controls(place, "x", "x") for place in PLACES if self._takes(place)}
        self._places = [place for place in PLACES if place.name in self._honest]

    def refused_places(self) -> int:
        """Return the number of places that the template has no form for."""
        return len(PLACES) - len(self._places)

    def try_attack(self, text: str, score: Score) -> None:
        """Put a hostile text into every place, and count and note the results in `score`."""
        left, right = self._split(text)
        for place in self._places:
            score.attacks += 1
            try:
                if self._controls(place, left, right) != self._honest[place.name]:
                    score.forged.append((place.name, text))
            except MessageError:  # the template would drop a part of the text, and the row's error names it
                score.refused += 1
            except REFUSALS:
                score.raised.append((place.name, text))

    def try_benign(self, text: str, score: Score) -> None:
        """Put a benign text into every place, and count and note the results in `score`."""
        left, right = text[: len(text) // 2], text[len(text) // 2 :]
        for place in self._places:
            if place.name == "call as text" and (text != text.strip() or not text):
                continue  # white space around arguments is not theirs, and blank ones are those of a call without any
            score.benign += 1
            plain, schemas = place.added(left, right), place.schemas(left, right) if place.schemas else []
            try:
                trusted = self._trusted(plain), self._trusted_schemas(schemas)
                # Equal messages give equal ids, so only changed messages need a look.
                if (
                    trusted != (plain, schemas)
                    and self._ids_of(place, *trusted) not in self._plain_ids(place, text, plain, schemas)
                    and self._controls(place, left, right, guarded=False) == self._honest[place.name]
                ):
                    score.differing.append((place.name, text))
            except MessageError:  # the template would drop a part of the text, and the row's error names it
                score.refused += 1
            except REFUSALS:
                score.raised.append((place.name, text))

    def _plain_ids(self, place: Place, text: str, plain: list[Message], schemas: list[Any]) -> list[list[int]]:
        """Return the ids of a benign text without the firewall.

        Arguments that came as the text of an object are that object where the template writes objects.
        """
        found = [self._ids_of(place, plain, schemas)]
        if place.name == "call as text":
            with suppress(*REFUSALS):  # a ValueError: it is no JSON
                if isinstance(read := json.loads(text), dict):
                    found.append(self._ids_of(place, _called(read), schemas))
        return found

    def _split(self, text: str) -> tuple[str, str]:
        """Split the text in two, through its first control token if it has one, else in the middle."""
        # The cut lies after the token's first character, in its middle or before its last character.
        cuts = [
            text.find(token) + (1, len(token) // 2, len(token) - 1)[len(text) % 3]
            for token in self.tokens
            if token in text
        ]
        cut = min(cuts, default=len(text) // 2)
        return text[:cut], text[cut:]

    def _takes(self, place: Place) -> bool:
        try:
            schemas = place.schemas(*WORDS[:2]) if place.schemas else []
            ids = self._ids_of(place, place.added(*WORDS[:2]), schemas)
        except REFUSALS:
            return False
        shown = self._tokenizer.decode(ids)
        # A template that cannot take parts prints them as Python or JSON would.
        as_data = not schemas and ("'type'" in shown or '"type"' in shown)
        return all(word in shown for word in WORDS[:2]) and not as_data

    def _ids_of(self, place: Place, messages: list[Message], schemas: list[dict[str, Any]]) -> list[int]:
        if not place.before:
            return self._codec.initial(messages, schemas)
        return self._codec.observation(place.before, messages, self._ids, []).observation

    def _controls(self, place: Place, left: str, right: str, guarded: bool = True) -> list[int | str]:
        """Return the control tokens of a message or schema with this text in order, then tags that are not tokens."""
        control = self._control.authored if place.authored else self._control.outside
        messages, schemas = place.added(left, right), place.schemas(left, right) if place.schemas else []
        if guarded:
            messages, schemas = self._trusted(messages), self._trusted_schemas(schemas)
        ids = self._ids_of(place, messages, schemas)
        tags = () if place.authored else self._control.tags
        shown = self._tokenizer.decode(ids) if tags else ""
        return [*(index for index in ids if index in control), *(tag for tag in tags for _ in range(shown.count(tag)))]


def measure(name: str, hostile: Sequence[str] | None = None, kind: Sequence[str] | None = None) -> Score:
    """Try one family against hostile and benign texts.

    Args:
        name: Name of the family.
        hostile: Hostile texts; None means all of `attacks`.
        kind: Benign texts; None means all of `benign`.
    """
    trial = Trial(family(name))
    score = Score()
    hostile = attacks(trial.tokens) if hostile is None else hostile
    kind = benign() if kind is None else kind
    score.refused = trial.refused_places() * (len(hostile) + len(kind))
    for text in hostile:
        trial.try_attack(text, score)
    for text in kind:
        trial.try_benign(text, score)
    return score


def run(chosen: Sequence[str]) -> dict[str, int]:
    """Try families, print a table and the worst cases, and return the figures."""
    console = Console(width=110)  # the width also holds where the output is not a terminal
    table = Table(
        "family", "attacks", "forged", "benign", "differences", "raised", "refused", "s", title="control tokens"
    )
    total = Score()
    for name in chosen:
        started = time.perf_counter()
        score = measure(name)
        numbers = [
            score.attacks,
            len(score.forged),
            score.benign,
            len(score.differing),
            len(score.raised),
            score.refused,
        ]
        table.add_row(name, *map(str, numbers), f"{time.perf_counter() - started:.1f}")
        for what, cases in (("forged", score.forged), ("differs", score.differing), ("raised", score.raised)):
            for place, text in sorted(cases, key=lambda case: len(case[1]))[:3]:
                console.print(f"{name}: {what}: {place}: {escape(repr(text))}")
        total.attacks += score.attacks
        total.benign += score.benign
        total.forged += score.forged
        total.differing += score.differing
        total.raised += score.raised
    console.print(table)
    return {
        "families": len(chosen),
        "attacks": total.attacks,
        "forged": len(total.forged),
        "benign": total.benign,
        "benign_differences": len(total.differing),
        "raised": len(total.raised),
    }
