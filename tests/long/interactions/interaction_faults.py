"""Faults of users and environments, injected into many conversations at once through the real runner.

    python -m benchmarks.interaction_faults [--conversations 2000] [--seed 0]

Groups of eight conversations are played on a scripted engine, 48 conversations at once, a third of the groups in each
`context.mode`. In each group one to three conversations have a fault: in one of the four methods of an interaction
(coroutine or thread), in the process of a `StepEnv`, at the endpoint of an `LlmUser` or the server of an
`OpenEnvClient`, or in the engine that plays a `PolicyUser`. A few conversations are cancelled from outside.

- `unmarked`: a conversation that a fault hit and that is not invalid, that is: a zero that the model did not earn.
- `sound_marked`: a conversation without a fault that is invalid.
- `leaks`: tasks, threads, processes and file descriptors that remain, `start` without exactly one `close`, calls after
  it.
- `over_budget`: conversations that took longer than their wall clock plus the stated grace and 2 s.
- `groups_incomplete`: groups in which a conversation did not end, has gaps in its rows, no record, or one
  that the independent verifier refuses. A wrong type raises (`InteractionContractError`); these are in groups of their
  own.
- `sibling_advantages_changed`: tokens of valid conversations whose advantage, as our trainer computes it, is another
  one than without the invalid conversations, by every estimator that takes such rows.
- `control_unmarked`, `control_advantages_changed`: the same with the marking taken away, for a part of the groups.

The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import AutoTokenizer

from tests.long.interactions import faulty_interactions as faulty
from tests.long.interactions.group_advantages import advantages_of
from tests.long.interactions.interaction_plans import MODES, Plan, interactions_file, make_decks
from tests.long.tools.fault_suite import GROUP, FaultSuite
from tests.long.tools.held import held, left
from tests.support.rollout_config import MODEL, make_config
from verl_multiturn import Ask, EngineError, Generation
from verl_multiturn.errors import InteractionContractError
from verl_multiturn.records.read.files import PACKED
from verl_multiturn.records.verify.folder import verify_files
from verl_multiturn.rollout import conversation, outcome
from verl_multiturn.rollout.limits import INVALID, StopReason
from verl_multiturn.verl_bridge.loops.life import follow
from verl_multiturn.verl_bridge.loops.runner import Runner, build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel

AT_ONCE = 48
WALL_CLOCK_S = 30.0
ESTIMATORS = {
    "append": ("grpo", "mt_grpo", "mt_turns", "mt_gigpo"),
    "window": ("mt_grpo", "mt_turns", "mt_gigpo"),
    "overflow": ("mt_grpo", "mt_turns", "mt_gigpo"),
}
_THREADS = ("interaction ", "leaked")
POLICY = ("raises", "no_ids", "abort", "hangs")


class Engine:
    """An engine that answers each request with a short turn, and fails where it plays a user."""

    def __init__(self, tokenizer: Any, tally: faulty.Tally) -> None:
        self._said = [tokenizer.encode(f"Turn {n}, and so I go on.<|im_end|>") for n in range(7)]
        self._tally = tally
        self.requests: set[str] = set()
        self._failed = 0

    async def generate(self, ask: Ask) -> Generation:
        """Return a turn; for a request that is not a conversation, do the next fault of `POLICY`."""
        await asyncio.sleep(0)
        if ask.request_id in self.requests:
            new = self._said[len(ask.ids) % 7]
            cut = new[: ask.max_new_tokens]
            return Generation(cut, [-0.5] * len(cut), [0] * len(cut), "stop" if cut == new else "length")
        self._failed += 1
        fault = POLICY[self._failed % len(POLICY)]
        self._tally.faults[f"policy {fault}"] += 1
        if fault == "hangs":
            await asyncio.Event().wait()
        if fault == "raises":
            raise EngineError("the server died")
        return Generation([], [], [], "abort" if fault == "abort" else "stop")


class Suite(FaultSuite):
    """All conversations of one run, with their results.

    Args:
        conversations: Number of conversations.
        seed: Seed of their plans.
        folder: Folder for the settings and the records.
    """

    def __init__(self, conversations: int, seed: int, folder: Path) -> None:
        self.tally = faulty.Faulty.tally = faulty.Tally()
        decks = make_decks(seed)
        super().__init__([Plan(index, seed, decks) for index in range(conversations)], AT_ONCE, WALL_CLOCK_S)
        self.folder = folder
        self.engine = Engine(AutoTokenizer.from_pretrained(MODEL), self.tally)
        self.runners: dict[str, Runner] = {}
        self.rows: dict[str, dict[str, Any]] = {mode: {} for mode in MODES}
        """Outputs of each mode by the names of their rows."""
        self.ended_with_rows: set[int] = set()
        """Numbers of the conversations that ended with rows, so that each has a record."""
        self.unmarked: list[str] = []
        self.sound_marked: list[str] = []

    def build(self, endpoint: faulty.Endpoint) -> None:
        """Build a runner for each mode."""
        path, tokenizer = interactions_file(self.folder, endpoint), AutoTokenizer.from_pretrained(MODEL)
        for mode, context in MODES.items():
            config = make_config(90 if mode == "overflow" else 400)
            rollout = config.actor_rollout_ref.rollout
            rollout.multi_turn.max_assistant_turns = 6
            rollout.custom = {
                "multiturn": {
                    "interaction_config_path": str(path),
                    "interaction_reward": {"mode": "replace"},
                    "context": context,
                    "user_turn_length": 24,
                    "tool_timeout_s": faulty.TIMEOUT_S,
                    "request_timeout_s": WALL_CLOCK_S,
                    "record_dir": str(self.folder / mode),
                    "certificate_share": 1.0,
                }
            }
            self.runners[mode] = build_runner(config, LoadedModel(tokenizer, "qwen2"), self.engine)

    async def run(self) -> None:
        """Run all conversations, and close all interactions and the files of the records."""
        await super().run()
        for runner in self.runners.values():
            for interaction in runner.interactions.values():
                if (closing := interaction.aclose()) is not None:
                    await closing
            if runner.records is not None:
                await runner.records.aclose()

    async def conversation(self, index: int) -> None:
        """Play a conversation, and check that its rows name its fault."""
        plan, request_id = self.plans[index], f"r{index}"
        self.engine.requests.add(request_id)
        row = {
            "raw_prompt": [{"role": "user", "content": "Go on."}],
            "extra_info": {"index": index, "interaction_kwargs": {plan.name: plan.kwargs}},
            "uid": f"g{index // GROUP}",
            "session_id": index % GROUP,
        }
        runner = self.runners[plan.mode]
        request = await runner.request(row, {"temperature": 1.0}, request_id)
        before = json.dumps(plan.kwargs)
        task = await self.ended(self._outputs(runner, request, row), plan.cancel_after_s)
        if json.dumps(plan.kwargs) != before:
            self.is_wrong(index, "the interaction changed its row")
        elif task.cancelled():
            self.end(index, "cancelled", "" if plan.cancel_after_s is not None else "it cancelled itself")
        elif (error := task.exception()) is not None:
            met = plan.author_error and isinstance(error, InteractionContractError)
            self.end(index, type(error).__name__, "" if met else f"raised {error!r:.300}")
        else:
            self._judge(index, task.result())

    async def _outputs(self, runner: Any, request: Any, row: dict[str, Any]) -> list[Any]:
        with follow(row, runner.records, name=request.request_id):
            return list(await runner.outputs(request, row, step=0))

    def _judge(self, index: int, outputs: list[Any]) -> None:
        plan, stats = self.plans[index], [output.stats for output in outputs]
        reason, valid = outputs[-1].extra_fields["stop_reason"], stats[-1]["valid"]
        broken = plan.breaks or (plan.may_break and f"r{index}" in self.tally.struck)
        said = f"conversation {index} ({plan.mode}, {plan.name}, {plan.kwargs}): {reason}"
        if broken and valid:
            self.unmarked.append(said)
        if not broken and not valid:
            self.sound_marked.append(said)
        self.ended_with_rows.add(index)
        for number, output in enumerate(outputs):
            self.rows[plan.mode][f"g{index // GROUP}_{index % GROUP}_{number}"] = output
        whole = [each["conversation"] for each in stats] == [
            {"rows": len(outputs), "row": number} for number in range(len(outputs))
        ]
        met = plan.author_error and "where" in plan.kwargs
        wrong = "the author's mistake did not raise" if met else "" if whole else "its rows have gaps"
        self.end(index, reason, wrong)

    def is_wrong(self, index: int, text: str) -> None:
        """Record a conversation's errors, and its actions."""
        super().is_wrong(index, f"{text} ({self.plans[index].kwargs})")

    def verify_records(self) -> int:
        """Verify every record that was written, and look whether one is missing; return how many there are."""
        # A mode without a conversation has a file of lines, and none of records.
        verdicts = list(verify_files(sorted(self.folder.rglob(f"*{PACKED}"))))
        for verdict in verdicts:
            if verdict.verified is None or verdict.verified.violations:
                index = int(verdict.request_id[1:])
                self.complete[index // GROUP] -= 1
                self.is_wrong(index, f"its record: {verdict.verified and verdict.verified.violations[0]}")
        for index in self.ended_with_rows - {int(verdict.request_id[1:]) for verdict in verdicts}:
            self.complete[index // GROUP] -= 1
            self.is_wrong(index, "it has no record")
        return len(verdicts)

    def advantages_changed(self) -> tuple[int, int]:
        """Return how many tokens of valid rows were compared, and how many have another advantage with the invalid."""
        compared = changed = 0
        for mode, outputs in self.rows.items():
            raised = {f"g{i // GROUP}" for i, plan in enumerate(self.plans) if plan.author_error}
            kept = {key: output for key, output in outputs.items() if key.split("_")[0] not in raised}
            broken = {f"r{i}" for i, plan in enumerate(self.plans) if plan.breaks} | self.tally.struck
            sound = {
                key: output
                for key, output in kept.items()
                if f"r{int(key.split('_')[0][1:]) * GROUP + int(key.split('_')[1])}" not in broken
            }
            for estimator in ESTIMATORS[mode]:
                with_them = advantages_of(kept, estimator, GROUP)
                without = advantages_of(sound, estimator, GROUP)
                for key, values in without.items():
                    compared += len(values)
                    changed += sum(abs(a - b) > 1e-6 for a, b in zip(values, with_them[key], strict=True))
        return compared, changed

    def leaks_of_calls(self) -> dict[str, int]:
        """Return the events in the interactions' lives."""
        started, closed = self.tally.started, self.tally.closed
        return {
            "starts without one close": sum(closed[each] != count for each, count in started.items()),
            "calls after close": self.tally.after_close,
        }


@contextmanager
def unmarked_failures() -> Iterator[None]:
    """Take the marking of failed interactions away: such a conversation counts as any other."""
    fewer = INVALID - {StopReason.ENVIRONMENT_ERROR}
    with mock.patch.object(outcome, "INVALID", fewer), mock.patch.object(conversation, "INVALID", fewer):
        yield


async def play(conversations: int, seed: int) -> tuple[Suite, dict[str, int]]:
    """Play a suite, and return it with its leaks."""
    folder = Path(tempfile.mkdtemp(prefix="interaction-faults-"))
    endpoint = faulty.Endpoint()
    try:
        suite = Suite(conversations, seed, folder)
        # Start asyncio's own thread pool before the count: it stays.
        await asyncio.to_thread(int)
        before = held(_THREADS)
        await endpoint.open()
        suite.build(endpoint)
        await suite.run()
        await endpoint.close()
        leaks = await left(before, _THREADS)
        records = suite.verify_records()
        print(f"{records} records verified")
    finally:
        shutil.rmtree(folder)
    return suite, leaks | suite.leaks_of_calls()


async def measure(conversations: int, seed: int, control: int = 240) -> dict[str, Any]:
    """Run the suite and its control, and print injected faults and errors.

    Args:
        conversations: Number of conversations.
        seed: Seed of their plans.
        control: Number of conversations without the marking.

    Returns:
        The figures of the last line.
    """
    suite, leaks = await play(conversations, seed)
    compared, changed = suite.advantages_changed()
    print(f"faults: {dict(sorted(suite.tally.faults.items()))}")
    others = Counter(plan.name for plan in suite.plans if plan.name not in ("one", "two"))
    print(f"other interactions: {dict(sorted(others.items()))}")
    print(f"ends: {dict(suite.stops)}; the slowest took {suite.slowest_s:.1f} s")
    print(f"leaks: {leaks}; advantages compared: {compared}")
    for line in [*suite.wrong[:10], *suite.unmarked[:10], *suite.sound_marked[:10]]:
        print(line)
    with unmarked_failures():
        without, _ = await play(control, seed)
        _, control_changed = without.advantages_changed()
    return {
        "conversations": conversations,
        "faults": suite.tally.faults.total() + others.total(),
        "marked": suite.stops[str(StopReason.ENVIRONMENT_ERROR)],
        "unmarked": len(suite.unmarked),
        "sound_marked": len(suite.sound_marked),
        "leaks": sum(leaks.values()),
        "over_budget": suite.over_budget,
        "groups_incomplete": suite.groups_incomplete(),
        "author_errors": suite.stops["InteractionContractError"],
        "advantages_compared": compared,
        "sibling_advantages_changed": changed,
        "control_unmarked": len(without.unmarked),
        "control_advantages_changed": control_changed,
    }
