"""`deploy_load` on the real command and a real SGLang on the CPU: is each token that of the weights with its hash?

    python -m benchmarks.deploy --engine [--swaps N] [--agents N] [--seed N] [--out DIR]

`verl-multiturn gateway` serves a tiny model, agents play sessions over HTTP, and `deploy_model`, which the command
`deploy` calls, swaps two models under them. Between the swaps come models that must not serve. Afterwards all tokens in
the records are scored anew by transformers, with each of the models: a token's recorded log-probability has to be that
of the model whose hash it has.

- `wrong_hash`: tokens with another log-probability than those weights give them;
- `telling`: tokens to which the other model gives another one; `swapped`: those of them that are seen if each token is
  given the other hash, as a control: all of them;
- `lost`: sessions whose answers or whose acknowledged end are not in the records, or which got an error;
- `not_refused`: models that served though they must not, or after which the former did not serve;
- `furthest`: largest difference between a recorded log-probability and that of its own weights.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT
from tests.support.families import QUICKSTART
from verl_multiturn.describe import describe
from verl_multiturn.gateway.deploy_client import deploy_model, deployment_at
from verl_multiturn.models.hash import model_hash
from verl_multiturn.records.read.records import Records

KINDS = ("wrong_hash", "lost", "not_refused", "unseen")
ADMIN = "benchmark-admin-key"
_TURNS = 3
_TOKENS = (16, 160)
_DRAIN_S = 1.0
"""Less than the longest generations take here, so that some drain and others are interrupted."""
_END = "<|im_end|>"
_NEAR = 2e-3
"""Largest difference of log-probabilities between SGLang and transformers, both in float32."""
_NOISE = 0.5
"""Size of the noise, in standard deviations of a tensor: such a model writes on, and each one writes otherwise."""


def make_models(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Make two models that may serve, one of them in another precision, and those that must not, by their fault."""
    torch.manual_seed(0)
    good = [folder / "good_0", folder / "good_1"]
    special = list(AutoTokenizer.from_pretrained(QUICKSTART).added_tokens_decoder)
    for number, path in enumerate(good):
        shutil.copytree(QUICKSTART, path)
        tensors = load_file(path / "model.safetensors")
        for name, tensor in tensors.items():
            noisy = tensor.float() + _NOISE * tensor.float().std() * torch.randn(tensor.shape)
            if name == "model.embed_tokens.weight":
                noisy[special] = 0.0  # they seldom end an answer, or call
            tensors[name] = noisy if number else noisy.to(tensor.dtype)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    bad = {
        name: folder / name for name in ("does_not_load", "nan", "vocabulary", "half_written", "wrong_hash", "tensor")
    }
    for number, path in enumerate(bad.values()):
        shutil.copytree(good[0], path)
        tensors = load_file(path / "model.safetensors")
        tensors["model.norm.weight"][0] += number + 1  # a hash of its own
        if path == bad["nan"]:
            tensors["model.norm.weight"][:] = torch.nan
        if path == bad["tensor"]:
            tensors["more.weight"] = torch.ones(2)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with (bad["does_not_load"] / "model.safetensors").open("ab") as file:
        file.write(b"what no tensor holds")
    tokenizer = bad["vocabulary"] / "tokenizer.json"
    held = json.loads(tokenizer.read_text())
    words = held["model"]["vocab"]
    one, two = list(words)[10:12]
    words[one], words[two] = words[two], words[one]
    tokenizer.write_text(json.dumps(held))
    weights = bad["half_written"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return good, bad


@contextmanager
def gateway(model: Path, records: Path, log: Path) -> Iterator[str]:
    """Run the command; yields its address. It ends all sessions at the end.

    Raises:
        RuntimeError: It does not serve, or ends with an error.
    """
    words = ["gateway", str(model), "--records", str(records), "--smoke", "--admin-key-env", "GATEWAY_ADMIN"]
    environment = {**os.environ, "GATEWAY_ADMIN": ADMIN, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "verl_multiturn.cli", *words], stdout=file, stderr=file, env=environment, cwd=ROOT
        )
    try:
        while not (found := [line for line in log.read_text().splitlines() if line.startswith("gateway http")]):
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)
        yield found[0].removeprefix("gateway ")
        process.send_signal(signal.SIGTERM)
        if process.wait():
            raise RuntimeError(log.read_text())
    finally:
        process.kill()
        process.wait()


