"""`check-tool` and the state of MCP servers: it names a server whose state leaks, and no other one."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_mcp_conversations import NOTES
from tests.servers.starting import by_name
from verl_multiturn.checking.examination import CheckResult, Grade
from verl_multiturn.checking.server_state import ServerState
from verl_multiturn.checking.tool_contract import check_tool
from verl_multiturn.checking.trial_calls import ToolProbe
from verl_multiturn.tools.mcp_tools import McpTool, mcp_tools


def tools_of(*options: str, **settings: Any) -> dict[str, McpTool]:
    given = {"command": "python", "args": [NOTES, *options], "exclude": ["die", "pid"], **settings}
    return by_name(mcp_tools(given, "tools.yaml: tools[0].mcp"))


async def leak(tool: McpTool, **arguments: Any) -> str:
    try:
        return await ServerState(ToolProbe(tool, {}, None), arguments).run()
    finally:
        await tool.aclose()


async def test_what_another_conversation_wrote_is_named_for_writer_and_reader() -> None:
    for name, arguments in (("add", {"text": "example"}), ("read", {})):
        found = await leak(tools_of()[name], **arguments)
        assert found.startswith("'read' answers a conversation with what another one gave 'add': 'word")


async def test_a_state_without_words_is_found_by_servers_started_anew() -> None:
    found = await leak(tools_of()["count"])
    assert found == (
        "a server that was started anew answers 'count' with ['1', '2'], and the same calls of the next conversation "
        "with ['3', '4']"
    )


@pytest.mark.parametrize("name", ["echo", "where", "mood"])
@pytest.mark.parametrize("mood", ["coin", "clock"])
async def test_neither_a_tool_without_a_state_nor_chance_nor_the_time_is_accused(name: str, mood: str) -> None:
    tools = tools_of(f"mood={mood}", include=["echo", "where", "mood"], exclude=[])
    assert await leak(tools[name], **({"text": "example"} if name == "echo" else {})) == ""


async def test_a_server_for_each_conversation_shows_nothing_unless_they_share_a_file(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"per": "conversation", "ready": 1}
    for option, leaks in (("file=${conversation.folder}/n", False), (f"file={tmp_path / 'notes'}", True)):
        found = await leak(tools_of(option, **settings)["read"])
        assert ("what another one gave 'add'" in found) is leaks
    assert await leak(tools_of(**settings)["count"]) == ""


def isolation(findings: list[CheckResult]) -> CheckResult:
    return next(finding for finding in findings if finding.check == "isolation")


def test_check_tool_says_what_to_set(tmp_path: Path) -> None:
    shared = isolation(check_tool(tools_of()["read"]))
    assert shared.verdict is Grade.PROBLEM
    assert shared.remedy.startswith("set `per: conversation` in the entry of the server; where it keeps a file")
    file = isolation(check_tool(tools_of(f"file={tmp_path / 'notes'}", per="conversation")["read"]))
    assert file.verdict is Grade.PROBLEM
    assert file.remedy.startswith("the servers share a file or a service: put ${conversation.folder}")


def test_check_tool_sends_an_author_to_the_server_for_a_description() -> None:
    (finding,) = [each for each in check_tool(tools_of()["add"]) if each.check == "descriptions"]
    assert (finding.found, finding.remedy) == (
        "none of text",
        "describe them in the server: the model reads nothing else",
    )


def test_a_server_has_its_own_time_to_start() -> None:
    shared, own = tools_of()["add"], tools_of(per="conversation", start_timeout_s=45)["add"]
    assert [ToolProbe(tool, {}, None).timeout_s for tool in (shared, own)] == [10, 55]
    assert ToolProbe(own, {}, 3).timeout_s == 3


def test_a_server_that_does_not_start_is_no_fault_of_the_conversations(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = f'if [ -e "$1" ]; then exit 1; fi; exec {sys.executable} {NOTES}'
    given = {"command": "sh", "args": ["-c", script, "sh", str(mark)], "per": "conversation", "ready": 0}
    tool = by_name(mcp_tools(given, "here"))["count"]
    mark.touch()
    findings = {each.check: each for each in check_tool(tool)}
    assert "an outage in a run" in findings["create"].found
    assert findings["create"].remedy.startswith("do what the error names; start the service where it is down")


def test_a_server_for_each_conversation_passes() -> None:
    tool = tools_of("file=${conversation.folder}/n", per="conversation", ready=2, most=12)["add"]
    findings = check_tool(tool, timeout_s=120)
    assert {finding.check: finding for finding in findings if finding.verdict is Grade.PROBLEM} == {}
