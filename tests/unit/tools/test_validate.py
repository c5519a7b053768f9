"""`verl-multiturn validate`: a run accepts rows that it passes; rows that a run refuses, it refuses by number."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT, EchoTool, make_schema
from verl_multiturn import BaseTool, ConfigError, ToolSchema, load_tools
from verl_multiturn.checking.data_rows import validate_dataset
from verl_multiturn.cli.main import app
from verl_multiturn.runs.data import make_row, read_splits, write_rows
from verl_multiturn.tools.loading.kwargs import tools_of_row

PROMPT = [{"role": "user", "content": "Q"}]


class Strict(BaseTool):
    """A tool whose `create` needs a value from the row."""

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config or {}, tool_schema or make_schema("strict"))

    async def create(self, instance_id: str, ground_truth: str) -> None: ...  # type: ignore[override]


TOOLS = {"echo": EchoTool(), "strict": Strict()}
GIVEN = {"strict": {"create_kwargs": {"ground_truth": "4"}}}

# `extra_info`, and the text in the message of both `validate` and the run; "" where the row can work.
ROWS: list[tuple[Any, str]] = [
    ({"tools_kwargs": GIVEN}, ""),
    ({"tools_kwargs": GIVEN, "tool_selection": ["strict"]}, ""),
    ({"tool_selection": ["echo"]}, ""),
    ({"need_tools_kwargs": True, "tools_kwargs": {"echo": {}}}, ""),
    ({"tool_selection": ["echo"], "tools_kwargs": {"strict": {}}}, ""),  # the row does not select this tool
    ({}, "tool 'strict': create"),  # the row has all tools, and one of them needs an argument
    (None, "tool 'strict': create"),
    ({"tools_kwargs": {"echo": {}}}, "tool 'strict': create"),
    ({"tool_selection": ["ecko"]}, "tool_selection names 'ecko', which is no tool of the YAML; did you mean 'echo'?"),
    ({"tool_selection": ["echo", "sql"]}, "tool_selection names 'sql', which is no tool of the YAML; known are"),
    ({"tool_selection": "echo"}, "tool_selection must be a list of tool names, got 'echo'"),
    ({"tool_selection": [1]}, "tool_selection must be a list of tool names, got [1]"),
    ({"tool_selection": {"echo": 1}}, "tool_selection must be a list of tool names"),
    ({"need_tools_kwargs": True, "tools_kwargs": GIVEN, "tool_selection": ["echo"]}, "leave the row no tool"),
    ({"need_tools_kwargs": True}, "need_tools_kwargs is set, but tools_kwargs names no tool"),
    ({"tools_kwargs": {**GIVEN, "ekho": {}}}, "tools_kwargs names 'ekho', which is no tool of the YAML; did you"),
    ({"tools_kwargs": "strict"}, "tools_kwargs must map tool names to kwargs"),
    ('{"tools_kwargs": {}}', "extra_info must be a mapping"),
]


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def as_verl_hands_it_over(extra_info: Any) -> dict[str, Any]:
    """Return a row as verl's data set hands it over."""
    given = {"raw_prompt": PROMPT, "extra_info": extra_info}
    if isinstance(extra_info, dict):
        given["tools_kwargs"] = extra_info.get("tools_kwargs") or {}
    return given


@pytest.mark.parametrize(("extra_info", "said"), ROWS)
def test_validate_says_what_the_run_would(tmp_path: Path, extra_info: Any, said: str) -> None:
    """Both call `tools_of_row`; `test_rows` tests the run."""
    _, problems = validate_dataset(write(tmp_path, {"prompt": PROMPT, "extra_info": extra_info}), TOOLS)
    given = as_verl_hands_it_over(extra_info)
    if not said:
        assert not problems
        chosen, _ = tools_of_row(given, TOOLS, "row")
        assert chosen.items() <= TOOLS.items()
        return
    with pytest.raises(ConfigError) as caught:
        tools_of_row(given, TOOLS, "row 0")
    assert problems == [str(caught.value)]
    assert problems[0].startswith("row 0: ")
    assert said in problems[0]