class World:
    """Agents, the deployments, and what they counted.

    Args:
        url: Address of the gateway.
        good: Models that may serve; the first one does.
        bad: Models that must not, by their fault.
        seed: Decides lengths and swaps.
    """

    def __init__(self, url: str, good: list[Path], bad: dict[str, Path], seed: int) -> None:
        self._url, self._good, self._bad, self._random = url, good, bad, random.Random(seed)
        self._numbers = itertools.count()
        self._over = False
        self.found: Counter[str] = Counter()
        self.problems: list[str] = []
        self.said: dict[str, list[str]] = {}
        """Answers of each session whose end was acknowledged."""

    async def play(self, swaps: int, agents: int) -> None:
        """Swap weights so many times under the load of agents."""
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(self._url, timeout=timeout) as client:
            playing = [asyncio.ensure_future(self._agent(client)) for _ in range(agents)]
            faults = itertools.cycle(self._bad)
            for number in range(swaps):
                await self._swap(number)
                await self._refuse(client, next(faults))
            self._over = True
            await asyncio.gather(*playing)

    async def _deploy(self, model: Path, mode: str, drain_s: float | None) -> dict[str, Any]:
        return dict(await asyncio.to_thread(deploy_model, model, self._url, ADMIN, mode, drain_s, lambda line: None))

    async def _swap(self, number: int) -> None:
        await asyncio.sleep(self._random.uniform(0.5, 2.0))
        model = self._good[(number + 1) % 2]
        mode = ("cut", None) if number % 2 else ("drain", _DRAIN_S)
        now = await self._deploy(model, *mode)
        self.found["interrupted"] += now["interrupted"]
        if now["state"] == "done" and now["serves_path"] == str(model.resolve()):
            self.found["swaps"] += 1
        else:
            self.problems.append(f"swap {number}: {now['error']}")

    async def _refuse(self, client: aiohttp.ClientSession, fault: str) -> None:
        """Deploy a model that must not serve."""
        before = await asyncio.to_thread(deployment_at, self._url, ADMIN)
        weights = model_hash(self._good[0]) if fault in ("half_written", "wrong_hash") else model_hash(self._bad[fault])
        body = {"path": str(self._bad[fault]), "hash": weights, "mode": "cut"}
        headers = {"Authorization": f"Bearer {ADMIN}"}
        async with client.post("/rl/deploy", json=body, headers=headers) as response:
            now = await response.json()
        while now["state"] not in ("done", "failed"):
            await asyncio.sleep(0.2)
            now = await asyncio.to_thread(deployment_at, self._url, ADMIN)
        async with client.get("/ready") as response:
            is_ready = response.status == 200
        self.found[f"refused_{fault}"] += 1
        self.found["interrupted"] += now["interrupted"]
        same = all(now[name] == before[name] for name in ("serves", "serves_path", "models"))
        if now["state"] != "failed" or not same or not is_ready:
            self.found["not_refused"] += 1
            self.problems.append(f"{fault}: {now}, ready {is_ready}")
        elif self.found[f"refused_{fault}"] == 1:
            self.problems.append(f"(expected) {fault}: {now['error']}")

    async def _agent(self, client: aiohttp.ClientSession) -> None:
        """Play sessions until the swaps are over; every second one streams."""
        while not self._over:
            number = next(self._numbers)
            try:
                await self._session(client, number)
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                self.found["lost"] += 1
                self.problems.append(f"session {number}: {describe(error)}")

    async def _session(self, client: aiohttp.ClientSession, number: int) -> None:
        admin = {"Authorization": f"Bearer {ADMIN}"}
        async with client.post("/rl/start_session", json={"task_id": f"t{number}"}, headers=admin) as response:
            session = await response.json()
        key = {"Authorization": f"Bearer {session['api_key']}"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {number}+4?"}]
        said = []
        for _ in range(_TURNS):
            body = {"model": "m", "messages": messages, "max_tokens": self._random.randint(*_TOKENS)}
            if number % 2:
                body["stream"] = True
            async with client.post("/v1/chat/completions", json=body, headers=key) as response:
                text = await response.text()
                if response.status != 200:
                    raise ValueError(f"{response.status}: {text[:300]}")
            said.append(_streamed(text) if number % 2 else json.loads(text)["choices"][0]["message"]["content"] or "")
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "Go on."}]
        async with client.post("/rl/end_session", headers=key) as response:
            ended = await response.json()
            if response.status != 200 or ended["completions"] != _TURNS:
                raise ValueError(f"end {response.status}: {ended}")
        self.said[session["session_id"]] = said
        self.found["sessions"] += 1


