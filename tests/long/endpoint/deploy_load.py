"""Does each token keep the hash of the weights that sampled it, while weights are swapped under load?

    python -m benchmarks.deploy [--swaps N] [--agents N] [--seed N] [--control]

Agents speak HTTP to the real endpoint, on `DeployedEngine` and `Deployer`, before a stand-in of SGLang. There each
model says one token for ever: that in the last byte of the weights that were really loaded. So a token shows its
weights, whatever hash it was given. Between the swaps come models that must not serve, and the former has to go on.

- `wrong_hash`: tokens whose hash is that of other weights than sampled them;
- `lost`: sessions without a whole answer to each request, or with tokens that no row trains once;
- `not_refused`: models that served though they must not, or after which the former did not serve;
- `mixed`, `interrupted`: answers with tokens of several weights, and generations that swaps interrupted.

`--control` gives each interrupted answer the hash of its last part alone, and shows that `wrong_hash` sees it. The last
line is one JSON object.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp

from tests.support.families import QUICKSTART
from tests.support.template_play import template_of
from tests.support.weights_server import WeightsServer
from verl_multiturn.certificate.receipts import ReceiptingEngine
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.describe import describe
from verl_multiturn.gateway import engine as engine_module
from verl_multiturn.gateway.deploy import Deployer
from verl_multiturn.gateway.engine import DeployedEngine
from verl_multiturn.models.hash import model_hash
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.rendering import PromptRenderer
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.proxy.sessions.turn_reading import TurnReader
from verl_multiturn.rollout.engines.protocol import Generation
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.limits import Limits, StopReason

SWAPS = 20
KINDS = ("wrong_hash", "lost", "not_refused")
_TURNS = 3
_TOKENS = (20, 120)
_STEP_S = 0.002
_FAR = 1_000_000
_SAYS = ("7", "8", "9")
_DRAIN_S = 0.05
"""Less than the longest generations take, so that some drain and others are interrupted."""


@dataclass
class Models:
    """Folders of models; the last byte of the weights decides what the stand-in says.

    Attributes:
        good: Those that may serve.
        hashes: Hash of each that can be loaded, by its last byte.
        bad: Those that must not, by their fault.
    """

    good: list[Path]
    hashes: dict[int, str] = field(default_factory=dict)
    bad: dict[str, Path] = field(default_factory=dict)


def make_models(folder: Path) -> Models:
    """Make the models from the quickstart's, in a folder."""

    def made(name: str, byte: int) -> Path:
        copy = folder / name
        shutil.copytree(QUICKSTART, copy)
        weights = copy / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + bytes([byte]))
        models.hashes[byte] = model_hash(copy)
        return copy

    models = Models([])
    models.good += [made(f"good_{byte}", byte) for byte in range(len(_SAYS))]
    for byte, fault in enumerate(("does_not_load", "nan", "vocabulary", "half_written", "wrong_hash"), len(_SAYS)):
        models.bad[fault] = made(fault, byte)
    tokenizer = models.bad["vocabulary"] / "tokenizer.json"
    held = json.loads(tokenizer.read_text())
    words = held["model"]["vocab"]
    one, two = list(words)[10:12]
    words[one], words[two] = words[two], words[one]
    tokenizer.write_text(json.dumps(held))
    weights = models.bad["half_written"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return models


class World:
    """Agents, the endpoint, and the stand-in.

    Args:
        models: The models.
        seed: Decides lengths and swaps.
    """

    def __init__(self, models: Models, seed: int) -> None:
        self._models, self._random = models, random.Random(seed)
        self._template = template_of("quickstart")
        encode = self._template.tokenizer.encode
        self._says = {byte: encode(text, add_special_tokens=False)[0] for byte, text in enumerate(_SAYS)}
        # Weights that never may serve say tokens of their own, so that one that is delivered is seen.
        others = iter("abcdefgh")
        for byte in range(len(_SAYS), len(models.hashes)):
            self._says[byte] = encode(next(others), add_special_tokens=False)[0]
        assert len(set(self._says.values())) == len(self._says), "two models say the same"
        self._byte_of = {token: byte for byte, token in self._says.items()}
        self._numbers = itertools.count()
        self._over = False
        self.found: Counter[str] = Counter()
        self.problems: list[str] = []

    async def play(self, swaps: int, agents: int) -> World:
        """Swap weights so many times under the load of agents, and return this."""
        first = self._models.good[0]
        stand_in = WeightsServer(self._says[0], self._models.hashes[0], self._token_of, _STEP_S)
        stand_in.nan_tokens = {self._says[_byte(self._models.bad["nan"])]}
        async with stand_in.serve() as url:
            engine = DeployedEngine(url, stand_in.version)
            deployer = Deployer(engine, first, self._template.tokenizer.encode("1+1="))
            run = self._run(engine)
            try:
                async with ProxyServer() as server, aiohttp.ClientSession() as client:
                    playing = [asyncio.ensure_future(self._agent(run, engine, server, client)) for _ in range(agents)]
                    await self._swaps(swaps, engine, deployer)
                    self._over = True
                    await asyncio.gather(*playing)
            finally:
                await deployer.aclose()
                await engine.aclose()
                run.renderer.close()
        return self

    def _run(self, engine: DeployedEngine) -> ProxyRun:
        template = self._template
        return ProxyRun(
            engine=ReceiptingEngine(StopTexts(engine, template.tokenizer)),
            renderer=PromptRenderer(template.codec, template.end_ids),
            reader=TurnReader(template.parser, template.tokenizer, template.end_ids, [THINK]),
            limits=Limits(prompt_length=_FAR, response_length=_FAR),
            fill_id=template.end_ids[0],
        )

    def _token_of(self, folder: Path) -> int:
        if folder == self._models.bad["does_not_load"]:
            raise ValueError("size mismatch for lm_head.weight")
        return self._says[_byte(folder)]

    async def _swaps(self, swaps: int, engine: DeployedEngine, deployer: Deployer) -> None:
        faults = itertools.cycle(self._models.bad)
        for number in range(swaps):
            await asyncio.sleep(self._random.uniform(0.02, 0.1))
            serves = engine.model
            new = self._random.choice([each for each in self._models.good if self._hash(each) != serves])
            mode = {"mode": "cut"} if number % 2 else {"drain_s": _DRAIN_S}
            deployer.begin({"path": str(new), "hash": self._hash(new), **mode})
            now = await deployer.wait()
            self.found["swaps"] += now.state == "done" and engine.model == self._hash(new)
            self.found["interrupted"] += now.interrupted
            if now.state != "done":
                self.problems.append(f"swap {number}: {now.error}")
            await self._refuse(next(faults), engine, deployer)

    async def _refuse(self, fault: str, engine: DeployedEngine, deployer: Deployer) -> None:
        """Deploy a model that must not serve."""
        folder, serves, known = self._models.bad[fault], engine.model, list(engine.models)
        weights = self._models.hashes[0] if fault == "wrong_hash" else self._hash(folder)
        deployer.begin({"path": str(folder), "hash": weights, "mode": "cut"})
        now = await deployer.wait()
        self.found[f"refused_{fault}"] += 1
        self.found["interrupted"] += now.interrupted
        if now.state != "failed" or engine.model != serves or engine.models != known or await engine.look():
            self.found["not_refused"] += 1
            self.problems.append(f"{fault}: {now.state}, serves {engine.model}, {await engine.look()}")

    def _hash(self, folder: Path) -> str:
        """Return the hash that a folder had when it was whole."""
        names = [each.name for each in (*self._models.good, *self._models.bad.values())]
        return self._models.hashes[names.index(folder.name)]

    async def _agent(
        self, run: ProxyRun, engine: DeployedEngine, server: ProxyServer, client: aiohttp.ClientSession
    ) -> None:
        """Play sessions until the swaps are over."""
        while not self._over:
            session = AgentSession(f"s{next(self._numbers)}", run, {})
            address = server.open(session)
            said: list[str] = []
            wanted = [self._random.randint(*_TOKENS) for _ in range(_TURNS)]
            messages: list[dict[str, Any]] = [{"role": "user", "content": "Count."}]
            try:
                for tokens in wanted:
                    body = {"model": "m", "messages": messages, "max_tokens": tokens}
                    headers = {"Authorization": f"Bearer {address.api_key}"}
                    async with client.post(
                        address.base_url + "/chat/completions", json=body, headers=headers
                    ) as response:
                        answer = await response.json()
                        if response.status != 200:
                            raise ValueError(f"{response.status}: {answer}")
                    said.append(answer["choices"][0]["message"]["content"])
                    messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "Go on."}]
            except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
                self.problems.append(f"session: {describe(error)}")
            session.returned()
            session.end()
            await session.closed()
            await server.close_session(address)
            self._count(session, engine, said, wanted)

    def _count(self, session: AgentSession, engine: DeployedEngine, said: list[str], wanted: list[int]) -> None:
        """Compare a session's receipts and rows with what its client got, and with what the weights say."""
        receipts = session.receipts()
        outcome = session.outcome(StopReason.FINISHED)
        session.forget()
        self.found["sessions"] += 1
        sampled: Counter[tuple[int, int]] = Counter()
        for receipt in receipts:
            own = list(zip(receipt.ids.tolist(), receipt.versions.tolist(), strict=True))
            sampled.update(own)
            self.found["tokens"] += len(own)
            self.found["mixed"] += len({version for _, version in own}) > 1
            self.found["wrong_hash"] += sum(self._is_wrong(engine, *each) for each in own)
        trained: Counter[tuple[int, int]] = Counter()
        for row in outcome.rows:
            kept = row.trajectory
            for token, version, mask in zip(kept.ids, kept.versions, kept.mask, strict=True):
                if mask:
                    trained[token, version] += 1
        decode = self._template.tokenizer.decode
        is_whole = [len(each.ids) for each in receipts] == wanted and trained == sampled
        if not is_whole or said != [decode(each.ids.tolist()) for each in receipts]:
            self.found["lost"] += 1

    def _is_wrong(self, engine: DeployedEngine, token: int, version: int) -> bool:
        byte = self._byte_of.get(token)
        # The hash is that of the weights whose last byte the stand-in read when it loaded them.
        return byte is None or not 0 <= version < len(engine.models) or (
            engine.models[version] != self._models.hashes[byte]
        )  # fmt: skip


