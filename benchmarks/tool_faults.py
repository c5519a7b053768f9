"""Faults of tools and engines, injected into many conversations at once through the real loop.

    python -m benchmarks.tool_faults [--conversations 2000] [--seed 0]

Each conversation has two tools. The scripted model calls them with the name of a fault as the argument. There are 25
kinds of faults in `execute`, and others in `create`, `calc_reward` and `release`, in the engine, and by cancelling the
conversation from outside. 64 conversations run at once.

For each conversation, the benchmark checks that it ended by itself, within its wall clock plus the stated grace and 2
s, with a trajectory that the independent verifier accepts and an output that verl accepts. After all conversations, it
checks that every `create` was met by one `release`, that no task, thread of ours, process, file descriptor or temporary
folder is left, and that no row was changed.

A tool that returns the wrong type is its author's mistake and has to raise `ToolContractError`. Such conversations are
in groups of their own. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from PIL import Image
from transformers import AutoTokenizer

from benchmarks.turn_cost import MESSAGES, MODEL, make_config
from verl_multiturn import BaseTool, EngineError, Generation, Request, ToolContractError, ToolResponse, ToolSchema
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.certificate.records import record_of
from verl_multiturn.certificate.verification import verify_record
from verl_multiturn.verl_bridge.agent_loop import Runner, build_runner, to_output

GROUP = 8
AT_ONCE = 64
WALL_CLOCK_S = 20.0
GRACE_S = 10.0
"""Grace in seconds, as `Limits.wall_clock_s` documents it: 5 s for calls that were given up, 5 s for `release`."""
LATE_S = 2.0
"""Seconds that the loop itself may be late, because tools hold it up."""
TIMEOUT_S = 0.2

EXECUTE = (
    "hang", "sleep", "raise", "exit", "cancels_itself", "big", "invalid_utf8", "child_killed", "fork", "leaks_thread",
    "sync_hang", "ignores_cancellation", "blocks_loop", "odd_metrics", "oserror", "recursion", "stop_iteration",
    "drips", "unspeakable", "far_unspeakable", "unspeakable_metrics", "nan_reward", "huge_reward",
    "big_metrics", "image",
)  # fmt: skip
LIFECYCLE = ("hang", "raise", "cancels_itself", "sleep", "unspeakable")
ENGINE = ("raises", "no_ids", "bad_logprobs", "too_long")
BIG = {"many": [0] * 1_000_000, "text": "x" * 10_000_000}
CALLS = ("no_such_tool", "bad_json", "bad_arguments")


class Unspeakable(Exception):
    """An exception that raises when it is asked for its text."""

    def __str__(self) -> str:
        raise AttributeError("response")

    __repr__ = __str__


class FarUnspeakable(BaseException):
    """A `BaseException` that raises when it is asked for its text; no `except Exception` catches it."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class Tally:
    """Counts of what was injected, and of what the tools saw."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.created: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.after_release = 0
        self.shared: dict[str, list[str]] = {"notes": []}
        """Object that every row shares. Each tool writes into the copy that it gets."""


class FaultyTool(BaseTool):
    """A tool that misbehaves as its argument or its row says; it keeps a temporary folder for each conversation."""

    def __init__(self, name: str, tally: Tally, root: Path) -> None:
        parameters = {"type": "object", "properties": {"fault": {"type": "string"}}, "required": ["fault"]}
        function = {"name": name, "description": "Misbehaves.", "parameters": parameters}
        super().__init__({}, ToolSchema.read({"type": "function", "function": function}, "benchmark"))
        self.tally = tally
        self.root = root

    def folder(self, instance_id: str) -> Path:
        """Return the temporary folder of a conversation."""
        return self.root / f"{self.name}-{instance_id}"

    async def create(self, instance_id: str, fault: str = "", **kwargs: Any) -> None:
        """Make the conversation's folder, then misbehave as the row says."""
        self.tally.created[f"{self.name} {instance_id}"] += 1
        self.folder(instance_id).mkdir()
        await self.misbehave("create", fault)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Write into the row's shared object, then misbehave as the argument says."""
        self.tally.after_release += self.tally.released[f"{self.name} {instance_id}"]
        fault = parameters.pop("fault")
        kwargs["shared"]["notes"].append(instance_id)
        self.tally.faults[f"execute {fault}"] += bool(fault)
        return await getattr(self, f"do_{fault or 'nothing'}")()

    async def calc_reward(self, instance_id: str, fault: str = "", **kwargs: Any) -> float:
        """Misbehave as the row says, else return 1.0."""
        await self.misbehave("calc_reward", fault)
        return float("nan") if fault == "sleep" else 1.0

    async def release(self, instance_id: str, fault: str = "", **kwargs: Any) -> None:
        """Remove the conversation's folder, then misbehave as the row says."""
        self.tally.released[f"{self.name} {instance_id}"] += 1
        shutil.rmtree(self.folder(instance_id))
        # The runtime waits 5 s for a tool that hangs here. Only a few do, or the benchmark would take hours.
        await self.misbehave("release", fault)

    async def misbehave(self, method: str, fault: str) -> None:
        """Do one of the faults `LIFECYCLE`; any other name does nothing."""
        self.tally.faults[f"{method} {fault}"] += bool(fault)
        if fault == "hang":
            await asyncio.Event().wait()
        elif fault == "sleep":
            await asyncio.sleep(2 * TIMEOUT_S)
        elif fault == "raise":
            raise RuntimeError(f"{method} fails")
        elif fault == "cancels_itself":
            raise asyncio.CancelledError
        elif fault == "unspeakable":
            raise Unspeakable

    async def do_nothing(self) -> ToolResponse:
        """Answer as a good tool does."""
        return ToolResponse("ok")

    async def do_hang(self) -> None:
        """Hang forever."""
        await asyncio.Event().wait()

    async def do_sleep(self) -> str:
        """Answer after the time limit."""
        await asyncio.sleep(2 * TIMEOUT_S)
        return "too late"

    async def do_raise(self) -> None:
        """Raise an ordinary error."""
        raise KeyError("of the tool")

    async def do_exit(self) -> None:
        """Raise `SystemExit`."""
        sys.exit(3)

    async def do_cancels_itself(self) -> None:
        """Raise `CancelledError`."""
        raise asyncio.CancelledError

    async def do_big(self) -> str:
        """Return 10 million characters."""
        return "0123456789" * 1_000_000

    async def do_invalid_utf8(self) -> str:
        """Return lone surrogates, which UTF-8 cannot encode."""
        return "\ud800\udfff " + b"\xff\xfe".decode("utf-8", "surrogateescape")

    async def do_child_killed(self) -> str:
        """Start a process that kills itself."""
        child = await asyncio.create_subprocess_exec("sh", "-c", "kill -9 $$")
        return f"exit status {await child.wait()}"

    async def do_fork(self) -> str:
        """Fork; the child returns into the conversation's loop."""
        child = os.fork()
        if child == 0:
            return "the child goes on with the conversation"
        return f"exit status {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"  # noqa: ASYNC222  # ends at once

    async def do_leaks_thread(self) -> str:
        """Leave a thread running."""
        threading.Thread(target=time.sleep, args=(1.0,), daemon=True, name="leaked").start()
        return "left a thread behind"

    async def do_sync_hang(self) -> str:
        """Block a thread beyond the time limit."""
        await asyncio.to_thread(time.sleep, 2 * TIMEOUT_S)
        return "too late"

    async def do_ignores_cancellation(self) -> str:
        """Go on after a cancellation, until three time limits have passed."""
        until = time.monotonic() + 3 * TIMEOUT_S
        while time.monotonic() < until:
            try:
                await asyncio.sleep(until - time.monotonic())
            except asyncio.CancelledError:
                continue
        return "at last"

    async def do_blocks_loop(self) -> str:
        """Block the event loop for 5 ms."""
        time.sleep(0.005)  # noqa: ASYNC251  # the fault
        return "held everybody up"

    async def do_odd_metrics(self) -> Any:
        """Return metrics that JSON cannot hold."""
        return "ok", True, {("a", "tuple"): object(), "set": {1, 2}}

    async def do_oserror(self) -> None:
        """Raise an `OSError`."""
        raise OSError(24, "Too many open files")

    async def do_recursion(self) -> Any:
        """Recurse without end."""
        return await self.do_recursion()

    async def do_stop_iteration(self) -> None:
        """Raise an error with half a character in its text, caused by `StopAsyncIteration`."""
        raise ValueError("half a character \ud83d") from StopAsyncIteration()

    async def do_drips(self) -> str:
        """Sleep in small steps, 10 s in all."""
        for _ in range(1000):
            await asyncio.sleep(0.01)
        return "done"

    async def do_unspeakable(self) -> None:
        """Raise `Unspeakable`."""
        raise Unspeakable

    async def do_far_unspeakable(self) -> None:
        """Raise `FarUnspeakable`."""
        raise FarUnspeakable

    async def do_unspeakable_metrics(self) -> Any:
        """Return metrics that raise when they are asked for their text."""
        return "ok", 0.0, {"odd": Unspeakable(), "deep": [{"er": Unspeakable()}]}

    async def do_nan_reward(self) -> Any:
        """Return a reward of NaN."""
        return "ok", float("nan"), {}

    async def do_huge_reward(self) -> Any:
        """Return a reward too large for a float."""
        return "ok", 10**400, {"huge": 10**5000}

    async def do_big_metrics(self) -> Any:
        """Return metrics with a million numbers and ten million characters."""
        return "ok", 0.0, BIG

    async def do_image(self) -> Any:
        """Return an image."""
        return ToolResponse("a picture", image=[Image.new("RGB", (8, 8))])

    async def do_wrong_type(self) -> Any:
        """Return the wrong type: the author's mistake."""
        return 42