def _streamed(text: str) -> str:
    """Return the content of a stream of chat completions.

    Raises:
        ValueError: It has no end, or it is an error.
    """
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise ValueError(f"the stream has no end: {text[-300:]}")
    parts = [json.loads(line)["choices"] for line in lines[:-1]]
    return "".join(each[0]["delta"].get("content") or "" for each in parts if each)


class Scorer:
    """Scores the tokens of records anew.

    Args:
        models: Folders of the models that were deployed.
    """

    def __init__(self, models: list[Path]) -> None:
        self._models = {
            model_hash(path): AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in models
        }
        self.found: Counter[str] = Counter()
        self.furthest = 0.0

    def score(self, record: dict[str, Any]) -> None:
        """Count the tokens of a record."""
        hashes = record["model"]
        for row in record["rows"]:
            places, versions = _sampled(row)
            if not places:
                continue
            logprobs = {name: self._logprobs(name, row["ids"], places) for name in self._models}
            for place, (version, given) in enumerate(zip(versions, row["logprobs"], strict=True)):
                own = hashes[version]
                off = abs(float(logprobs[own][place]) - given)
                others = [abs(float(each[place]) - given) for name, each in logprobs.items() if name != own]
                self.furthest = max(self.furthest, off)
                self.found["tokens"] += 1
                self.found["wrong_hash"] += off > _NEAR
                self.found["telling"] += min(others) > 2 * _NEAR
                self.found["swapped"] += min(others) > _NEAR and min(others) > 2 * _NEAR

    @torch.no_grad()
    def _logprobs(self, name: str, ids: list[int], places: list[int]) -> torch.Tensor:
        logits = self._models[name](torch.tensor([ids])).logits[0]
        found = torch.log_softmax(logits, -1)
        return found[[place - 1 for place in places], [ids[place] for place in places]]


def _sampled(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the places of the sampled tokens of a row, and their versions."""
    places, versions, at = [], [], 0
    for count, _, version, _, source in row["runs"]:
        if source == 1:
            places += range(at, at + count)
            versions += [version] * count
        at += count
    return places, versions


def measure(
    swaps: int, agents: int, seed: int, report: Callable[[str], None] = print, out: Path | None = None
) -> dict[str, Any]:
    """Swap weights under load, score all tokens anew, and return the figures.

    Args:
        swaps: Number of good models that are deployed one after the other.
        agents: Sessions at once.
        seed: Decides lengths and swaps.
        report: Gets a line for each problem.
        out: Folder for models, records and logs; None: one that is removed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        good, bad = make_models(folder)
        records = folder / "records"
        with gateway(good[0], records, folder / "gateway.log") as url:
            world = World(url, good, bad, seed)
            asyncio.run(world.play(swaps, agents))
        scorer, found = Scorer(good), world.found
        decode = AutoTokenizer.from_pretrained(good[0]).decode
        kept = {each["request_id"]: each for each in Records(records).require().records()}
        for name, said in world.said.items():
            if name not in kept:
                found["lost"] += 1
                world.problems.append(f"{name} is in no record")
                continue
            record = kept[name]
            scorer.score(record)
            texts = _texts(record, decode)
            if texts != [each.strip() for each in said]:
                found["lost"] += 1
                world.problems.append(f"{name}: its client got {said}, and its record has {texts}")
            found["mixed"] += sum(len({*_versions(record, turn)}) > 1 for turn in range(_TURNS))
    for problem in world.problems[:40]:
        report(problem)
    found |= scorer.found
    found["unseen"] = found["telling"] - found["swapped"] + (not found["telling"])
    names = ("swaps", "sessions", "tokens", "telling", "swapped", "mixed", "interrupted", *KINDS)
    refused = {name: count for name, count in found.items() if name.startswith("refused_")}
    return {**{name: found[name] for name in names}, "furthest": scorer.furthest, **refused}


def _turns(record: dict[str, Any]) -> dict[int, list[tuple[int, int]]]:
    """Return ids and versions of the sampled tokens of a record by their generation."""
    found: dict[int, list[tuple[int, int]]] = {}
    for row in record["rows"]:
        at = 0
        for count, _, version, turn, source in row["runs"]:
            if source == 1:
                found.setdefault(turn, []).extend((token, version) for token in row["ids"][at : at + count])
            at += count
    return found


def _texts(record: dict[str, Any], decode: Callable[..., str]) -> list[str]:
    turns = _turns(record)
    texts = [decode([token for token, _ in turns[turn]]) for turn in sorted(turns)]
    return [text.removesuffix(_END).strip() for text in texts]  # as clients get them


def _versions(record: dict[str, Any], turn: int) -> list[int]:
    return [version for _, version in _turns(record).get(turn, [])]
