"""Compare the cost of the engine's attention on a CPU: SGLang's own and ours, with one thread and with two.

    python -m benchmarks.attention [--requests 32 128] [--rounds 5] [--model FOLDER]

SGLang's model runner computes batches of the quickstart's size, without a scheduler: requests that share the 182 tokens
of system text and tools in the cache, with 16 tokens of their own, and then decode. The two backends compute the same
batches in turns in one process. Whether threads spin while they wait is decided when a process starts, so there are two
processes; only one of them computes at a time, again in turns. Times are medians of the rounds.

The last line is a JSON object:

- `cpu_ms`, `wall_ms`: milliseconds by `decode` (a step) or `prefill` (of all requests), threads (`1`, `2 passive`,
  `2 spinning`), number of requests, and `native` or `ours`;
- `ratio`: CPU time of `native` over that of `ours`, by the same;
- `difference`: the largest between the probabilities that they give any token, in float32;
- `load`: processes that wanted a core in the minute before, at the end.

It fails when the difference is above 2e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHARED, OWN, STEPS = 182, 16, 4
"""Tokens of a prompt that all requests share, its other ones, and decode steps of a round."""
THREADS = {"1": (1, "passive"), "2 passive": (2, "passive"), "2 spinning": (2, "")}
"""Number of threads, and OpenMP's wait policy."""
MODEL = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"
MOST = 2e-5


class Runner:
    """SGLang's model runner with both backends.

    Args:
        model: Folder of the model.
        requests: Most requests at once.
    """

    def __init__(self, model: Path, requests: int) -> None:
        import verl  # noqa: F401  # first: its plugin turns the CPU platform on
        from sglang import bench_one_batch
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.server_args import PortArgs, ServerArgs

        from verl_multiturn.cpu.defaults import ATTENTION

        arguments = ServerArgs(
            model_path=str(model), device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
            grammar_backend="none", disable_overlap_schedule=True, dtype="float32", mem_fraction_static=0.1,
            max_total_tokens=SHARED + requests * (OWN + STEPS + 2), max_running_requests=requests + 1,
            disable_cuda_graph=True, log_level="error",
        )  # fmt: skip
        ports = PortArgs.init_new(arguments)
        bench_one_batch._set_envs_and_config(arguments)
        self._sglang = bench_one_batch
        self._runner = bench_one_batch.load_model(arguments, ports, 0, 0)[0].torch_runner
        names = {"native": "torch_native", "ours": ATTENTION["decode_attention_backend"]}
        self._backends = {key: ATTENTION_BACKENDS[name](self._runner) for key, name in names.items()}

    def play(self, backend: str, requests: int) -> SimpleNamespace:
        """Prefill and decode with a backend; return CPU and wall times in milliseconds, and the last probabilities."""
        import torch

        self._runner.attn_backend = self._runner.decode_attn_backend = self._backends[backend]
        self._runner.req_to_token_pool.clear()
        self._runner.token_to_kv_pool_allocator.clear()
        random = torch.Generator().manual_seed(requests)

        def tokens(*shape: int) -> Any:
            return torch.randint(10, 500, shape, generator=random)

        prompt = tokens(SHARED).tolist()
        first = self._requests([prompt], None)
        self._sglang.extend(first, self._runner)
        slots = self._runner.req_to_token_pool.req_to_token[first[0].req_pool_idx, :SHARED].clone()
        batch = self._requests([[*prompt, *row] for row in tokens(requests, OWN).tolist()], slots)
        held: list[Any] = []

        def prefill() -> None:
            held[:] = self._sglang.extend(batch, self._runner)

        def decode(sampled: Any) -> None:
            held[0], held[1] = self._sglang.decode(sampled, held[2], self._runner)

        spent = SimpleNamespace(prefill=[_measured(prefill)])
        # The tokens are the same for both backends.
        spent.decode = [_measured(partial(decode, sampled)) for sampled in tokens(STEPS, requests)]
        spent.probabilities = held[1].float().softmax(-1)
        return spent

    def _requests(self, rows: Sequence[Sequence[int]], slots: Any) -> list[Any]:
        found = self._sglang.prepare_synthetic_inputs_for_latency_test(len(rows), len(rows[0]), list(rows))
        for request in found:
            if slots is not None:
                request.prefix_indices = slots.to(request.prefix_indices.dtype)
                request.set_extend_input_len(len(request.fill_ids) - len(request.prefix_indices))
        return found


def _measured(work: Callable[[], None]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)


def serve(model: Path, requests: Sequence[int]) -> None:
    """Measure a round for each line `THREADS REQUESTS` of the standard input; answer with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of SGLang
    import torch

    runner = Runner(model, max(requests))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        threads, number = map(int, line.split())
        torch.set_num_threads(threads)
        spent = {backend: runner.play(backend, number) for backend in ("native", "ours")}
        difference = float((spent["native"].probabilities - spent["ours"].probabilities).abs().max())
        times = {backend: {"prefill": each.prefill, "decode": each.decode} for backend, each in spent.items()}
        print(json.dumps({"difference": difference, "times": times}), file=answers, flush=True)


class Child:
    """A process that measures.

    Args:
        policy: OpenMP's wait policy; empty: its own.
        arguments: Arguments of the command.
    """

    def __init__(self, policy: str, arguments: Sequence[str]) -> None:
        environment = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": policy}
        if not policy:
            del environment["OMP_WAIT_POLICY"]
        command = [sys.executable, "-m", "benchmarks.attention", *arguments, "--serve"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def answer(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a process that measures ended with status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def measure(self, threads: int, requests: int) -> dict[str, Any]:
        """Measure one round."""
        assert self.process.stdin is not None
        print(threads, requests, file=self.process.stdin, flush=True)
        return self.answer()


def figures(rounds: Sequence[tuple[str, int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the last line's object.

    Args:
        rounds: Threads, requests and answer of each round.
    """
    gathered: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for threads, requests, answer in rounds:
        for backend, parts in answer["times"].items():
            for part, times in parts.items():
                gathered.setdefault((part, threads, str(requests), backend), []).extend(times)
    found: dict[str, Any] = {"cpu_ms": {}, "wall_ms": {}, "ratio": {}}
    for (part, threads, requests, backend), times in gathered.items():
        for key, values in zip(("cpu_ms", "wall_ms"), zip(*times, strict=True), strict=True):
            place = found[key].setdefault(part, {}).setdefault(threads, {}).setdefault(requests, {})
            place[backend] = round(statistics.median(values), 1)
    for part, by_threads in found["cpu_ms"].items():
        found["ratio"][part] = {
            threads: {number: round(its["native"] / its["ours"], 2) for number, its in by_requests.items()}
            for threads, by_requests in by_threads.items()
        }
    return {**found, "difference": max(answer["difference"] for _, _, answer in rounds)}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=(32, 128), help="numbers of requests at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a model; default: the quickstart's")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.requests)
        return
    arguments = ["--model", str(args.model), "--requests", *map(str, args.requests)]
    children = {policy: Child(policy, arguments) for policy in {policy for _, policy in THREADS.values()}}
    for child in children.values():
        child.answer()  # it is ready
    rounds = []
    for number in range(-1, args.rounds):
        for name, (threads, policy) in THREADS.items():
            for requests in args.requests:
                answer = children[policy].measure(threads, requests)
                if number >= 0:  # the first round of a process is slow
                    rounds.append((name, requests, answer))
        print(f"round {number + 1} of {args.rounds}", flush=True)
    for child in children.values():
        child.process.communicate()
    found = figures(rounds)
    print(json.dumps({**found, "load": round(os.getloadavg()[0], 1)}))
    if found["difference"] > MOST:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