class FaultyEngine:
    """An engine that says each request's script; an entry of `ENGINE` in it is a fault instead of a turn."""

    def __init__(self, tokenizer: Any, tally: Tally) -> None:
        self._encode = tokenizer.encode
        self._tally = tally
        self.scripts: dict[str, list[str]] = {}

    async def generate(
        self, request_id: str, ids: Sequence[int], sampling: Mapping[str, Any], max_new_tokens: int
    ) -> Generation:
        """Return the next turn of the request's script, or do the fault that stands there."""
        await asyncio.sleep(0)
        said = self.scripts[request_id].pop(0)
        if said not in ENGINE:
            for kind in CALLS:
                self._tally.faults[f"call {kind}"] += malformed(kind) in said
            new = self._encode(said)[:max_new_tokens]
            return Generation(new, [-0.5] * len(new), [0] * len(new), "stop")
        self._tally.faults[f"engine {said}"] += 1
        if said == "raises":
            raise EngineError("the server died")
        if said == "no_ids":
            return Generation([], [], [], "stop")
        if said == "bad_logprobs":
            return Generation([5, 6], [-0.5], [0, 0], "stop")
        return Generation([5] * (max_new_tokens + 1), [-0.5] * (max_new_tokens + 1), [0] * (max_new_tokens + 1), "stop")


