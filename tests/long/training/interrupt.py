"""Are the tokens of interrupted generations what the engine sampled, and what does an interruption cost?

    python -m benchmarks.interrupt

The real SGLang server of `rollout.name=sglang_async`, our client and our conversations run in one process, over a
random model in float32; only Ray and the load balancer are replaced. Whatever SGLang returns is written into a journal,
around the server's own `tokenizer_manager.generate_request`, with the weights that the benchmark itself loaded. A
trajectory is `wrong` when its ids, log-probabilities, versions or mask are not the journal's, or when a turn goes on
after an end token.

- `positions`: greedy conversations, stopped after every k-th token, k = 1…20, each time by a pause with a new version
  of the same weights. They have to equal the uninterrupted conversation wherever its two best tokens are more than 1e-3
  apart (`compared`, `excluded`; text behind a nearer pair that turned out differently is excluded, too).
- `real`: pauses at random moments, while 32 conversations are sampled and their tools run. Each loads other weights, so
  a token's log-probability shows its version, too: the model is run again over each trajectory.
- `extra_pause_ms`: how long `abort_all_requests` takes, and from the call of `resume_generation` to the first attempt
  that SGLang gets, where requests were in flight. The control (`verl_pause_ms`) is verl's own server class and client
  over the same SGLang. The calls that Ray would carry count in neither.
- `faults`: single cases, listed in `CASES`.

The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.long.training.interrupt_engine import SCALES, Engine, Pause, conversation, of_verl, save_model, start, stop
from tests.long.training.interrupt_stand_ins import until
from tests.long.training.interrupt_talk import GREEDY, SAMPLED, Talk, differences, unlike_their_version

QUESTIONS = ("12 + 34?", "What is 5 times 77?", "Say something.", "9")
NEAR = 1e-3
"""Two tokens whose log-probabilities are nearer than this may change places."""
LONG_S = 4.0
"""Seconds of a pause that is longer than a conversation may take."""
STUCK_S = 60.0


@dataclass
class Found:
    """The findings of the benchmark."""

    trajectories: int = 0
    wrong: list[str] = field(default_factory=list)
    """Name and difference of each trajectory that is not the journal's."""
    unlike: int = 0
    """Tokens whose log-probability is not that of their version's weights."""
    attempts: int = 0

    def check(self, talk: Talk, model: Any = None) -> None:
        """Compare the conversations of `talk` with the journal; with a model also the log-probabilities."""
        for name, outcome in talk.outcomes.items():
            attempts = talk.engine.journal.of(name)
            self.trajectories += 1
            self.attempts += len(attempts)
            if found := differences(outcome, attempts):
                self.wrong.append(f"{name}: {found}")
            if talk.went_on(name):
                self.wrong.append(f"{name}: a turn goes on after an end token")
            if outcome.error:
                self.wrong.append(f"{name}: {outcome.error}")
            if model is not None:
                self.unlike += unlike_their_version(outcome, model)
        talk.outcomes.clear()


async def stop_at_positions(engine: Engine, every: Sequence[int], found: Found) -> dict[str, int]:
    """Stop greedy conversations after every k-th token, and compare them with uninterrupted ones."""
    talk, journal = Talk(engine), engine.journal
    talk.tool.longest_s = 0.02
    journal.want_gaps = True
    whole = {}
    for index, question in enumerate(QUESTIONS):
        whole[question] = await talk.run(f"whole {index}", question, GREEDY)
    pauses: list[asyncio.Task[Pause]] = []

    async def pause() -> None:
        pauses.append(asyncio.ensure_future(engine.pause(scale=SCALES[0])))
        await until(lambda: engine.server.tokenizer_manager.is_pause)

    journal.on_cut = pause
    counts = {"stops": 0, "compared": 0, "excluded": 0, "different": 0}
    for k, (index, question) in zip(every, itertools.cycle(enumerate(QUESTIONS))):
        name, journal.cut_after = f"every {k}", k
        outcome = await talk.run(name, question, GREEDY)
        journal.cut_after = None
        lengths = [len(attempt.ids) for attempt in journal.of(name) if attempt.reason == "abort"]
        if set(lengths) != {k}:
            found.wrong.append(f"{name}: stopped after {sorted(set(lengths))} tokens")
        counts["stops"] += len(lengths)
        gaps = [gap for attempt in journal.of(f"whole {index}") for gap in attempt.gaps]
        _compare(whole[question].trajectory, outcome.trajectory, gaps, counts)
    await asyncio.gather(*pauses)
    journal.on_cut, journal.want_gaps = None, False
    found.check(talk)
    return counts


