"""How much SGLang reads again, and how leading siblings and holding back younger conversations change it.

    python -m benchmarks.cache [--cache 2048] [--passes 3] [--only siblings need below behind]

A real SGLang on the CPU, with a small cache and a random model, behind our server's code and our client, in one process
without Ray. Read tokens are those that SGLang reports itself (`cached_tokens`); the least that it can read is known,
since nothing ends before its last turn. Times count seconds of the engine's CPU, which other work on the machine does
not change, unless their name has `wall`.

- `siblings`: eight siblings begin at once, with prompts of several lengths; `plain` sends all of them, with `led` one
  goes ahead.
- `need`: conversations of eight turns, with a tool between them, which together need 3.5 and 5 times the cache; in
  `plain` all of them go on at once, with `held` the younger ones wait.
- `below`: the same, of conversations that fit into the cache together.
- `behind`: many groups of two behind one long system text, which fit because that is there once.

The last line is one JSON object:

- `siblings`: by length of the prompt, tokens that were read ÷ the least, `plain` and `led`;
- `need`: by need, for `plain` and `held`: `over_minimal`, `hit_share`, `cpu_s` of the engine in all, `prefill_cpu_s`,
  which is that without the time of the sampled tokens where nothing is read again (`decode_cpu_s` each), `wall_s`,
  `held_s` in all; and `latest`, the largest ratio of a conversation's end to its end in `plain`;
- `below`: `cpu_s` and `wall_s` of the shortest of the passes, plain and held, and their ratios; `held_s`;
- `behind`: `groups`, `conversations`, `system` in tokens, `once_a_group`, their need if each group had the system text
  to itself, as a share of the cache; `use`, the most that the server reported; `held_s`.

The command fails where siblings that are led read more than 1.05 of the least; where conversations that are held read
more than 1.3 of it, need more than half of the CPU seconds of prefill, or end more than twice as late; and where
anything is held below the cache, behind one system text too.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

SIBLINGS, PROMPTS = 8, (200, 1000, 1800)
NEEDS = (3.5, 5.0)
TURNS, PROMPT, OBSERVATION, SAMPLED, TOOL_S = 8, 200, 42, 8, 0.02
"""A conversation: its turns, the tokens of its prompt, of an answer and of a turn, and the seconds of a call."""
WHOLE = PROMPT + TURNS * SAMPLED + (TURNS - 1) * OBSERVATION
LEAST = PROMPT + (TURNS - 1) * (OBSERVATION + 1)
"""Tokens of a whole conversation, and the fewest that are read: of a turn, the last token is read with the next."""
SYSTEM, GROUPS, OWN = 900, 8, 16
"""Tokens of the long system text, how many groups are behind it, and the tokens of their own of a prompt."""
MOST = {"led": 1.05, "held": 1.3, "prefill": 0.5, "latest": 2.0}
VOCABULARY = 2048
_NUMBER = count()


class Method:
    """A method that is called as that of a Ray actor is."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method in a task."""
        return asyncio.ensure_future(self._method(*args, **kwargs))


class Handle:
    """An object of this process that is used as a Ray actor is, with some of its methods."""

    def __init__(self, inside: Any, *names: str) -> None:
        for name in names:
            method = getattr(inside, name)
            setattr(self, name, Method(method if inspect.iscoroutinefunction(method) else _later(method)))


def _later(method: Any) -> Any:
    async def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


@dataclass
class Found:
    """Measurements of a scenario."""

    read: int = 0
    given: int = 0
    sampled: int = 0
    held_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    use: float = 0.0
    """The most that the server reported of its cache's use."""
    ends: dict[int, float] = field(default_factory=dict)
    """CPU seconds of the engine at the end of each conversation."""


