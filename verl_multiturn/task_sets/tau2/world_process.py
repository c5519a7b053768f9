"""The program of the forks of a domain's zygote: each is the world of one conversation, or judges one.

The zygote parses the data base twice, which takes up to a second. A fork has both copies for nothing: a world plays in
the first. A verdict plays the conversation's calls in the first and the right ones in the second, with τ²'s own
evaluators, and has a process of its own.

Invariants:
- a call's answer is τ²'s own, also where the tool raises;
- whatever a call does, the process answers, or ends; the worker then makes another one (`worlds.py`).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.describe import message_of
from verl_multiturn.processes.lines import answer_lines
from verl_multiturn.processes.zygote import problem_of
from verl_multiturn.task_sets.tau2.package import import_tau2, tasks_of

_EVALUATORS = {
    "env": "EnvironmentEvaluator",
    "action": "ActionEvaluator",
    "communicate": "CommunicateEvaluator",
}


@dataclass(frozen=True)
class DomainData:
    """Modules that a domain's zygote has loaded.

    Attributes:
        domain: Its name.
        worlds: Two worlds in the state in which every conversation begins.
        tasks: Its tasks by their ids.
        messages: τ²'s module of messages.
        evaluators: τ²'s evaluators by their subjects.
    """

    domain: str
    worlds: Sequence[Any]
    tasks: Mapping[str, Any]
    messages: Any
    evaluators: Mapping[str, Any]


def load(spec: Mapping[str, Any]) -> DomainData:
    """Import τ², and parse a domain's data base twice.

    Args:
        spec: `domain`, its name.
    """
    domain = spec["domain"]
    make = import_tau2(f"domains.{domain}.environment").get_environment
    evaluators = {
        judged: getattr(import_tau2(f"evaluator.evaluator_{judged}"), name) for judged, name in _EVALUATORS.items()
    }
    return DomainData(domain, [make(), make()], tasks_of(domain), import_tau2("data_model.message"), evaluators)


def serve(served: socket.socket, loaded: DomainData) -> None:
    """Answer requests, a line of JSON each, until the worker closes the socket.

    Args:
        served: The socket.
        loaded: The domain.
    """

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["do"] == "call":
                return call(loaded, request["name"], request["arguments"])
            if request["do"] == "repeat":
                for each in lasting(loaded, request["calls"]):
                    call(loaded, each["name"], each["arguments"])
            elif request["do"] == "judge":
                return judge(loaded, request["task"], request["calls"], request["texts"])
            return {}
        except BaseException as error:  # tau2's code may raise anything; the answer names it
            return {"failed": problem_of(error), "is_outage": False}

    answer_lines(served, answer)


def call(loaded: DomainData, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Make a call in the world, and return the `content` that τ² shows, and whether it is an `error`.

    Args:
        loaded: The domain.
        name: Name of the tool.
        arguments: Its arguments.
    """
    try:
        made = loaded.messages.ToolCall(name=name, arguments=dict(arguments))
        shown = loaded.worlds[0].get_response(made)
    except Exception as error:  # an answer that τ² cannot write; it shows other errors in this form
        return {"content": f"Error: {message_of(error)}", "error": True}
    return {"content": shown.content, "error": shown.error}


def lasting(loaded: DomainData, calls: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the calls that read or write the data base.

    A calculation changes nothing, and one that a model chose may take long.
    """
    kit = loaded.worlds[0].tools
    return [
        each for each in calls if kit.has_tool(each["name"]) and kit.tool_type(each["name"]).value in ("read", "write")
    ]


def judge(
    loaded: DomainData, task_id: str, calls: Sequence[Mapping[str, Any]], texts: Sequence[str]
) -> dict[str, float]:
    """Judge a conversation that its user ended, and return the fields of a `TauScore`.

    Args:
        loaded: The domain, with worlds in which nothing has been done yet.
        task_id: Id of the task.
        calls: The calls in the order in which they were made: `name`, `arguments`, `content`, `error`.
        texts: The agent's messages, in this order.
    """
    task, messages = loaded.tasks[task_id], loaded.messages
    said = [messages.AssistantMessage(role="assistant", content=text) for text in texts]
    left = iter(loaded.worlds)
    infos = {
        "env": loaded.evaluators["env"].calculate_reward(
            environment_constructor=lambda solo_mode=False: next(left),
            task=task,
            full_trajectory=[*_as_messages(lasting(loaded, calls), messages), *said],
        )
    }
    for judged in ("action", "communicate"):
        infos[judged] = loaded.evaluators[judged].calculate_reward(
            task=task, full_trajectory=[*_as_messages(calls, messages), *said]
        )
    parts = {"DB": "env", "ENV_ASSERTION": "env", "ACTION": "action", "COMMUNICATE": "communicate"}
    reward = 1.0
    for judged in {parts[str(basis.value)] for basis in task.evaluation_criteria.reward_basis}:
        reward *= infos[judged].reward
    checks = infos["action"].action_checks or []
    return {
        "reward": reward,
        "db": infos["env"].db_check.db_reward,
        "communicate": infos["communicate"].reward,
        "actions": sum(each.action_reward for each in checks) / len(checks) if checks else 1.0,
    }


def _as_messages(calls: Sequence[Mapping[str, Any]], messages: Any) -> list[Any]:
    """Return calls and their answers as τ² keeps them."""
    written: list[Any] = []
    for number, each in enumerate(calls):
        made = messages.ToolCall(id=str(number), name=each["name"], arguments=each["arguments"])
        written.append(messages.AssistantMessage(role="assistant", tool_calls=[made]))
        written.append(messages.ToolMessage(id=str(number), role="tool", content=each["content"], error=each["error"]))
    return written