def _compare(whole: Any, stopped: Any, gaps: Sequence[float], counts: dict[str, int]) -> None:
    places = [at for at, trained in enumerate(whole.mask) if trained]
    for number, (at, gap) in enumerate(zip(places, gaps, strict=True)):
        same = at < len(stopped.ids) and whole.ids[at] == stopped.ids[at]
        if gap > NEAR:
            counts["compared" if same else "different"] += 1
        else:
            counts["excluded"] += 1
        if not same:
            counts["excluded"] += len(places) - number - 1
            return
    counts["different"] += len(whole.ids) != len(stopped.ids)


async def pause_at_random(
    talk: Talk, pauses: int, conversations: int, mean_s: float, prefix: str
) -> tuple[list[Pause], int]:
    """Pause while conversations run; return the pauses and how many conversations there were."""
    source, numbers, done = random.Random(1), itertools.count(), asyncio.Event()

    async def keep_talking() -> None:
        while not done.is_set():
            number = next(numbers)
            await talk.run(f"{prefix} {number}", f"{QUESTIONS[number % 4]} {number}", SAMPLED)

    talking = [asyncio.ensure_future(keep_talking()) for _ in range(conversations)]
    made = []
    for _ in range(pauses):
        await asyncio.sleep(source.expovariate(1 / mean_s))
        made.append(await talk.engine.pause(tools=talk.tool.running))
    done.set()
    await asyncio.gather(*talking)
    return made, next(numbers)


async def two_at_once(engine: Engine) -> str:
    """Pause twice at once, ten times."""
    talk, source = Talk(engine), random.Random(2)
    talking = [asyncio.ensure_future(talk.run(f"two {i}", f"{i}", SAMPLED)) for i in range(8)]

    async def later(seconds: float) -> None:
        await asyncio.sleep(seconds)
        await engine.pause(scale=SCALES[0])

    for _ in range(10):
        await asyncio.gather(later(source.uniform(0, 0.02)), later(source.uniform(0, 0.02)))
        await asyncio.sleep(0.1)
    await asyncio.gather(*talking)
    return _judged(talk)


async def while_nothing_runs(engine: Engine) -> str:
    """Pause while nothing runs, then talk."""
    talk = Talk(engine)
    pause = await engine.pause(scale=SCALES[0])
    outcome = await talk.run("nothing", "9", SAMPLED)
    versions = {version for version in outcome.trajectory.versions if version >= 0}
    return _judged(talk) or ("" if versions == {pause.version} else f"versions {versions}")


async def tools_finish_in_it(engine: Engine) -> str:
    """Let the tools of conversations finish during a pause: their next turns have the new version."""
    talk = Talk(engine)
    talk.tool.gate = asyncio.Event()
    talking = [asyncio.ensure_future(talk.run(f"tools {i}", f"{i}", SAMPLED)) for i in range(4)]
    await until(lambda: talk.tool.running >= 4)
    before = len(engine.journal.attempts)
    pausing = asyncio.ensure_future(engine.pause(long_s=0.5, scale=SCALES[0]))
    await asyncio.sleep(0.2)
    talk.tool.gate.set()
    pause = await pausing
    await asyncio.gather(*talking)
    later = [at for at in engine.journal.attempts[before:] if at.began < pause.resumed or at.version != pause.version]
    return _judged(talk) or (f"{len(later)} attempts began in the pause" if later else "")


async def longer_than_the_request(engine: Engine) -> str:
    """Pause for longer than a conversation may take: its clock stops."""
    talk = Talk(engine, request_timeout_s=LONG_S - 1, turn_length=20)
    talking = asyncio.ensure_future(talk.run("long", "9", SAMPLED, stops=False))
    await until(lambda: engine.journal.in_flight > 0)
    await engine.pause(long_s=LONG_S, scale=SCALES[0])
    outcome = await talking
    wrong = _judged(talk)
    if str(outcome.stop_reason) != "turn_length":
        return wrong or f"stop reason {outcome.stop_reason}"
    return wrong


async def clock_without_a_pause(engine: Engine) -> str:
    """Let a conversation's time run out within a generation: it keeps its tokens, and SGLang stops."""
    talk = Talk(engine, request_timeout_s=0.3)
    outcome = await talk.run("clock", "9", SAMPLED, stops=False)
    (attempt,) = engine.journal.of("clock")
    return _judged(talk) or _ended_early(str(outcome.stop_reason) == "wall_clock", attempt) or await _idle(engine)


