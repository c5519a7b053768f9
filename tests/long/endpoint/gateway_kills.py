"""The kills of `benchmarks.gateway`: gateway, engine and writer end by SIGKILL at drawn moments, under load.

    players ⇄ gateway ⇄ engine        killer: kill, start again        in the end: ledger.compare(folder)

A moment is a number of acknowledgements since the last start, and a part of a second. A kill in the writer is a failure
of power (`gateway_process.PowerFailure`): what no fsync took is gone. Players repeat what was not acknowledged, and
rewards that were, and go on with new sessions.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.long.endpoint.gateway_children import Answer, Child, Client, engine, gateway
from tests.long.endpoint.gateway_ledger import Ledger, RewardName, stored_records
from tests.support.gateway_process import ADMIN
from verl_multiturn.records.verify.record import verify_record

KINDS = ("gateway", "engine", "writer")
_ACKNOWLEDGED = (5, 40)
"""Acknowledgements between two kills."""
_PLAYERS = 12
"""Sessions at once."""
_PAUSE_S = 0.1
_RECOVERY_S = 300.0
_TRIES = 10_000


@dataclass
class Found:
    """Figures of the kills."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class _Load:
    """Sessions that are played one after the other, and the ledger of what was acknowledged to them."""

    def __init__(self, client: Client, found: Found) -> None:
        self.client, self.found = client, found
        self.ledger = Ledger()
        self.over = False
        self.acknowledged = 0
        self._more = asyncio.Condition()
        self._counted: Counter[RewardName] = Counter()

    async def play(self, drawn: random.Random) -> None:
        """Play sessions until `over`."""
        while not self.over:
            await self._session(drawn)

    async def wait(self, acknowledgements: int) -> None:
        """Wait for further acknowledgements."""
        until = self.acknowledged + acknowledgements
        async with asyncio.timeout(_RECOVERY_S), self._more:
            await self._more.wait_for(lambda: self.acknowledged >= until)

    async def _session(self, drawn: random.Random) -> None:
        started = await self._sent(self.client.start, f"t{drawn.randrange(5)}")
        if started.status != 201:
            return
        session_id, key = started.body["session_id"], started.body["api_key"]
        completions: list[str] = []
        names: dict[RewardName, float] = {}
        for number in range(drawn.randint(1, 3)):
            answer = await self._sent(self.client.chat, key, f"{number}?")
            if answer.status != 200:
                self.found.counts["cut_sessions"] += 1
                break
            completions.append(answer.body["id"].removeprefix("chatcmpl-"))
            if drawn.random() < 0.5:
                await self._reward(drawn, session_id, key, completions, names)
        if not completions:
            return
        await self._reward(drawn, session_id, key, completions, names)
        ended = await self._sent(self.client.end, key)
        if ended.status == 200:
            self.ledger.end(session_id, ended.body["completions"])
            self.found.counts["ends"] += 1
            if ended.body["completions"] < len(completions):
                self.found.problems.append(f"{session_id}: {len(completions)} completions were given, {ended.body}")
            await self._acknowledge()
        for _ in range(drawn.randint(0, 2)):
            await self._reward(drawn, session_id, key, completions, names)

    async def _reward(
        self, drawn: random.Random, session_id: str, key: str, completions: list[str], names: dict[RewardName, float]
    ) -> None:
        """Reward a session, a completion or the last one; at times what was rewarded before."""
        if names and drawn.random() < 0.3:
            name, value = drawn.choice(list(names.items()))
        else:
            target = drawn.choice([None, *completions])
            name, value = RewardName(session_id, target, f"r{drawn.getrandbits(60):x}"), drawn.randint(1, 63) / 64
        more = {"id": name.id}
        if name.generation is None:
            more["session_id"], key = session_id, ADMIN
        elif name.generation != completions[-1] or drawn.random() < 0.5:
            more["interaction_id"] = f"chatcmpl-{name.generation}"
        if name not in self.ledger.rewarded:
            self.ledger.reward(name, value, is_acknowledged=False)
        answer = await self._sent(self.client.reward, key, value, **more)
        if answer.status != 200:
            return
        self.ledger.doubtful.pop(name, None)
        self.ledger.reward(name, value, is_acknowledged=True)
        names[name] = value
        self.found.counts["rewards"] += 1
        self._counted[name] += answer.body["counted"]
        if self._counted[name] > 1:
            self.found.counts["twice"] += 1
            self.found.problems.append(f"{name} was counted again")
        await self._acknowledge()

    async def _sent(self, ask: object, *given: object, **named: object) -> Answer:
        """Send a request until it is answered, over restarts; 503 and 429 are repeated, too."""
        for _ in range(_TRIES):
            answer: Answer = await ask(*given, **named)  # type: ignore[operator]
            if answer.status not in (0, 429, 503):
                break
            self.found.counts["unanswered"] += 1
            await asyncio.sleep(_PAUSE_S)
        if answer.status >= 500:
            self.found.counts["server_errors"] += 1
            self.found.problems.append(f"{answer}")
        return answer

    async def _acknowledge(self) -> None:
        self.acknowledged += 1
        async with self._more:
            self._more.notify_all()


async def kill(folder: Path, moments: int, seed: int, *options: str, among: Sequence[str] = KINDS) -> Found:
    """Kill at so many moments, and return the figures.

    Args:
        folder: Where the records go.
        moments: Number of kills.
        seed: Draws moments, kinds, and what is played.
        options: Further ones of the gateway, such as `--fault unsynced`.
        among: Kinds of kills.
    """
    drawn, found = random.Random(seed), Found()
    kinds = [among[number % len(among)] for number in range(moments)]
    drawn.shuffle(kinds)
    async with engine() as behind, gateway(folder, "--engine", behind.address, *options) as front:
        async with Client(front.address) as client:
            load = _Load(client, found)
            playing = [asyncio.ensure_future(load.play(random.Random(drawn.random()))) for _ in range(_PLAYERS)]
            for kind in kinds:
                await load.wait(drawn.randint(*_ACKNOWLEDGED))
                await asyncio.sleep(drawn.random() * 0.05)
                await _kill_one(kind, front, behind, drawn)
                found.counts[f"kills_{kind}"] += 1
            await load.wait(_ACKNOWLEDGED[1])
            load.over = True
            await asyncio.gather(*playing)
        found.counts["not_ended"] += await front.stop() != 0
    _compare(load.ledger, folder, found)
    return found


async def _kill_one(kind: str, front: Child, behind: Child, drawn: random.Random) -> None:
    if kind == "engine":
        await behind.kill()
        await asyncio.sleep(drawn.random() * 0.2)
        await behind.start()
        return
    await (front.fail_power() if kind == "writer" else front.kill())
    await front.start("--seed", str(drawn.getrandbits(30)))


def _compare(ledger: Ledger, folder: Path, found: Found) -> None:
    compared = ledger.compare(folder)
    found.counts.update(compared.figures)
    found.problems += [*compared.lost, *compared.twice, *compared.unknown]
    for record in stored_records(folder):
        violations = verify_record(record).violations
        found.counts["violations"] += len(violations)
        found.problems += map(str, violations)