class Engine:
    """SGLang behind our server's code, and the clients of it.

    Args:
        folder: Folder of the model.
        cache: Tokens in the cache.
    """

    def __init__(self, folder: Path, cache: int) -> None:
        # SGLang keeps room for whole turns, since it cannot read a turn's own tokens again on a CPU (it pins memory).
        os.environ |= {"SGLANG_INIT_NEW_TOKEN_RATIO": "1", "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "1"}
        import sglang

        self.cache = cache
        self._engine = sglang.Engine(
            model_path=str(folder), skip_tokenizer_init=True, device="cpu", attention_backend="torch_native",
            sampling_backend="pytorch", grammar_backend="none", disable_overlap_schedule=True, disable_cuda_graph=True,
            max_total_tokens=cache, mem_fraction_static=0.8, dtype="float32", sleep_on_idle=True, log_level="error",
        )  # fmt: skip
        self._processes = psutil.Process().children(recursive=True)
        self._server: Any = None

    async def start(self) -> None:
        """Put our server's code before SGLang."""
        from verl_multiturn.rollout.cache.need import CacheNeed
        from verl_multiturn.verl_bridge.compat.engine import cache_tokens
        from verl_multiturn.verl_bridge.servers.admission import Admission
        from verl_multiturn.verl_bridge.servers.cache_hits import CacheHits
        from verl_multiturn.verl_bridge.servers.server import AsyncSGLangServer

        server: Any = object.__new__(AsyncSGLangServer)  # without Ray, HTTP, and the launch that they need
        rollout = {"max_model_len": 4096, "prompt_length": 2048, "response_length": 2048, "mtp": None}
        server.config = SimpleNamespace(**rollout, enable_rollout_routing_replay=False, skip_tokenizer_init=True)
        server.model_config = SimpleNamespace(lora_rank=0, lora={}, hf_config=None)
        server.node_rank, server.replica_rank, server.global_steps = 0, 0, 1
        server._disaggregation_role = None
        server._admission, server._switching = Admission(), asyncio.Lock()
        server._hits = server.tokenizer_manager = CacheHits(self._engine.tokenizer_manager)
        tokens = await cache_tokens(self._engine.tokenizer_manager)
        if not tokens:
            raise SystemExit("SGLang does not say how many tokens its cache holds")
        self.cache = sum(tokens)
        server._need = CacheNeed(self.cache)
        self._server = server

    def client(self, lead_ms: int, full: float | None) -> Any:
        """Return a client of ours with these settings."""
        from omegaconf import OmegaConf

        from verl_multiturn.verl_bridge.servers.client import RolloutClient
        from verl_multiturn.verl_bridge.servers.router import GroupRouter

        settings = {"multiturn": {"cache": {"lead_ms": lead_ms, "full": full}}}
        rollout = {"name": "sglang", "response_length": 2048, "custom": settings}
        server = Handle(self._server, "generate", "abort_request", "resumed", "prefilled", "cache_need")
        asked = ("require_acquire_fields", "require_release_fields", "acquire_server", "release_server")
        router = Handle(GroupRouter({"server": server}), *asked)
        return RolloutClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), router)

    async def flush(self) -> None:
        """Empty the cache, as soon as the engine has let go of its last request."""
        if not (await self._engine.tokenizer_manager.flush_cache(timeout_s=60.0)).success:
            raise SystemExit("SGLang does not empty its cache")

    def cpu_s(self) -> float:
        """Return the CPU seconds of the engine's processes."""
        times = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)

    def shutdown(self) -> None:
        """End SGLang."""
        self._engine.shutdown()


async def ask(client: Any, found: Found, request: str, prompt: Sequence[int], sampled: int) -> list[int]:
    """Sample a turn, count the tokens read for it, and return its tokens."""
    params = {"temperature": 1.0, "max_new_tokens": sampled, "ignore_eos": True, "logprobs": True}
    output = await client.generate(request, prompt_ids=list(prompt), sampling_params=params)
    found.given += len(prompt)
    found.read += len(prompt) - output.extra_fields["num_cached_tokens"]
    found.sampled += len(output.token_ids)
    found.held_s += output.extra_fields["held_s"]
    found.use = max(found.use, output.extra_fields.get("cache_use", 0.0))
    tokens: list[int] = output.token_ids
    return tokens


async def siblings(engine: Engine, length: int, lead_ms: int) -> Found:
    """Let eight siblings begin at once, with a prompt of this length."""
    from verl_multiturn.rollout.life import Life, live

    client, found, prompt = engine.client(lead_ms, None), Found(), next(_prompts(length, length))

    async def begin() -> None:
        with live(Life("r", "g")):
            await ask(client, found, f"{next(_NUMBER)}", prompt, 4)

    await engine.flush()
    await asyncio.gather(*(begin() for _ in range(SIBLINGS)))
    return found


