"""Tools derived from verl's own `BaseTool`, as written for verl 0.4 and for 0.9, loaded from YAML."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from verl_multiturn import ConfigError, load_tools
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.checking.data_rows import validate_dataset
from verl_multiturn.rows.reward_numbers import USABLE
from verl_multiturn.tools.loading.registry import schema_of
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallStatus
from verl_multiturn.tools.running.session import ToolSession

pytestmark = pytest.mark.stack

verl_tools = pytest.importorskip("verl.tools.base_tool")

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse  # noqa: E402
from verl.utils.rollout_trace import rollout_trace_op  # noqa: E402

SCHEMA = {
    "type": "function",
    "function": {
        "name": "check",
        "description": "Check an answer.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer."}},
            "required": ["answer"],
        },
    },
}


class Tool04(verl_tools.BaseTool):  # type: ignore[misc, name-defined]
    """A tool as in verl 0.4: `create` returns the id, the row's kwargs come one by one, answers are plain text."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.truths: dict[str, str] = {}

    async def create(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        assert ground_truth is not None
        self.truths[instance_id] = ground_truth
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float, dict[str, Any]]:
        right = self.truths[instance_id] == parameters["answer"]
        return f"{right} {self.config}", -0.05, {"right": right}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 1.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.truths[instance_id]


