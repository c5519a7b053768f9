"""Reading a YAML file with an MCP server: the tools that are found, and the errors."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.servers.starting import PLAIN, WORKSHOP, HttpServer, by_name, children, plain, text
from verl_multiturn import ConfigError, load_tools
from verl_multiturn.tools.loading.kwargs import bind_kwargs
from verl_multiturn.tools.mcp_tools import mcp_tools


async def test_a_yaml_is_read_while_a_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELF_KEY", "s3cret")
    path = tmp_path / "tools.yaml"
    entry = {
        "mcp": {
            "command": "python",
            "args": [WORKSHOP, "stdio"],
            "env": {"KEY": "key-${SHELF_KEY}"},
            "include": ["add", "var*", "pid", "die"],
            "exclude": ["d*"],
            "prefix": "shop_",
        },
        "limits": {"timeout_s": 5},
    }
    path.write_text(json.dumps({"tools": [entry]}))
    tools = load_tools(path)
    assert list(tools) == ["shop_add", "shop_variable", "shop_pid"]
    assert tools["shop_add"].repeatable
    assert not tools["shop_pid"].repeatable
    assert tools["shop_add"].tool_schema.function.description == "Add two numbers."
    assert await text(tools, "shop_variable", name="KEY") == "key-s3cret"
    assert await text(tools, "shop_variable", name="SHELF_KEY") == ""
    await tools["shop_add"].aclose()


async def test_headers_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELF_KEY", "s3cret")
    server = HttpServer()
    try:
        settings = {"url": server.url, "headers": {"X-Key": "${SHELF_KEY}"}, "include": ["header"]}
        tools = by_name(mcp_tools(settings, "here"))
        assert await text(tools, "header", name="x-key") == "s3cret"
        await tools["header"].aclose()
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected either 'command' or 'url'"),
        ({"command": "python", "url": "http://x"}, "expected either 'command' or 'url'"),
        ({"url": "http://x", "args": ["y"]}, "args: means nothing to a server with 'url'"),
        ({"command": "python", "arg": ["y"]}, "did you mean 'args'"),
        ({"command": "no-such-program"}, "there is no program 'no-such-program'"),
        ({"command": "python", "cwd": "/nowhere"}, "'/nowhere' is no folder"),
        ({"command": "python", "env": {"K": "${NOT_SET_AT_ALL}"}}, "'NOT_SET_AT_ALL' is not set"),
        ({"url": "http://x", "headers": {"K": "${NOT_SET_AT_ALL}"}}, "'NOT_SET_AT_ALL' is not set"),
        ({"url": "http://127.0.0.1:9/mcp"}, "ConnectError"),
        ({"command": "python", "args": [PLAIN, "exits"]}, "no licence key, giving up"),
        ({"command": "python", "args": [PLAIN, "silent"], "start_timeout_s": 0.5}, "no answer within 0.5 s"),
        ({"command": "python", "args": ["-c", "pass"]}, "Connection closed"),
        ({"command": "python", "args": [PLAIN, "bad_schema"]}, "tool 'bad'"),
        (
            {"command": "python", "args": [PLAIN, "bad_list"]},
            "does not fit the protocol: inputSchema.type: Input should be",
        ),
        (
            {"command": "python", "args": [PLAIN, "twice"]},
            "'python' lists two tools called 'a'; put 'a' under 'exclude'",
        ),
        ({"command": "python", "args": [PLAIN, "twins"]}, "'a b' and 'a/b' would both be called 'a_b'"),
        ({"command": "python", "args": [PLAIN, "twins"], "include": ["a*c"]}, "'a*c' fits none of the 2 tools"),
        ({"command": "python", "args": [PLAIN, "asks"], "include": ["aks"]}, "did you mean 'ask'?"),
        ({"command": "python", "args": [PLAIN, "asks"], "exclude": ["*"]}, "leaves none of the tools"),
    ],
)
def test_a_bad_entry_names_what_is_wrong(settings: dict[str, Any], message: str) -> None:
    before = children()
    with pytest.raises(ConfigError) as caught:
        mcp_tools(settings, "tools.yaml: tools[0].mcp")
    assert message in str(caught.value)
    assert str(caught.value).startswith("tools.yaml: tools[0].mcp")
    assert children() == before


@pytest.mark.parametrize("end", ["os.abort()", "os._exit(3)"])
def test_the_words_of_our_server_that_crashes_are_in_the_error(end: str, tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(f"import os, sys\nprint('no licence,')\nos.write(2, b'giving up')\n{end}\n")
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"class_name": "crashing.Tool"}]}))
    settings = {
        "command": sys.executable,
        "args": ["-m", "verl_multiturn.cli", "mcp", str(tmp_path / "tools.yaml")],
        "env": {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        "start_timeout_s": 300,
    }
    with pytest.raises(
        ConfigError, match=r"did not list its tools[^;]*; its last words:\n(.*\n)*no licence,\ngiving up"
    ):
        mcp_tools(settings, "here")


def test_an_excluded_tool_may_have_any_schema_and_pages_end() -> None:
    assert [tool.name for tool in plain("bad_schema", exclude=["bad"])] == ["good"]
    with pytest.raises(ConfigError, match="lists its tools without end"):
        plain("endless")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_type", "it does not fit the protocol: inputSchema.type: Field required"),
        ("null_type", "it does not fit the protocol: inputSchema.type: Input should be 'object'"),
        ("no_schema", "it does not fit the protocol: inputSchema: Field required"),
        ("#5", "it does not fit the protocol: name: Field required"),
        ("#6", "it does not fit the protocol: the tool: "),
        ("wrong_output", "it does not fit the protocol: outputSchema.type: Input should be 'object'"),
        (
            "bad_output",
            "it does not fit the protocol: outputSchema.properties.a.type: no valid JSON Schema: 'objekt' is no type",
        ),
        ("unknown_draft", "its schema.function.parameters.$schema: the draft 'http://127.0.0.1:9/x' is not known"),
    ],
)
def test_one_tool_that_cannot_be_used_is_named(name: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plain("mixed", include=["good", name])
    assert f"tool {name!r} of 'python3' cannot be used, {why}" in str(caught.value)
    assert str(caught.value).endswith(f"; put {name!r} under 'exclude', or mend the server")


async def test_the_other_tools_of_such_a_server_are_there() -> None:
    bad = ["no_*", "null_type", "#*", "*_output", "unknown_draft", "get[1]"]
    tools = by_name(plain("mixed", exclude=bad))
    assert list(tools) == ["good", "tuple", "last"]
    assert tools["good"].tool_schema.as_dict()["function"] == {
        "name": "good",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    assert tools["tuple"].tool_schema.read_arguments('{"p": ["a"]}')[0] is None
    try:
        assert "Sampling not supported" in await text(tools, "last")
    finally:
        await tools["last"].aclose()
    assert list(by_name(plain("twice", exclude=["a"]))) == ["last"]
    with pytest.raises(
        ConfigError, match=r"tool 'no_type' of .* \(and 5 more of its tools\); put 'no_type', 'null_type'"
    ):
        plain("mixed", exclude=["#*", "get[1]"])


def test_a_row_cannot_hand_kwargs_to_a_server() -> None:
    (tool,) = plain("asks")
    for method in ("create", "execute"):
        with pytest.raises(ConfigError, match=f"{method}_kwargs"):
            bind_kwargs(tool, method, {"ground_truth": "42"}, "row 1")