async def converse(engine: Engine, conversations: int, full: float | None) -> Found:
    """Let so many conversations go on at once."""
    from verl_multiturn.rollout.life import Life, live

    client, found, prompts = engine.client(0, full), Found(), _prompts(PROMPT, conversations)

    async def one(number: int, ids: list[int]) -> None:
        own, request = random.Random(number), f"{next(_NUMBER)}"
        with live(Life("r", f"{number}")):
            for turn in range(TURNS):
                ids += await ask(client, found, request, ids, SAMPLED)
                if turn + 1 < TURNS:
                    await asyncio.sleep(TOOL_S)
                    ids += [own.randrange(10, VOCABULARY) for _ in range(OBSERVATION)]
        found.ends[number] = engine.cpu_s() - cpu_s

    await engine.flush()
    cpu_s, began = engine.cpu_s(), time.perf_counter()
    await asyncio.gather(*(one(number, next(prompts)) for number in range(conversations)))
    found.cpu_s, found.wall_s = engine.cpu_s() - cpu_s, time.perf_counter() - began
    return found


def _prompts(length: int, seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(10, VOCABULARY) for _ in range(length)]


def save_model(folder: Path) -> None:
    """Save a random model whose prefill takes most of a small run."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=1,
            bos_token_id=None, pad_token_id=None,
        )
    ).save_pretrained(folder)  # fmt: skip


async def prefill_seconds(engine: Engine) -> float:
    """Return the CPU seconds of a token that is read, with prompts that are read one after the other."""
    from verl_multiturn.rollout.life import Life, live

    client, found, prompts = engine.client(0, None), Found(), _prompts(PROMPT, 0)
    await engine.flush()
    cpu_s = engine.cpu_s()
    for _ in range(6):
        request = f"{next(_NUMBER)}"
        with live(Life("r", request)):
            await ask(client, found, request, next(prompts), 1)
    return (engine.cpu_s() - cpu_s) / found.read


async def measure(engine: Engine, parts: Sequence[str], passes: int) -> dict[str, Any]:
    """Run the scenarios, and return the last line's object."""
    await engine.start()
    await prefill_seconds(engine)  # the first requests are slow
    result: dict[str, Any] = {"cache": engine.cache}
    if "siblings" in parts:
        result["siblings"] = by_length = {}
        for length in (length for length in PROMPTS if length + 64 < engine.cache):
            least = length + SIBLINGS - 1
            found = {name: await siblings(engine, length, ms) for name, ms in (("plain", 0), ("led", 60_000))}
            by_length[str(length)] = {name: round(its.read / least, 3) for name, its in found.items()}
            print(f"siblings, {length}: {by_length[str(length)]}", flush=True)
    if "need" in parts:
        prefill_s = await prefill_seconds(engine)
        result["need"] = {str(need): await of_need(engine, need, prefill_s) for need in NEEDS}
    if "below" in parts:
        result["below"] = await below(engine, passes)
    if "behind" in parts:
        result["behind"] = await behind(engine)
    return result


