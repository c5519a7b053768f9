"""Faults of tools and engines, injected into many conversations at once through the real loop.

    python -m benchmarks.tool_faults [--conversations 2000] [--seed 0]

Each conversation has two tools. The scripted model calls them with the name of a fault as the argument. There are 29
kinds of faults in `execute`, and others in `create`, `calc_reward` and `release`, in the engine, and by cancelling the
conversation from outside. 64 conversations run at once.

For each conversation, the benchmark checks that it ended by itself, within its wall clock plus the stated grace and 2
s, with a trajectory that the independent verifier accepts and an output that verl accepts. After all conversations, it
checks that every `create` had one `release`, that no task, thread of ours, process, file descriptor or temporary folder
remains, and that no row was changed.

A tool that returns the wrong type is its author's mistake and has to raise `ToolContractError`. Such conversations are
in groups of their own. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.long.tools.fault_suite import GROUP, FaultSuite
from tests.long.tools.faulty_tools import EXECUTE, LIFECYCLE, TIMEOUT_S, FaultyTool, Tally
from tests.long.tools.held import held, left
from tests.support.rollout_config import MESSAGES, MODEL, make_config
from verl_multiturn import Ask, EngineError, Generation, Request, ToolContractError
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.life import Life
from verl_multiturn.rows.reward_numbers import LARGEST_REWARD
from verl_multiturn.verl_bridge.loops.output import to_outputs
from verl_multiturn.verl_bridge.loops.runner import Runner, build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel

AUTHORS = 50
"""One group in so many has tools whose author made a mistake."""


AT_ONCE = 64


WALL_CLOCK_S = 20.0


_THREADS = ("tool ", "leaked")


ENGINE = ("raises", "no_ids", "bad_logprobs", "too_long")


CALLS = ("no_such_tool", "bad_json", "bad_arguments")


class FaultyEngine:
    """An engine that follows each request's script; an entry of `ENGINE` in it is a fault instead of a turn."""

    def __init__(self, tokenizer: Any, tally: Tally) -> None:
        self._encode = tokenizer.encode
        self._tally = tally
        self.scripts: dict[str, list[str]] = {}

    async def generate(self, ask: Ask) -> Generation:
        """Return the next turn of the request's script, or do the fault in its place."""
        await asyncio.sleep(0)
        said = self.scripts[ask.request_id].pop(0)
        if said not in ENGINE:
            for kind in CALLS:
                self._tally.faults[f"call {kind}"] += malformed(kind) in said
            new = self._encode(said)[: ask.max_new_tokens]
            return Generation(new, [-0.5] * len(new), [0] * len(new), "stop")
        self._tally.faults[f"engine {said}"] += 1
        if said == "raises":
            raise EngineError("the server died")
        if said == "no_ids":
            return Generation([], [], [], "stop")
        if said == "bad_logprobs":
            return Generation([5, 6], [-0.5], [0, 0], "stop")
        return Generation(
            [5] * (ask.max_new_tokens + 1), [-0.5] * (ask.max_new_tokens + 1), [0] * (ask.max_new_tokens + 1), "stop"
        )


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
        self.author_error = index // GROUP % AUTHORS == AUTHORS - 1
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


class Suite(FaultSuite):
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
        super().__init__([Plan(i, seed) for i in range(conversations)], AT_ONCE, WALL_CLOCK_S)
        for plan in self.plans:
            for methods in plan.kwargs.values():
                methods["execute_kwargs"] = {"shared": self.tally.shared}
        config = make_config(8192)
        rollout = config.actor_rollout_ref.rollout
        rollout.multi_turn.max_parallel_calls = 4
        rollout.multi_turn.max_tool_response_length = 200
        rollout.custom = {"multiturn": {"tool_timeout_s": TIMEOUT_S, "request_timeout_s": WALL_CLOCK_S}}
        self.runner: Runner = build_runner(config, LoadedModel(tokenizer, "qwen2"), self.engine)
        self.tools = {name: FaultyTool(name, self.tally, root) for name in ("one", "two")}

    async def conversation(self, index: int) -> None:
        """Play a conversation, and check its record."""
        plan, request_id = self.plans[index], f"r{index}"
        self.engine.scripts[request_id] = list(plan.script)

        def cancelled(in_time: bool) -> None:
            self.tally.faults["cancelled from outside"] += in_time

        request = Request(request_id, MESSAGES, self.tools, plan.kwargs)
        task = await self.ended(self.runner.run(request), plan.cancel_after_s, cancelled)
        if task.cancelled():
            self.end(index, "cancelled", "" if plan.cancel_after_s is not None else "it cancelled itself")
        elif (error := task.exception()) is not None:
            expected = plan.author_error and isinstance(error, ToolContractError)
            self.end(index, "ToolContractError", "" if expected else f"raised {error!r:.300}")
        else:
            outcome, generations = task.result()
            output = to_outputs(outcome, self.runner.output_settings, step=0)[0].as_dict()
            record = record_of(Life(outcome.request_id, outcome=outcome, generations=generations, request=request))
            violations = [str(violation) for violation in verify_record(record).violations]
            if len(output["responses"]) != len(output["response_mask"]):
                violations.append("the mask is not as long as the response")
            if any(not abs(result.reward) <= LARGEST_REWARD for result in outcome.calls):
                violations.append("a reward is larger than the trainer can hold")
            if plan.author_error:
                violations.append("the author's mistake did not raise")
            self.end(index, str(outcome.stop_reason), "; ".join(violations))


async def measure(conversations: int, seed: int) -> dict[str, Any]:
    """Run the suite, and print injected faults and errors.

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
        before = held(_THREADS)
        await suite.run()
        leaks = await left(before, _THREADS)
        tally = suite.tally
        leaks["temporary folders"] = len(os.listdir(root))
        leaks["creates without one release"] = len(tally.created - tally.released) + len(tally.released - tally.created)
        leaks["calls after release"] = tally.after_release
        leaks["what tools wrote into their rows"] = len(tally.shared["notes"])
    finally:
        shutil.rmtree(root)
    print(f"faults: {dict(sorted(tally.faults.items()))}")
    print(f"ends: {dict(suite.stops)}; the slowest took {suite.slowest_s:.1f} s")
    print(f"leaks: {leaks}")
    for line in suite.wrong[:10]:
        print(line)
    return {
        "conversations": conversations,
        "faults": tally.faults.total(),
        "invalid": len(suite.wrong),
        "leaks": sum(leaks.values()),
        "over_budget": suite.over_budget,
        "author_errors": suite.stops["ToolContractError"],
        "groups_incomplete": suite.groups_incomplete(),
    }
