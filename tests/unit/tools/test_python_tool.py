"""The code interpreter tool: the texts that the model reads, state, settings."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.conftest import ROOT, child_processes, make_schema, names_of_children, until
from tests.idle_loop import hold_up
from verl_multiturn import ConfigError, load_tools
from verl_multiturn.tools.python import PythonTool


@pytest.fixture
async def one_shot() -> AsyncIterator[PythonTool]:
    tool = PythonTool({"timeout_s": 60, "pool": 1})
    await tool.create("c")
    yield tool
    await tool.release("c")
    await tool.aclose()


@pytest.fixture
async def stateful() -> AsyncIterator[PythonTool]:
    tool = PythonTool({"stateful": True, "timeout_s": 60, "pool": 1})
    await tool.create("c")
    yield tool
    await tool.release("c")
    await tool.aclose()


async def ask(tool: PythonTool, code: str, conversation: str = "c") -> str:
    return (await tool.execute(conversation, {"code": code})).text


async def test_each_call_starts_anew(one_shot: PythonTool) -> None:
    assert await ask(one_shot, "x = 1\nopen('f', 'w').write('1')") == "1\n"
    assert "NameError: name 'x' is not defined" in await ask(one_shot, "x")
    assert await ask(one_shot, "import os; os.listdir('.')") == "[]\n"


async def test_a_call_that_shows_nothing_says_so(one_shot: PythonTool) -> None:
    assert await ask(one_shot, "x = 1") == "(no output)"


async def test_stateful_keeps_what_a_conversation_made(stateful: PythonTool) -> None:
    await stateful.create("d")
    await ask(stateful, "x = 1\nopen('helper.py', 'w').write('answer = 42')")
    assert await ask(stateful, "import helper; x + helper.answer") == "43\n"
    assert "NameError" in await ask(stateful, "x", "d")
    assert "No module named 'helper'" in await ask(stateful, "import helper", "d")
    await stateful.release("d")


async def test_parallel_calls_of_one_conversation_keep_their_order(stateful: PythonTool) -> None:
    calls = ["import time; time.sleep(0.1); order = [0]", *[f"order.append({i})" for i in range(1, 5)], "order"]
    answers = await asyncio.gather(*(ask(stateful, call) for call in calls))
    assert answers == ["(no output)"] * 5 + ["[0, 1, 2, 3, 4]\n"]


async def test_a_session_that_died_says_what_is_lost(stateful: PythonTool) -> None:
    await ask(stateful, "x = 1")
    with pytest.raises(
        ValueError, match=r"^the Python process ended with exit code 3; the variables are lost"
    ) as caught:
        await ask(stateful, "print('so far', flush=True)\nimport os; os._exit(3)")
    assert str(caught.value).endswith("the next call starts anew; until then:\nso far\n")
    assert "NameError" in await ask(stateful, "x")
    await ask(stateful, "import ctypes; ctypes.CDLL(None).prctl(15, b'victim')")
    sandbox = stateful._sessions["c"].sandbox
    assert sandbox is not None
    (victim,) = [process for process in child_processes(recursive=True) if process.name() == "victim"]
    victim.kill()
    await sandbox.wait_gone()
    lost = "[The earlier variables are lost: the Python process was killed by signal SIGKILL.]\n"
    assert await ask(stateful, "1 + 1") == f"{lost}2\n"
    assert await ask(stateful, "1 + 1") == "2\n"


@pytest.mark.parametrize("is_stateful", [True, False])
async def test_too_long_is_stopped(is_stateful: bool) -> None:
    tool = PythonTool({"stateful": is_stateful, "timeout_s": 60})
    await tool.create("c")
    note = "; the variables are lost, the next call starts anew" if is_stateful else ""
    name_it = "import ctypes; ctypes.CDLL(None).prctl(15, b'endless')"
    running = asyncio.ensure_future(ask(tool, f"print('some', flush=True)\n{name_it}\nwhile True: pass"))
    await until(lambda: "endless" in names_of_children())
    hold_up(60)
    with pytest.raises(ValueError, match=rf"^the code was stopped after 60 s{note}; until then:\nsome\n$"):
        await running
    assert await ask(tool, "1") == "1\n"
    await tool.release("c")
    await tool.aclose()


@pytest.mark.parametrize("is_stateful", [True, False])
async def test_cancelled_it_leaves_no_process(is_stateful: bool) -> None:
    tool = PythonTool({"stateful": is_stateful, "timeout_s": 60, "pool": 0})
    await tool.create("c")
    before = set(child_processes(recursive=True))
    await ask(tool, "1")
    running = asyncio.create_task(ask(tool, "import subprocess; subprocess.run(['sleep', '1000'])"))
    await until(lambda: "sleep" in names_of_children())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await tool.release("c")
    # The zygote, which waits for the next conversation, and bubblewrap remain.
    left = set(child_processes(recursive=True)) - before
    assert len(left) == 2
    assert "bwrap" in [process.name() for process in left]
    await tool.aclose()
    assert set(child_processes(recursive=True)) <= before


async def test_release_ends_what_runs_in_the_background(stateful: PythonTool) -> None:
    await stateful.create("d")
    await ask(stateful, "import subprocess\n_ = subprocess.Popen(['sleep', '1000'], start_new_session=True)", "d")
    assert "sleep" in names_of_children()
    await stateful.release("d")
    assert "sleep" not in names_of_children()


def test_it_describes_itself() -> None:
    function = PythonTool({"timeout_s": 5}).tool_schema.function
    assert function.name == "python"
    assert "Each call starts anew. At most 5 s and 512 MB; no network." in function.description
    assert "stay between calls" in PythonTool({"stateful": True}).tool_schema.function.description
    schema = PythonTool({}).tool_schema
    assert schema.read_arguments('{"code": "1"}') == ({"code": "1"}, "")
    assert schema.read_arguments('{"cod": "1"}')[0] is None
    assert list(load_tools(ROOT / "tool_configs" / "python.yaml")) == ["python"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"timeout": 3}, "config.timeout: unknown setting; did you mean 'timeout_s'?"),
        ({"timeout_s": 0}, "config.timeout_s: Input should be greater than 0, got 0"),
        ({"isolation": "docker"}, "config.isolation: Input should be 'bwrap' or 'subprocess', got 'docker'"),
        ({"preimport": ["os; evil"]}, "config.preimport.0: String should match"),
        ({"preimport": ["no_such_module"]}, "preimport of 'no_such_module': ModuleNotFoundError"),
        ({"memory_mb": 1}, "config.memory_mb: Input should be greater than or equal to 16, got 1"),
    ],
)
def test_settings_that_cannot_work(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PythonTool(config)
    assert message in str(caught.value)


def test_a_schema_without_code() -> None:
    with pytest.raises(ConfigError, match="tool_schema of 'python' does not require an argument 'code'"):
        PythonTool({}, make_schema("python", program="string"))