async def behind(engine: Engine) -> dict[str, Any]:
    """Let groups of two go on at once behind one long system text."""
    from verl_multiturn.rollout.life import Life, live

    client, found, system = engine.client(60_000, 0.9), Found(), next(_prompts(SYSTEM, 0))

    async def one(group: int) -> None:
        ids, request = [*system, *next(_prompts(OWN, group + 1))], f"{next(_NUMBER)}"
        with live(Life("r", f"{group}")):
            for turn in range(3):
                ids += await ask(client, found, request, ids, 4)
                if turn < 2:
                    await asyncio.sleep(TOOL_S)
                    ids += next(_prompts(SAMPLED, turn))

    await engine.flush()
    await asyncio.gather(*(one(number // 2) for number in range(2 * GROUPS)))
    shown: dict[str, Any] = {"groups": GROUPS, "conversations": 2 * GROUPS, "system": SYSTEM}
    once_a_group = round(GROUPS * (SYSTEM + OWN) / engine.cache, 2)
    shown |= {"once_a_group": once_a_group, "use": round(found.use, 2), "held_s": round(found.held_s, 3)}
    print(f"behind: {shown}", flush=True)
    return shown


async def of_need(engine: Engine, need: float, prefill_s: float) -> dict[str, Any]:
    """Compare conversations that need so many times the cache; one token takes `prefill_s` CPU seconds to read."""
    conversations = round(need * engine.cache / WHOLE)
    alone = await converse(engine, max(1, int(0.85 * engine.cache / WHOLE)), None)  # nothing is read again
    decode_s = max(0.0, alone.cpu_s - prefill_s * alone.read) / alone.sampled
    found = {name: await converse(engine, conversations, full) for name, full in (("plain", None), ("held", 0.9))}
    shown: dict[str, Any] = {"conversations": conversations, "decode_cpu_s": round(decode_s, 5)}
    for name, its in found.items():
        shown[name] = {
            "over_minimal": round(its.read / (LEAST * conversations), 3),
            "hit_share": round(1 - its.read / its.given, 3),
            "cpu_s": round(its.cpu_s, 2),
            "prefill_cpu_s": round(its.cpu_s - decode_s * its.sampled, 2),
            "wall_s": round(its.wall_s, 2),
            "held_s": round(its.held_s, 2),
        }
    shown["latest"] = round(max(found["held"].ends[n] / found["plain"].ends[n] for n in found["plain"].ends), 2)
    print(f"need {need}: {shown}", flush=True)
    return shown


async def below(engine: Engine, passes: int) -> dict[str, Any]:
    """Compare conversations that fit into the cache, plain and held."""
    conversations = max(1, int(0.85 * engine.cache / WHOLE))
    found: dict[str, list[Found]] = {"plain": [], "held": []}
    for _ in range(passes):
        for name, full in (("plain", None), ("held", 0.9)):
            found[name].append(await converse(engine, conversations, full))
    shown: dict[str, Any] = {"conversations": conversations}
    for key in ("cpu_s", "wall_s"):
        least = {name: min(getattr(its, key) for its in each) for name, each in found.items()}
        shown[key] = {**{name: round(value, 3) for name, value in least.items()}}
        shown[key]["ratio"] = round(least["held"] / least["plain"], 3)
    shown["held_s"] = max(its.held_s for its in found["held"])
    print(f"below: {shown}", flush=True)
    return shown


def failures(result: dict[str, Any]) -> list[str]:
    """Return the claims that do not hold."""
    said = []
    for length, its in result.get("siblings", {}).items():
        if its["led"] > MOST["led"]:
            said.append(f"siblings with a prompt of {length} read {its['led']} of the least, at most {MOST['led']}")
    for need, its in result.get("need", {}).items():
        held, plain = its["held"], its["plain"]
        if held["over_minimal"] > MOST["held"]:
            said.append(f"need {need}: {held['over_minimal']} of the least is read, at most {MOST['held']}")
        if held["prefill_cpu_s"] > MOST["prefill"] * plain["prefill_cpu_s"]:
            said.append(f"need {need}: {held['prefill_cpu_s']} s of prefill, of {plain['prefill_cpu_s']}")
        if its["latest"] > MOST["latest"]:
            said.append(f"need {need}: a conversation ends {its['latest']} times as late, at most {MOST['latest']}")
    if result.get("below", {}).get("held_s", 0.0) > 0:
        said.append("turns were held although the cache suffices")
    if result.get("behind", {}).get("held_s", 0.0) > 0:
        said.append("groups behind one system text were held although the cache suffices")
    return said


def main() -> int:
    """Print the figures; return 1 where one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=int, default=2048, help="tokens in the engine's cache")
    parser.add_argument("--passes", type=int, default=3, help="passes of `below`; the shortest counts")
    parts = ("siblings", "need", "below", "behind")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    args = parser.parse_args()
    os.environ["VERL_PLATFORM"] = "cpu"
    import verl  # noqa: F401  # its plugin turns the CPU platform on

    with tempfile.TemporaryDirectory(prefix="cache-") as folder:
        save_model(Path(folder))
        engine = Engine(Path(folder), args.cache)
        try:
            result = asyncio.run(measure(engine, args.only, args.passes))
        finally:
            engine.shutdown()
    said = failures(result)
    for each in said:
        print(f"does not hold: {each}", file=sys.stderr)
    print(json.dumps(result))
    return int(bool(said))


if __name__ == "__main__":
    raise SystemExit(main())
