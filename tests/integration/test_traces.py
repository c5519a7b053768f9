"""Traces of the real worker's conversations, read back from real backends."""

import asyncio
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.conftest import ROOT
from tests.integration.test_refusals import ROLLOUT, composed
from tests.proxy_clients import until

pytestmark = [
    pytest.mark.stack,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),
    pytest.mark.filterwarnings("ignore:::(mlflow|trackio|alembic|sqlalchemy|google|databricks)"),
]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Let backends write here; Trackio reads its folder when it is imported."""
    path = tmp_path_factory.mktemp("traces")
    addresses = {"TRACKIO_DIR": str(path / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{path}/mlflow.db"}
    before = Path.cwd()
    with mock.patch.dict(os.environ, addresses):
        os.chdir(path)  # MLflow makes a folder here
        yield path
        os.chdir(before)


def make_worker(folder: Path, script: Any = None, **settings: Any) -> Any:
    from transformers import AutoTokenizer

    from benchmarks.oversample_world import Script, ScriptedWorker

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    trace = {"project_name": "shop", "experiment_name": "first", "token2text": True, **settings.pop("trace", {})}
    return ScriptedWorker(script or Script(), tokenizer, folder, **{"n": 2, **settings, "trace": trace})


class Kept:
    """A backend in memory."""

    name = "kept"

    def __init__(self) -> None:
        self.traces: list[Any] = []

    def open(self) -> None:
        pass

    def write(self, traced: Any, trace: Any) -> None:
        self.traces.append(trace)

    def close(self) -> None:
        pass


def keep(worker: Any, most: int | None = None) -> list[Any]:
    """Let a worker keep its traces in the list that is returned."""
    from verl_multiturn.verl_bridge.traces.tracer import Tracer

    sink = Kept()
    worker._tracer = Tracer([sink], None, most, "first")
    return sink.traces


async def end(worker: Any) -> None:
    await worker._tracer.writer.aclose()


COMPLETE = ["agent_loop", "turn 0", "generation", "tool wait", "turn 1", "generation"]


def by_name(spans: list[Any]) -> list[str]:
    """Return the spans' names, each before those below it."""
    below: dict[Any, list[Any]] = {}
    for span in sorted(spans, key=lambda span: span.start_time_ns):
        below.setdefault(span.parent_id, []).append(span)

    def walk(above: Any) -> list[str]:
        return [name for span in below.get(above, []) for name in (span.name, *walk(span.span_id))]

    return walk(None)


async def test_mlflow_has_one_trace_for_each_sampled_conversation_and_none_for_others(folder: Path) -> None:
    import mlflow

    worker = make_worker(folder, trace={"backend": "mlflow", "max_samples_per_step_per_worker": 1})
    await worker.run_groups([4, 5, 6])
    await worker.run_groups([4, 5], validate=True)
    await worker.run_groups([5], global_steps=2)
    await end(worker)
    found = mlflow.search_traces(return_type="list")
    told = [(trace.info.tags["sample_index"], trace.info.tags["rollout_n"]) for trace in found]
    of_steps = Counter((trace.info.tags["step"], trace.info.tags["validate"]) for trace in found)
    assert sorted(told) == [("4", "0"), ("4", "0"), ("4", "1"), ("5", "0"), ("5", "1")]
    assert of_steps == {("1", "False"): 2, ("1", "True"): 1, ("2", "False"): 2}
    for trace in found:
        assert by_name(trace.data.spans) == COMPLETE
        spans = {span.name: span for span in trace.data.spans}
        assert spans["tool wait"].outputs["text"] == "ok"
        assert spans["agent_loop"].outputs["stop_reason"] == "finished"
        assert spans["agent_loop"].outputs["rows"][0]["response_text"].endswith("Done.<|im_end|>")
        assert {span.status.status_code.name for span in trace.data.spans} == {"OK"}
        assert all(span.start_time_ns <= span.end_time_ns for span in trace.data.spans)
        assert trace.info.state.name == "OK"


