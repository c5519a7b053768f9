"""`SandboxFusionTool` against a server with the protocol of SandboxFusion that runs real programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from tests.serving import conversation, serving
from verl_multiturn import ConfigError
from verl_multiturn.tools.sandbox_fusion import SandboxFusionTool
from verl_multiturn.tools.services.http_client import ServiceFailedError


class RunCode(BaseModel):
    code: str
    language: str
    compile_timeout: float
    run_timeout: float
    memory_limit_MB: int


def build_app() -> FastAPI:
    app = FastAPI()

    @app.post("/run_code")
    def run_code(asked: RunCode) -> dict[str, Any]:
        result: dict[str, Any] = {"status": "Success", "message": "", "compile_result": None, "files": {}}
        if asked.language == "broken":
            return result | {"status": "SandboxError", "message": "no container"}
        if asked.language == "cpp":
            failed = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": "main.cpp:1: error"}
            return result | {"status": "Failed", "compile_result": failed, "run_result": None}
        if asked.language == "limits":
            told = f"{asked.compile_timeout} {asked.run_timeout} {asked.memory_limit_MB}"
            return result | {"run_result": {"status": "Finished", "return_code": 0, "stdout": told, "stderr": None}}
        try:
            program = [sys.executable, "-c", asked.code]
            ran = subprocess.run(program, capture_output=True, text=True, timeout=asked.run_timeout, check=False)
        except subprocess.TimeoutExpired:
            return result | {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "so far"}}
        status = "Failed" if ran.returncode else "Success"
        command = {"status": "Finished", "return_code": ran.returncode, "stdout": ran.stdout, "stderr": ran.stderr}
        return result | {"status": status, "run_result": command}

    return app


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(build_app()) as address:
        yield address


LANGUAGES = ("python", "cpp", "broken", "limits")


def tool_of(url: str, **config: Any) -> SandboxFusionTool:
    return SandboxFusionTool({"url": url, "languages": LANGUAGES, **config})


async def test_what_the_model_reads_of_a_program(url: str) -> None:
    async with conversation(tool_of(url)) as call:
        response, reward, metrics = await call(code="print(1 + 1)")
        assert (response.text, reward, metrics) == ("2", 0.0, {"succeeded": 1.0})
        response, _, metrics = await call(code="print('a'); import sys; sys.exit('bad')")
        assert (response.text, metrics) == ("a\nbad\n[exit code 1]", {"succeeded": 0.0})
        assert (await call(code="1 + 1"))[0].text == "[no output; print what you want to see]"
        assert (await call(code="x", language="cpp"))[0].text == "main.cpp:1: error\n[exit code 1]"
        with pytest.raises(ServiceFailedError, match=r"^the code sandbox failed$"):
            await call(code="x", language="broken")


async def test_limits_reach_the_service(url: str) -> None:
    limits = {"compile_timeout_s": 3.5, "run_timeout_s": 0.5, "memory_limit_mb": 64}
    async with conversation(tool_of(url, **limits)) as call:
        assert (await call(code="", language="limits"))[0].text == "3.5 0.5 64"
        response, _, metrics = await call(code="while True: pass")
        assert (response.text, metrics) == ("so far\n[stopped after 0.5 s]", {"succeeded": 0.0})


async def test_text_that_is_hard_to_carry(url: str) -> None:
    async with conversation(tool_of(url)) as call:
        assert (await call(code="print('zażółć \N{PILE OF POO} \\0')"))[0].text == "zażółć \N{PILE OF POO} \0"
        with pytest.raises((ValueError, ServiceFailedError), match="code sandbox"):
            await call(code="print('\ud800')")  # no server can read it; the next call works
        assert (await call(code="print(1)"))[0].text == "1"


async def test_languages(url: str) -> None:
    async with conversation(tool_of(url, languages=["python"])) as call:
        with pytest.raises(ValueError, match="'bash' is not available; use one of: python"):
            await call(code="ls", language="bash")
    one = tool_of(url, languages=["python"]).tool_schema.function.parameters
    several = tool_of(url).tool_schema.function.parameters
    assert set(one["properties"]) == {"code"}
    assert several["properties"]["language"]["enum"] == list(LANGUAGES)


def test_settings_that_cannot_work(url: str) -> None:
    with pytest.raises(ConfigError, match=r"config.timeout_s: 30.0 is too short; expected more than"):
        tool_of(url, run_timeout_s=30)
    with pytest.raises(ConfigError, match=r"languages: .*at least 1"):
        tool_of(url, languages=[])
    assert tool_of(url).repeatable
    assert not tool_of(url).pure
