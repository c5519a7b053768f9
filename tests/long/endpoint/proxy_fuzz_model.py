"""The model of `benchmarks.proxy_fuzz`: an engine whose turns are drawn, and a log of its requests and answers.

Each generation of a session has a number, from 0. Twice the number, or one more, is the weight version of its tokens;
the number is a mark in the text of most of them (`m000017y`), so that rows and answers show which generation they hold.
A session's draws depend on its name and the seed alone, so that it can be played again without the others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.attacks import attacks, benign
from verl_multiturn.chat.template import TOOL, Template
from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engines.protocol import Ask, Engine, Generation

MARK = re.compile(r"m(\d{6})y")
STOPS = ("</code>", "STOP", "\n\n", "Observation:", "}")
_WORD, _NUMBER = "wordq7", 7007
_MOST_TOKENS = 400
_ARGUMENTS = re.compile(r'\{"word": "[^{}]*\}')
NAMES = (TOOL, "lookup")
Writer = Callable[[Mapping[str, Any]], "str | None"]


def texts(chance: random.Random, hostile: Sequence[str]) -> str:
    """Draw a text of a client, a tool or a model, short enough to be cheap."""
    kind = chance.random()
    if kind < 0.35:
        return chance.choice(("yes", "42", "Go on.", "Größe 北京 число", "a\nb\n", " x ", ""))
    drawn = chance.choice(hostile if kind < 0.7 else benign())
    if kind > 0.97:
        drawn += chance.choice(("\ud800", "\udfff!", "\ud83d"))  # halves of a pair
    return drawn[:300]


@dataclass(frozen=True)
class Family:
    """A chat template, its model's texts, and the texts that attack it."""

    name: str
    template: Template
    write: Writer
    """Returns the template's text for an assistant's turn, with its end token; None if it refuses it."""
    tools: bool
    """Whether the family has a format for calls."""
    hostile: Sequence[str]
    outside: Mapping[int, str]
    """Control tokens by id that no text of a tool or a user may bring in."""
    authored: Mapping[int, str]
    """Control tokens that no text at all may bring in."""
    marks: Sequence[tuple[str, str]]
    """Pairs of texts around reasoning."""
    vocabulary: int
    """Ids below this number are tokens."""
    one_call: bool = False
    user_turns: bool = True
    """Whether a user's message can be appended to a turn; else a request that does so begins a root."""
    _calls: dict[tuple[int, int], str] = field(default_factory=dict)

    def turn(self, chance: random.Random, mark: str, opened: bool, stops: Sequence[str]) -> list[int]:
        """Draw the ids of a turn."""
        tokenizer, ends = self.template.tokenizer, set(self.template.end_ids)
        kind = chance.choices(("text", "calls", "cut call", "noise", "empty"), (8, 8 if self.tools else 0, 2, 1, 1))[0]
        if kind == "empty":
            said = [chance.choice(self.template.end_ids)]
        elif kind == "noise":
            some = [chance.randrange(self.vocabulary) for _ in range(chance.randint(1, 30))]
            said = [*tokenizer.encode(mark, add_special_tokens=False), *some, self.template.end_ids[-1]]
        else:
            text = self._text(chance, mark, kind, stops)
            start, end = self.marks[0]
            if opened and end not in text:
                text = f"thought {mark if chance.random() < 0.5 else ''}\n{end}\n\n{text}"
            elif not opened and chance.random() < 0.2:
                text = f"{start}\nthought {mark}{end if chance.random() < 0.9 else ''}\n\n{text}"
            said = self._encoded(chance, text)
        if chance.random() < 0.06 and said[-1] in ends:
            del said[-1]  # the engine stopped it for a reason of its own
        ended = next((at for at, index in enumerate(said) if index in ends), len(said))
        return said[: min(ended + 1, _MOST_TOKENS)] or [0]

    def _text(self, chance: random.Random, mark: str, kind: str, stops: Sequence[str]) -> str:
        words = f"{mark} {texts(chance, self.hostile)}"
        if stops and chance.random() < 0.6:
            stop = chance.choice(stops)
            words += chance.choice((f" {stop} more", stop, f"{stop[:-1]} {stop[:1]}{stop}"))
        text = self.write({"role": "assistant", "content": _WORD}) or _WORD
        text = text.replace(_WORD, words)
        if kind == "text" or not self.tools:
            return text
        count = 1 if self.one_call else chance.choice((1, 1, 1, 2, 3))
        call = self._written_calls(count, chance.randrange(len(NAMES)))
        if chance.random() < 0.05:
            strange = chance.choice(('"no JSON"', "[1, 2]", "5", "null", json.dumps('{"word": "w"}'), "{}"))
            call = _ARGUMENTS.sub(lambda _: strange, call, count=1)
        for _ in range(count):
            value = json.dumps(f"{mark}{texts(chance, self.hostile) if chance.random() < 0.4 else ''}")[1:-1]
            number = chance.choice(("7", "-1", "1.5", "2.0", "1e400", str(2**70), "9007199254740993", "NaN", "true"))
            call = call.replace(_WORD, value, 1).replace(str(_NUMBER), number, 1)
        if kind == "cut call":
            return call[: chance.randrange(1, len(call))]
        return f"{words}\n{call}" if chance.random() < 0.3 else call

    def _written_calls(self, count: int, name: int) -> str:
        if (count, name) not in self._calls:
            given = {"word": _WORD, "count": _NUMBER}
            function = {"name": NAMES[name], "arguments": given}
            calls = [{"id": f"call0000{index}", "type": "function", "function": function} for index in range(count)]
            self._calls[count, name] = self.write({"role": "assistant", "content": "", "tool_calls": calls}) or _WORD
        return self._calls[count, name]

    def _encoded(self, chance: random.Random, text: str) -> list[int]:
        """Encode a text, at times in pieces, so that text like a control token in it is not one."""
        tokenizer = self.template.tokenizer
        if chance.random() < 0.3:
            cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randint(1, 4)))
            pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        else:
            pieces = [text]
        clean = [piece.encode("utf-8", "replace").decode() for piece in pieces]
        return [index for piece in clean for index in tokenizer.encode(piece, add_special_tokens=False)]


