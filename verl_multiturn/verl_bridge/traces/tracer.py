"""`Tracer`: chooses the conversations of a worker whose traces are written, and follows them to their end.

verl's V1 worker never chooses any (`trace_this_sample = False`), so the trace of a conversation is ours alone:

    worker  `begun` ──▶ the conversation's task ──▶ loop  `note`: the outcome, which is filled in as it goes on
    worker  how it ended, its reward ──▶ TraceWriter ──thread──▶ backend
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.rollout_trace import RolloutTraceConfig
from verl.utils.tracking import RLInsightLogger

from verl_multiturn.describe import describe
from verl_multiturn.observe.metrics import numbers_of
from verl_multiturn.observe.trace_writer import Sink, TraceWriter
from verl_multiturn.observe.traces import Traced
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.verl_bridge.closing import close_at_end
from verl_multiturn.verl_bridge.loops.certified_output import CertifiedOutput
from verl_multiturn.verl_bridge.names import OUR_LOOPS
from verl_multiturn.verl_bridge.traces.backends import RLInsight, open_rl_insight, session_of, sink_of

logger = logging.getLogger(__name__)

_traced: ContextVar[Traced | None] = ContextVar("traced", default=None)


def note(outcome: Outcome) -> None:
    """Give the running conversation's trace its outcome; a loop calls it before the outcome is complete, or after."""
    if (traced := _traced.get()) is not None:
        traced.outcome = outcome


def note_end() -> None:
    """Note that the running conversation is over, and its reward is computed next."""
    if (traced := _traced.get()) is not None:
        traced.ended = time.time()


def note_score(outputs: AgentLoopOutput | list[AgentLoopOutput]) -> None:
    """Note the reward of the running conversation, once its rows are written.

    Args:
        outputs: what the agent loop's `run` returned.
    """
    traced, last = _traced.get(), outputs[-1] if isinstance(outputs, list) and outputs else outputs
    if traced is not None and isinstance(last, CertifiedOutput):
        traced.score = last.total()
        traced.reported = numbers_of(last.extra_fields.get("reward_extra_info") or {})


def is_traced() -> bool:
    """Tell whether the trace of the running conversation is written."""
    return _traced.get() is not None


def hold_verls_tracing(config: Any) -> None:
    """Keep verl's worker from opening the backend, which it would do on the event loop; call it before verl's worker.

    `RolloutTraceConfig` is set up once in a process. So verl's decorators do nothing, as in all of verl's V1.

    Args:
        config: verl's whole configuration.
    """
    if (trace := config.actor_rollout_ref.rollout.get("trace")) is not None:
        RolloutTraceConfig.init(trace.project_name, trace.experiment_name, backend=None)


class Tracer:
    """The traces of one worker.

    Args:
        sinks: where they are written.
        tokenizer: the model's tokenizer, for `token2text`; None: traces have ids alone.
        most: the most data rows of a step that are traced, with all their samples; None: all.
        experiment_name: `rollout.trace.experiment_name`.
    """

    def __init__(self, sinks: list[Sink], tokenizer: Any, most: int | None, experiment_name: str | None) -> None:
        self.writer = TraceWriter(sinks, None if tokenizer is None else tokenizer.decode)
        self._has_sessions = any(isinstance(sink, RLInsight) for sink in sinks)
        self._most = most
        self._experiment_name = experiment_name
        self._steps: dict[bool, tuple[int, int]] = {}
        """The last step of training, and of validation, with the number of its groups that are traced."""
        self._groups: set[str] = set()
        """Running groups that are traced."""
        self._is_closing = False

    @classmethod
    def of(cls, worker: Any) -> Tracer | None:
        """Return the tracer of verl's agent-loop worker; None where neither `rollout.trace` nor RL-Insight is in use.

        Args:
            worker: the worker, of whom the configuration and the tokenizer are read.
        """
        config = worker.config
        trace = config.actor_rollout_ref.rollout.get("trace")
        if trace is None or trace.get("max_samples_per_step_per_worker") == 0:
            return None
        sinks = [sink_of(trace)] if trace.get("backend") else []
        if RLInsightLogger.enabled():
            try:
                open_rl_insight(config)
                sinks.append(RLInsight())
            except Exception as error:
                logger.warning("RL-Insight gets no conversations: it cannot be opened: %s", describe(error))
        if not sinks:
            return None
        most = trace.get("max_samples_per_step_per_worker")
        return cls(sinks, worker.tokenizer if trace.get("token2text") else None, most, trace.get("experiment_name"))

    def choose(self, prompt: Mapping[str, Any], validate: bool) -> None:
        """Decide whether a group that begins is traced: the first ones of each step and worker are.

        Batches are shuffled, so the first rows are any rows; those of a validation are the same ones each time.
        """
        if prompt.get("agent_name") not in OUR_LOOPS:
            return
        step = int(prompt.get("global_steps") or 0)
        last, count = self._steps.get(validate, (step, 0))
        count = count + 1 if last == step else 1
        if self._most is None or count <= self._most:
            self._groups.add(prompt["uid"])
        self._steps[validate] = step, count

    def over(self, uid: str) -> None:
        """Forget a group that is over."""
        self._groups.discard(uid)

    @contextmanager
    def conversation(self, row: Mapping[str, Any], validate: bool) -> Iterator[Traced | None]:
        """Follow a conversation while the context lasts, in whose task it runs, and then write its trace.

        Yields what the worker completes (status, score); None for a conversation that is not traced.

        Args:
            row: verl's row, with `uid`, `session_id`, `index`, `global_steps` and `agent_name`.
            validate: whether it is one of a validation.
        """
        if row["uid"] not in self._groups:
            yield None
            return
        traced = Traced(
            uid=row["uid"],
            session_id=row["session_id"],
            sample_index=row.get("index"),
            step=int(row.get("global_steps") or 0),
            validate=validate,
            experiment_name=self._experiment_name,
            agent_name=row["agent_name"],
            began=time.time(),
        )
        if self._has_sessions:
            try:
                traced.session = session_of(traced)
            except Exception as error:
                logger.warning("RL-Insight gets no conversations any more: %s", describe(error))
                self._has_sessions = False
        token = _traced.set(traced)
        try:
            yield traced
        except asyncio.CancelledError:
            traced.status = "cancelled"
            raise
        except Exception as error:
            traced.status, traced.error = "error", describe(error)
            raise
        finally:
            _traced.reset(token)
            traced.ended = traced.ended or time.time()
            if traced.outcome is not None:  # it has begun
                self._close_at_end()
                self.writer.put(traced)

    def _close_at_end(self) -> None:
        """Let the last traces be written when the run ends; needs the running loop."""
        if not self._is_closing:
            self._is_closing = True
            close_at_end([self.writer])
