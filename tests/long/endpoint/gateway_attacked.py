"""The attack of `benchmarks.gateway`: hostile requests at a healthy gateway, beside honest sessions.

The engine says the end of its prompt, and each session's prompts have a marker of their own: so an answer shows what
its session knows, and one with another's marker has read another's session.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tests.long.endpoint.gateway_children import Client, gateway
from tests.long.endpoint.gateway_hostile import ADMIN_OWNER, NOBODY, Attack, Attacks, Known, Sessions
from tests.long.endpoint.gateway_ledger import Ledger, RewardName
from tests.support.gateway_process import ADMIN

KINDS = ("server_errors", "foreign", "twice", "lost")
"""Figures that have to be 0."""
_AT_ONCE = 24
_PATIENCE_S = 300.0
_HONEST, _OWN, _MOST_OWN = 6, 6, 12
_OPEN = re.compile(rb'\{"status": "(ok|ready)"\}|# TYPE verl_multiturn_gateway_')
"""Answers that need no key."""
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_MARKER = re.compile(rb"marker-[0-9a-f]{12}")
_COMPLETION = re.compile(rb'"id":"((?:chatcmpl-|msg_|resp_)[0-9A-Za-z]+)"')


class Siege:
    """Attackers and honest sessions at one gateway.

    Args:
        client: Speaks to it.
        port: Where it listens.
        seed: Draws the attacks.
    """

    def __init__(self, client: Client, port: int, seed: int) -> None:
        self._client, self._port = client, port
        self._sessions = Sessions(ADMIN)
        self._attacks = Attacks(seed, port, self._sessions)
        self._drawn = random.Random(seed)
        self._owners: dict[bytes, str] = {}
        """By the marker of a session its id."""
        self._honest: set[str] = set()
        self._counted: Counter[RewardName] = Counter()
        self._over = False
        self.ledger = Ledger()
        self.found: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.problems: list[str] = []

    async def play(self, requests: int) -> None:
        """Send so many hostile requests, while honest sessions go on."""
        for _ in range(_HONEST):
            honest = await self._begin()
            self._honest.add(honest.session_id)
            self._sessions.honest.append(honest)
        for _ in range(_OWN):
            self._sessions.own.append(await self._begin())
        left = iter(range(requests))
        async with asyncio.TaskGroup() as playing:
            for each in self._sessions.honest:
                playing.create_task(self._play_honest(each))
            await asyncio.gather(*(self._attack(left) for _ in range(_AT_ONCE)))
            self._over = True

    async def _begin(self) -> Known:
        """Start a session, and let it say its marker."""
        started = await self._client.start()
        assert started.status == 201, started
        return await self._known(started.body)

    async def _known(self, body: Any) -> Known:
        known = Known(body["session_id"], body["api_key"], f"marker-{self._drawn.getrandbits(48):012x}")
        self._owners[known.marker.encode()] = known.session_id
        answer = await self._client.chat(known.key, known.marker, tokens=200)
        if answer.status == 200:
            self._expect(known.marker in json.dumps(answer.body), f"a session that forgot its marker: {answer}")
            known.completions.append(answer.body["id"])
        return known

    async def _play_honest(self, known: Known) -> None:
        """Ask and reward until the attack is over, then end; all that is sent has to be answered well."""
        drawn, rewards, count = random.Random(known.session_id), 0.0, 1
        while not self._over:
            answer = await self._client.chat(known.key, f"{known.marker} {count}", tokens=200)
            self._expect(answer.status == 200, f"an honest request: {answer}")
            if answer.status != 200:
                return
            count += 1
            known.completions.append(answer.body["id"])
            name, value = RewardName(known.session_id, "", f"h{drawn.getrandbits(60):x}"), drawn.randint(0, 64) / 1024
            self.ledger.reward(name, value, is_acknowledged=True)
            answer = await self._client.reward(known.key, value, id=name.id)
            is_counted = answer.status == 200 and answer.body["counted"]
            self._expect(is_counted, f"an honest reward: {answer}")
            rewards += value
            await asyncio.sleep(0.2)
        answer = await self._client.end(known.key)
        expected = {"session_id": known.session_id, "completions": count, "reward": rewards or None}
        self._expect(answer.status == 200, f"an honest end: {answer}")
        if answer.status == 200 and {key: answer.body[key] for key in expected} != expected:
            self._foreign(f"an honest session ended as {answer.body}, expected {expected}")
        self.ledger.end(known.session_id, count)

    def _expect(self, is_right: bool, problem: str) -> None:
        if not is_right:
            self.found["lost"] += 1
            self.problems.append(problem)

    def _foreign(self, problem: str) -> None:
        self.found["foreign"] += 1
        self.problems.append(problem)

    async def _attack(self, left: Any) -> None:
        for _ in left:
            attack = self._attacks.draw()
            self._doubt(attack)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    data = await self._sent(attack)
            except TimeoutError:
                self.problems.append(f"no answer in {_PATIENCE_S:g} s: {attack.written[:300]!r}")
                self.found["lost"] += 1
                continue
            self.found["requests"] += 1
            await self._look(attack, data)

    def _doubt(self, attack: Attack) -> None:
        """Note a reward that may count."""
        body = attack.reward
        if body is None:
            return
        owner = body.get("session_id") if attack.owner == ADMIN_OWNER else attack.owner
        self.ledger.reward(RewardName(str(owner), "", str(body.get("id"))), body["reward"], is_acknowledged=False)

    async def _sent(self, attack: Attack) -> bytes:
        """Send an attack on a connection of its own, and return all that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            size = -(-len(attack.written) // attack.pieces) or 1
            for place in range(0, len(attack.written), size):
                writer.write(attack.written[place : place + size])
                await writer.drain()
                if attack.pieces > 1:
                    await asyncio.sleep(0.05)
            if attack.torn:
                return b""
            writer.write_eof()
            return await reader.read(-1)
        except OSError:  # it was refused before its end
            return b""
        finally:
            writer.close()

    async def _look(self, attack: Attack, data: bytes) -> None:
        """Compare an answer with what the sender may do."""
        statuses = [int(each) for each in _STATUS.findall(data)]
        self.statuses.update(statuses or [0])
        shown = f"{attack.written[:400]!r}: {data[:400]!r}"
        if any(each >= 500 for each in statuses):
            self.found["server_errors"] += 1
            self.problems.append(shown)
        for marker in _MARKER.findall(data):
            if self._owners.get(marker) != attack.owner:
                self._foreign(shown)
        is_taken = any(200 <= each < 300 for each in statuses)
        if is_taken and attack.owner == NOBODY and not _OPEN.search(data) and not attack.written.startswith(b"HEAD"):
            self._foreign(shown)
        if not is_taken:
            return
        if attack.kind == "rl" and attack.path:
            await self._take(attack, data, shown)
        own = next((each for each in self._sessions.own if each.session_id == attack.owner), None)
        if attack.kind == "model" and own is not None:
            own.completions += [each.decode() for each in _COMPLETION.findall(data)]

    async def _take(self, attack: Attack, data: bytes, shown: str) -> None:
        """Look at a request to `/rl/*` that was taken, and go on with the sessions that there are now."""
        body = json.loads(data.rpartition(b"\r\n\r\n")[2])  # an interim answer may be before it
        if attack.path == "/rl/start_session":
            if attack.owner != ADMIN_OWNER:
                self._foreign(shown)
            await self._adopt(body)
        elif attack.path in ("/rl/stats", "/rl/deploy"):
            if attack.owner != ADMIN_OWNER:
                self._foreign(shown)
        else:
            name = body["session_id"]
            if name in self._honest or attack.owner not in (ADMIN_OWNER, name):
                self._foreign(shown)
            if attack.path == "/rl/set_reward":
                self._count(attack, body, shown)
            else:
                await self._ended(name)

    def _count(self, attack: Attack, body: Any, shown: str) -> None:
        sent = attack.reward
        if sent is None:
            self._foreign(f"no reward, and taken: {shown}")
        elif isinstance(sent.get("id"), str) and isinstance(target := sent.get("interaction_id"), str):
            name = RewardName(body["session_id"], re.sub(r".*[-_]", "", target), sent["id"])
            self._counted[name] += body["counted"]
            if self._counted[name] == 2:
                self.found["twice"] += 1
                self.problems.append(f"counted twice: {shown}")

    async def _adopt(self, body: Any) -> None:
        """Take a session that an attack began as an attackers' own; where there are enough, end it."""
        known = await self._known(body)
        if len(self._sessions.own) < _MOST_OWN:
            self._sessions.own.append(known)
            return
        await self._client.end(known.key)
        self._sessions.ended.append(known)

    async def _ended(self, session_id: str) -> None:
        sessions = self._sessions
        for known in [each for each in sessions.own if each.session_id == session_id]:
            sessions.own.remove(known)
            sessions.ended.append(known)
        while len(sessions.own) < _OWN:
            sessions.own.append(await self._begin())


async def attack(folder: Path, requests: int, seed: int, *options: str) -> Siege:
    """Attack a healthy gateway, and return what was found.

    Args:
        folder: Where the records go.
        requests: Number of hostile requests.
        seed: Draws them.
        options: Further ones of the gateway, such as `--fault any_key`.
    """
    async with gateway(folder, "--most", "400", *options) as front, Client(front.address) as client:
        siege = Siege(client, front.port, seed)
        await siege.play(requests)
        siege.found["lost"] += await front.stop() != 0
    compared = siege.ledger.compare(folder)
    siege.found["foreign"] += len(compared.unknown)
    siege.found["twice"] += len(compared.twice)
    siege.found["lost"] += len(compared.lost)
    siege.problems += [*compared.unknown, *compared.twice, *compared.lost]
    return siege
