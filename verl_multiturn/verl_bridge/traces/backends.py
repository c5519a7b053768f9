"""The backends of `rollout.trace.backend`, and RL-Insight, as sinks of a `TraceWriter`.

verl opens the backends of `rollout.trace` (`RolloutTraceConfig`), under its own names of project and experiment, and
its names of fields are kept in a trace. Its decorator `rollout_trace_op` is not used: it calls the backend on the
event loop, in the middle of the conversation, and takes the times of its own call.
"""

from __future__ import annotations

import datetime
import json
import os
from types import SimpleNamespace
from typing import Any

from verl.utils.rollout_trace import RolloutTraceConfig
from verl.utils.tracking import RLInsightLogger

from verl_multiturn.observe.spans import TraceSpan
from verl_multiturn.observe.trace_writer import Sink
from verl_multiturn.observe.traces import TAGS, chat_of
from verl_multiturn.rollout.life import Life

_MLFLOW_TYPES = {"agent": "AGENT", "turn": "CHAIN", "generation": "LLM", "tool": "TOOL", "interaction": "CHAIN"}
_TRACKIO_KINDS = {"generation": "generation", "tool": "tool"}


class _BackendConfig(RolloutTraceConfig):
    """verl's settings of a backend that is open.

    A class of its own is another singleton: verl's decorators, which ask for that of `RolloutTraceConfig`, stay off.
    """

    _instance = None


class _Backend:
    """A backend of `rollout.trace`.

    Args:
        trace: `rollout.trace`.
    """

    def __init__(self, trace: Any) -> None:
        self._trace = trace
        self.client: Any = None

    @property
    def name(self) -> str:
        """Return the name that messages have for it."""
        return f"trace.backend={self._trace.backend}"

    def open(self) -> None:
        """Let verl open it, in this thread."""
        _BackendConfig.reset()  # a half-opened one
        _BackendConfig.init(self._trace.project_name, self._trace.experiment_name, self._trace.backend)
        self.client = _BackendConfig.get_client()


class Mlflow(_Backend):
    """MLflow: one trace for each conversation, with a span for each of its spans."""

    def open(self) -> None:
        """Let verl open it; spans go out in larger batches than MLflow's five, in half of the CPU time."""
        os.environ.setdefault("MLFLOW_ASYNC_TRACE_LOGGING_MAX_SPAN_BATCH_SIZE", "200")
        super().open()

    def write(self, life: Life, trace: TraceSpan) -> None:
        """Write a trace; MLflow sends it in threads of its own."""
        self._write(trace, None, {name: str(trace.attributes[name]) for name in TAGS})

    def _write(self, span: TraceSpan, above: Any, tags: dict[str, str] | None = None) -> None:
        live = self.client.start_span_no_context(
            span.name,
            span_type=_MLFLOW_TYPES[span.kind],
            parent_span=above,
            inputs=span.inputs,
            attributes=span.attributes,
            tags=tags,
            start_time_ns=_nanoseconds(span.began),
        )
        try:
            for child in span.children:
                self._write(child, live)
        finally:
            status = "ERROR" if span.error else "OK"
            outputs = {**span.outputs, "error": span.error} if span.error else span.outputs
            live.end(outputs=outputs, status=status, end_time_ns=_nanoseconds(span.ended))

    def close(self) -> None:
        """Wait until MLflow has sent all traces."""
        self.client.flush_trace_async_logging()


class Trackio(_Backend):
    """Trackio: one trace for each conversation, with its messages and spans."""

    def write(self, life: Life, trace: TraceSpan) -> None:
        """Write a trace; Trackio sends it in a thread of its own."""
        metadata = {**trace.attributes, **{key: trace.outputs[key] for key in ("stop_reason", "score")}}
        if trace.error:
            metadata["error"] = trace.error
        spans: list[dict[str, Any]] = []
        self._collect(trace, None, spans)
        made = self.client.Trace(messages=chat_of(trace), metadata=metadata, spans=spans)
        self.client.log({f"rollout_trace/{trace.name}": made}, step=life.step)

    def _collect(self, span: TraceSpan, above: str | None, spans: list[dict[str, Any]]) -> None:
        name = str(len(spans))
        spans.append(
            {
                "id": name,
                "parent_id": above,
                "name": span.name,
                "kind": _TRACKIO_KINDS.get(span.kind, "span"),
                "start_time": _moment(span.began).isoformat(),
                "end_time": _moment(span.ended).isoformat(),
                "duration_ms": 1000 * (span.ended - span.began),
                "status": "error" if span.error else "ok",
                "error": span.error or None,
                "input": span.inputs,
                "output": span.outputs,
                "metadata": span.attributes,
            }
        )
        for child in span.children:
            self._collect(child, name, spans)

    def close(self) -> None:
        """Wait until Trackio has sent all traces."""
        self.client.finish()