def call(tool: str, fault: str) -> str:
    """Return a tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{"fault": "{fault}"}}}}\n</tool_call>'


def malformed(kind: str) -> str:
    """Return a call that cannot be executed, of one of the kinds `CALLS`."""
    return {
        "no_such_tool": call("missing", ""),
        "bad_json": '<tool_call>\n{"name": "one", "arguments": {\n</tool_call>',
        "bad_arguments": '<tool_call>\n{"name": "one", "arguments": {"fault": 7}}\n</tool_call>',
    }[kind]


class Plan:
    """The script of one conversation: its turns, its faults, and when it is cancelled.

    Args:
        index: Number of the conversation.
        seed: Seed of the run.
    """

    def __init__(self, index: int, seed: int) -> None:
        choose = random.Random(f"{seed} {index}")
        self.author_error = index // GROUP % 50 == 49
        self.cancel_after_s = choose.uniform(0, 0.5) if not self.author_error and choose.random() < 0.03 else None
        self.kwargs: dict[str, dict[str, dict[str, Any]]] = {"one": {}, "two": {}}
        self.script: list[str] = []
        for _ in range(6):
            calls = [
                call(choose.choice(("one", "two")), choose.choice(EXECUTE)) for _ in range(choose.choice((1, 1, 2)))
            ]
            if choose.random() < 0.1:
                calls.append(malformed(choose.choice(CALLS)))
            self.script.append("\n".join(calls) + "<|im_end|>")
        if choose.random() < 0.1:
            self.script[choose.randrange(6)] = choose.choice(ENGINE)
        if self.author_error:
            self.script[0] = call("one", "wrong_type") + "<|im_end|>"
        self.script.append("Done.<|im_end|>")
        for method, share in (("create", 0.05), ("calc_reward", 0.1), ("release", 0.05)):
            if choose.random() < share and not self.author_error:
                kinds = LIFECYCLE if method != "release" or choose.random() < 0.2 else LIFECYCLE[1:]
                self.kwargs[choose.choice(("one", "two"))][f"{method}_kwargs"] = {"fault": choose.choice(kinds)}


class Suite:
    """All conversations of one run, with their results.

    Args:
        conversations: Number of conversations.
        seed: Seed of their plans.
        root: Folder for the tools' temporary folders.
    """

    def __init__(self, conversations: int, seed: int, root: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.tally = Tally()
        self.engine = FaultyEngine(tokenizer, self.tally)
        self.plans = [Plan(i, seed) for i in range(conversations)]
        for plan in self.plans:
            for methods in plan.kwargs.values():
                methods["execute_kwargs"] = {"shared": self.tally.shared}
        rollout = make_config(8192).actor_rollout_ref.rollout
        rollout.multi_turn.max_parallel_calls = 4
        rollout.multi_turn.max_tool_response_length = 200
        rollout.custom = {"multiturn": {"tool_timeout_s": TIMEOUT_S, "request_timeout_s": WALL_CLOCK_S}}
        self.runner: Runner = build_runner(rollout, tokenizer, self.engine, "qwen2", {})
        self.tools = {name: FaultyTool(name, self.tally, root) for name in ("one", "two")}
        self.stops: Counter[str] = Counter()
        self.invalid: list[str] = []
        self.slowest_s = 0.0
        self.over_budget = 0
        self.complete = [0] * (-(-conversations // GROUP))

    async def run(self) -> None:
        """Run all conversations, `AT_ONCE` at a time."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(index: int) -> None:
            async with places:
                await self._conversation(index)

        async with asyncio.TaskGroup() as group:
            for index in range(len(self.plans)):
                group.create_task(one(index))

    async def _conversation(self, index: int) -> None:
        plan, request_id = self.plans[index], f"r{index}"
        self.engine.scripts[request_id] = list(plan.script)
        started = time.monotonic()
        task = asyncio.ensure_future(self.runner.run(Request(request_id, MESSAGES, self.tools, plan.kwargs)))

        def cancel() -> None:
            self.tally.faults["cancelled from outside"] += task.cancel()  # False for a task that has ended

        if plan.cancel_after_s is not None:
            asyncio.get_running_loop().call_later(plan.cancel_after_s, cancel)
        await asyncio.wait({task})
        seconds = time.monotonic() - started
        self.slowest_s = max(self.slowest_s, seconds)
        self.over_budget += seconds > WALL_CLOCK_S + GRACE_S + LATE_S
        if task.cancelled():
            self._end(index, "cancelled", "" if plan.cancel_after_s is not None else "it cancelled itself")
        elif (error := task.exception()) is not None:
            expected = plan.author_error and isinstance(error, ToolContractError)
            self._end(index, "ToolContractError", "" if expected else f"raised {error!r:.300}")
        else:
            outcome, generations = task.result()
            receipts = Receipts(request_id, generations, "", 0)
            output = to_output(outcome, self.runner, step=0).as_dict()
            record = json.loads(json.dumps(record_of(outcome, receipts), default=str))
            violations = [str(violation) for violation in verify_record(record).violations]
            if len(output["responses"]) != len(output["response_mask"]):
                violations.append("the mask is not as long as the response")
            if plan.author_error:
                violations.append("the author's mistake did not raise")
            self._end(index, str(outcome.stop_reason), "; ".join(violations))

    def _end(self, index: int, how: str, wrong: str) -> None:
        self.stops[how] += 1
        if wrong:
            self.invalid.append(f"conversation {index}: {wrong}")
        else:
            self.complete[index // GROUP] += 1


def held() -> dict[str, int]:
    """Count what this process holds and could leak."""
    gc.collect()
    process = psutil.Process()
    return {
        "processes": len(process.children(recursive=True)),
        "file descriptors": process.num_fds(),
        "threads": sum(thread.name.startswith(("tool ", "leaked")) for thread in threading.enumerate()),
    }


async def measure(conversations: int, seed: int) -> dict[str, Any]:
    """Run the suite, and print what was injected and what went wrong.

    Args:
        conversations: Number of conversations.
        seed: Seed of their plans.

    Returns:
        The figures of the last line.
    """
    root = Path(tempfile.mkdtemp(prefix="tool-faults-"))
    try:
        suite = Suite(conversations, seed, root)
        # Start asyncio's own thread pool and its watcher of child processes before the count: they stay.
        await asyncio.to_thread(int)
        await (await asyncio.create_subprocess_exec("true")).wait()
        before = held()
        await suite.run()
        for _ in range(50):  # calls that were given up are still ending
            after = held() | {"tasks": len(asyncio.all_tasks()) - 1}
            if after == before | {"tasks": 0}:
                break
            await asyncio.sleep(0.2)
        tally = suite.tally
        leaks = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
        leaks["temporary folders"] = len(os.listdir(root))
        leaks["creates without one release"] = len(tally.created - tally.released) + len(tally.released - tally.created)
        leaks["calls after release"] = tally.after_release
        leaks["what tools wrote into their rows"] = len(tally.shared["notes"])
    finally:
        shutil.rmtree(root)
    print(f"faults: {dict(sorted(tally.faults.items()))}")
    print(f"ends: {dict(suite.stops)}; the slowest took {suite.slowest_s:.1f} s")
    print(f"leaks: {leaks}")
    for line in suite.invalid[:10]:
        print(line)
    return {
        "conversations": conversations,
        "faults": tally.faults.total(),
        "invalid": len(suite.invalid),
        "leaks": sum(leaks.values()),
        "over_budget": suite.over_budget,
        "author_errors": suite.stops["ToolContractError"],
        "groups_incomplete": sum(
            count != min(GROUP, conversations - GROUP * group) for group, count in enumerate(suite.complete)
        ),
    }


def main() -> None:
    """Run the suite, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every fault is logged
    print(json.dumps(asyncio.run(measure(arguments.conversations, arguments.seed))))


if __name__ == "__main__":
    main()