class Tool09(Tool04):
    """A tool as in verl 0.9.

    The row's kwargs come in one piece, `create` returns the id with a response, calls are traced, and an image comes
    beside the text.
    """

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(SCHEMA)

    async def create(  # type: ignore[override]
        self, instance_id: str | None = None, create_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        assert create_kwargs is not None
        own_id = f"own-{instance_id}"
        self.truths[own_id] = create_kwargs["ground_truth"]
        return own_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        assert instance_id.startswith("own-")
        text, reward, metrics = await super().execute(instance_id, parameters)
        return ToolResponse(text=text, image=["pixels"]), reward, metrics


class ToolWithAList(Tool04):
    """A tool as verl 0.4 to 0.7's search and sandbox tools.

    `calc_reward` returns a list, and `execute` returns a text in the place of the step reward.
    """

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:  # type: ignore[override]
        assert instance_id is not None
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return parameters["answer"], parameters["answer"], parameters["answer"].strip()

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return ["so", "it", "was", "meant"]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        pass


class ToolWithAgentData(ToolWithAList):
    """A tool as in verl 0.9 that finds all data of its conversation in `agent_data`."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        data = kwargs["agent_data"]
        truth = data.tools_kwargs[self.name]["create_kwargs"]["ground_truth"]
        data.extra_fields.setdefault("answers", []).append(parameters["answer"])
        said = data.messages.pop()["content"]
        seen = f"{data.request_id} {truth} turn {data.assistant_turns} {data.user_turns} {data.image_data} {said!r}"
        return ToolResponse(text=seen), None, None


class Empty(verl_tools.BaseTool):  # type: ignore[misc, name-defined]
    """A tool whose four methods are all verl's own."""


class Bare(Empty):
    """A tool whose methods are verl's own, except `execute`."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text="x"), 0.0, {}


def load(tmp_path: Path, kind: type, schema: dict[str, Any] | None) -> Any:
    path = tmp_path / "tools.yaml"
    entry = {"class_name": f"{__name__}.{kind.__name__}", "config": {"type": "native"}, "tool_schema": schema}
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    return load_tools(path)["check"]


@pytest.mark.parametrize(("kind", "schema", "images"), [(Tool04, SCHEMA, ()), (Tool09, None, ("pixels",))])
async def test_a_tool_of_verl_works_unchanged(
    tmp_path: Path, kind: type, schema: dict[str, Any] | None, images: tuple[Any, ...]
) -> None:
    tool = load(tmp_path, kind, schema)
    assert schema_of(tool).as_dict() == SCHEMA
    kwargs = {"check": {"create_kwargs": {"ground_truth": "42"}}}
    async with ToolSession("r1", {"check": tool}, kwargs, Gates(Gate, 5.0), 8) as session:
        good, bad = await session.execute(
            [ToolCall("check", '{"answer": "42"}', "c1"), ToolCall("check", '{"answer": 42}', "c2")]
        )
        assert await session.calc_rewards() == {"check": 1.0}
    assert (good.text, good.reward, good.metrics) == ("True {'type': 'native'}", -0.05, {"right": True})
    assert good.images == images
    assert bad.status is CallStatus.BAD_ARGUMENTS
    assert tool.truths == {}


async def test_a_reward_that_is_none_is_left_out_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tool = load(tmp_path, ToolWithAList, SCHEMA)
    for _ in range(2):
        async with ToolSession("r1", {"check": tool}, {}, Gates(Gate, 5.0), 8) as session:
            (result,) = await session.execute([ToolCall("check", '{"answer": " 42"}', "c1")])
            assert await session.calc_rewards() == {}
        assert (result.status, result.text, result.reward, result.metrics) == (CallStatus.OK, " 42", 0.0, {})
    assert len(caplog.records) == 2
    left_out = f"the reward of calc_reward is no {USABLE} and is left out: ['so', 'it'"
    assert f"'check': {left_out}" in caplog.text


async def test_a_tool_reads_its_conversation_in_agent_data(tmp_path: Path) -> None:
    tool = load(tmp_path, ToolWithAgentData, SCHEMA)
    row = {"check": {"create_kwargs": {"ground_truth": "42"}}}
    gates, calls = Gates(Gate, 5.0), [ToolCall("check", '{"answer": "1"}', "c1")]
    seen = []
    for name in ("r1", "r2"):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Well?"}]
        async with ToolSession(name, {"check": tool}, row, gates, 8, messages=messages) as session:
            for said in ("first", "second"):
                messages.append({"role": "assistant", "content": said})
                seen += [result.text for result in await session.execute(calls)]
            assert session.extra_fields == {"answers": ["1", "1"]}
        assert len(messages) == 3
    assert seen == [
        f"{name} 42 turn {turn} {turn - 1} None {said!r}"
        for name in ("r1", "r2")
        for turn, said in ((1, "first"), (2, "second"))
    ]


FUNCTIONS = '''
import numpy as np
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool
def judge_{n}(answer: str, strict: bool = False):
    """Judge an answer.

    Args:
        answer: The answer.
        strict: Whether to be strict.
    """
    return "text", np.float32(0.75)


@function_tool("renamed_{n}")
async def its_own_name(answer: str):
    """Look an answer up.

    Args:
        answer: The answer.
    """
    return ToolResponse(text=answer), None, {{"looked": 1}}


@function_tool(schema={{
    "type": "function",
    "function": {{
        "name": "given_{n}",
        "description": "As it was given.",
        "parameters": {{"type": "object", "properties": {{"answer": {{"type": "string", "enum": ["a"]}}}},
                        "required": ["answer"]}},
    }},
}})
def undescribed_{n}(answer):
    return {{"answer": answer + "é"}}


def helper():
    pass
'''


async def call_functions(tools: dict[str, Any], n: str) -> list[tuple[Any, ...]]:
    """Call each of `FUNCTIONS`, and return the answers as the model and the trainer get them."""
    calls = [
        ToolCall(name, '{"answer": "a"}', f"c{index}")
        for index, name in enumerate([f"judge_{n}", f"renamed_{n}", f"given_{n}"])
    ]
    async with ToolSession("r1", tools, {}, Gates(Gate, 5.0), 8) as session:
        return [(result.text, result.reward, result.metrics) for result in await session.execute(calls)]


ANSWERS = [("text", 0.75, {}), ("a", 0.0, {"looked": 1}), ('{"answer": "aé"}', 0.0, {})]


async def test_a_function_of_verls_registry_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "functions_by_name.py").write_text(FUNCTIONS.format(n="x"))
    monkeypatch.syspath_prepend(tmp_path)
    entries = [{"function": f"functions_by_name.{name}"} for name in ("judge_x", "its_own_name", "undescribed_x")]
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": entries}))
    tools = load_tools(tmp_path / "tools.yaml")
    assert list(tools) == ["judge_x", "renamed_x", "given_x"]
    parameters = schema_of(tools["given_x"]).as_dict()["function"]["parameters"]
    assert parameters["properties"] == {"answer": {"type": "string", "enum": ["a"]}}
    assert schema_of(tools["judge_x"]).function.description == "Judge an answer."
    assert await call_functions(tools, "x") == ANSWERS


async def test_the_functions_of_function_tool_path(tmp_path: Path) -> None:
    from verl_multiturn.errors import ConfigError
    from verl_multiturn.verl_bridge.loops.tools import load_run_tools

    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS.format(n="y"))
    calculator = str(ROOT / "tool_configs" / "calculator.yaml")
    tools = load_run_tools(calculator, str(path))
    assert sorted(tools) == ["calculator", "given_y", "judge_y", "renamed_y"]
    assert await call_functions(tools, "y") == ANSWERS
    (tmp_path / "none.py").write_text("x = 1")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    (tmp_path / "twice.py").write_text(FUNCTIONS.format(n="z").replace("renamed_z", "calculator"))
    for name, message in (
        ("none.py", "no function in it is decorated"),
        ("exits.py", "cannot be loaded \\(SystemExit: 0\\)"),
        ("missing.py", "cannot be loaded \\(FileNotFoundError"),
        ("twice.py", "the tool name 'calculator' is used twice"),
    ):
        with pytest.raises(ConfigError, match=f"function_tool_path=.*{message}"):
            load_run_tools(calculator, str(tmp_path / name))


def test_the_start_up_check_accepts_function_tool_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.trainer_config import compose_config
    from verl_multiturn.verl_bridge.startup.configuration import prepare_config

    (tmp_path / "functions.py").write_text(FUNCTIONS.format(n="w"))
    monkeypatch.chdir(tmp_path)
    rollout = "actor_rollout_ref.rollout"
    config = compose_config(
        [
            f"actor_rollout_ref.model.path={ROOT}/recipes/quickstart/model",
            f"{rollout}.name=sglang_async",
            f"{rollout}.multi_turn.enable=True",
            f"{rollout}.multi_turn.function_tool_path=functions.py",
            f"{rollout}.agent.default_agent_loop=multiturn_agent",
            "trainer.n_gpus_per_node=1",
        ]
    )
    prepare_config(config)
    assert config.actor_rollout_ref.rollout.multi_turn.function_tool_path == str(tmp_path / "functions.py")


async def test_verls_own_methods_work(tmp_path: Path) -> None:
    tool = load(tmp_path, Bare, SCHEMA)
    async with ToolSession("r1", {"check": tool}, {}, Gates(Gate, 5.0), 8) as session:
        (result,) = await session.execute([ToolCall("check", '{"answer": "42"}', "c1")])
        assert await session.calc_rewards() == {"check": 0.0}
    assert result.status is CallStatus.OK


def test_a_tool_with_verls_own_execute_is_refused(tmp_path: Path) -> None:
    """The `execute` of verl's class answers "Updated the tool state." to every call of the model."""
    with pytest.raises(ConfigError, match=r"Empty' does not define execute\(\)"):
        load(tmp_path, Empty, SCHEMA)


def test_rows_are_checked_against_them(tmp_path: Path) -> None:
    from json import dumps

    rows = [
        {
            "prompt": [{"role": "user", "content": "Q"}],
            "extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "1"}}}},
        },
        {"prompt": [{"role": "user", "content": "Q"}], "extra_info": {"tools_kwargs": {"check": {"creat_kwargs": {}}}}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(dumps, rows)))
    for kind, schema in ((Tool04, SCHEMA), (Tool09, None)):
        count, problems = validate_dataset(path, {"check": load(tmp_path, kind, schema)})
        assert count == 2
        assert [problem.partition(":")[0] for problem in problems] == ["row 1"]
