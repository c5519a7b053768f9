"""Tools that derive from verl's own `BaseTool`, as they were written for verl 0.4 and for 0.9, through the YAML."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_multiturn import load_tools
from verl_multiturn.chat.parsers import ToolCall
from verl_multiturn.tools.gate import Gates
from verl_multiturn.tools.registry import schema_of
from verl_multiturn.tools.runtime import CallStatus, ToolSession
from verl_multiturn.tools.validate import validate_dataset

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
    """As in verl 0.4: the id comes back, kwargs of the row one by one, plain text."""

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
    """As in verl 0.9: kwargs of the row in one piece, a response with the id, traced, an image beside the text."""

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


class Bare(verl_tools.BaseTool):  # type: ignore[misc, name-defined]
    """All four methods are verl's own."""


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
    async with ToolSession("r1", {"check": tool}, kwargs, Gates(5.0), 8) as session:
        good, bad = await session.execute(
            [ToolCall("check", '{"answer": "42"}', "c1"), ToolCall("check", '{"answer": 42}', "c2")]
        )
        assert await session.calc_rewards() == {"check": 1.0}
    assert (good.text, good.reward, good.metrics) == ("True {'type': 'native'}", -0.05, {"right": True})
    assert good.images == images
    assert bad.status is CallStatus.BAD_ARGUMENTS
    assert tool.truths == {}


async def test_verls_own_methods_work(tmp_path: Path) -> None:
    tool = load(tmp_path, Bare, SCHEMA)
    async with ToolSession("r1", {"check": tool}, {}, Gates(5.0), 8) as session:
        (result,) = await session.execute([ToolCall("check", '{"answer": "42"}', "c1")])
        assert await session.calc_rewards() == {"check": 0.0}
    assert result.status is CallStatus.OK


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