def test_kwargs_that_verls_data_set_does_not_read(tmp_path: Path) -> None:
    """The data set puts the kwargs of `extra_info` into the column."""
    beside = {"prompt": PROMPT, "tools_kwargs": GIVEN}
    equal = {**beside, "extra_info": {"tools_kwargs": GIVEN}}
    other = {**beside, "extra_info": {"tools_kwargs": {"strict": {"create_kwargs": {"ground_truth": "5"}}}}}
    count, problems = validate_dataset(write(tmp_path, beside, equal, other), TOOLS)
    assert count == 3
    assert [problem.partition(":")[0] for problem in problems] == ["row 0", "row 2"]
    assert "verl reads extra_info.tools_kwargs alone" in problems[0]


def test_a_run_without_tools_takes_rows_that_name_some() -> None:
    """A run without tools is a baseline on the same rows."""
    row = {"extra_info": {"need_tools_kwargs": True, "tools_kwargs": GIVEN, "tool_selection": ["strict"]}}
    assert tools_of_row(row, {}, "row") == ({}, GIVEN)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": [{"type": "video", "video": "x"}]}, "video in a message is not supported"),
        ({"role": 3, "content": "x"}, "message 0 has the role 3, expected one of"),
        ({"role": "usr", "content": "x"}, "message 0 has the role 'usr', expected one of"),
        ({"role": "User", "content": "x"}, "; did you mean 'user'?"),
        ({"role": "human", "content": "x"}, "; write one of these"),
    ],
)
def test_messages_that_no_template_takes(tmp_path: Path, message: Any, said: str) -> None:
    path = write(tmp_path, {"prompt": [message]}, {"prompt": [{"role": "user", "content": [{"text": "x"}]}]})
    _, problems = validate_dataset(path, {"echo": TOOLS["echo"]})
    assert [problem.partition(":")[0] for problem in problems] == ["row 0"]
    assert said in problems[0]


def test_every_way_to_make_rows_refuses_an_unknown_role(tmp_path: Path) -> None:
    """A template leaves such a message out, so the model would never see the question."""
    prompt = [{"role": "system", "content": "S"}, {"role": "usr", "content": "Q"}]
    with pytest.raises(ConfigError, match=r"a row of 'qa': message 1 has the role 'usr', .*did you mean 'user'\?"):
        make_row("qa", prompt, "4")
    row = make_row("qa", PROMPT, "4")
    with pytest.raises(ConfigError, match=r"'train', row 1: message 1 has the role 'usr'"):
        write_rows(tmp_path, {"train": [row, {**row, "prompt": prompt}]})


