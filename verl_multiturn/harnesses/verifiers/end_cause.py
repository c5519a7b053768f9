"""Find who caused the end of an episode of verifiers. This is the one place that decides it.

In this order:
1. an episode that its environment calls complete has its **reward**: the mean over the traces of its trainable seats,
   and one for each of these seats. A limit of turns, or a stop of the task's own, is such an end;
2. a sandbox, a tunnel or the interception that failed is an **outage**. But a file that a sandbox could not read after
   the model has spoken is one that the model did not write: the agent has **failed**. Before the model has spoken, a
   connection that failed is an outage, too, and so is an OpenEnv server that is full;
3. a harness that failed before the model has spoken could not be set up: **unjudged**. After that, it has **failed**;
   so has an agent that the endpoint refused, and the endpoint decides the effect;
4. a task, a tool set or an environment that failed, or was late, is **unjudged**. But a `ValueError` in one of them
   after the model has spoken is about the model's text (`calls/outages/causes.py` has the same rule): **failed**. So is
   an action that an OpenEnv server does not take;
5. anything else is **unjudged**.

Imports the standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_multiturn.harnesses.ends import HarnessEnd

_OUT = ("SandboxError", "TunnelError", "InterceptionError")
_AGENTS = ("ProviderError",)
_TEXTS = ("ValueError", "JSONDecodeError", "ValidationError", "UnicodeDecodeError", "UnicodeEncodeError")
"""Names of errors about a text, as verifiers reports them within its own: `scoring: ValueError: …`."""
_CONNECTIONS = ("ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "ConnectError", "ConnectTimeout")
_CODE = re.compile(r"\(code: (\w+)\)$")
"""The end of an error that an OpenEnv server answers with (`openenv.core.env_client`)."""
_MOST = 2_000


@dataclass(frozen=True)
class Fault:
    """An error that verifiers has noted.

    Attributes:
        kind: Its class, such as `TaskError`.
        text: Its message.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class SeatTrace:
    """The part of one seat in an episode.

    Attributes:
        seat: Its name.
        trainable: Whether its environment has it trained.
        reward: The sum of its weighted rewards.
        turns: Its completions.
        stop: Its stop condition; "" without one.
        faults: Its errors, from the oldest to the newest.
    """

    seat: str
    trainable: bool = True
    reward: float = 0.0
    turns: int = 0
    stop: str = ""
    faults: Sequence[Fault] = ()


@dataclass(frozen=True)
class EpisodeEvents:
    """The events of an episode.

    Attributes:
        complete: Whether its environment takes it for a valid result.
        traces: The parts of the seats.
        faults: Errors of the episode itself.
        late: Whether the environment's own time was up.
    """

    complete: bool
    traces: Sequence[SeatTrace] = ()
    faults: Sequence[Fault] = ()
    late: bool = False


@dataclass(frozen=True)
class EpisodeEnd(HarnessEnd):
    """How a session with an episode ends.

    Attributes:
        seats: The rewards of the trainable seats, by their names, for the kind `reward`.
        others: Names of the seats that are not trainable and have spoken.
    """

    seats: Mapping[str, float] = field(default_factory=dict)
    others: Sequence[str] = ()


def end_of(story: EpisodeEvents) -> EpisodeEnd:
    """Return who caused the end, by the module's rules."""
    others = tuple(dict.fromkeys(trace.seat for trace in story.traces if not trace.trainable))
    if story.complete:
        return _rewarded([trace for trace in story.traces if trace.trainable], others)
    has_spoken = any(trace.turns for trace in story.traces)
    faults = [*story.faults, *(fault for trace in story.traces for fault in trace.faults)]
    said = "; ".join(f"{fault.kind}: {fault.text[-_MOST:]}" for fault in faults) or _stops(story)
    kinds = [_kind(fault, has_spoken) for fault in faults]
    for kind in ("outage", "unjudged", "failed"):
        if kind in kinds:
            return EpisodeEnd(kind, problem=said, others=others)
    return EpisodeEnd("unjudged", problem=said, others=others)


def _rewarded(traces: Sequence[SeatTrace], others: Sequence[str]) -> EpisodeEnd:
    """Return the end of a complete episode."""
    late = [trace for trace in traces if trace.stop in ("setup_timeout", "finalize_timeout", "scoring_timeout")]
    if late:
        return EpisodeEnd("unjudged", problem=f"the seat {late[0].seat!r} ended by {late[0].stop}", others=others)
    if not traces:
        return EpisodeEnd("unjudged", problem=f"no seat is trainable; there are {list(others)}", others=others)
    if unusable := [trace for trace in traces if not math.isfinite(trace.reward)]:
        said = f"the reward of the seat {unusable[0].seat!r} is {unusable[0].reward!r}, expected a finite number"
        return EpisodeEnd("unjudged", problem=said, others=others)
    by_seat: dict[str, list[float]] = {}
    for trace in traces:
        by_seat.setdefault(trace.seat, []).append(trace.reward)
    mean = math.fsum(trace.reward for trace in traces) / len(traces)
    seats = {seat: math.fsum(rewards) / len(rewards) for seat, rewards in by_seat.items()}
    return EpisodeEnd("reward", mean, seats=seats, others=others)


def _kind(fault: Fault, has_spoken: bool) -> str:
    if fault.kind in _OUT:
        is_models = fault.kind == "SandboxError" and has_spoken and fault.text.startswith("read ")
        return "failed" if is_models else "outage"
    if fault.kind in _AGENTS or (fault.kind == "HarnessError" and has_spoken):
        return "failed"
    kinds = [fault.kind, *re.findall(r"\b(\w+): ", fault.text.partition("\n")[0])]
    code = _CODE.search(fault.text.rstrip())
    if has_spoken:
        is_models = any(each in _TEXTS for each in kinds) or (code is not None and code[1] == "VALIDATION_ERROR")
        return "failed" if is_models else "unjudged"
    is_out = any(each in _CONNECTIONS for each in kinds) or (code is not None and code[1] == "CAPACITY_REACHED")
    return "outage" if is_out else "unjudged"


def _stops(story: EpisodeEvents) -> str:
    if story.late:
        return "the environment's own time was up"
    return f"it ended without a result and without an error: {[trace.stop for trace in story.traces]}"