class Weave(_Backend):
    """Weave: one tree of calls for each conversation."""

    def write(self, life: Life, trace: TraceSpan) -> None:
        """Write a trace; Weave sends it in threads of its own."""
        self._write(trace, None)

    def _write(self, span: TraceSpan, above: Any) -> None:
        call = self.client.create_call(
            span.name,
            span.inputs,
            parent=above,
            attributes=dict(span.attributes),
            use_stack=False,
            started_at=_moment(span.began),
        )
        error = _ConversationError(span.error) if span.error else None
        try:
            for child in span.children:
                self._write(child, call)
        finally:
            self.client.finish_call(call, output=span.outputs, exception=error, ended_at=_moment(span.ended))

    def close(self) -> None:
        """Wait until Weave has sent all calls."""
        self.client.flush()


class _ConversationError(Exception):
    """The error of a conversation, for Weave, which takes exceptions alone."""


class RLInsight:
    """RL-Insight: a session for each conversation, and a span for each of its generations, calls and replies.

    The attributes are those that its dashboard of agent loops reads.

    Args:
        experiment_name: `rollout.trace.experiment_name`.
    """

    name = "RL-Insight"
    """Name that messages have for it."""

    def __init__(self, experiment_name: str | None) -> None:
        self._experiment_name = experiment_name

    def open(self) -> None:
        """Do nothing: the worker has opened it before its first conversation."""

    def write(self, life: Life, trace: TraceSpan) -> None:
        """Publish a conversation's spans and end its session."""
        outcome = life.outcome
        if outcome is None or life.session is None:
            return
        lanes = [session_of(life, self._experiment_name, row).identity for row in range(len(outcome.rows))]
        for turn in trace.children:
            row = turn.attributes["row"]
            lane = lanes[row] if isinstance(row, int) else lanes[0]
            for span in turn.children:
                self._span(span, {**lane, "turn": turn.attributes["turn"], **_told(span)})
        status = trace.attributes["status"]
        task = {
            **lanes[0],
            "monitor.trace_source": "task",
            "task_name": life.loop,
            "status": status,
            "reward": 0.0 if life.score is None else life.score,
            "finished": status == "finished",
            "error": trace.error,
        }
        self._span(trace, task)
        life.session.finish(
            trajectories=[
                SimpleNamespace(reward_score=life.score, num_turns=row.trajectory.turns) for row in outcome.rows
            ],
            status=status,
            runner_name=life.loop,
            finished=status == "finished",
        )

    def _span(self, span: TraceSpan, attributes: dict[str, Any]) -> None:
        began, ended = _nanoseconds(span.began), _nanoseconds(span.ended)
        RLInsightLogger.trace_span(span.name, start_time_ns=began, end_time_ns=ended, attributes=attributes)

    def close(self) -> None:
        """Do nothing: RL-Insight holds nothing back."""


def _told(span: TraceSpan) -> dict[str, Any]:
    """Return the fields of a turn's span that RL-Insight's dashboard shows."""
    if span.kind == "tool":
        told = {"type": "tool", "tools": span.name.removeprefix("tool "), "content": str(span.outputs["text"])}
        return {**told, "tool_args": str(span.inputs.get("arguments", ""))}
    if span.kind == "interaction":
        return {"type": "interaction", "content": str(span.outputs["text"])}
    calls = span.outputs.get("tool_calls", [])
    return {
        "type": "llm",
        "content": str(span.outputs.get("content", "")),
        "reasoning": str(span.outputs.get("reasoning", "")),
        "tools": ", ".join(call.get("name", "") for call in calls),
        "tool_args": json.dumps([call.get("arguments", "") for call in calls], ensure_ascii=False) if calls else "",
        "completion_tokens": len(span.outputs["token_ids"]),
    }


def open_rl_insight(config: Any) -> None:
    """Open RL-Insight in this process, if it is one of `trainer.logger`.

    Args:
        config: verl's whole configuration.
    """
    # Only its own settings: with the whole configuration verl would register the metrics of TransferQueue once more.
    settings = (config.get("trainer") or {}).get("rl_insight") or {}
    trace = config.actor_rollout_ref.rollout.trace
    RLInsightLogger.init(trace.project_name, trace.experiment_name, {"trainer": {"rl_insight": settings}})


def session_of(life: Life, experiment_name: str | None, row: int = 0) -> Any:
    """Return RL-Insight's session of one row of a conversation, which begins now."""
    return RLInsightLogger.agent_loop_session(
        experiment_name=experiment_name,
        sample=f"{life.row.get('index')}-{life.group[:8]}",  # data may have the same index everywhere
        session=life.number,
        traj=row,
        uid=life.group,
        global_steps=life.step,
        session_id=f"{life.group}_{life.number}",
    )


BACKENDS: dict[str, type[Mlflow] | type[Trackio] | type[Weave]] = {"mlflow": Mlflow, "trackio": Trackio, "weave": Weave}
"""The backends of `rollout.trace.backend`, by name."""


def sink_of(trace: Any) -> Sink:
    """Return the sink of `rollout.trace`, whose backend is one of `BACKENDS`."""
    return BACKENDS[trace.backend](trace)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
