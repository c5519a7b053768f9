"""The protocols of services that run code: the request of each, and how its answer is read.

    sandbox_fusion   POST /run_code {"code", "language", "compile_timeout", "run_timeout", "memory_limit_MB"}
                     → {"status": "Success" | "Failed" | "SandboxError", "message", "compile_result", "run_result"}
    e2b              POST /execute_batch {"scripts", "languages", "timeout", "request_timeout"}
                     → [{"execution": {"results", "logs": {"stdout", "stderr"}, "error"} | null, "exception_str"}]
    morph            POST /execute_batch, as `e2b`
                     → [{"text": … | null, "exception_str": … | null}]

The first is https://github.com/bytedance/SandboxFusion (`sandbox/server/sandbox_api.py`), the others are routers of
https://github.com/huggingface/open-r1 (`scripts/e2b_router.py`, `scripts/morph_router.py`). A request to a router holds
one script, since a batch is answered only when its slowest script is done.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, RootModel, field_validator

from verl_multiturn.errors import MultiTurnError
from verl_multiturn.tools.services.http_client import HttpSettings

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Jupyter's kernels, which both routers use, colour their tracebacks."""
_NO_OUTPUT = "No output from execution"
"""`exception_str` of Morph's router for a script that ran and printed nothing."""


class CodeSettings(HttpSettings):
    """Settings of a service that runs code, each with its meaning; `PROTOCOLS` has the defaults of each service."""

    service: Literal["sandbox_fusion", "e2b", "morph"]
    """The service at `url`: SandboxFusion, or open-r1's router before E2B or Morph."""

    languages: tuple[str, ...] = Field(("python",), min_length=1)
    """Languages that the model may use, by the service's names. The first one holds where a call names none."""

    run_timeout_s: float = Field(gt=0, allow_inf_nan=False)
    """Seconds that a program may run: 10 for `sandbox_fusion`, else 20, which have to be whole seconds.

    Behind a router it is the life of a sandbox.
    """

    compile_timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds that a compiler may run: 10. Of `sandbox_fusion` alone."""

    memory_limit_mb: int | None = Field(None, gt=0)
    """Memory of a program: 1024. Of `sandbox_fusion` alone."""

    request_timeout_s: int | None = Field(None, gt=0)
    """Seconds that the router waits for its provider to start a sandbox: 10. Of `e2b` alone."""

    timeout_s: float = Field(gt=0, allow_inf_nan=False)
    """Seconds for one request, the wait for a free sandbox included: 30 for `sandbox_fusion`, else 60.

    It has to be longer than all that the service itself waits.
    """

    @field_validator("languages")
    @classmethod
    def _are_different(cls, languages: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for at, name in enumerate(languages) if name in languages[:at]]:
            raise ValueError(f"{twice[0]!r} is there twice; name each language once")
        return languages


@dataclass(frozen=True)
class CodeOutcome:
    """A service's report of a program that ran."""

    parts: tuple[str, ...]
    """Texts in their order, such as the output, the errors, and how it ended; some may be empty."""
    succeeded: bool | None
    """Whether the program raised nothing; None where the service does not report it."""


class NoOutcomeError(MultiTurnError):
    """An answer has no outcome: the service failed, or it cannot be read.

    Args:
        problem: The service's failure, which follows its name in the text for the model.
        cause: The cause, for the log.
    """

    def __init__(self, problem: str, cause: str) -> None:
        super().__init__(problem)
        self.problem, self.cause = problem, cause


class OtherServiceError(MultiTurnError):
    """An answer is in the form of another service than the configured one."""


class CodeProtocol:
    """A protocol, which `CodeServiceTool` speaks.

    Attributes:
        path: Path to which requests are posted.
        defaults: Settings that the service has beside those of every service, and the defaults of all.
        waits: Names of the settings for the seconds that the service itself waits.
        whole_seconds: Whether the service takes no part of a second as a program's time.
        answer: The model that reads an answer.
    """

    path: ClassVar[str]
    defaults: ClassVar[Mapping[str, float]]
    waits: ClassVar[tuple[str, ...]]
    whole_seconds: ClassVar[bool] = False
    answer: ClassVar[type[BaseModel]]

    def payload(self, settings: CodeSettings, code: str, language: str) -> dict[str, Any]:
        """Return the request for a program."""
        raise NotImplementedError

    def outcome(self, settings: CodeSettings, answer: Any) -> CodeOutcome:
        """Return the outcome in an answer.

        Raises:
            ValueError: The program was not run to its end; the text is for the model.
            NoOutcomeError: There is none.
            OtherServiceError: The answer is another service's.
        """
        raise NotImplementedError


class _Command(BaseModel):
    status: str
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _Ran(BaseModel):
    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: _Command | None = None
    run_result: _Command | None = None