@dataclass(frozen=True)
class Sampled:
    """A generation that the session got from its engine."""

    number: int
    lane: str
    given: list[int]
    ids: list[int]
    sound: bool
    """Whether it can be trained on."""

    @property
    def after(self) -> list[int]:
        """Return the ids with which a continuation begins."""
        return self.given + self.ids


@dataclass
class Log:
    """The engine's requests of one session, and its answers."""

    sampled: list[Sampled] = field(default_factory=list)
    asked: int = 0
    """Calls of the engine, failed and cancelled ones too."""
    failed: int = 0
    """Calls that failed, or gave an answer that cannot be trained."""
    cancelled: int = 0
    busy: set[str] = field(default_factory=set)
    most_at_once: int = 0
    wrong: list[str] = field(default_factory=list)
    """Requests that the engine should not get."""


class FuzzEngine:
    """An engine that returns drawn turns, late, and at times fails."""

    def __init__(self, family: Family, seed: int) -> None:
        self._family, self._seed = family, seed
        self._sessions: dict[str, tuple[itertools.count[int], random.Random]] = {}

    def forget(self, session: str) -> None:
        """Forget a session that is over, so that one of the same name begins anew."""
        self._sessions.pop(session, None)

    async def generate(self, ask: Ask) -> Generation:
        """Return a turn, or do something wrong."""
        session = ask.request_id.rpartition(".")[0]
        if session not in self._sessions:
            self._sessions[session] = itertools.count(), random.Random(f"engine {session} {self._seed}")
        numbers, chance = self._sessions[session]
        number = next(numbers)
        before = self._family.template.tokenizer.decode(list(ask.ids[-8:])).rstrip()
        opened = any(before.endswith(start) for start, _ in self._family.marks)
        stops = [re.sub(r"\\(.)", r"\1", each) for each in ask.sampling.get("stop_regex", ())]
        said = self._family.turn(chance, f"m{number:06d}y", opened, stops)
        wait = chance.choice((0, 0, 1, 3, 0.001, 0.004, 0.02))
        for _ in range(wait if isinstance(wait, int) else 0):
            await asyncio.sleep(0)
        if wait and isinstance(wait, float):
            await asyncio.sleep(wait)
        mishap = chance.random()
        if mishap < 0.005:
            raise EngineError("scripted")
        finish = "length" if len(said) > ask.max_new_tokens else "stop"
        said = said[: ask.max_new_tokens]
        versions = sorted(2 * number + chance.randint(0, 1) for _ in said)
        made = Generation(said, [-chance.random() * 10 ** chance.uniform(-6, 2) for _ in said], versions, finish)
        if mishap < 0.01:
            return replace(made, finish="abort")
        if mishap < 0.0125:
            return replace(made, logprobs=[*made.logprobs[:-1], float("nan")])
        if mishap < 0.015:
            more = ask.max_new_tokens + len(said)
            return replace(
                made, ids=[*said, *[0] * ask.max_new_tokens], logprobs=[-1.0] * more, versions=[2 * number] * more
            )
        return made


class Recorder:
    """An engine right below the receipts, which writes the logs.

    Args:
        engine: Samples the tokens, and cuts them at stop texts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.logs: defaultdict[str, Log] = defaultdict(Log)

    async def generate(self, ask: Ask) -> Generation:
        """Sample as the engine does."""
        log = self.logs[ask.request_id.rpartition(".")[0]]
        if ask.request_id in log.busy:
            log.wrong.append(f"two generations at once in lane {ask.request_id}")
        log.busy.add(ask.request_id)
        log.asked += 1
        log.most_at_once = max(log.most_at_once, len(log.busy))
        given = list(ask.ids)
        try:
            made = await self._engine.generate(ask)
        except asyncio.CancelledError:
            log.cancelled += 1
            raise
        except EngineError:
            log.failed += 1
            raise
        finally:
            log.busy.discard(ask.request_id)
        sound = (
            made.finish != "abort" and 0 < len(made.ids) <= ask.max_new_tokens and all(p <= 0 for p in made.logprobs)
        )
        log.failed += not sound
        log.sampled.append(Sampled(made.versions[0] // 2, ask.request_id, given, list(made.ids), sound))
        return made


def attacks_on(tokens: Sequence[str]) -> list[str]:
    """Return texts that attack a family, none of them very long."""
    return [text for text in attacks(list(tokens)[:60]) if len(text) <= 300]
