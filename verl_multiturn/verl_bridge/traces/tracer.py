"""`Tracer`: chooses the conversations of a worker whose traces are written, and hands them over when they are over.

verl's V1 worker never chooses any (`trace_this_sample = False`), so the trace of a conversation is ours alone.
`rollout/life.py` follows conversations to their end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from verl.utils.rollout_trace import RolloutTraceConfig
from verl.utils.tracking import RLInsightLogger

from verl_multiturn.describe import describe
from verl_multiturn.observe.trace_writer import Sink, TraceWriter
from verl_multiturn.rollout.life import Life
from verl_multiturn.verl_bridge.closing import close_at_end
from verl_multiturn.verl_bridge.names import SAMPLING_LOOPS
from verl_multiturn.verl_bridge.traces.backends import RLInsight, open_rl_insight, session_of, sink_of

logger = logging.getLogger(__name__)

_STEPS = 64
"""Steps and validations that are remembered; more do not run side by side."""


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
        sinks: Where they are written.
        tokenizer: The model's tokenizer, for `token2text`; None: traces have ids alone.
        most: The most data rows of a step that are traced, with all their samples; None: all.
        experiment_name: `rollout.trace.experiment_name`.
    """

    def __init__(self, sinks: list[Sink], tokenizer: Any, most: int | None, experiment_name: str | None) -> None:
        self.writer = TraceWriter(sinks, None if tokenizer is None else tokenizer.decode, experiment_name)
        self._has_sessions = any(isinstance(sink, RLInsight) for sink in sinks)
        self._most = most
        self._experiment_name = experiment_name
        self._begun: dict[tuple[bool, int], int] = {}
        """How many groups of a step of training, or of a validation, have begun here; groups of several steps run side
        by side."""
        self._groups: set[str] = set()
        """Running groups that are traced."""
        self._is_closing = False

    @classmethod
    def of(cls, worker: Any) -> Tracer | None:
        """Return the tracer of verl's agent-loop worker; None where neither `rollout.trace` nor RL-Insight is in use.

        Args:
            worker: The worker, of whom the configuration and the tokenizer are read.
        """
        config = worker.config
        trace = config.actor_rollout_ref.rollout.get("trace")
        if trace is None or trace.get("max_samples_per_step_per_worker") == 0:
            return None
        sinks = [sink_of(trace)] if trace.get("backend") else []
        if RLInsightLogger.enabled():
            try:
                open_rl_insight(config)
                sinks.append(RLInsight(trace.get("experiment_name")))
            except Exception as error:  # a foreign library: a trace ends no run
                logger.warning("RL-Insight gets no conversations: it cannot be opened: %s", describe(error))
        if not sinks:
            return None
        most = trace.get("max_samples_per_step_per_worker")
        return cls(sinks, worker.tokenizer if trace.get("token2text") else None, most, trace.get("experiment_name"))

    def choose(self, prompt: Mapping[str, Any], validate: bool) -> None:
        """Decide whether a group that begins is traced: the first ones of each step and worker are.

        Batches are shuffled, so the first rows are any rows; those of a validation are the same ones each time.
        """
        if prompt.get("agent_name") not in SAMPLING_LOOPS:
            return
        step = int(prompt.get("global_steps") or 0)
        count = self._begun[validate, step] = self._begun.pop((validate, step), 0) + 1
        if self._most is None or count <= self._most:
            self._groups.add(prompt["uid"])
        while len(self._begun) > _STEPS:
            del self._begun[next(iter(self._begun))]

    def wants(self, uid: str) -> bool:
        """Return whether a group is traced."""
        return uid in self._groups

    def forget(self, uid: str) -> None:
        """Forget a group that is over."""
        self._groups.discard(uid)

    def begun(self, life: Life) -> None:
        """Take note of a conversation that begins and whose trace is written."""
        if self._has_sessions:
            try:
                life.session = session_of(life, self._experiment_name)
            except Exception as error:  # a foreign library: a trace ends no conversation
                logger.warning("RL-Insight gets no conversations any more: %s", describe(error))
                self._has_sessions = False

    def over(self, life: Life) -> None:
        """Write the trace of a conversation that is over, unless it never began."""
        if life.outcome is not None:
            self._close_at_end()
            self.writer.put(life)

    def _close_at_end(self) -> None:
        """Let the last traces be written when the run ends; needs the running loop."""
        if not self._is_closing:
            self._is_closing = True
            close_at_end([self.writer])