def test_an_assistants_message_may_be_calls_alone(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "echo", "arguments": {"text": "x"}}}
    prompt = [*PROMPT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert validate_dataset(write(tmp_path, {"prompt": prompt}), {"echo": TOOLS["echo"]}) == (1, [])


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.parquet"])
def test_all_files_that_verl_reads_are_read(tmp_path: Path, name: str) -> None:
    """One text holds characters that some readers take for the end of a line."""
    rows = [{"prompt": [{"role": "user", "content": "one\u2028line\x85"}]}, {"prompt": PROMPT}]
    path = tmp_path / name
    if name == "rows.json":
        path.write_text(json.dumps(rows, ensure_ascii=False))
    elif name == "rows.jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert validate_dataset(path, {"echo": TOOLS["echo"]}) == (2, [])
    assert read_splits(str(path), held_out=0)["train"] == rows


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.parquet", b"PAR1 and no more", "cannot be read"),
        ("rows.parquet", b"", "cannot be read"),
        ("rows.json", b'{"a": 1', "cannot be read"),
        ("rows.json", b"[1, 2", "cannot be read"),
        ("rows.jsonl", b"\xff\xfe", "cannot be read"),
        ("rows.jsonl", b'{"prompt": 1}\n{"prompt"', "(ValueError: line 2, column 10: "),
        ("rows.jsonl", b"", "has no rows"),
        ("rows.csv", b"prompt\nx", "verl's data set reads no CSV; `verl-multiturn run RECIPE --data"),
        ("rows.txt", b"prompt\nx", "expected one of *.parquet, *.jsonl, *.json"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n  - class_name: tests.conftest.EchoTool\n")
    done = CliRunner().invoke(app, ["validate", str(tools), "--dataset", str(path)])
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)  # no traceback
    assert said in done.output
    assert str(path) in done.output
    assert done.output.count("verl-multiturn:") == 1


BAD_MODULES = {
    "import sys\nsys.exit(0)": "SystemExit",
    "raise KeyboardInterrupt_": "NameError",
    """
from verl_multiturn import BaseTool
class Tool(BaseTool):
    def __init__(self, config, tool_schema):
        self.table = config
""": "call super().__init__(config, tool_schema)",
    """
import sys
from verl_multiturn import BaseTool
class Tool(BaseTool):
    def __init__(self, config, tool_schema):
        sys.exit(0)
""": "SystemExit",
    """
class Tool:
    name = "look"
    tool_schema = {"type": "function"}
    def __init__(self, config, tool_schema): ...
    def create(self, *args, **kwargs): ...
    execute = calc_reward = release = create
""": "tool_schema",
}


@pytest.mark.parametrize("source", BAD_MODULES, ids=range(len(BAD_MODULES)))
def test_a_module_of_tools_that_is_broken_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "some_bad_tools.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    schema = json.dumps(make_schema("look").as_dict())
    tools = tmp_path / "tools.yaml"
    tools.write_text(f"tools:\n  - class_name: some_bad_tools.Tool\n    tool_schema: {schema}\n")
    try:
        with pytest.raises(ConfigError) as caught:
            load_tools(tools)
        done = CliRunner().invoke(app, ["validate", str(tools)])
    finally:
        sys.modules.pop("some_bad_tools", None)
    assert BAD_MODULES[source] in str(caught.value)
    assert "tools.yaml: tools[0]" in str(caught.value)
    assert done.exit_code == 2
    assert BAD_MODULES[source] in done.output


class NoExecute(BaseTool):
    """A tool whose `execute` is misspelt."""

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config or {}, tool_schema or make_schema("mute"))

    async def exceute(self, instance_id: str, parameters: dict[str, Any]) -> str:
        return "x"


def test_a_class_without_execute_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """A run would answer every call of the model with an error."""
    name = f"{__name__}.{NoExecute.__name__}"
    tools = tmp_path / "tools.yaml"
    tools.write_text(f"tools:\n  - class_name: {name}\n")
    with pytest.raises(ConfigError, match=r"tools\[0\]: .*NoExecute' does not define execute\(\), .*; define execute"):
        load_tools(tools)
    for command in (["validate", str(tools)], ["check-tool", name]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert "define execute" in done.output


@pytest.mark.parametrize("command", ["validate", "check-tool"])
def test_an_interaction_file_in_the_place_of_the_tools_is_told(tmp_path: Path, command: str) -> None:
    users = tmp_path / "users.yaml"
    users.write_text("interaction: [{class_name: quiz.Quiz}]\n")
    done = CliRunner().invoke(app, [command, str(users)])
    assert done.exit_code == 2
    assert "this is an interactions' file; give it as interaction_config_path" in " ".join(done.stderr.split())
    assert "--interactions FILE" in done.stderr


def test_no_tools_at_all_is_refused_where_a_row_is_made() -> None:
    """An empty selection means none to verl, so such a row would get every tool."""
    with pytest.raises(ConfigError, match="leave `tools` out"):
        make_row("qa", "Who?", "Ada", tools=[])


@pytest.mark.parametrize("command", [["validate", "tools.yaml"], ["doctor"]])
def test_a_model_without_verl_beside_it_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.yaml").write_text("tools:\n  - class_name: tests.conftest.EchoTool\n")
    monkeypatch.setitem(sys.modules, "verl_multiturn.verl_bridge.model.chat_setup", None)
    done = CliRunner().invoke(app, [*command, "--model", "x"])
    assert done.exit_code == 1
    assert "verl-multiturn: --model needs verl" in done.output


def test_a_row_that_names_an_interaction_needs_one(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": PROMPT, "interaction_kwargs": {"user": {}}}))
    tools = str(ROOT / "tool_configs" / "calculator.yaml")
    done = CliRunner().invoke(app, ["validate", tools, "--dataset", str(rows)])
    assert done.exit_code == 1
    assert "row 0: interaction_kwargs names 'user', but the run has no interactions" in done.output
    assert "(validate: --interactions)" in done.output
