"""`PythonTool`: a Python interpreter for the model, in a sandbox (`sandbox/`).

Without `stateful` each call starts a new interpreter. With it, a conversation keeps its variables and files from call
to call. The model reads the output of a notebook: the printed text, the value of the last expression, a short
traceback. Nothing else comes out of the sandbox: no reward, no metric, no object.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field

from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.sandbox.launch import check
from verl_multiturn.sandbox.pool import SandboxPool
from verl_multiturn.sandbox.sandbox import CellResult, Sandbox
from verl_multiturn.sandbox.settings import SandboxSettings
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import FunctionSchema, ToolSchema


class PythonSettings(SandboxSettings):
    """Settings of the tool: those of a sandbox, and two more."""

    stateful: bool = Field(False)
    """True if a conversation keeps its variables and files between calls."""

    argument: str = Field("code")
    """Name of the argument that holds the code, for a `tool_schema` with another name."""


class _CellSession:
    """State of one conversation: no sandbox before its first call."""

    def __init__(self) -> None:
        self.sandbox: Sandbox | None = None
        self.ending: list[Sandbox] = []
        """Sandboxes of one call that were killed and whose processes may still run."""
        # Parallel calls of one turn share the variables, so they run one after the other, in their order.
        self.lock = asyncio.Lock()


class PythonTool(BaseTool):
    """The tool `python(code)`: a Python interpreter in a sandbox.

    Args:
        config: The fields of `PythonSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: A setting is wrong, the schema does not require the argument that holds the code, or the isolation
            does not work on this machine.
    """

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        self._settings = read_model(PythonSettings, config, "config")
        super().__init__(config, tool_schema)
        argument = self._settings.argument
        if argument not in self.tool_schema.function.parameters.get("required", []):
            raise ConfigError(
                f"tool_schema of {self.name!r} does not require an argument {argument!r}; add it, or name the one that "
                "holds the code in config.argument"
            )
        check(self._settings)
        self._pool = SandboxPool(self._settings)
        self._sessions: dict[str, _CellSession] = {}

    def get_schema(self) -> ToolSchema:
        """Return the schema; its description names the settings that the model should know."""
        settings = self._settings
        state = "Variables and files stay between calls." if settings.stateful else "Each call starts anew."
        about = (
            "Run Python code. You see what it prints, the value of its last expression, or its error. "
            f"{state} At most {settings.timeout_s:g} s and {settings.memory_mb} MB; no network."
        )
        code = {"type": "string", "description": "The code, for example: print(sum(range(10)))"}
        name = settings.argument
        parameters = {"type": "object", "properties": {name: code}, "required": [name]}
        function = FunctionSchema(name="python", description=about, parameters=parameters)
        return ToolSchema(type="function", function=function)

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Begin a conversation, still without a sandbox."""
        self._sessions[instance_id] = _CellSession()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Run the code of a call.

        Raises:
            ValueError: The code is too long, or it ended the sandbox, for example by a time limit. The text is for the
                model, with the output so far.
            SandboxError: No sandbox could be started.
        """
        session = self._sessions[instance_id]
        if not self._settings.stateful:
            sandbox = await self._pool.acquire()
            try:
                return _answer(await sandbox.run(parameters[self._settings.argument]))
            finally:
                sandbox.kill()
                session.ending = [ending for ending in (*session.ending, sandbox) if not ending.is_gone]
        async with session.lock:
            note = ""
            if session.sandbox is not None and session.sandbox.stopped is not None:
                note = f"[The earlier variables are lost: {session.sandbox.stopped}.]\n"
                session.sandbox = None
            if session.sandbox is None:
                session.sandbox = await self._pool.acquire()
            result = await session.sandbox.run(parameters[self._settings.argument])
            if result.stopped is not None:
                session.sandbox = None
            return _answer(result, note, "; the variables are lost, the next call starts anew")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Kill the conversation's sandbox, and wait until no process of the conversation remains."""
        session = self._sessions.pop(instance_id, None)
        if session is None:
            return
        if session.sandbox is not None:
            session.sandbox.kill()
            session.ending.append(session.sandbox)
        for sandbox in session.ending:
            await sandbox.wait_gone()

    async def aclose(self) -> None:
        """End all sandboxes; a later call would start new ones."""
        await self._pool.aclose()


def _answer(result: CellResult, note: str = "", loss: str = "") -> ToolResponse:
    if result.stopped is not None:
        raise ValueError(f"{note}{result.stopped}{loss}" + (f"; until then:\n{result.output}" if result.output else ""))
    return ToolResponse(text=note + result.output or "(no output)")
