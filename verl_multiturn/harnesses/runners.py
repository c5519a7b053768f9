"""Which runner an agent gets: a thread of the worker, or a process.

A thread is cheaper. A process can be killed, has an environment of its own, and may run any program. A function that
takes the address as an argument runs in a thread unless the setting `runner` differs. Every other agent reads the
address from its environment, so it runs in a process. So does an agent of another interpreter (`python`), which this
one never imports.
"""

from __future__ import annotations

import re
import shutil
from urllib.request import getproxies, proxy_bypass

from verl_multiturn.config import PATH, ProxySettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.trials.runner import INSTALL as HARBOR_INSTALL
from verl_multiturn.harnesses.harbor.trials.runner import HarborRunner, check_harbor
from verl_multiturn.harnesses.own_python import needed_python
from verl_multiturn.harnesses.verifiers.runner import INSTALL as VERIFIERS_INSTALL
from verl_multiturn.harnesses.verifiers.runner import VerifiersRunner, check_verifiers
from verl_multiturn.processes.forks import ForkError, check_import
from verl_multiturn.processes.interpreters import check_python
from verl_multiturn.proxy.agents.agent import Agent, load_agent
from verl_multiturn.proxy.agents.process_runner import KEEPER, ProcessRunner
from verl_multiturn.proxy.agents.runner import AgentRunner
from verl_multiturn.proxy.agents.thread_runner import ThreadRunner

HARBOR = "harbor"
"""Name of the agent that is a trial of Harbor for each session."""
VERIFIERS = "verifiers"
"""Name of the agent that is an episode of verifiers for each session."""
_OF_THEIR_OWN = {
    HARBOR: ("Harbor's own Python 3.12", HARBOR_INSTALL),
    VERIFIERS: ("verifiers' own Python 3.11", VERIFIERS_INSTALL),
}
_WHERE = f"{PATH}.proxy"


def build_runner(settings: ProxySettings) -> AgentRunner:
    """Return the runner of a worker.

    Args:
        settings: Settings that `check_agent` accepts. A function that runs in a thread is imported here.

    Raises:
        ConfigError: The agent cannot be imported, or the settings do not fit it.
    """
    if settings.agent == HARBOR:
        return HarborRunner(settings.harbor, _harness_python(settings))
    if settings.agent == VERIFIERS:
        return VerifiersRunner(settings, _harness_python(settings))
    agent = _checked(settings)
    if settings.command is not None:
        return ProcessRunner(None, settings.command, f"{_WHERE}.command")
    if agent is not None and _is_threaded(agent, settings):
        return ThreadRunner(agent)
    return ProcessRunner(settings.agent, None, _agent_key(settings), settings.python)


def check_agent(settings: ProxySettings) -> None:
    """Check that the agent can be started, without starting it. Its module is imported, by the Python that runs it.

    Raises:
        ConfigError: There is no agent or there are two; it cannot be imported, called or found; a word in braces of its
            command is unknown; its interpreter is none; or its runner or the network's proxy settings do not fit it.
    """
    if settings.agent == HARBOR:
        check_harbor(settings.harbor, _harness_python(settings))
        return
    if settings.agent == VERIFIERS:
        check_verifiers(settings, _harness_python(settings))
        return
    agent = _checked(settings)
    if settings.python is not None:
        _check_elsewhere(settings, settings.python)
    if settings.command is not None and shutil.which(settings.command[0]) is None:
        raise ConfigError(
            f"{_WHERE}.command: {settings.command[0]!r} is no program that can be started; install it on every node, "
            "give its full path, or set PATH"
        )
    for word in settings.command or ():
        if re.fullmatch(r"\{\w+\}", word) and word not in ("{row}", "{result}"):
            raise ConfigError(f"{_WHERE}.command: nothing takes the place of {word!r}; write '{{row}}' or '{{result}}'")
    if agent is not None and _is_threaded(agent, settings):
        _check_network(settings.host)


def _checked(settings: ProxySettings) -> Agent | None:
    if (settings.agent is None) == (settings.command is None):
        given = "neither is" if settings.agent is None else "both are"
        raise ConfigError(f"{_WHERE}: 'agent' or 'command' is the agent, and {given} set; set one of them")
    if settings.agent is None:
        if settings.runner == "thread":
            raise ConfigError(f"{_WHERE}.runner: a command cannot run in a 'thread'; leave the setting out")
        if settings.python is not None:
            raise ConfigError(
                f"{_WHERE}.python: {settings.python!r} imports no 'command'; name it in the command itself, or set "
                "'agent'"
            )
        return None
    if settings.python is not None:
        if settings.runner == "thread":
            raise ConfigError(
                f"{_WHERE}.runner: an agent of {settings.python!r} cannot run in a 'thread' of this interpreter; leave "
                "the setting out"
            )
        return None
    agent = load_agent(settings.agent, f"{_WHERE}.agent")
    if settings.runner == "thread" and not agent.takes_address:
        raise ConfigError(
            f"{_WHERE}.runner: {settings.agent!r} takes no address, and the environment of a 'thread' is that of all "
            "sessions; set runner: process, or write it as f(row, session)"
        )
    return agent


def _harness_python(settings: ProxySettings) -> str:
    """Return the interpreter that has the harness which `agent` names.

    Raises:
        ConfigError: There is none, or other settings name another agent.
    """
    others = {"command": settings.command, "runner": "thread" if settings.runner == "thread" else None}
    version, install = _OF_THEIR_OWN[str(settings.agent)]
    return needed_python(settings.python, others, str(settings.agent), version, install)


def _agent_key(settings: ProxySettings) -> str:
    """Return the name of the setting of a function, for errors: with the interpreter that imports it."""
    return f"{_WHERE}.agent" + ("" if settings.python is None else f" (imported by {settings.python!r})")


def _check_elsewhere(settings: ProxySettings, python: str) -> None:
    """Let another interpreter import the agent, and end.

    Raises:
        ConfigError: It is not an interpreter, or it cannot import the agent.
    """
    check_python(python, f"{_WHERE}.python")
    where = _agent_key(settings)
    try:
        check_import(KEEPER, {"agent": settings.agent, "where": where}, "agent", python)
    except ForkError as error:
        raise ConfigError(
            f"{where}: {settings.agent!r}: {error}; import it with this interpreter by hand to see why"
        ) from None


def _is_threaded(agent: Agent, settings: ProxySettings) -> bool:
    return settings.runner != "process" and agent.takes_address


def _check_network(host: str) -> None:
    """Refuse proxy variables by which clients in this process would look for the endpoint behind a proxy.

    Raises:
        ConfigError: There are such.
    """
    proxies = getproxies()
    name = next((f"{kind}_proxy" for kind in ("http", "all") if kind in proxies), None)
    if name is not None and not proxy_bypass(host):
        raise ConfigError(
            f"the environment variable {name.upper()} leads clients of the agent to a proxy, which cannot reach "
            f"{host}; add {host} to NO_PROXY, or set {_WHERE}.runner: process"
        )
