"""How fast the engine of `benchmarks.async_speed` is with many requests, and after a weight update.

    python -m benchmarks.engine_speed [--requests 16 64 128 192] [--passes 6] [--save FILE]

The real server and client of `rollout.name=sglang_async` run on the CPU, each in a process of its own, as in
`colocate_async`: the engine has all cores, the requests go through Ray, and the conversations' process sends them. No
trainer works meanwhile. The prompts are those of `async_speed`, eight samples of each. A turn has as many tokens as its
turns that call, whatever the model writes.

Each round sends N requests to an engine whose cache is empty:

- `first`: for one token, so that nearly all of it is prefilling;
- `whole`: for a whole turn. Its time beyond `first` is decoding;
- `again`: for a whole turn, which a pause interrupts while it is decoded. The pause has the steps of a weight update,
  without the weights: it stops all generations, empties the cache, and goes on. The same requests then come back, are
  prefilled again, and sample the rest.

Other work on the machine can only make a time longer, so each is the shortest of the passes. The last line is a JSON
object, whose values are objects by number of requests:

- `prefill_s`: seconds of `first`, for each request;
- `step_s`: seconds of a decoding step, which gives each request a token;
- `again_s`: seconds of `again` from the end of the pause, without its decoding steps, for each request;
- `pause_s`: seconds from the order to stop until the engine may go on;
- `prefill_tokens_per_s`, `again_tokens_per_s`, `decode_tokens_per_s`: the same in tokens a second. Tokens that the
  cache has from another request of the round count as prefilled;
- `cores`: how many cores the benchmark had in `whole`: with less than all of them, other work slowed it down;
- `lines`: straight lines through the seconds of a whole round: the seconds for no request, and for each one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.async_speed import SAMPLES
from benchmarks.async_speed_inputs import RECIPE, write_rows

REQUESTS = (16, 64, 128, 192)
"""With more, the engine's cache (16,384 tokens) is full, and some wait while others sample."""
CALL_TOKENS = 27
"""Tokens of a turn that calls (`call_tokens` in `results/async_speed.json`)."""
_NUMBER = count()
_FIGURES = {
    "prefill_s": 6, "step_s": 6, "again_s": 6, "pause_s": 4, "prefill_tokens_per_s": 0, "again_tokens_per_s": 0,
    "decode_tokens_per_s": 0, "cores": 2,
}  # fmt: skip
"""Names of the figures, and the digits to which they are rounded."""


class Spent(NamedTuple):
    """Costs of a part of a round."""

    wall_s: float
    cpu_s: float
    """Of all processes of the benchmark."""


class Round(NamedTuple):
    """Measurements of one pass with a number of requests."""

    first: Spent
    whole: Spent
    pause: Spent
    rest: Spent
    """From the end of the pause to the end of the last request."""
    left: Sequence[int]
    """Tokens that each request still had to sample after the pause."""
    prompt_tokens: int

    @property
    def is_cut(self) -> bool:
        """Whether the pause interrupted the decoding of every request: none had ended, each had its first token."""
        return min(self.left) > 0 and max(self.left) < CALL_TOKENS


class Stopwatch:
    """Measures the time and cost since its start; it counts the processes that live at its start and at its end."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_s()

    def stop(self) -> Spent:
        """Return the time and cost since the start."""
        return Spent(time.perf_counter() - self._wall, _cpu_s() - self._cpu)


def _cpu_s() -> float:
    me = psutil.Process()
    seconds = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


class Served:
    """The engine of a run that shares its devices, and its client.

    Args:
        manager: verl's manager of the servers.
        ask: `RolloutClient.generate`.
    """

    def __init__(self, manager: Any, ask: Callable[..., Any]) -> None:
        (self._replica,) = manager.get_replicas()
        self._ask = ask

    async def pause(self) -> Spent:
        """Run the steps of a weight update without the weights."""
        watch = Stopwatch()
        await self._replica.abort_all_requests()
        await self._replica.clear_kv_cache()
        await self._replica.resume_generation()
        return watch.stop()

    async def sample(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Any]:
        """Sample so many tokens after each prompt, all at once; return verl's outputs."""
        params = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True, "logprobs": True}
        return await asyncio.gather(
            *(
                self._ask(f"{next(_NUMBER)}", prompt_ids=list(prompt), sampling_params=dict(params))
                for prompt in prompts
            )
        )


async def round_of(engine: Served, prompts: Sequence[Sequence[int]]) -> Round:
    """Measure the engine with these prompts, whose tokens are not in its cache."""
    await engine.pause()
    watch = Stopwatch()
    await engine.sample(prompts, 1)
    first = watch.stop()
    await engine.pause()
    watch = Stopwatch()
    await engine.sample(prompts, CALL_TOKENS)
    whole = watch.stop()
    await engine.pause()
    sampling = asyncio.ensure_future(engine.sample(prompts, CALL_TOKENS))
    await asyncio.sleep((first.wall_s + whole.wall_s) / 2)
    pause = await engine.pause()
    watch = Stopwatch()
    outputs = await sampling
    rest = watch.stop()
    # The first attempt has the tokens from before the pause, unless it came back without one.
    left = [len(output.token_ids) - output.extra_fields["segments"][0][1] for output in outputs]
    return Round(first, whole, pause, rest, left, sum(map(len, prompts)))