async def cancelled(engine: Engine) -> str:
    """Cancel a generation: its tokens come back, and SGLang stops."""
    conversation.set("cancelled")
    params = {**SAMPLED, "max_new_tokens": 384, "ignore_eos": True}
    asking = asyncio.ensure_future(
        engine.client.generate("cancelled", prompt_ids=list(range(100, 130)), sampling_params=params)
    )
    await asyncio.sleep(0.3)
    asking.cancel()
    output = await asking
    (attempt,) = engine.journal.of("cancelled")
    same = (output.token_ids, output.log_probs) == (attempt.ids, attempt.logprobs)
    return _ended_early(same, attempt) or await _idle(engine)


def _ended_early(right: bool, attempt: Any) -> str:
    if right and attempt.reason == "abort" and attempt.ids:
        return ""
    return f"as expected: {right}; the attempt ended with {attempt.reason!r} after {len(attempt.ids)} tokens"


async def _idle(engine: Engine) -> str:
    """Return "" if SGLang's scheduler has nothing to do: only then does it empty its cache."""
    await asyncio.sleep(0.1)
    return "" if (await engine.server.tokenizer_manager.flush_cache()).success else "the scheduler still works"


def _judged(talk: Talk) -> str:
    found = Found()
    found.check(talk)
    return "; ".join(found.wrong)


CASES: tuple[Callable[[Engine], Awaitable[str]], ...] = (
    two_at_once,
    while_nothing_runs,
    tools_finish_in_it,
    longer_than_the_request,
    clock_without_a_pause,
    cancelled,
)


def spread(pauses: Sequence[Pause], engine: Engine) -> dict[str, float | int]:
    """Return the median and the 95th percentile of the costs of pauses with requests in flight, in milliseconds."""
    costs = [pause.extra_ms(engine.journal) for pause in pauses if pause.in_flight]
    stops = [pause.stop_s * 1e3 for pause in pauses if pause.in_flight]
    if not costs:
        return {"pauses": 0}
    return {
        "pauses": len(costs),
        "p50": round(float(np.percentile(costs, 50)), 1),
        "p95": round(float(np.percentile(costs, 95)), 1),
        "stop_p95": round(float(np.percentile(stops, 95)), 1),
    }


@dataclass(frozen=True)
class Amount:
    """How much is interrupted."""

    k: Sequence[int] = range(1, 21)
    """Tokens from one stop to the next."""
    pauses: int = 200
    """Pauses at random moments."""
    every: float = 0.4
    """Mean seconds from one of them to the next."""
    conversations: int = 32
    """Conversations at once."""
    control: int = 20
    """Pauses of verl's own server."""


async def measure(folder: Path, amount: Amount) -> dict[str, Any]:
    """Run everything over one engine, and return the figures."""
    model = save_model(folder)
    engine = await start(folder)
    found, clock = Found(), time.perf_counter
    began = clock()

    def say(text: str) -> None:
        print(f"{clock() - began:6.1f} s  {text}", flush=True)

    say("SGLang runs")
    positions = await stop_at_positions(engine, amount.k, found)
    say(f"positions: {positions}; wrong: {found.wrong}")
    talk = Talk(engine)
    await engine.pause()
    pauses, talked = await pause_at_random(talk, amount.pauses, amount.conversations, amount.every, "real")
    found.check(talk, model)
    cost = spread(pauses, engine)
    say(f"real: {talked} conversations; wrong: {found.wrong}; unlike their version: {found.unlike} tokens; {cost}")
    faults = {}
    for case in CASES:
        try:
            async with asyncio.timeout(STUCK_S):
                wrong = await case(engine)
        except TimeoutError:
            wrong = f"not done after {STUCK_S} s"
        say(f"{case.__name__}: {wrong or 'right'}")
        if wrong:
            faults[case.__name__] = wrong
    verls = of_verl(engine)
    control, _ = await pause_at_random(Talk(verls), amount.control, amount.conversations, amount.every, "verl")
    say("control")
    in_flight = [pause for pause in pauses if pause.in_flight]
    return {
        "positions": positions["stops"],
        "real": len(pauses),
        "wrong": len(found.wrong) + positions["different"],
        "extra_pause_ms": cost,
        "verl_pause_ms": spread(control, verls),
        "trajectories": found.trajectories,
        "attempts": found.attempts,
        "unlike_their_version": found.unlike,
        "compared": positions["compared"],
        "excluded": positions["excluded"],
        "with_tools_running": sum(pause.tools > 0 for pause in in_flight),
        "not_flushed": engine.unflushed,
        "faults": faults,
    }


def run(amount: Amount) -> dict[str, Any]:
    """Start the engine, interrupt conversations, and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return asyncio.run(measure(Path(folder), amount))
        finally:
            stop()
