"""`E2bRouterTool` against a server with the protocol of open-r1's router that runs real scripts."""

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
from verl_multiturn.tools.e2b_router import E2bRouterTool


class Batch(BaseModel):
    scripts: list[str]
    languages: list[str]
    timeout: int
    request_timeout: int


def build_app() -> FastAPI:
    app = FastAPI()

    @app.post("/execute_batch")
    def execute_batch(batch: Batch) -> list[dict[str, Any]]:
        return [run(script, batch) for script, _ in zip(batch.scripts, batch.languages, strict=True)]

    def run(script: str, batch: Batch) -> dict[str, Any]:
        if script == "limits":
            logs = {"stdout": [f"{batch.timeout} {batch.request_timeout} {batch.languages}"], "stderr": []}
            return {"execution": {"results": [], "logs": logs, "error": None}, "exception_str": None}
        try:
            program = [sys.executable, "-c", script]
            ran = subprocess.run(program, capture_output=True, text=True, timeout=batch.timeout, check=False)
        except subprocess.TimeoutExpired:
            return {"execution": None, "exception_str": ""}
        error = None
        if ran.returncode:
            error = {"name": "ZeroDivisionError", "value": "division by zero", "traceback": ran.stderr}
        value = [{"text": "the value", "png": None, "is_main_result": True}] if "value" in script else []
        logs = {"stdout": ran.stdout.splitlines(keepends=True), "stderr": [] if error else [ran.stderr]}
        execution = {"results": value, "logs": logs, "error": error, "execution_count": 1}
        return {"execution": execution, "exception_str": None}

    return app


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(build_app()) as address:
        yield address


def tool_of(url: str, **config: Any) -> E2bRouterTool:
    return E2bRouterTool({"url": url, **config})


async def test_what_the_model_reads_of_a_script(url: str) -> None:
    async with conversation(tool_of(url)) as call:
        response, reward, metrics = await call(code="print('hello')\nprint('world')")
        assert (response.text, reward, metrics) == ("hello\nworld", 0.0, {"succeeded": 1.0})
        assert (await call(code="print('value')"))[0].text == "value\nthe value"
        response, _, metrics = await call(code="print(1)\n1 / 0")
        assert response.text.startswith("1\nTraceback")
        assert response.text.endswith("ZeroDivisionError: division by zero")
        assert metrics == {"succeeded": 0.0}
        assert (await call(code="pass"))[0].text == "[no output; print what you want to see]"


async def test_a_script_that_never_ends_is_not_repeated(url: str) -> None:
    async with conversation(tool_of(url, run_timeout_s=1)) as call:
        with pytest.raises(ValueError, match="not run to its end: it takes longer than 1 s"):
            await call(code="while True: pass")


async def test_limits_and_languages_reach_the_router(url: str) -> None:
    async with conversation(tool_of(url, run_timeout_s=7, request_timeout_s=3, languages=["r", "python"])) as call:
        assert (await call(code="limits"))[0].text == "7 3 ['r']"
        assert (await call(code="limits", language="python"))[0].text == "7 3 ['python']"
        with pytest.raises(ValueError, match="use one of: r, python"):
            await call(code="limits", language="bash")


def test_settings_that_cannot_work(url: str) -> None:
    with pytest.raises(ConfigError, match=r"config.timeout_s: 60.0 is too short; expected more than"):
        tool_of(url, run_timeout_s=60)
    with pytest.raises(ConfigError, match="expected an address such as"):
        tool_of("0.0.0.0:8001")