def figures(passes: Sequence[Mapping[int, Round]]) -> dict[str, Any]:
    """Return the last line's object.

    Raises:
        SystemExit: No pass has interrupted the decoding of a number of requests.
    """
    found: dict[str, Any] = {key: {} for key in _FIGURES}
    for n in passes[0]:
        rounds = [each[n] for each in passes]
        if not (cut := [its for its in rounds if its.is_cut]):
            raise SystemExit(
                f"no pass interrupted {n} requests while they were decoded; ask for more --passes, or fewer --requests"
            )
        first_s, whole = min(its.first.wall_s for its in rounds), min(its.whole for its in rounds)
        step_s = (whole.wall_s - first_s) / (CALL_TOKENS - 1)
        # The first token of the rest comes with the prefilling.
        again_s, its = min((its.rest.wall_s - (statistics.mean(its.left) - 1) * step_s, its) for its in cut)
        values = (
            first_s / n,
            step_s,
            again_s / n,
            min(its.pause.wall_s for its in cut),
            its.prompt_tokens / first_s,
            (its.prompt_tokens + n * CALL_TOKENS - sum(its.left)) / again_s,
            n / step_s,
            whole.cpu_s / whole.wall_s,
        )
        for (key, digits), value in zip(_FIGURES.items(), values, strict=True):
            found[key][str(n)] = round(value, digits)
    numbers = list(passes[0])
    whole_rounds = {
        "prefill": [found["prefill_s"][str(n)] * n for n in numbers],
        "step": [found["step_s"][str(n)] for n in numbers],
        "again": [found["again_s"][str(n)] * n for n in numbers],
        "pause": [found["pause_s"][str(n)] for n in numbers],
    }
    found["lines"] = {key: line(numbers, seconds) for key, seconds in whole_rounds.items()}
    return found


def line(numbers: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Return the seconds for no request and for each one, by least squares; the first is not negative."""
    if len(numbers) == 1:
        return [0.0, round(seconds[0] / numbers[0], 6)]
    each, none = np.polyfit(numbers, seconds, 1)
    if none < 0:
        none, each = 0.0, np.dot(numbers, seconds) / np.dot(numbers, numbers)
    return [round(float(none), 6), round(float(each), 6)]


def rows_of(folder: Path, most: int, seed: int) -> list[list[dict[str, Any]]]:
    """Return the messages of the first rows of `async_speed`, enough for so many requests."""
    import pandas as pd

    write_rows(folder, -(-most // SAMPLES), seed)
    return [list(map(dict, row)) for row in pd.read_parquet(folder / "train.parquet")["prompt"]]


def compose(folder: Path, seed: int) -> Any:
    """Return the configuration of the quickstart on the CPU, with a server apart."""
    from omegaconf import OmegaConf

    from verl_multiturn.runs.compose import compose_run
    from verl_multiturn.runs.plan import plan_run
    from verl_multiturn.verl_bridge.startup.configuration import prepare_config

    overrides = ["actor_rollout_ref.rollout.n_gpus_per_node=1"]
    plan = plan_run("quickstart", mode="separate_async", out=folder / "run", seed=seed, overrides=overrides)
    config = compose_run(plan)
    prepare_config(config)
    OmegaConf.resolve(config)  # the engine gets a section of it
    return config


def prompts_of(folder: Path, most: int, seed: int) -> list[list[int]]:
    """Return the token ids of the prompts of so many requests, `SAMPLES` of each row."""
    import yaml
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(RECIPE / "model")
    tools = yaml.safe_load((RECIPE.parents[1] / "tool_configs" / "calculator.yaml").read_text())["tools"]
    schemas = [entry["tool_schema"] for entry in tools]
    rows = rows_of(folder / "rows", most, seed)
    ids = [
        tokenizer.apply_chat_template(row, tools=schemas, add_generation_prompt=True, return_dict=False) for row in rows
    ]
    return [row for row in ids for _ in range(SAMPLES)][:most]


async def measure(config: Any, prompts: Sequence[Sequence[int]], numbers: Sequence[int], passes: int) -> list[Any]:
    """Start the engine, and measure so many passes over the numbers of requests."""
    from verl.workers.rollout.llm_server import LLMServerManager

    from verl_multiturn.verl_bridge.servers.client import RolloutClient

    manager = await LLMServerManager.create(config)
    client = manager.get_client(client_cls=RolloutClient)
    engine = Served(manager, client.generate)
    await round_of(engine, prompts[: min(numbers)])  # the first requests of an engine are slow
    found = []
    for number in range(passes):
        measured = {}
        for requests in numbers:
            measured[requests] = its = await round_of(engine, prompts[:requests])
            seconds = [round(part.wall_s, 3) for part in its[:4]]
            print(
                f"pass {number + 1}, {requests} requests: {seconds} s, {'cut' if its.is_cut else 'not cut'}", flush=True
            )
        found.append(measured)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS, help="numbers of requests at once")
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="file that gets the figures")
    args = parser.parse_args()
    os.environ["VERL_PLATFORM"], os.environ["RAY_ADDRESS"] = "cpu", "local"
    import ray
    import verl  # noqa: F401  # its plugin turns the CPU platform on
    from omegaconf import OmegaConf

    with tempfile.TemporaryDirectory(prefix="engine_speed-") as folder:
        config = compose(Path(folder), args.seed)
        prompts = prompts_of(Path(folder), max(args.requests), args.seed)
        ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True))
        try:
            passes = asyncio.run(measure(config, prompts, args.requests, args.passes))
        finally:
            ray.shutdown()
    found = {"seed": args.seed, "passes": args.passes, **figures(passes)}
    if args.save is not None:
        args.save.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
