"""The calculator, the registry, schemas, settings, and `validate`: good and bad input."""

import pickle
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.conftest import ROOT, make_schema
from verl_multiturn import BaseTool, ConfigError, ToolSchema, load_tools
from verl_multiturn.checking.data_rows import validate_dataset
from verl_multiturn.cli.main import app
from verl_multiturn.config import read_settings
from verl_multiturn.tools.calculator import evaluate
from verl_multiturn.tools.loading.registry import schema_of

CALCULATOR = ROOT / "tool_configs" / "calculator.yaml"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2 * 3", 7), ("(56 + -33) - 84", -61), ("7 / 2", 3.5), ("7 // 2", 3), ("2 ** 10", 1024), (" -(-3) ", 3)],
)
def test_calculator(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "x", "__import__('os')", "9**9**9", "(" * 300, "1/0", "'a' * 9", "1e308 * 10", "(-8) ** 0.5", "True"],
)
def test_calculator_refuses(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        evaluate(expression)


@pytest.mark.parametrize("path", sorted((ROOT / "tool_configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_tool_configs_load(path: Path) -> None:
    assert load_tools(path)


def write(tmp_path: Path, **changes: Any) -> Path:
    entry = yaml.safe_load(CALCULATOR.read_text())["tools"][0]
    entry.update(changes)
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    return path


def function(**changes: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {"type": "object"}, **changes},
    }


class OtherNames(BaseTool):
    def __init__(self, config: Any, schema: Any) -> None:
        super().__init__(config, schema)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class_name": "nowhere.at_all.Tool"}, "cannot import 'nowhere.at_all'"),
        ({"class_name": "verl_multiturn.tools.calculator.Nope"}, "has no 'Nope'; correct the name, or define it there"),
        ({"class_name": "verl_multiturn.tools.calculator.CalcTool"}, "; did you mean 'CalculatorTool'?"),
        ({"class_name": "Tool"}, "no dotted name"),
        ({"class_name": "pathlib.Path"}, "has no method 'create'"),
        ({"class": "x"}, "unknown key 'class'"),
        ({"config": [1]}, "expected a mapping"),
        ({"class_name": f"{__name__}.OtherNames"}, "; let its __init__ take an argument with the name tool_schema"),
        ({"tool_schema": {"type": "function"}}, "function: Field required"),
        ({"tool_schema": function(name="two words")}, "'two words'"),
        ({"tool_schema": function(parameters={"type": "objekt"})}, "no valid JSON Schema"),
        ({"tool_schema": function(parameters={"type": "string"})}, "expected 'object', got 'string'"),
        ({"tool_schema": None}, "has no tool_schema"),
        ({"tool_schema": function(parameters={"type": "object", "default": date(2024, 1, 1)})}, "parameters.default"),
        ({"tool_schema": function(parameters={"type": "object", "enum": [{True: 1}]})}, "parameters.enum.0: True is"),
        ({"tool_schema": function(since={1})}, "function.since: {1} is no JSON"),
    ],
)
def test_bad_tool_yaml_names_what_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tools(write(tmp_path, **changes))
    assert message in str(caught.value)
    assert "tools.yaml: tools[0]" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"tools": [{"functon": "my.tool"}]}, "got {'functon': 'my.tool'}; 'functon': did you mean 'function'?"),
        (
            {"tools": [{"functon": "my.tool", "limits": {}}]},
            "got {'functon': 'my.tool', 'limits': {}}; 'functon': did you mean 'function'?",
        ),
        ({"tools": [{"function": "my.tool", "limit": {}}]}, "unknown key 'limit'; did you mean 'limits'?"),
        (
            {"tools": [{"function": "my.tool", 3: {}, "xyz": 1}]},
            "unknown key 3; beside 'function' known are ['limits', 'tool_schema']",
        ),
    ],
)
def test_a_misspelt_key_is_told_with_the_nearest_known_one(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        load_tools(path)
    assert str(caught.value).endswith(said)


def test_no_such_yaml_and_a_name_used_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        load_tools(tmp_path / "missing.yaml")
    entry = yaml.safe_load(CALCULATOR.read_text())["tools"][0]
    path = tmp_path / "twice.yaml"
    path.write_text(yaml.safe_dump({"tools": [entry, entry]}))
    with pytest.raises(ConfigError, match="used twice"):
        load_tools(path)


def test_the_schema_reaches_the_template_as_it_was_written() -> None:
    raw = yaml.safe_load(CALCULATOR.read_text())["tools"][0]["tool_schema"]
    assert list(ToolSchema.read(raw, "x").as_dict().items()) == list(raw.items())
    assert ToolSchema.read(raw, "x").as_dict() == load_tools(CALCULATOR)["calculator"].tool_schema.model_dump(
        exclude_unset=True, exclude_none=True
    )


def test_settings() -> None:
    assert read_settings(None).tool_timeout_s == 60.0
    assert read_settings({"tool_timeout_s": 3}).tool_timeout_s == 3.0
    with pytest.raises(ConfigError, match="did you mean 'tool_timeout_s'"):
        read_settings({"tool_timeout": 3})
    with pytest.raises(ConfigError, match=r"tool_timeout_s: .*, got -1"):
        read_settings({"tool_timeout_s": -1})
    with pytest.raises(ConfigError, match="expected a mapping"):
        read_settings([1])  # type: ignore[arg-type]


class Strict:
    """A tool whose `create` takes a single argument of the row."""

    name = "strict"
    tool_schema = make_schema("strict")

    async def create(self, instance_id: str, ground_truth: str = "") -> None: ...
    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> str:
        return ""

    async def calc_reward(self, instance_id: str) -> float:
        return 0.0

    async def release(self, instance_id: str) -> None: ...


def test_validate_dataset(tmp_path: Path) -> None:
    import json

    prompt = [{"role": "user", "content": "Q"}]
    kwargs = {"strict": {"create_kwargs": {"ground_truth": "1"}}}
    rows = [
        {"prompt": prompt, "extra_info": {"need_tools_kwargs": True, "tools_kwargs": kwargs}},
        {"prompt": prompt, "extra_info": {"tools_kwargs": {"strict": {"create_kwargs": {"truth": "1"}}}}},
        {"prompt": prompt, "extra_info": {"tools_kwargs": {"other": {}}}},
        {"prompt": prompt, "extra_info": {"need_tools_kwargs": True}},
        {"prompt": "Q"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    count, problems = validate_dataset(path, {"strict": Strict()})
    assert count == 5
    assert [problem.partition(":")[0] for problem in problems] == ["row 1", "row 2", "row 3", "row 4"]
    assert "truth" in problems[0]
    assert "no tool of the YAML" in problems[1]


def test_command_line(tmp_path: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["validate", str(CALCULATOR)])
    assert good.exit_code == 0
    assert "calculator" in good.output
    bad = runner.invoke(app, ["validate", str(write(tmp_path, class_name="nowhere.Tool"))])
    assert bad.exit_code == 2
    assert "cannot import 'nowhere'" in bad.output


def test_a_schema_can_be_sent_to_another_process() -> None:
    schema = make_schema("echo", text="string")
    again = pickle.loads(pickle.dumps(schema))
    assert again == schema
    assert again.read_arguments('{"text": 1}')[0] is None


class WithoutSettings(BaseTool):
    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        if config:
            raise ConfigError(f"unknown settings {sorted(config)}")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return ""


class Foreign:
    """A tool as written for verl, which derives from no class of ours."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema, self.name = config, tool_schema, tool_schema.function.name

    async def create(self, instance_id: str) -> None: ...
    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> str:
        return ""

    async def calc_reward(self, instance_id: str) -> float:
        return 0.0

    async def release(self, instance_id: str) -> None: ...


@pytest.mark.parametrize(("kind", "seen"), [(WithoutSettings, {}), (Foreign, {"type": "native"})])
def test_what_verls_loader_demands_does_not_reach_our_tools(tmp_path: Path, kind: type, seen: dict[str, Any]) -> None:
    path = tmp_path / "tools.yaml"
    entry = {
        "class_name": f"{__name__}.{kind.__name__}",
        "config": {"type": "native"},
        "tool_schema": make_schema("x").as_dict(),
    }
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    assert load_tools(path)["x"].config == seen


RAW = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}


class Describes(BaseTool):
    """A class that describes itself by its test."""

    described: Any = RAW

    def get_schema(self) -> Any:
        return self.described

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return "1"


async def as_a_coroutine() -> Any:
    return RAW


def test_a_class_may_describe_itself_with_a_mapping() -> None:
    for described in (RAW, MappingProxyType(RAW), ToolSchema.read(RAW, "test"), ToolSchema.read(RAW, "test")):
        tool = type("Own", (Describes,), {"described": described})({})
        assert (tool.name, tool.tool_schema) == ("count", ToolSchema.read(RAW, "test"))
    assert Describes({}, {**RAW, "function": {"name": "given"}}).name == "given"


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"type": "function"}, "Describes.get_schema().function: Field required"),
        ({"name": "count", "parameters": {}}, "Describes.get_schema().type: Field required"),
        ([RAW], 'Describes.get_schema(): expected {"type": "function", "function": {…}} or a ToolSchema, got [{'),
        ("count", "got 'count'; see tool_configs/"),
        (as_a_coroutine, "got <coroutine object as_a_coroutine>"),
        (None, "Describes has no tool_schema"),
    ],
)
def test_a_schema_in_another_form_is_refused(described: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Describes, "described", described() if callable(described) else described)
    with pytest.raises(ConfigError) as caught:
        Describes({})
    assert message in str(caught.value)


def test_another_loops_tool_may_have_a_mapping_as_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [{"class_name": f"{__name__}.WithMapping"}]}))
    assert schema_of(load_tools(path)["count"]) == ToolSchema.read(RAW, "test")


class WithMapping:
    """A tool that derives from no class of ours."""

    def __init__(self, config: Any, tool_schema: Any) -> None:
        self.name, self.tool_schema = "count", RAW

    async def create(self, instance_id: str, **kwargs: Any) -> None: ...

    execute = calc_reward = release = create
