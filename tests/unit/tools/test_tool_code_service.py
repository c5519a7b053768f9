"""`CodeServiceTool` against stand-ins for its three services, which run real programs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.servers import code_services
from tests.servers.code_services import e2b_router, morph_router, sandbox_fusion
from tests.serving import conversation, serving
from tests.support.served import answering, served
from tests.unit.tools.broken_tools import on_any_machine
from verl_multiturn import ConfigError, load_tools
from verl_multiturn.calls.outages.causes import cause_of, next_try_s
from verl_multiturn.checking.tool_contract import Grade, check_tool
from verl_multiturn.tools.code_service import CodeServiceTool
from verl_multiturn.tools.services.http_client import ServiceFailedError, UnavailableError

SERVICES: dict[str, Callable[[], FastAPI]] = {
    "sandbox_fusion": sandbox_fusion,
    "e2b": e2b_router,
    "morph": morph_router,
}
PATHS = {"sandbox_fusion": "run_code", "e2b": "execute_batch", "morph": "execute_batch"}
NO_OUTPUT = "[no output; print what you want to see]"
EMPTY = {"sandbox_fusion": {"status": "Success", "run_result": {"status": "Finished", "return_code": 0}}}
OLD = {"sandbox_fusion": "sandbox_fusion.SandboxFusionTool", "e2b": "e2b_router.E2bRouterTool"}


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, tuple[FastAPI, str]]]:
    with contextlib.ExitStack() as stack:
        apps = {name: build() for name, build in SERVICES.items()}
        yield {name: (app, stack.enter_context(serving(app))) for name, app in apps.items()}


Running = dict[str, tuple[FastAPI, str]]


def tool_of(running: Running, service: str, **config: Any) -> CodeServiceTool:
    return CodeServiceTool({"service": service, "url": running[service][1], **config})


READ: dict[str, dict[str, tuple[str, dict[str, float]]]] = {
    "print('zażółć \N{PILE OF POO} \\0')\nprint('b')": {
        "sandbox_fusion": ("zażółć \N{PILE OF POO} \0\nb", {"succeeded": 1.0}),
        "e2b": ("zażółć \N{PILE OF POO} \0\nb", {"succeeded": 1.0}),
        "morph": ("zażółć \N{PILE OF POO} \0\nb", {}),
    },
    "1 + 1": {
        "sandbox_fusion": (NO_OUTPUT, {"succeeded": 1.0}),
        "e2b": (NO_OUTPUT, {"succeeded": 1.0}),
        "morph": (NO_OUTPUT, {}),
    },
    "print('a'); import sys; sys.exit('bad: news')": {
        "sandbox_fusion": ("a\nbad: news\n[exit code 1]", {"succeeded": 0.0}),
        "e2b": ("a\nTraceback\nbad: news", {"succeeded": 0.0}),
        "morph": ("a\n\n\nError: bad: news\nTraceback", {}),
    },
    "import sys; print('warned', file=sys.stderr); print('value')": {
        "sandbox_fusion": ("value\nwarned", {"succeeded": 1.0}),
        "e2b": ("value\nthe value\nwarned", {"succeeded": 1.0}),
        "morph": ("value", {}),
    },
}


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("code", READ)
async def test_what_the_model_reads_of_a_program(running: Running, service: str, code: str) -> None:
    async with conversation(tool_of(running, service)) as call:
        response, reward, metrics = await call(code=code)
    assert (response.text, reward, metrics) == (READ[code][service][0], 0.0, READ[code][service][1])


@pytest.mark.parametrize("service", SERVICES)
async def test_text_that_no_server_can_read_is_the_models_mistake_or_a_failure(running: Running, service: str) -> None:
    async with conversation(tool_of(running, service)) as call:
        with pytest.raises((ValueError, ServiceFailedError), match="code sandbox"):
            await call(code="print('\ud800')")
        assert (await call(code="print(1)"))[0].text == "1"


@pytest.mark.parametrize("service", SERVICES)
async def test_output_without_end_is_refused(running: Running, service: str) -> None:
    async with conversation(tool_of(running, service)) as call:
        with pytest.raises(ValueError, match="answer of the code sandbox has more than 2000000 bytes"):
            await call(code="print('a' * 2_000_001)")
        assert (await call(code="print(1)"))[0].text == "1"


async def test_a_program_that_never_ends(running: Running) -> None:
    async with conversation(tool_of(running, "sandbox_fusion", run_timeout_s=0.5)) as call:
        response, _, metrics = await call(code="while True: pass")
        assert (response.text, metrics) == ("so far\n[stopped after 0.5 s]", {"succeeded": 0.0})
    for service in ("e2b", "morph"):
        async with conversation(tool_of(running, service, run_timeout_s=1)) as call:
            with pytest.raises(ValueError, match="not run to its end: it takes longer than 1 s"):
                await call(code="while True: pass")


async def test_programs_that_are_not_run(running: Running) -> None:
    async with conversation(tool_of(running, "sandbox_fusion", languages=["cpp", "bash"])) as call:
        assert (await call(code="x"))[0].text == "a.cpp:1: error\n[exit code 1]"
        assert (await call(code="template"))[0].text == "[stopped after 10 s]"
        with pytest.raises(ServiceFailedError, match=r"^the code sandbox failed$"):
            await call(code="ls", language="bash")
    async with conversation(tool_of(running, "morph", languages=["python", "cobol"])) as call:
        with pytest.raises(ValueError, match=r"not run to its end: Kernel 1 .* out of memory"):
            await call(code="import os; os.kill(os.getpid(), 9)")
        with pytest.raises(ValueError, match="not run to its end: Code must be a non-empty string"):
            await call(code="")
        assert (await call(code="x", language="cobol"))[0].text == "Error: Unsupported language: cobol"


REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sandbox_fusion": (
        {"compile_timeout_s": 3.5, "run_timeout_s": 0.5, "memory_limit_mb": 64, "languages": ["nodejs", "python"]},
        {
            "code": "", "language": "python", "compile_timeout": 3.5, "run_timeout": 0.5, "memory_limit_MB": 64,
            "stdin": None, "files": {}, "fetch_files": [],
        },
    ),
    "e2b": (
        {"run_timeout_s": 7, "request_timeout_s": 3, "languages": ["r", "python"]},
        {"scripts": [""], "languages": ["python"], "timeout": 7, "request_timeout": 3},
    ),
    "morph": (
        {"run_timeout_s": 7, "timeout_s": 28.5, "languages": ["rust", "python"]},
        {"scripts": [""], "languages": ["python"], "timeout": 7, "request_timeout": 29},
    ),
}  # fmt: skip


@pytest.mark.parametrize("service", SERVICES)
async def test_settings_and_languages_reach_the_service(running: Running, service: str) -> None:
    config, request = REQUESTS[service]
    app, _ = running[service]
    tool = tool_of(running, service, **config)
    async with conversation(tool) as call:
        with contextlib.suppress(ValueError):  # Morph runs no empty script
            await call(code="", language="python")
        assert app.state.requests[-1] == request
        with pytest.raises(ValueError, match=f"'go' is not available; use one of: {', '.join(config['languages'])}"):
            await call(code="", language="go")
        with contextlib.suppress(ValueError):
            await call(code="print(1)")
    assert config["languages"][0] in (
        app.state.requests[-1].get("language"),
        *app.state.requests[-1].get("languages", ()),
    )
    assert tool.tool_schema.function.parameters["properties"]["language"]["enum"] == config["languages"]
    assert set(tool_of(running, service).tool_schema.function.parameters["properties"]) == {"code"}


async def test_the_first_form_of_morphs_router() -> None:
    app = morph_router(languages=False)
    with serving(app) as url:
        async with conversation(CodeServiceTool({"service": "morph", "url": url})) as call:
            assert (await call(code="print(1)"))[0].text == "1"
    assert app.state.requests == [{"scripts": ["print(1)"], "language": "python", "timeout": 20, "request_timeout": 60}]


FINE, ENDED = {"logs": {"stdout": ["fine"], "stderr": []}, "results": [{"text": None}], "error": None}, None
ANSWERS: list[tuple[str, Any, str]] = [
    ("morph", {"text": "a", "exception_str": None}, "a"),
    ("morph", {"text": "a"}, "a"),
    ("morph", {"text": "a", "exception_str": "boom"}, "a\nboom"),
    ("morph", {"text": "", "exception_str": ""}, NO_OUTPUT),
    ("morph", {"text": "", "exception_str": "No output from execution"}, NO_OUTPUT),
    ("morph", {"text": "", "exception_str": "boom"}, "ValueError: not run to its end: boom"),
    ("morph", {"text": None, "exception_str": "x" * 9000}, "ValueError: not run to its end: " + "x" * 500),
    ("morph", {"text": None, "exception_str": None}, "ValueError: takes longer than 20 s"),
    ("morph", {"exception_str": None}, "ServiceFailedError: cannot be read"),
    ("morph", {}, "ServiceFailedError: cannot be read"),
    ("morph", {"text": 3}, "ServiceFailedError: cannot be read"),
    ("morph", {"text": "a", "exception_str": 3}, "ServiceFailedError: cannot be read"),
    ("morph", {"execution": FINE, "exception_str": None}, "UnavailableError: another service than 'morph'"),
    ("e2b", {"text": "a", "exception_str": None}, "UnavailableError: another service than 'e2b'"),
    ("e2b", {"execution": FINE, "exception_str": None}, "fine"),
    ("e2b", {"execution": ENDED, "exception_str": "boom"}, "ValueError: not run to its end: boom"),
    ("e2b", {"execution": ENDED, "exception_str": None}, "ValueError: takes longer than 20 s"),
    ("e2b", {"execution": FINE | {"error": {"name": "E", "value": "v"}}, "exception_str": None}, "fine\nE: v"),
    ("e2b", {"execution": FINE, "exception_str": "the sandbox is gone"}, "fine\nthe sandbox is gone"),
    ("e2b", {"execution": FINE | {"logs": {"stdout": "text"}}}, "ServiceFailedError: cannot be read"),
    ("e2b", {"exception_str": "boom"}, "ServiceFailedError: cannot be read"),
]


async def show(call: Callable[..., Any]) -> str:
    try:
        return (await call(code="a"))[0].text  # type: ignore[no-any-return]
    except (ValueError, ServiceFailedError, UnavailableError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("service", "answer", "shown"), ANSWERS)
async def test_every_result_of_a_router_has_one_reading(service: str, answer: Any, shown: str) -> None:
    kind, colon, words = shown.partition(": ") if "Error: " in shown else ("", "", shown)
    async with (
        served(execute_batch=answering([answer])) as url,
        conversation(CodeServiceTool({"service": service, "url": url})) as call,
    ):
        found = await show(call)
    assert found.startswith(kind + colon)
    assert words in found if kind else found == shown
    assert len(found) < 600


@pytest.mark.parametrize("service", ["e2b", "morph"])
@pytest.mark.parametrize("count", [0, 2])
async def test_one_script_has_one_result(service: str, count: int) -> None:
    good = {"text": "a", "execution": FINE, "exception_str": None}
    async with (
        served(execute_batch=answering([good] * count)) as url,
        conversation(CodeServiceTool({"service": service, "url": url})) as call,
    ):
        with pytest.raises(ServiceFailedError, match="cannot be read"):
            await call(code="a")


async def test_another_service_is_an_outage_that_names_the_setting(running: Running) -> None:
    """A script cannot choose the form of the answer, so that this is for the user of the setting."""
    for service, other, setting in (
        ("e2b", "morph", "service"),
        ("morph", "e2b", "service"),
        ("e2b", "sandbox_fusion", "url"),
    ):
        async with conversation(CodeServiceTool({"service": service, "url": running[other][1]})) as call:
            with pytest.raises(UnavailableError, match=rf"; correct config\.{setting}$") as caught:
                await call(code="print(1)")
        assert cause_of(caught.value, "model") == "outage"


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_that_is_busy_names_the_time_of_the_next_try(service: str) -> None:
    async with (
        served(**{PATHS[service]: answering((429, "7"), (503, "9"), 500, 422)}) as url,
        conversation(CodeServiceTool({"service": service, "url": url})) as call,
    ):
        for seconds in (7.0, 9.0):
            with pytest.raises(UnavailableError) as caught:
                await call(code="a")
            assert (cause_of(caught.value, "model"), next_try_s(caught.value)) == ("outage", seconds)
        with pytest.raises(ServiceFailedError, match=r"failed \(HTTP 500\)"):
            await call(code="a")
        with pytest.raises(ValueError, match=r"refused the request \(HTTP 422\)"):
            await call(code="a")


@pytest.mark.parametrize(
    ("service", "config", "said"),
    [
        (None, {}, "service: Input should be 'sandbox_fusion', 'e2b' or 'morph', got None"),
        ("e2c", {}, "service: Input should be 'sandbox_fusion', 'e2b' or 'morph', got 'e2c'"),
        (["e2b"], {}, r"service: .*got \['e2b'\]"),
        ("e2b", {"url": "0.0.0.0:8001"}, "url: expected an address such as"),
        ("e2b", {"memory_limit_mb": 9}, "memory_limit_mb=9: service 'e2b' has no such setting, but 'sandbox_fusion'"),
        ("morph", {"request_timeout_s": 9}, "request_timeout_s=9: service 'morph' has no such setting, but 'e2b' has"),
        ("morph", {"compile_timeout_s": None}, "compile_timeout_s=None: service 'morph' has no such setting"),
        ("sandbox_fusion", {"request_timeout_s": 9}, "request_timeout_s=9: service 'sandbox_fusion' has no such"),
        ("morph", {"run_timeout_s": 1.5}, r"run_timeout_s: expected whole seconds for service 'morph', got 1\.5"),
        ("morph", {"run_timeout_s": 60}, r"timeout_s: 60\.0 is too short; expected more than run_timeout_s$"),
        (
            "e2b",
            {"run_timeout_s": 50},
            "timeout_s: .* short; expected more than run_timeout_s and request_timeout_s together$",
        ),
        (
            "sandbox_fusion",
            {"run_timeout_s": 20},
            r"timeout_s: 30\.0 is too short; .* compile_timeout_s and",
        ),
        ("sandbox_fusion", {"compile_timeout_s": None}, r"compile_timeout_s: expected a number, .* for 10\.0$"),
        ("sandbox_fusion", {"memory_limit_mb": None}, "memory_limit_mb: expected a number, .* for 1024$"),
        ("e2b", {"request_timeout_s": None}, "request_timeout_s: expected a number, got None; leave it out for 10$"),
        ("e2b", {"run_timeout_s": True}, "run_timeout_s: expected a number, got True"),
        ("e2b", {"timeout_s": float("inf")}, "timeout_s: .*finite"),
        ("e2b", {"languages": []}, "languages: .*at least 1"),
        ("e2b", {"languages": ["python", "r", "python"]}, "languages: .*'python' is there twice; name each language"),
        ("e2b", {"run_timeout": 3}, "run_timeout: unknown setting; did you mean 'run_timeout_s'"),
    ],
)
def test_settings_that_cannot_work(service: Any, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.{said}"):
        CodeServiceTool({"service": service, "url": "http://h", **config})


def test_a_service_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match=r"^config\.service: Field required, got nothing"):
        CodeServiceTool({"url": "http://h"})


@pytest.mark.parametrize("service", OLD)
@pytest.mark.filterwarnings("ignore:the module 'verl_multiturn:FutureWarning")  # the file's name
async def test_an_address_of_before_is_the_service_by_its_class(running: Running, service: str, tmp_path: Path) -> None:
    path, name = tmp_path / "tools.yaml", f"verl_multiturn.tools.{OLD[service]}"
    path.write_text(f"tools:\n- class_name: {name}\n  config: {{url: '{running[service][1]}', run_timeout_s: 9}}\n")
    try:
        with pytest.warns(
            FutureWarning, match=rf"CodeServiceTool' with 'service: {service}' in its config.*2027-06-01"
        ):
            tool = load_tools(path)["code_interpreter"]
    finally:
        sys.modules.pop(name.rpartition(".")[0], None)
    assert isinstance(tool, CodeServiceTool)
    async with conversation(tool) as call:
        assert (await call(code="print(1)"))[0].text == "1"
    today = tool_of(running, service, run_timeout_s=9)
    assert tool._settings == today._settings
    assert tool.tool_schema == today.tool_schema


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_check_tool_finds_no_fault(running: Running, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_machine(monkeypatch)
    ran = subprocess.CompletedProcess([], 0, "1\n", "")
    monkeypatch.setattr(code_services, "_run", lambda code, timeout_s: ran)  # 64 programs at once are slow
    findings = check_tool(tool_of(running, service), {"code": "print(1)"})
    assert [finding for finding in findings if finding.verdict in (Grade.PROBLEM, Grade.WARNING)] == []
