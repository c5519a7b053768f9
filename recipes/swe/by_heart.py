"""Make the tiny Qwen2 that `--smoke` trains: it knows the repairs of the smoke tasks by heart.

mini-swe-agent itself plays each repair, with a model that writes the commands of `commands_of` and a real workspace.
The tiny model learns the turns of these conversations.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from openai.types.chat import ChatCompletion
from transformers import Qwen2ForCausalLM

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.mini_swe import MiniSettings, bash_tool, play
from verl_multiturn.task_sets.swe.draw import settings_for
from verl_multiturn.task_sets.swe.tasks import SweTask, installed
from verl_multiturn.workspaces.tars import read_tar
from verl_multiturn.workspaces.threads import open_workspace

COMMON = Path(__file__).resolve().parents[1] / "common"
sys.path.insert(0, str(COMMON))
from sft import Learner, encode  # noqa: E402
from tiny_model import tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer, renderer  # noqa: E402

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def commands_of(task: SweTask) -> list[str]:
    """Return the commands of a repair: look at the place, write the original lines there, hand in."""
    mutation = task.mutation
    original = installed(task.package).files[mutation.path]
    mutated = mutation.apply(original)
    first = original[: mutation.start].count(b"\n")
    lines = original.decode().split("\n")[first : original[: mutation.end].count(b"\n") + 1]
    last = mutated[: mutation.start + len(mutation.after.encode())].count(b"\n")
    text = "\\\n".join(line.replace("\\", "\\\\") for line in lines)
    script = f"{first + 1},{last + 1}c" + "\\" + text
    return [
        f"sed -n '{max(1, first)},{last + 2}p' {mutation.path}",
        f"sed -i {shlex.quote(script)} {mutation.path}",
        SUBMIT,
    ]


class Scripted:
    """A client of OpenAI's form whose model gives some commands in their order.

    Args:
        commands: The commands.
    """

    def __init__(self, commands: Sequence[str]) -> None:
        self._left = list(commands)
        self.chat = SimpleNamespace(completions=self)

    def create(self, **_: Any) -> ChatCompletion:
        """Return the next command as a call."""
        call = {"name": "bash", "arguments": json.dumps({"command": self._left.pop(0)})}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"call_{len(self._left)}", "type": "function", "function": call}],
        }
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
        return ChatCompletion.model_validate(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )


def conversation_of(task: SweTask, settings: MiniSettings) -> list[dict[str, Any]]:
    """Return the conversation in which mini-swe-agent repairs a task.

    Args:
        task: The task.
        settings: Settings of the agent.

    Raises:
        ConfigError: The repair does not give the original text.
    """
    path = task.mutation.path
    with open_workspace(settings_for(task.package)) as workspace:
        workspace.put(task.task().tar())
        said = play(task.statement, workspace.run, Scripted(commands_of(task)), settings)
        left = read_tar(workspace.get(path)).files.get(path)
    if left != installed(task.package).files[path]:
        raise ConfigError(f"the commands {commands_of(task)} do not mend {path!r}; this is a fault of the recipe")
    messages = [{key: value for key, value in each.items() if key != "extra"} for each in said]
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])  # as chat templates want it
    return [message for message in messages if message["role"] != "exit"]


def make_model(folder: Path, tasks: Sequence[SweTask], settings: MiniSettings, steps: int = 120) -> None:
    """Train the model, and write it with its tokenizer.

    Args:
        folder: Folder for the files.
        tasks: The tasks.
        settings: Settings of the agent.
        steps: Number of optimizer steps.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with more threads, so small a model is slower on a busy machine
    rng = random.Random(0)
    conversations = [conversation_of(task, settings) for task in tasks]
    template = (COMMON / "model" / "chat_template.jinja").read_text(encoding="utf-8")
    texts = [renderer(template)(messages=each, tools=[bash_tool()]) for each in conversations]
    tokenizer = make_tokenizer(texts * 4, template, 1024)
    model = Qwen2ForCausalLM(tiny_config(tokenizer, 96, 3, 4096, 0.08))
    examples = [encode(tokenizer, each, [bash_tool()]) for each in conversations]
    learner = Learner(model, lr=3e-3, steps=steps, warmup=20, weight_decay=0.0)
    for _ in range(steps):
        loss = learner.learn(rng.sample(examples, min(4, len(examples))))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tokens = [len(ids) for ids, _ in examples]
    print(json.dumps({"conversations": len(tokens), "tokens": max(tokens), "loss": round(loss.item(), 4)}))
