"""mini-swe-agent unchanged, behind the endpoint: its model calls the session, its commands run where the caller wants.

`recipes/swe/agent.py` runs it over a workspace, `harbor/mini_swe.py` over an environment of Harbor. The loop, the
templates and the reading of calls are the package's own; LiteLLM is not needed, and not imported.

Invariants:
- a session is one row: each request repeats all that the model wrote before. mini-swe-agent forgets a turn that it
  cannot read; here the turn stays, and the model sees its own mistake;
- an event that the model can cause ends the agent in its own way, never with an error: a text that no longer fits, a
  workspace that a command has ended. Any other, such as a lost sandbox, is raised.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.workspaces.workspace import CommandResult

if TYPE_CHECKING:
    from openai import OpenAI

INSTALL = f"{sys.executable} -m pip install --no-deps mini-swe-agent==2.4.6 python-dotenv==1.2.4"
"""Without `--no-deps` it would replace the `openai` that SGLang pins."""
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_REFUSED = 400
RunCommand = Callable[..., CommandResult]
"""Runs a command, and waits for it: `ThreadWorkspace.run`, with `timeout_s` and `env` by their names."""


@dataclass(frozen=True)
class MiniSettings:
    """Settings of the agent."""

    config: str = "mini.yaml"
    """Its templates: a file of mini-swe-agent's own by name, or a path."""
    step_limit: int = 50
    """Most turns of the model; 0: no limit."""
    timeout_s: float = 30.0
    """Seconds of a command."""


def check_installed() -> None:
    """Refuse an environment without mini-swe-agent.

    Raises:
        ConfigError: It is not installed.
    """
    package()


def solve(task: str, run: RunCommand, session: SessionAddress, settings: MiniSettings) -> str:
    """Let mini-swe-agent work at a task, and return its exit status, such as `Submitted` or `LimitsExceeded`.

    Args:
        task: The problem statement.
        run: Runs a command of its.
        session: Where it finds the model.
        settings: Its settings.

    Raises:
        ConfigError: mini-swe-agent is not installed, or has no such configuration.
    """
    with client_of(session.base_url, session.api_key) as client:
        return str(play(task, run, client, settings)[-1]["extra"].get("exit_status", ""))


def client_of(base_url: str, api_key: str) -> OpenAI:
    """Return a client of the endpoint, to be closed.

    Args:
        base_url: Address of the session.
        api_key: Its secret.
    """
    from openai import DefaultHttpxClient, OpenAI

    # A client of its own: in one that many threads share, a connection may be closed under a request, which then hangs
    # until its time is up (httpcore#1110). Without certificates it takes a quarter of a millisecond to make.
    return OpenAI(base_url=base_url, api_key=api_key, http_client=DefaultHttpxClient(verify=False))


def play(task: str, run: RunCommand, client: Any, settings: MiniSettings) -> list[dict[str, Any]]:
    """Let mini-swe-agent work at a task with any client of OpenAI's form, and return its messages.

    Args:
        task: The problem statement.
        run: Runs a command of its.
        client: Asks the model.
        settings: Its settings.

    Returns:
        All messages; the last one has the role `exit`.

    Raises:
        ConfigError: As `solve`.
    """
    mini = package()
    config = _read_config(settings.config)
    known = {key: value for key, value in config["agent"].items() if key in mini.agent_fields}
    limits = {"step_limit": settings.step_limit, "cost_limit": 0.0}
    environment = CommandEnvironment(run, settings.timeout_s, config.get("environment", {}).get("env", {}))
    agent = mini.agent(EndpointModel(client, config["model"]), environment, **{**known, **limits})
    agent.run(task)
    messages: list[dict[str, Any]] = agent.messages
    return messages


def bash_tool() -> dict[str, Any]:
    """Return the schema of the only tool that mini-swe-agent gives its model."""
    found: dict[str, Any] = package().bash_tool
    return found


