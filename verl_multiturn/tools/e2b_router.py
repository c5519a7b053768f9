"""`E2bRouterTool`: runs code in one of several sandboxes behind one address, that of open-r1's `e2b_router.py`.

    POST /execute_batch {"scripts": [...], "languages": [...], "timeout", "request_timeout"}
    → [{"execution": {"results", "logs": {"stdout", "stderr"}, "error"} | null, "exception_str": … | null}, …]

A request holds one script, since the router answers a batch only when its slowest script is done. Each call gets a
fresh sandbox. `sandbox_fusion.py` has the rule when a call may be repeated; the same holds here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, RootModel

from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.services.code_service import CodeServiceTool, CodeSettings, show_output


class E2bRouterSettings(CodeSettings):
    """Settings of the router's tool, each with its default and meaning."""

    run_timeout_s: int = Field(20, gt=0)
    """Seconds that a sandbox lives, and so the most that a script may run."""

    request_timeout_s: int = Field(10, gt=0)
    """Seconds that the router waits for its provider to start a sandbox."""

    timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds for one request, the wait for a free sandbox included."""


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
    execution: _Execution | None
    exception_str: str | None = None


class _RouterBatch(RootModel[list[_RouterScript]]):
    pass


class E2bRouterTool(CodeServiceTool[E2bRouterSettings]):
    """The tool `code_interpreter(code)`, with an argument `language` where there are several.

    Args:
        config: The fields of `E2bRouterSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: A setting is wrong.
    """

    path = "/execute_batch"

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(E2bRouterSettings, ("run_timeout_s", "request_timeout_s"), config, tool_schema)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a script.

        Returns:
            The script's output, no reward, and the metric `succeeded`: 1.0 if the script raised nothing, else 0.0.

        Raises:
            ValueError: The language is none of `languages`, the router refuses the request, or the sandbox did not run
                the script to its end.
            UnavailableError: The router does not answer.
            ServiceFailedError: It failed at this request, broke off, or its answer cannot be read.
        """
        settings = self._settings
        payload = {
            "scripts": [parameters["code"]],
            "languages": [self._language(parameters)],
            "timeout": settings.run_timeout_s,
            "request_timeout": settings.request_timeout_s,
        }
        scripts = (await self._ask(payload, _RouterBatch)).root
        if len(scripts) != 1:
            raise self._failed("gave an answer that cannot be read", f"{len(scripts)} results for one script")
        execution = scripts[0].execution
        if execution is None:
            # The router does not report whose fault it was, and gives no reason when the time was up. No
            # UnavailableError, since a script that never ends would do so again.
            reason = scripts[0].exception_str or f"it takes longer than {settings.run_timeout_s} s"
            raise ValueError(f"the script was not run to its end: {reason:.500}")
        error, logs = execution.error, execution.logs
        failure = error.traceback or f"{error.name}: {error.value}" if error else ""
        values = [value.text for value in execution.results if value.text]
        text = show_output("".join(logs.stdout), *values, "".join(logs.stderr), failure)
        return ToolResponse(text), 0.0, {"succeeded": float(error is None)}
