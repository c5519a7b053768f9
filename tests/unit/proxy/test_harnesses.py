"""`scripts/harnesses.sh` without its programs: the faults that it finds, and its effects on a program of ours."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from scripts.harnesses.__main__ import EXPECTED, FAMILIES, faults
from scripts.harnesses.environments import LOCKS, Environment
from scripts.harnesses.policies import FILE, claude_code, codex, reader, second_looker, smolagents_code
from scripts.harnesses.programs import PROGRAMS, Endpoint, Program
from scripts.harnesses.running import run_program
from tests.agent_sessions import tiny_template
from tests.conftest import ROOT

GOOD = {
    "roots": 1,
    "rows": 1,
    "completions": 3,
    "generations": 3,
    "trained": 2,
    "untrained": {"undelivered": 1},
    "unenforced": {},
    "refused": 0,
    "violations": 0,
    "tool_ran": True,
    "exit": 0,
}
LOT = "lot-0123456789"[:13]
# A program with a tool: it reads the file that the model's call names, and prints the model's answer.
AGENT = """
import json, os, urllib.request
messages = [{"role": "user", "content": "Which lot?"}]
while True:
    body = json.dumps({"model": "policy", "messages": messages, "tools": [{"type": "function", "function": {
        "name": "read", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}}}]}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    message = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        text = open(json.loads(call["function"]["arguments"])["name"]).read()
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
print(message["content"])
"""


@dataclass(frozen=True)
class Here(Environment):
    """The environment of the tests."""

    @property
    def programs(self) -> Path:
        return Path(sys.executable).parent


def program(code: str) -> Program:
    return Program("ours", Here("ours"), [sys.executable, "-c", code], reader("read", name=FILE))


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, None),
        ({"exit": 1}, "ended with 1, and its tool ran"),
        ({"tool_ran": False}, "ended with 0, and its tool did not run"),
        ({"refused": 2}, "2 requests were refused"),
        ({"violations": 1}, "1 violations"),
        ({"generations": 4}, "3 of 4 generations are accounted for"),
        ({"untrained": {}}, "2 of 3 generations are accounted for"),
        ({"roots": 2}, "roots: 2, expected 1, as docs/reference/harnesses.md says"),
        ({"error": "npm is not here"}, "npm is not here"),
    ],
)
def test_what_is_a_fault(changed: dict[str, Any], fault: str | None) -> None:
    found = faults("codex", {**GOOD, **changed}, {"codex": {"roots": 1, "rows": 1}})
    assert [text.strip() for text in found] == ([f"codex: {fault}"] if fault else [])


def test_a_program_without_documented_roots_is_a_fault() -> None:
    assert faults("new", GOOD, {})


def test_the_documented_roots_and_versions_are_those_of_the_script() -> None:
    expected = json.loads(EXPECTED.read_text())
    assert list(expected) == [each.name for each in PROGRAMS]
    assert len({each.family for each in PROGRAMS}) == FAMILIES
    page = (ROOT / "docs" / "reference" / "harnesses.md").read_text()
    table = page.partition("| harness, version tried |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    assert [int(row[2]) for row in rows] == [each["roots"] for each in expected.values()]
    for row, each in zip(rows, PROGRAMS, strict=True):
        version = re.search(r"\d+\.\d+\.\d+", row[0])
        npm = (each.environment.npm or "").replace(" ", "\n")
        pins = npm or (LOCKS / f"{each.environment.name}.txt").read_text().replace("==", "@")
        assert version is not None
        assert re.search(rf"@{re.escape(version[0])}$", pins, re.MULTILINE), row[0]


def test_every_package_is_pinned_and_no_registry_is_named() -> None:
    for lock in LOCKS.glob("*.txt"):
        assert all(re.fullmatch(r"[\w.-]+==[\w.+-]+", line) for line in lock.read_text().splitlines()), lock


def test_a_program_gets_the_session_and_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_SECRET", "x")
    for each in PROGRAMS:
        home = tmp_path / each.name
        home.mkdir()
        environ = each.environ(home, Endpoint("http://127.0.0.1:1", "key"))
        assert "OUR_SECRET" not in environ
        assert environ["HOME"] == str(home)
        assert environ["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
        assert environ["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
        assert environ["OPENAI_API_KEY"] == environ["ANTHROPIC_API_KEY"] == "key"


def test_what_the_model_says() -> None:
    read = reader("bash", command="cat lot.txt")
    assert read("x") == '<tool_call>\n{"name": "bash", "arguments": {"command": "cat lot.txt"}}\n</tool_call>'
    assert read(f"x {LOT} y") == f"The lot is {LOT}."
    look = second_looker("bash", command="cat lot.txt")
    assert look("x") == look(f"x {LOT} y") == read("x")
    assert look(f"x {LOT} y {LOT}") == f"The lot is {LOT}."
    assert smolagents_code("x").endswith('<code>\nprint(read_file("lot.txt"))\n</code>')
    assert '"Agent"' in claude_code("<|im_start|>user\nWhich lot?<|im_end|>\n<|im_start|>assistant\n")
    assert '"Bash"' in claude_code("<|im_start|>user\nLook into lot.txt for your parent.<|im_end|>\n")
    assert codex(f"# Tools\ncat lot.txt\n{LOT}").count("wc -c") == 1
    assert codex(f"cat lot.txt\n{LOT}") == f"The lot is {LOT}."


async def test_a_program_runs_its_tool_and_is_accounted_for() -> None:
    report = await run_program(program(AGENT), tiny_template(), 60.0)
    seconds = report.pop("seconds")
    assert report == {**GOOD, "completions": 2, "generations": 2, "untrained": {}}
    assert seconds > 0


async def test_a_program_that_makes_up_its_answer_ran_no_tool() -> None:
    report = await run_program(program("print('lot-0123456789')"), tiny_template(), 60.0)
    assert (report["exit"], report["tool_ran"], report["completions"], report["rows"]) == (0, False, 0, 0)


async def test_a_program_that_hangs_is_killed() -> None:
    report = await run_program(program("import time; time.sleep(600)"), tiny_template(), 0.2)
    assert (report["exit"], report["tool_ran"]) == (-9, False)


async def test_a_program_is_killed_with_its_children_when_the_script_ends(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    hanging = replace(
        program(""), command=["sh", "-c", f"sleep 600 & echo $! > {note}.new; mv {note}.new {note}; wait"]
    )
    running = asyncio.ensure_future(run_program(hanging, tiny_template(), 600.0))
    while not note.exists():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
    child = Path("/proc") / note.read_text().strip()
    assert child.exists()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(60):
        while _runs(child):  # noqa: ASYNC110 - a killed process still has to end, and sends no event
            await asyncio.sleep(0.01)


def _runs(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_program_that_is_not_there_is_named() -> None:
    missing = replace(program(""), command=["no-such-program"])
    with pytest.raises(RuntimeError, match="'no-such-program' is not in"):
        await run_program(missing, tiny_template(), 5.0)
