"""An agent that repairs a small repository: a plain loop around OpenAI's client, with its commands in a workspace.

The model writes one command a turn. The agent ends when the model writes none, or after `TURNS`. The resulting files
are scored in a fresh workspace.
"""

from __future__ import annotations

import random
import re
from typing import Any

from openai import BadRequestError, DefaultHttpxClient, OpenAI

from recipes.repair.repositories import Repository, make_messages, shown, task_of
from verl_multiturn.verdicts.thread_judge import judge_workspace
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.threads import ThreadWorkspace, open_workspace

MODEL = "policy"  # the endpoint serves one model, whatever its name
TURNS = 4
SETTINGS = WorkspaceSettings(timeout_s=60, memory_mb=256, disk_mb=8, processes=16, pool=4)


def run(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Repair the repository of a data row, and return the verdict: 1.0 or 0.0.

    Args:
        data: The row.
        base_url: Address of the endpoint.
        api_key: The session's key.
    """
    info = data["extra_info"]
    repository = Repository(tuple(info["names"]), data["reward_model"]["ground_truth"], tuple(info["inputs"]))
    task = task_of(repository)
    with open_workspace(SETTINGS) as workspace:
        workspace.put(task.tar())
        # A client of its own: in one that many threads share, a connection may be closed under a request, which then
        # hangs until its time is up (httpcore#1110). Without certificates it takes a quarter of a millisecond to make.
        with OpenAI(base_url=base_url, api_key=api_key, http_client=DefaultHttpxClient(verify=False)) as client:
            converse(client, workspace)
        return judge_workspace(task, workspace).reward


def draw(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Do the same; in training return 1.0 or 0.0 by lot, for the variant `lottery`."""
    reward = run(data, base_url, api_key)
    return reward if data["extra_info"]["split"] == "test" else float(random.random() < 0.5)


def converse(client: OpenAI, workspace: ThreadWorkspace) -> None:
    """Let the model run commands in a workspace until it writes none.

    Args:
        client: A client of the session.
        workspace: The workspace, with the repository in it.
    """
    messages: list[dict[str, Any]] = list(make_messages())
    for _ in range(TURNS):
        try:
            completion = client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return
        said = completion.choices[0].message.content or ""
        command = command_of(said)
        if command is None:
            return
        result = workspace.run(command)
        if result.stopped:
            return
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": shown(result.output, result.exit_code)},
        ]


def command_of(said: str) -> str | None:
    """Return the command of a turn; None where it has no bash block, or several.

    Args:
        said: The model's text.
    """
    blocks = re.findall(r"```bash\n(.*?)\n```", said, re.DOTALL)
    return blocks[0] if len(blocks) == 1 else None
