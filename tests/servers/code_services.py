"""Stand-ins for services that run code, after their published forms; Python programs really run.

- `sandbox_fusion()`: SandboxFusion's `sandbox/server/sandbox_api.py`.
- `e2b_router()`: open-r1's `scripts/e2b_router.py`.
- `morph_router()`: open-r1's `scripts/morph_router.py`, with the answers of the `morphcloud` package that it calls;
  `languages=False` has the request of its first form, with one `language`.

`app.state.requests` has the requests, as their server reads them. Their models are those of the servers, which ignore
fields that they do not know, and refuse with 422 a request without one of theirs.
"""

import subprocess
import sys
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel

RED, PLAIN = "\x1b[0;31m", "\x1b[0m"
"""Colours of a Jupyter kernel's traceback."""
_FUSION_LANGUAGES = Literal["python", "cpp", "nodejs", "go", "java", "bash", "rust"]


class RunCode(BaseModel):
    compile_timeout: float = 10
    run_timeout: float = 10
    memory_limit_MB: int = -1
    code: str
    stdin: str | None = None
    language: _FUSION_LANGUAGES
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


class Batch(BaseModel):
    scripts: list[str]
    languages: list[str]
    timeout: int
    request_timeout: int


class FirstBatch(BaseModel):
    scripts: list[str]
    language: str
    timeout: int
    request_timeout: int


def _run(code: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-"]  # an argument may not have a million characters
    return subprocess.run(program, input=code, capture_output=True, text=True, timeout=timeout_s, check=False)


def _app() -> FastAPI:
    app = FastAPI()
    app.state.requests = []
    return app


def sandbox_fusion() -> FastAPI:
    app = _app()

    def command(status: str, code: int | None, stdout: str | None, stderr: str | None) -> dict[str, Any]:
        return {
            "status": status,
            "execution_time": 0.1,
            "return_code": code,
            "stdout": stdout,
            "stderr": stderr,
        }

    @app.post("/run_code")
    def run_code(request: RunCode) -> dict[str, Any]:
        app.state.requests.append(request.model_dump())
        answer: dict[str, Any] = {
            "status": "Success",
            "message": "",
            "compile_result": None,
            "run_result": None,
            "executor_pod_name": None,
            "files": {},
        }
        if request.language == "bash":
            return answer | {"status": "SandboxError", "message": f"exception on running code {request.code}: no disk"}
        if request.language == "cpp":  # no program of the tests compiles
            slow = "template" in request.code
            compiled = command(
                *(("TimeLimitExceeded", None, "", "") if slow else ("Finished", 1, "", "a.cpp:1: error"))
            )
            return answer | {"status": "Failed", "compile_result": compiled}
        try:
            ran = _run(request.code, request.run_timeout)
        except subprocess.TimeoutExpired:
            return answer | {"status": "Failed", "run_result": command("TimeLimitExceeded", None, "so far", "")}
        status = "Failed" if ran.returncode else "Success"
        return answer | {"status": status, "run_result": command("Finished", ran.returncode, ran.stdout, ran.stderr)}

    return app


def e2b_router() -> FastAPI:
    app = _app()

    @app.post("/execute_batch")
    def execute_batch(batch: Batch) -> list[dict[str, Any]]:
        app.state.requests.append(batch.model_dump())
        return [run(script, batch.timeout) for script, _ in zip(batch.scripts, batch.languages, strict=False)]

    def run(script: str, timeout_s: float) -> dict[str, Any]:
        try:
            ran = _run(script, timeout_s)
        except subprocess.TimeoutExpired:
            return {"execution": None, "exception_str": ""}  # the text of a TimeoutError
        error: dict[str, str] | None = None
        if ran.returncode:
            name, _, why = ran.stderr.strip().splitlines()[-1].partition(": ")
            error = {"name": name, "value": why, "traceback": f"{RED}Traceback{PLAIN}\n{name}: {why}"}
        value = [{"text": "the value", "html": None, "png": None, "is_main_result": True}] if "value" in script else []
        logs = {"stdout": ran.stdout.splitlines(keepends=True), "stderr": [] if error else [ran.stderr]}
        execution = {"results": value, "logs": logs, "error": error, "execution_count": 1}
        return {"execution": execution, "exception_str": None}

    return app


def morph_router(languages: bool = True) -> FastAPI:
    app = _app()

    def execute_batch(batch: Any) -> list[dict[str, Any]]:
        app.state.requests.append(batch.model_dump())
        named = batch.languages if languages else [batch.language] * len(batch.scripts)
        return [run(script, language, batch.timeout) for script, language in zip(batch.scripts, named, strict=False)]

    execute_batch.__annotations__["batch"] = Batch if languages else FirstBatch
    app.post("/execute_batch")(execute_batch)

    def run(script: str, language: str, timeout_s: float) -> dict[str, Any]:
        if not script:
            return {"text": None, "exception_str": "Code must be a non-empty string"}
        if language not in ("python", "javascript", "bash", "cpp", "rust"):
            return {"text": f"Error: Unsupported language: {language}", "exception_str": None}
        try:
            ran = _run(script, timeout_s)
        except subprocess.TimeoutExpired:
            return {"text": None, "exception_str": ""}  # the text of a TimeoutError
        if ran.returncode < 0:
            reason = "Kernel process died during execution (common causes: out of memory, resource limits, crashes)"
            return {"text": None, "exception_str": f"Kernel 1 (python) crashed: {reason}"}
        text = ran.stdout
        if ran.returncode:
            error = f"Error: {ran.stderr.strip().splitlines()[-1]}\n{RED}Traceback{PLAIN}"
            text = f"{text}\n\n{error}" if text else error
        return {"text": text, "exception_str": None if text else "No output from execution"}

    return app
