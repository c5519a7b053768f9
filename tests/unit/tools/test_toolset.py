"""`toolset` in the tool YAML: one entry, many tools; allowed results of its function, and refusals by name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import make_schema
from verl_multiturn import BaseTool, ConfigError, ToolResponse, load_tools, tool
from verl_multiturn.calls.limits import limits_of
from verl_multiturn.tools.loading.call_limits import ToolLimits
from verl_multiturn.tools.loading.functions import function_tool
from verl_multiturn.tools.loading.kwargs import tools_of_row


class Named(BaseTool):
    def __init__(self, name: str) -> None:
        super().__init__({}, make_schema(name))

    async def create(self, instance_id: str, *, start: int = 0) -> None:  # type: ignore[override]  # names its kwargs
        pass

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        return ToolResponse(self.name)


class WithoutExecute(BaseTool):
    pass


def count(text: str) -> int:
    """Count the characters of a text."""
    return len(text)


@tool(repeatable=True)
def echo(text: str) -> str:
    """Return a text."""
    return text


def shelf(names: Iterable[str] = ("take", "put")) -> list[Any]:
    return [*map(Named, names), count, function_tool(lambda **given: str(given), make_schema("given", a="integer"))]


def echoes() -> tuple[Any, ...]:
    return (echo,)


async def later() -> list[Any]:
    return [count]


def failing() -> list[Any]:
    raise OSError("no shelf")


def refusing() -> list[Any]:
    raise ConfigError("the shelf 'x' is unknown; name one that is there")


def returning(kind: str) -> Any:
    return {
        "none": None,
        "empty": [],
        "mapping": {"count": count},
        "number": [count, 3],
        "class": [Named],
        "no execute": [WithoutExecute({}, make_schema("x"))],
        "no annotation": [lambda x: x],
        "twice": [Named("take"), Named("take")],
    }[kind]


NOT_CALLABLE = [count]


def load(folder: Path, *entries: dict[str, Any]) -> dict[str, Any]:
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": list(entries)}))
    return load_tools(path)


def entry(name: str, **rest: Any) -> dict[str, Any]:
    return {"toolset": f"{__name__}.{name}", **rest}


def test_a_toolset_stands_for_many_tools(tmp_path: Path) -> None:
    tools = load(tmp_path, entry("shelf"), {"function": f"{__name__}.echo"})
    assert list(tools) == ["take", "put", "count", "given", "echo"]
    tools = load(tmp_path, entry("shelf", config={"names": ["find"]}, limits={"timeout_s": 3, "concurrency": 2}))
    assert list(tools) == ["find", "count", "given"]
    assert {limits_of(each, ToolLimits).timeout_s for each in tools.values()} == {3.0}
    assert limits_of(load(tmp_path, entry("echoes", limits={"retries": 1}))["echo"], ToolLimits).retries == 1


def test_a_row_chooses_among_the_tools_of_a_toolset(tmp_path: Path) -> None:
    tools = load(tmp_path, entry("shelf"))
    kwargs = {"put": {"create_kwargs": {"start": 3}}, "count": {}}
    chosen, given = tools_of_row({"extra_info": {"need_tools_kwargs": True, "tools_kwargs": kwargs}}, tools, "row")
    assert list(chosen) == ["put", "count"]
    assert given["put"] == {"create_kwargs": {"start": 3}}
    with pytest.raises(ConfigError, match=r"tool 'take': create.*cannot be called with"):
        tools_of_row({"extra_info": {"tools_kwargs": {"take": {"create_kwargs": {"begin": 3}}}}}, tools, "row")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (entry("nothing"), "tools[0].toolset: 'tests.unit.tools.test_toolset' has no 'nothing'"),
        (entry("Named"), "name a function that returns a list of tools"),
        (entry("NOT_CALLABLE"), "name a function that returns a list of tools"),
        (entry("later"), "later returned <coroutine"),
        (entry("failing"), "failing (config keys: none) raised OSError: no shelf"),
        (entry("refusing"), "tools[0]: the shelf 'x' is unknown; name one that is there"),
        (entry("shelf", config={"nmaes": []}), "shelf (config keys: nmaes) raised TypeError"),
        (entry("shelf", config=["take"]), "tools[0].config: expected a mapping, got ['take']"),
        (entry("shelf", tool_schema={}), "unknown key 'tool_schema'"),
        (entry("shelf", function="x.y"), "expected a mapping with one of"),
        (entry("shelf", limits={"retries": 2}), "tools[0].limits.retries=2: Named does not declare"),
        (entry("returning", config={"kind": "none"}), "returning returned None; expected a list of tools"),
        (entry("returning", config={"kind": "empty"}), "returning returned []; expected a list of tools"),
        (entry("returning", config={"kind": "mapping"}), "expected a list of tools"),
        (entry("returning", config={"kind": "number"}), "returning()[1]: expected a function or a tool, got 3"),
        (entry("returning", config={"kind": "class"}), "returning()[0]: "),
        (entry("returning", config={"kind": "no execute"}), "'WithoutExecute' does not define execute()"),
        (entry("returning", config={"kind": "no annotation"}), "parameter 'x' has no annotation"),
        (entry("returning", config={"kind": "twice"}), "the tool name 'take' is used twice"),
    ],
)
def test_a_wrong_toolset_is_refused_by_name(written: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, written)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_two_entries_with_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tools\[1\]: the tool name 'count' is used twice"):
        load(tmp_path, {"function": f"{__name__}.count"}, entry("shelf"))
