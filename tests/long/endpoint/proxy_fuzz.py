"""Do sessions of agents keep what the proxy promises, whatever agents send and whenever they leave?

    python -m benchmarks.proxy_fuzz [--requests N] [--families NAME ...] [--seed N] [--control]
    python -m benchmarks.proxy_fuzz --seed N --only FAMILY-NUMBER [--requests N]

Agents at random speak HTTP, in all three protocols, to the real server: they rewrite and fork histories, repeat
requests, ask for the same at once, leave at any moment and come back, send turns back in other words and with other
ids, name items by their ids, and put hostile texts everywhere. The engine writes random turns with each family's own
template. Rows, receipts and the certificate are the real ones; they are compared with what the engine logged and what
the clients received. Clients close their sending side at times, and send one more request after the agent's return.
Commands end badly, and strangers crowd an endpoint that may open few files (`ends`, `strangers`).

- `violations`: the certificate, answers, usage, histories that the model did not get, turns that were not continued,
  answers of tools that belong to another call than their client names;
- `trained_twice`: generations that are trained in two rows, or twice in one;
- `undelivered_trained`: generations that are trained though no client got all of them;
- `control_tokens`: prompts with other control tokens than the same messages have without their texts;
- `unaccounted`: generations without a receipt, a row or a true cause.

`--control` puts one fault at a time into the proxy, and shows which counters see it. A session with findings is written
to a file whole. `--only` plays that session again and again, with the same draws; the order of simultaneous events is
up to the machine. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from tests.long.endpoint.proxy_fuzz_agents import Fuzzed
from tests.long.endpoint.proxy_fuzz_checks import KINDS, Checked, Findings
from tests.long.endpoint.proxy_fuzz_ends import ask_late, play_ends, play_strangers
from tests.long.endpoint.proxy_fuzz_faults import FAULTS
from tests.long.endpoint.proxy_fuzz_http import Clients
from tests.long.endpoint.proxy_fuzz_ids import ACTS
from tests.long.endpoint.proxy_fuzz_model import Family, FuzzEngine, Recorder, attacks_on
from tests.support.families import family as made_family
from verl_multiturn.certificate.receipts import ReceiptingEngine
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.errors import ConfigError
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.protocols.requests import Completion
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.rendering import PromptRenderer
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.proxy.sessions.turn_reading import TurnReader
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.limits import Limits, StopReason

REQUESTS = 20_400
REQUESTS_OF_ONE = 480
"""Requests where one session is played again and again: some fifteen times."""
CONTROLLED = 720
"""Requests for each fault: at 240, a fault that only shows with a client that has gone occurred once or never."""
_PER_SESSION = 24
_AT_ONCE = 3
_FAR = 100_000


def family_of(name: str) -> Family:
    """Return a family of `tests.support.families`."""
    from tests.long.tokens.control_tokens import control_tokens
    from tests.support.template_play import ONE_CALL, template_of
    from verl_multiturn.chat.template import turn_text
    from verl_multiturn.verl_bridge.model.call_formats import reasoning_marks

    made, template = made_family(name), template_of(name)
    control = control_tokens(made)
    return Family(
        name,
        template,
        lambda turn: turn_text(template, dict(turn)),
        made.format is not None,
        attacks_on([*control.outside.values(), *control.tags]),
        control.outside,
        control.authored,
        reasoning_marks(made.tokenizer),
        len(made.tokenizer),
        name in ONE_CALL,
        _takes_user_turns(template.codec, template.end_ids[0]),
    )


def _takes_user_turns(codec: ChatCodec, end_id: int) -> bool:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    try:
        codec.observation(said, [{"role": "user", "content": "x"}], [end_id], [])
    except ConfigError:
        return False
    return True


class World:
    """One family's proxy, with sessions of random settings.

    Args:
        family: The family.
        seed: Decides everything.
        findings: Target of the errors found.
    """

    def __init__(self, family: Family, seed: int, findings: Findings) -> None:
        template = family.template
        self._family, self._seed, self._findings = family, seed, findings
        self._model = FuzzEngine(family, seed)
        self._recorder = Recorder(StopTexts(self._model, template.tokenizer))
        self._engine = ReceiptingEngine(self._recorder)
        self._run = ProxyRun(
            engine=self._engine,
            renderer=PromptRenderer(template.codec, template.end_ids),
            reader=TurnReader(template.parser, template.tokenizer, template.end_ids, family.marks),
            limits=Limits(prompt_length=_FAR, response_length=_FAR),
            fill_id=template.end_ids[0],
        )
        self.places: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.requests = self.sessions = self.answered = self.rows = self.generations = 0

    async def play(self, requests: int, only: int | None = None) -> World:
        """Play sessions until so many requests were sent, and return this.

        Args:
            requests: Number of requests.
            only: Number of a session that is played again and again; None plays one after the other.
        """
        async with ProxyServer(ping_s=0.005) as server:
            while self.requests < requests:
                if only is not None:
                    await self._session(server, only)
                    continue
                await asyncio.gather(*(self._session(server, self.sessions + more) for more in range(_AT_ONCE)))
            if server._open or self._engine._open:
                self._findings.add("violations", f"{self._family.name}: sessions are left behind")
        if len(asyncio.all_tasks()) > 1:
            self._findings.add("violations", f"{self._family.name}: tasks are left: {asyncio.all_tasks()}")
        self._run.renderer.close()
        return self

    def _drawn(self, chance: random.Random) -> ProxyRun:
        limits = Limits(
            prompt_length=chance.choice((_FAR, _FAR, _FAR, 300)),
            response_length=chance.choice((_FAR, _FAR, _FAR, 300)),
            turn_length=chance.choice((None, None, None, 20)),
        )
        return replace(
            self._run,
            limits=limits,
            max_completions=chance.choice((None, None, None, 8)),
            max_inflight=chance.choice((16, 16, 2, 1)),
            max_rows=chance.choice((None, None, 4, 1)),
            select=chance.choice((None, None, None, _half, _none)),
        )

    async def _session(self, server: ProxyServer, number: int) -> None:
        """Play one session, and check its results."""
        name = f"{self._family.name}-{number}"
        self.sessions += 1
        chance = random.Random(f"{name} {self._seed}")
        run = self._drawn(chance)
        session = AgentSession(name, run, {"temperature": 1.0})
        address = server.open(session)
        clients = Clients(int(server.address.rpartition(":")[2]), address.api_key)
        played = Fuzzed(session, self._family, clients, f"{name} {self._seed}", itertools.count(), ACTS)
        playing = [asyncio.create_task(played.play(_PER_SESSION)) for _ in range(chance.choice((1, 2, 3)))]
        if chance.random() < 0.15:
            await asyncio.wait(playing, timeout=chance.random())
        else:
            await asyncio.wait(playing)
        played.closing = True
        session.returned()
        await session.closed()
        await asyncio.gather(*playing)
        await ask_late(played, clients, self._findings)
        await server.close_session(address)
        clients.close()
        outcome = session.outcome(StopReason.ENGINE_ERROR if session.failed else StopReason.FINISHED)
        if session.failed.startswith("the proxy failed"):
            self._findings.add("violations", f"{name}: {session.failed}")
        receipts = session.receipts()
        log = self._recorder.logs.pop(name, None)
        self._model.forget(name)
        self.requests += played.requests
        self.generations += len(receipts)
        self.rows += len(outcome.rows)
        self.places.update("row" if isinstance(place, int) else place for place in outcome.places)
        for done in played.done:
            self.answered += bool(done.received)
            if done.error:
                self.refusals[_code(done.error)] += 1
        if log is not None:
            await Checked(played, log, outcome, receipts, run, self._findings).run_all(self._seed)


def _half(views: Sequence[Completion]) -> Collection[str]:
    return [view.id for index, view in enumerate(views) if index % 2]


def _none(views: Sequence[Completion]) -> Collection[str]:
    return []


def _code(error: str) -> str:
    said = json.loads(error)["error"] if error.startswith("{") else {"message": error}
    return str(said.get("code") or said["message"])[:60]


def measure(
    chosen: Sequence[Family],
    requests: int,
    seed: int,
    console: Console | None = None,
    with_ends: bool = True,
    only: int | None = None,
) -> dict[str, int]:
    """Play all families, and return the figures.

    Args:
        chosen: The families.
        requests: Number of requests, over all families.
        seed: Decides the draws; the order of simultaneous events is up to the machine.
        console: Where a table and examples are written; None writes none.
        with_ends: Whether commands that end badly and strangers are played, too.
        only: Number of the session that is played again and again; None plays one after the other.
    """
    findings = Findings()
    table = Table("family", "sessions", "requests", "answered", "generations", "rows", "in no row", "found", "s")
    refusals: Counter[str] = Counter()
    total = sessions = 0
    for family in chosen:
        started, before = time.perf_counter(), findings.count.total()
        world = asyncio.run(World(family, seed, findings).play(-(-requests // len(chosen)), only))
        total += world.requests
        sessions += world.sessions
        refusals += world.refusals
        left = ", ".join(f"{count} {cause}" for cause, count in world.places.most_common() if cause != "row")
        figures = [world.sessions, world.requests, world.answered, world.generations, world.rows, left]
        seconds = f"{time.perf_counter() - started:.1f}"
        table.add_row(family.name, *map(str, figures), str(findings.count.total() - before), seconds)
    ends = asyncio.run(play_ends(findings)) if with_ends else 0
    strangers = asyncio.run(play_strangers(seed, findings)) if with_ends else 0
    if console is not None:
        console.print(table)
        console.print("refused:", dict(refusals.most_common(12)), markup=False, highlight=False)
        for kind in KINDS:
            for example in findings.examples[kind]:
                console.print(f"{kind}: {example}"[:1500], markup=False, highlight=False)
        for file in findings.files:
            console.print(f"whole: {file}", markup=False, highlight=False, soft_wrap=True)
    return {"requests": total, "sessions": sessions, "families": len(chosen), "ends": ends, "strangers": strangers} | {
        kind: findings.count[kind] for kind in KINDS
    }


def control(family: Family, requests: int, seed: int, console: Console | None = None) -> dict[str, int]:
    """Put each fault into the proxy, and return how many there are and how many their counters saw."""
    table = Table("fault", "has to be seen by", *KINDS)
    seen = 0
    for fault in FAULTS:
        with ExitStack() as stack:
            for each in fault.patched():
                stack.enter_context(each)
            figures = measure([family], requests, seed, with_ends=False)
        seen += figures[fault.seen_by] > 0
        table.add_row(fault.what, fault.seen_by, *(str(figures[kind]) for kind in KINDS))
    if console is not None:
        console.print(table)
    return {"faults": len(FAULTS), "seen": seen}
