"""`SandboxFusionTool`: runs code in a SandboxFusion service (https://github.com/bytedance/SandboxFusion).

    POST /run_code {"code", "language", "compile_timeout", "run_timeout", "memory_limit_MB"}
    → {"status": "Success" | "Failed" | "SandboxError", "message", "compile_result", "run_result"}

Each call runs in a fresh sandbox, so nothing is kept between calls. For the same reason a call may be repeated when its
answer was lost: only the effects of a script outside of its sandbox would happen twice. Leave `limits.retries` at 0 if
your sandboxes can change something outside, for example a database.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.services.code_service import CodeServiceTool, CodeSettings, show_output


class SandboxFusionSettings(CodeSettings):
    """Settings of the SandboxFusion tool, each with its default and meaning."""

    compile_timeout_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    """Seconds that the service gives a compiler."""

    run_timeout_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    """Seconds that the service gives a program."""

    memory_limit_mb: int = Field(1024, gt=0)
    """Memory of a program."""


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


class SandboxFusionTool(CodeServiceTool[SandboxFusionSettings]):
    """The tool `code_interpreter(code)`, with an argument `language` where there are several.

    Args:
        config: The fields of `SandboxFusionSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: A setting is wrong.
    """

    path = "/run_code"

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(SandboxFusionSettings, ("compile_timeout_s", "run_timeout_s"), config, tool_schema)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a program.

        Returns:
            The program's output, no reward, and the metric `succeeded`: 1.0 if the service reports success, else 0.0.

        Raises:
            ValueError: The language is none of `languages`, or the service refuses the request.
            UnavailableError: The service does not answer.
            ServiceFailedError: It failed at this request, broke off, or its answer cannot be read.
        """
        settings = self._settings
        payload = {
            "code": parameters["code"],
            "language": self._language(parameters),
            "compile_timeout": settings.compile_timeout_s,
            "run_timeout": settings.run_timeout_s,
            "memory_limit_MB": settings.memory_limit_mb,
        }
        result = await self._ask(payload, _Ran)
        if result.status == "SandboxError":
            raise self._failed("failed", result.message)
        ran, limit_s = result.run_result, settings.run_timeout_s
        if ran is None and result.compile_result is not None:  # it did not compile, so it was not run
            ran, limit_s = result.compile_result, settings.compile_timeout_s
        if ran is None:
            raise self._failed("gave an answer that cannot be read", "it has no result")
        end = ""
        if ran.status == "TimeLimitExceeded":
            end = f"[stopped after {limit_s:g} s]"
        elif ran.return_code:
            end = f"[exit code {ran.return_code}]"
        text = show_output(ran.stdout or "", ran.stderr or "", end)
        return ToolResponse(text), 0.0, {"succeeded": float(result.status == "Success")}