class EndpointModel:
    """A model of mini-swe-agent's that asks an endpoint through OpenAI's client.

    Args:
        client: The client.
        config: The section `model` of the configuration, with the templates.
    """

    def __init__(self, client: Any, config: Mapping[str, Any]) -> None:
        self._client = client
        self._mini = package()
        self.config = SimpleNamespace(
            observation_template=config["observation_template"], format_error_template=config["format_error_template"]
        )

    def query(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> dict[str, Any]:
        """Return the model's next turn, with the actions in it.

        Raises:
            minisweagent.exceptions.FormatError: It has none that can be read. The turn is the first of its messages.
            minisweagent.exceptions.LimitsExceeded: The conversation no longer fits, or has had all its completions.
        """
        from openai import APIStatusError

        asked = [{key: value for key, value in message.items() if key != "extra"} for message in messages]
        try:
            completion = self._client.chat.completions.create(
                model="policy", messages=asked, tools=[self._mini.bash_tool]
            )
        except APIStatusError as error:
            if error.status_code != _REFUSED:
                raise
            raise self._mini.limits_exceeded(_exit("LimitsExceeded", str(error.code or "refused"))) from None
        choice = completion.choices[0]
        turn: dict[str, Any] = choice.message.model_dump(exclude_none=True)
        turn["extra"] = {"actions": [], "cost": 0.0}
        try:
            turn["extra"]["actions"] = self._mini.parse(
                choice.message.tool_calls or [],
                format_error_template=self.config.format_error_template,
                template_kwargs={"finish_reason": choice.finish_reason},
            )
        except self._mini.format_error as error:
            raise self._mini.format_error(turn, *error.messages) from None
        return turn

    def format_message(self, **message: Any) -> dict[str, Any]:
        """Return a message as the agent keeps it."""
        return message

    def format_observation_messages(
        self, message: Mapping[str, Any], outputs: Sequence[Mapping[str, Any]], template_vars: Any = None
    ) -> list[dict[str, Any]]:
        """Return the messages for the model on its commands, one for each call."""
        found: list[dict[str, Any]] = self._mini.observe(
            actions=message["extra"]["actions"],
            outputs=list(outputs),
            observation_template=self.config.observation_template,
            template_vars=template_vars,
        )
        return found

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        """Return the variables that the templates may use."""
        return dict(vars(self.config))

    def serialize(self) -> dict[str, Any]:
        """Return nothing: the run's records have the conversation."""
        return {}


class CommandEnvironment:
    """An environment of mini-swe-agent's whose commands run where the caller wants.

    Args:
        run: Runs a command.
        timeout_s: Seconds of a command.
        variables: Variables of each command.
    """

    def __init__(self, run: RunCommand, timeout_s: float, variables: Mapping[str, str]) -> None:
        self.config = SimpleNamespace(timeout=timeout_s, env=dict(variables))
        self._run = run
        self._mini = package()

    def execute(self, action: Mapping[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run a command, and return the message for the model.

        Raises:
            minisweagent.exceptions.Submitted: The command hands the work in.
            minisweagent.exceptions.LimitsExceeded: A command has ended the workspace.
        """
        command = action["command"]
        if not isinstance(command, str):
            return _output("", -1, f"The command is {type(command).__name__}, expected a text")
        result = self._run(command, timeout_s=self.config.timeout, env=self.config.env)
        if result.stopped is not None:
            raise self._mini.limits_exceeded(_exit("WorkspaceEnded", result.stopped))
        if result.timed_out:
            return _output(result.output, -1, f"The command did not end within {self.config.timeout:g} seconds")
        first, _, rest = result.output.lstrip().partition("\n")
        if first.strip() == _SUBMIT and result.exit_code == 0:
            raise self._mini.submitted(_exit("Submitted", rest))
        return _output(result.output, -1 if result.exit_code is None else result.exit_code)

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        """Return the variables that the templates may use; those of this process's environment are not among them."""
        return {**platform.uname()._asdict(), **vars(self.config)}

    def serialize(self) -> dict[str, Any]:
        """Return nothing: the run's records have the conversation."""
        return {}


def _output(text: str, code: int, problem: str = "") -> dict[str, Any]:
    return {"output": text, "returncode": code, "exception_info": problem}


def _exit(status: str, text: str) -> dict[str, Any]:
    return {"role": "exit", "content": text, "extra": {"exit_status": status, "submission": ""}}


@functools.cache
def package() -> SimpleNamespace:
    """Import the used parts of mini-swe-agent.

    Raises:
        ConfigError: It is not installed.
    """
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")  # else each worker prints its banner
    try:
        from minisweagent import __version__ as version
        from minisweagent import exceptions
        from minisweagent.agents.default import AgentConfig, DefaultAgent
        from minisweagent.models.utils import actions_toolcall
    except ImportError as error:
        raise ConfigError(f"mini-swe-agent cannot be imported ({error}); {INSTALL}") from None
    return SimpleNamespace(
        agent=DefaultAgent,
        agent_fields=set(AgentConfig.model_fields),
        bash_tool=actions_toolcall.BASH_TOOL,
        parse=actions_toolcall.parse_toolcall_actions,
        observe=actions_toolcall.format_toolcall_observation_messages,
        format_error=exceptions.FormatError,
        limits_exceeded=exceptions.LimitsExceeded,
        submitted=exceptions.Submitted,
        version=version,
    )


@functools.cache
def _read_config(name: str) -> dict[str, Any]:
    """Read a configuration of mini-swe-agent.

    Raises:
        ConfigError: There is none of that name.
    """
    import yaml
    from minisweagent.config import get_config_path

    try:
        found = yaml.safe_load(Path(get_config_path(name)).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"mini-swe-agent has no configuration {name!r}, expected one such as 'mini.yaml', or a path; name another"
        ) from None
    if not isinstance(found, dict) or not {"agent", "model"} <= set(found):
        raise ConfigError(
            f"{name!r} is no configuration of mini-swe-agent, expected the sections 'agent' and 'model'; correct it"
        )
    return found