class _SandboxFusion(CodeProtocol):
    path = "/run_code"
    defaults: ClassVar = {
        "run_timeout_s": 10.0,
        "compile_timeout_s": 10.0,
        "memory_limit_mb": 1024,
        "timeout_s": 30.0,
    }
    waits = ("compile_timeout_s", "run_timeout_s")
    answer = _Ran

    def payload(self, settings: CodeSettings, code: str, language: str) -> dict[str, Any]:
        return {
            "code": code,
            "language": language,
            "compile_timeout": settings.compile_timeout_s,
            "run_timeout": settings.run_timeout_s,
            "memory_limit_MB": settings.memory_limit_mb,
        }

    def outcome(self, settings: CodeSettings, answer: _Ran) -> CodeOutcome:
        if answer.status == "SandboxError":
            raise NoOutcomeError("failed", answer.message)
        ran, limit_s = answer.run_result, settings.run_timeout_s
        if ran is None and answer.compile_result is not None:  # it did not compile, so it was not run
            ran, limit_s = answer.compile_result, settings.compile_timeout_s or 0.0
        if ran is None:
            raise NoOutcomeError("gave an answer that cannot be read", "it has no result")
        end = ""
        if ran.status == "TimeLimitExceeded":
            end = f"[stopped after {limit_s:g} s]"
        elif ran.return_code:
            end = f"[exit code {ran.return_code}]"
        return CodeOutcome((ran.stdout or "", ran.stderr or "", end), answer.status == "Success")


class _Logs(BaseModel):
    stdout: list[str] = []
    stderr: list[str] = []


class _Error(BaseModel):
    name: str = ""
    value: str = ""
    traceback: str = ""


class _RouterValue(BaseModel):
    text: str | None = None


class _Execution(BaseModel):
    results: list[_RouterValue] = []
    logs: _Logs = _Logs()
    error: _Error | None = None


class _RouterScript(BaseModel):
    execution: _Execution | None = None
    text: str | None = None
    exception_str: str | None = None


class _RouterBatch(RootModel[list[_RouterScript]]):
    pass


class _Router(CodeProtocol):
    path = "/execute_batch"
    answer = _RouterBatch
    whole_seconds = True
    field: ClassVar[str]
    """Field of a result that this router has, and the other one has not."""

    def payload(self, settings: CodeSettings, code: str, language: str) -> dict[str, Any]:
        return {
            "scripts": [code],
            "languages": [language],
            "timeout": int(settings.run_timeout_s),
            # Morph's router means the whole request by it.
            "request_timeout": settings.request_timeout_s or math.ceil(settings.timeout_s),
        }

    def outcome(self, settings: CodeSettings, answer: _RouterBatch) -> CodeOutcome:
        scripts = answer.root
        if len(scripts) != 1:
            raise NoOutcomeError("gave an answer that cannot be read", f"{len(scripts)} results for one script")
        (script,) = scripts
        if self.field not in script.model_fields_set:
            if script.model_fields_set & {"execution", "text"}:
                raise OtherServiceError
            raise NoOutcomeError("gave an answer that cannot be read", f"its result has no {self.field!r}")
        ran = self._ran(script)
        if ran is None:
            # The router does not report whose fault it was, and gives no reason when the time was up. So this is no
            # outage, since a script that never ends would do so again.
            reason = script.exception_str or f"it takes longer than {settings.run_timeout_s:g} s"
            raise ValueError(f"the script was not run to its end: {reason:.500}")
        return ran

    def _ran(self, script: _RouterScript) -> CodeOutcome | None:
        """Return the outcome of a script; None: it was not run to its end."""
        raise NotImplementedError


class _E2b(_Router):
    defaults: ClassVar = {"run_timeout_s": 20.0, "request_timeout_s": 10, "timeout_s": 60.0}
    waits = ("run_timeout_s", "request_timeout_s")
    field = "execution"

    def _ran(self, script: _RouterScript) -> CodeOutcome | None:
        if script.execution is None:
            return None
        error, logs = script.execution.error, script.execution.logs
        failure = _COLOUR.sub("", error.traceback) or f"{error.name}: {error.value}" if error else ""
        values = [value.text for value in script.execution.results if value.text]
        reason = script.exception_str or ""  # beside an execution: the router lost it at its end
        texts = ("".join(logs.stdout), *values, "".join(logs.stderr), failure, reason)
        return CodeOutcome(texts, error is None and not reason)


class _Morph(_Router):
    defaults: ClassVar = {"run_timeout_s": 20.0, "timeout_s": 60.0}
    waits = ("run_timeout_s",)
    field = "text"

    def payload(self, settings: CodeSettings, code: str, language: str) -> dict[str, Any]:
        # The router had `language` before it had `languages`, and ignores the other one.
        return {**super().payload(settings, code, language), "language": language}

    def _ran(self, script: _RouterScript) -> CodeOutcome | None:
        reason = "" if script.exception_str == _NO_OUTPUT else script.exception_str or ""
        if script.text is None or (reason and not script.text):
            return None
        # The text has the script's error, too, so that nothing shows whether there was one. It has no stderr.
        return CodeOutcome((_COLOUR.sub("", script.text), reason), None)


PROTOCOLS: Mapping[str, CodeProtocol] = {"sandbox_fusion": _SandboxFusion(), "e2b": _E2b(), "morph": _Morph()}
"""The protocols by their names in the setting `service`."""