def _byte(folder: Path) -> int:
    return (folder / "model.safetensors").read_bytes()[-1]


def measure(swaps: int, agents: int, seed: int, report: Callable[[str], None] = print) -> dict[str, int]:
    """Swap weights under load, and return the figures.

    Args:
        swaps: Number of good models that are deployed one after the other.
        agents: Sessions at once.
        seed: Decides lengths and swaps.
        report: Gets a line for each problem.
    """
    with tempfile.TemporaryDirectory() as folder:
        world = asyncio.run(World(make_models(Path(folder)), seed).play(swaps, agents))
    for problem in world.problems[:20]:
        report(problem)
    names = ("swaps", "sessions", "tokens", "mixed", "interrupted", *KINDS)
    refused = {name: count for name, count in world.found.items() if name.startswith("refused_")}
    return {**{name: world.found[name] for name in names}, **refused}


def control(swaps: int, agents: int, seed: int, report: Callable[[str], None] = print) -> dict[str, int]:
    """Give interrupted answers the hash of their last part alone, and return the figures: `wrong_hash` sees it."""
    joined = engine_module._joined

    def last_alone(made: Generation | None, part: Generation | None) -> Generation | None:
        found = joined(made, part)
        return found and replace(found, versions=found.versions[-1:] * len(found.ids))

    with patch.object(engine_module, "_joined", last_alone):
        return measure(swaps, agents, seed, report)