async def test_trackio_has_the_messages_and_spans_of_a_conversation(folder: Path) -> None:
    worker = make_worker(folder, trace={"backend": "trackio", "max_samples_per_step_per_worker": 1})
    await worker.run_groups([4, 5])
    await end(worker)
    from trackio.sqlite_storage import SQLiteStorage

    found = SQLiteStorage.get_traces("shop", "first")
    assert len(found) == 2
    for trace in found:
        assert [message["role"] for message in trace["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert {"sample_index": 4, "step": 1, "stop_reason": "finished"}.items() <= trace["metadata"].items()
        assert [span["name"] for span in trace["spans"]] == COMPLETE


async def test_a_backend_that_cannot_be_opened_harms_no_conversation(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(folder, trace={"backend": "mlflow"})
    with mock.patch("mlflow.set_experiment", side_effect=ConnectionError("refused")):
        await worker.run_groups([0, 1])
        await end(worker)
    assert len(worker.rows) == 4
    lost = [record.message for record in caplog.records if "traces are lost" in record.message]
    assert lost == ["traces are lost: trace.backend=mlflow: ConnectionError: refused; the run goes on (said once)"]


async def test_samples_that_are_cut_have_a_trace_that_says_so(folder: Path) -> None:
    from benchmarks.oversample_world import Sample, Script

    class Slow(Script):
        async def use_tool(self, sample: Sample, call: int) -> None:
            if sample[1] == 2:
                await asyncio.sleep(60.0)

    worker = make_worker(folder, Slow(), over_sample_rate=0.3)
    traces = keep(worker)
    await worker.run_groups([0])
    await end(worker)
    found = {trace.attributes["rollout_n"]: trace for trace in traces}
    assert {number: trace.attributes["status"] for number, trace in found.items()} == {
        0: "finished",
        1: "finished",
        2: "cut",
    }
    assert [span.name for span in found[2].walk()] == ["agent_loop", "turn 0", "generation"]
    assert found[2].error == "cut"


async def test_a_group_that_is_cancelled_leaves_whole_traces(folder: Path) -> None:
    from benchmarks.oversample_world import Sample, Script

    class Hanging(Script):
        async def use_tool(self, sample: Sample, call: int) -> None:
            await asyncio.sleep(60.0)

    script = Hanging()
    worker = make_worker(folder, script)
    traces = keep(worker)
    groups = asyncio.ensure_future(worker.run_groups([0]))
    await until(lambda: sum(count for (_, method), count in script.methods.items() if method == "execute") == 2)
    assert await worker.cancel(["row0"]) == 1
    with pytest.raises(asyncio.CancelledError):
        await groups
    await end(worker)
    assert [trace.attributes["status"] for trace in traces] == ["cancelled"] * 2
    assert all(span.began <= span.ended for trace in traces for span in trace.walk())
    assert worker._tracer._groups == set()


async def test_a_conversation_that_raises_has_a_trace_with_the_error(folder: Path) -> None:
    from benchmarks.oversample_world import Sample, Script
    from verl_multiturn.errors import ToolContractError

    class Wrong(Script):
        async def use_tool(self, sample: Sample, call: int) -> None:
            raise ToolContractError("a tool broke its contract")

    worker = make_worker(folder, Wrong(), n=1)
    traces = keep(worker)
    await worker.run_groups([0])
    await end(worker)
    (trace,) = traces
    assert (trace.attributes["status"], worker.status["row0"]) == ("error", "failure")
    assert "a tool broke its contract" in trace.error


async def test_agents_are_traced_and_verls_own_loops_are_not(folder: Path) -> None:
    custom = {"multiturn": {"proxy": {"agent": "tests.endpoint_agents:chat"}, "request_timeout_s": 60}}
    worker = make_worker(folder, custom=custom, n=1)
    traces = keep(worker)
    await worker.run_groups([0], agent_name="proxy_agent", extra_info={})
    worker._tracer.choose({"uid": "other", "agent_name": "tool_agent"}, validate=False)
    assert worker._tracer._groups == set()
    await end(worker)
    (trace,) = traces
    assert [span.name for span in trace.walk()] == ["agent_loop", "turn 0", "generation", "turn 1", "generation"]
    assert (trace.attributes["agent_name"], trace.outputs["score"]) == ("proxy_agent", 1.75)


def test_the_first_groups_of_a_step_are_traced() -> None:
    from verl_multiturn.verl_bridge.traces.tracer import Tracer

    tracer = Tracer([Kept()], None, 2, None)
    for number in range(6):
        prompt = {"uid": f"u{number}", "agent_name": "multiturn_agent", "global_steps": number // 3}
        tracer.choose(prompt, validate=False)
    tracer.choose({"uid": "v", "agent_name": "multiturn_agent", "global_steps": 1}, validate=True)
    assert tracer._groups == {"u0", "u1", "u3", "u4", "v"}
    tracer.forget("u0")
    assert "u0" not in tracer._groups


def test_steps_that_run_side_by_side_are_counted_apart() -> None:
    from verl_multiturn.verl_bridge.traces.tracer import Tracer

    tracer = Tracer([Kept()], None, 2, None)
    for number in range(8):
        prompt = {"uid": f"u{number}", "agent_name": "multiturn_agent", "global_steps": number % 2}
        tracer.choose(prompt, validate=False)
    assert tracer._groups == {"u0", "u1", "u2", "u3"}


def test_verl_does_not_open_the_backend() -> None:
    from omegaconf import OmegaConf
    from verl.utils.rollout_trace import RolloutTraceConfig

    from verl_multiturn.verl_bridge.traces.tracer import hold_verls_tracing

    trace = {"project_name": "shop", "experiment_name": "first", "backend": "nowhere"}
    RolloutTraceConfig.reset()
    hold_verls_tracing(OmegaConf.create({"actor_rollout_ref": {"rollout": {"trace": trace}}}))
    RolloutTraceConfig.init("shop", "first", "mlflow")  # as verl's worker does
    found = RolloutTraceConfig.get_instance()
    assert (found.backend, found.client, found.experiment_name) == (None, None, "first")
    RolloutTraceConfig.reset()


class WeaveClient:
    """Weave's client at its boundary: the parameters are those of weave 0.54."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def create_call(
        self, op: str, inputs: dict[str, Any], parent: Any = None, attributes: Any = None, display_name: Any = None,
        *, use_stack: bool = True, _call_id_override: Any = None, started_at: Any = None,
    ) -> Any:  # fmt: skip
        assert not use_stack
        call = SimpleNamespace(op=op, inputs=inputs, parent=parent, attributes=attributes, began=started_at, ended=None)
        self.calls.append(call)
        return call

    def finish_call(
        self, call: Any, output: Any = None, exception: Any = None, *, op: Any = None, ended_at: Any = None
    ) -> None:
        assert call.ended is None
        call.output, call.exception, call.ended = output, exception, ended_at

    def flush(self) -> None:
        self.is_flushed = True


async def test_weave_gets_a_tree_of_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = WeaveClient()
    monkeypatch.setitem(sys.modules, "weave", SimpleNamespace(init=lambda project: client))
    worker = make_worker(folder, n=1, trace={"backend": "weave"})
    await worker.run_groups([4])
    await end(worker)
    assert [call.op for call in client.calls] == COMPLETE
    root, turn, _, tool, *_ = client.calls
    assert (root.parent, turn.parent, tool.parent) == (None, root, turn)
    assert root.attributes["sample_index"] == 4
    assert all(call.began <= call.ended and call.exception is None for call in client.calls)
    assert client.is_flushed


def test_the_boundary_of_weave_is_that_of_the_package() -> None:
    weave_client = pytest.importorskip("weave.trace.weave_client", reason="weave is in no lock: it wants a login")
    for name in ("create_call", "finish_call", "flush"):
        ours, theirs = (inspect.signature(getattr(each, name)) for each in (WeaveClient, weave_client.WeaveClient))
        assert set(ours.parameters) <= set(theirs.parameters)


async def test_rl_insight_has_a_session_and_the_spans_of_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import rl_insight.api
    from verl.utils.tracking import RLInsightLogger

    events: list[dict[str, Any]] = []
    monkeypatch.setenv("VERL_RL_INSIGHT_ENABLE", "1")
    monkeypatch.setenv("RL_INSIGHT_SERVER_URL", "http://127.0.0.1:1")
    client = SimpleNamespace(apply_event=events.append)
    monkeypatch.setattr(rl_insight.api, "create_monitor_client", lambda conf: client)
    worker = make_worker(folder, n=1)
    try:
        await worker.run_groups([4])
        await end(worker)
    finally:
        RLInsightLogger.finish()
    spans = [event for event in events if "start_time_ns" in str(event)]
    names = [event["name"] for event in spans]
    assert names == ["generation", "tool wait", "generation", "agent_loop", "agent_session"]
    told = str(spans[1])
    for expected in ("'turn': 0", "'type': 'tool'", "'tool_args': '{\"call\": 0}'", "'global_steps': 1", "first"):
        assert expected in told
    assert "'monitor.trace_source': 'task'" in str(spans[3])
    gauges = {event["name"] for event in events} - set(names)
    assert {"agent_loop_run_info", "agent_loop_traj_info"} <= gauges


BACKEND = f"{ROLLOUT}.trace.backend"


@pytest.mark.parametrize(
    ("changes", "missing", "said"),
    [
        ({BACKEND: "mlflow"}, {"mlflow"}, "pip install mlflow, or leave it out"),
        ({BACKEND: "mlflow"}, {"sqlalchemy", "alembic"}, "pip install sqlalchemy alembic, or leave it out"),
        ({BACKEND: "trackio"}, {"trackio"}, "backend='trackio': it needs packages that are not installed"),
        ({BACKEND: "weave"}, {"weave"}, "pip install weave"),
        ({BACKEND: "mlfow"}, set(), "trace.backend='mlfow': expected one of .*did you mean 'mlflow'"),
        ({"trainer.logger": "[console,rl_insight]"}, {"rl_insight"}, "pip install rl-insight"),
    ],
)
def test_a_missing_package_is_refused_by_name(
    changes: dict[str, str], missing: set[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration
    from verl_multiturn.verl_bridge.startup.refusals import traces

    monkeypatch.setattr(traces, "find_spec", lambda name: None if name in missing else name)
    monkeypatch.setattr(configuration, "config_hooks", [])
    config = composed(**changes, **{"ray_kwargs.ray_init.num_cpus": "64"})
    with pytest.raises(ConfigError, match=said):
        configuration.prepare_config(config)


def test_traces_that_nobody_writes_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl_multiturn.verl_bridge.startup import configuration
    from verl_multiturn.verl_bridge.startup.refusals import traces

    monkeypatch.setattr(traces, "find_spec", lambda name: name)
    monkeypatch.setattr(configuration, "config_hooks", [])
    given = {BACKEND: "trackio", "ray_kwargs.ray_init.num_cpus": "64"}
    configuration.prepare_config(composed(**given))
    assert "trace" not in capsys.readouterr().err
    configuration.prepare_config(composed(**given, **{"trainer.v1.trainer_mode": "mine"}))
    assert "trace.backend='trackio': it has no effect" in capsys.readouterr().err
