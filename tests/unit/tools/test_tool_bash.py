"""The tool `bash`: the texts that the model reads, the files of a row, and refusals."""

import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, make_schema, names_of_children, until
from verl_multiturn import ConfigError, load_tools
from verl_multiturn.tools import bash
from verl_multiturn.tools.bash import BashTool

COMMANDS = [
    ("echo out; echo err >&2", "out\nerr\n"),
    ("true", "(no output)"),
    ("printf text; exit 3", "text\n[exit code 3]"),
    ("false", "[exit code 1]"),
    ("echo kept > file; cd /tmp", "(no output)"),
    ("pwd; cat file", "/tmp/workspace\nkept\n"),
]


@pytest.fixture
async def tool(tmp_path: Path) -> AsyncIterator[BashTool]:
    tool = BashTool({"timeout_s": 60, "pool": 0, "root": str(tmp_path)})
    yield tool
    await tool.release("c")
    await tool.aclose()


async def ask(tool: BashTool, command: str, **arguments: Any) -> str:
    return (await tool.execute("c", {"command": command, **arguments})).text


async def test_what_the_model_reads(tool: BashTool) -> None:
    await tool.create("c")
    for command, text in COMMANDS:
        assert await ask(tool, command) == text
    stopped = "[the command was stopped after 3 s, with all other processes]"
    assert await ask(tool, "echo begun; sleep 1000", timeout_s=3.0) == f"begun\n{stopped}"
    assert await ask(tool, "cat file") == "kept\n"


async def test_the_files_of_a_row(tool: BashTool, tmp_path: Path) -> None:
    (tmp_path / "repo/src").mkdir(parents=True)
    (tmp_path / "repo/src/a.py").write_text("1")
    (tmp_path / "repo/run").write_text("#!/bin/sh\necho ran")
    (tmp_path / "repo/run").chmod(0o755)
    with tarfile.open(tmp_path / "more.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "repo/src/a.py", "more/b.py")
    files: dict[str, str | None] = {"src/a.py": "changed", "new": "é", "of_another_row": None}
    await tool.create("c", files=files, folder="repo", tar="more.tar.gz")
    assert await ask(tool, "./run; cat src/a.py new more/b.py") == "ran\nchangedé1"
    assert (tmp_path / "repo/src/a.py").read_text() == "1"


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"folder": "none"}, "create_kwargs.folder: 'none' is no folder under"),
        ({"folder": 5}, "create_kwargs.folder: 5 is no path"),
        ({"files": ["a"]}, "create_kwargs.files: expected the text of each file by its path"),
        ({"files": {"a": "\ud800"}}, "create_kwargs.files: a text cannot be written in UTF-8"),
        ({"folder": "../.."}, "create_kwargs.folder: '../..' is no folder under"),
        ({"tar": "/etc/passwd"}, "create_kwargs.tar: '/etc/passwd' is no file under"),
        ({"tar": "\0"}, "create_kwargs.tar: '\\\\x00' is no path"),
        ({"tar": "text"}, r"the files cannot be unpacked into '\.': ReadError"),
        ({"files": {"../a": ""}}, "the path '../a' of a file: a path that leads out of its folder; name it"),
        ({"files": {"a": 1}}, "create_kwargs.files: expected the text of each file, got {'a': 1}"),
    ],
)
async def test_a_row_that_cannot_work(tool: BashTool, tmp_path: Path, kwargs: dict[str, Any], problem: str) -> None:
    (tmp_path / "text").write_text("no tar")
    with pytest.raises(ConfigError, match=problem):
        await tool.create("c", **kwargs)


def test_the_tars_that_are_kept_have_a_bound_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def packed(folder: Path) -> bytes:
        made.append(folder.name)
        return bytes(int(folder.name))

    monkeypatch.setattr(bash, "_packed", packed)
    monkeypatch.setattr(bash, "_KEPT_BYTES", 100)
    tars = bash._Tars()
    for name in ("40", "50", "40", "20", "40", "20", "50", "200", "50", "200"):
        assert len(tars.of(tmp_path / name)) == int(name)
    # 20 drops 50, unused for longest; 50 drops 40; a file that alone is too large is not kept, and drops nothing.
    assert made == ["40", "50", "20", "50", "200", "200"]


async def test_a_folder_needs_a_root() -> None:
    with pytest.raises(ConfigError, match=r"'x' needs config.root, the folder that it lies in; set it"):
        await BashTool({}).create("c", folder="x")
    with pytest.raises(ConfigError, match=r"config.root: '/no/such' is no folder"):
        BashTool({"root": "/no/such"})
    with pytest.raises(ConfigError, match="packages: 'no-such-package' is not installed"):
        BashTool({"packages": ["no-such-package"]})
    with pytest.raises(ConfigError, match=r"config.timeout: unknown setting; did you mean 'timeout_s'"):
        BashTool({"timeout": 1})


async def test_another_schema() -> None:
    with pytest.raises(ConfigError, match="tool_schema of 'sh' does not require an argument 'command'; add it"):
        BashTool({}, make_schema("sh", cmd="string"))
    tool = BashTool({"pool": 0}, make_schema("sh", command="string", timeout_s="string"))
    await tool.create("c")
    for value in ("1", 0, 601):
        with pytest.raises(ValueError, match="write a number above 0, at most 600"):
            await ask(tool, "true", timeout_s=value)
    await tool.release("c")
    await tool.aclose()


async def test_a_workspace_that_ended_stays_ended(tool: BashTool) -> None:
    await tool.create("c")
    for command in ("kill -9 $PPID; sleep 1000", "true"):
        with pytest.raises(
            ValueError, match=r"^the workspace ended: the process that starts .* SIGKILL; its files are"
        ):
            await ask(tool, command)


async def test_release_leaves_no_process(tool: BashTool) -> None:
    await tool.create("c")
    await ask(tool, "setsid sleep 1000 & disown")
    await until(lambda: "sleep" in names_of_children())  # the shell returns before its child has become `sleep`
    await tool.release("c")
    assert "sleep" not in names_of_children()


def test_the_yaml_in_the_box() -> None:
    tool = load_tools(ROOT / "tool_configs" / "bash.yaml")["bash"]
    timeout = tool.tool_schema.function.parameters["properties"]["timeout_s"]
    assert (timeout["exclusiveMinimum"], timeout["maximum"]) == (0, 120)
