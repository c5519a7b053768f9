"""Make the tiny Qwen2 that `--smoke` trains: it knows the commands of a few made tasks by heart."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from made_tasks import Made
from transformers import Qwen2ForCausalLM

from verl_multiturn.harnesses.harbor.tasks.tool import TaskBash
from verl_multiturn.verdicts.task import read_task

COMMON = Path(__file__).resolve().parents[1] / "common"
sys.path.insert(0, str(COMMON))
from sft import Learner, encode  # noqa: E402
from tiny_model import tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer, renderer  # noqa: E402

_NO_TESTS = {"kind": "script", "files": {"test.sh": ""}, "unguarded": True}  # nothing is scored here
_PLACE = {"name": "by heart", "allowed": ["**/*"], "verdict": _NO_TESTS}


async def conversations(tasks: Sequence[Made], bash: TaskBash, system: str) -> list[list[dict[str, Any]]]:
    """Return the conversation in which each task is done: look, do, report it. The tool itself answers the calls."""
    found = []
    for number, made in enumerate(tasks):
        name = f"c{number}"
        await bash.create(name, task=read_task({**_PLACE, "files": dict(made.files)}, "a made task").model_dump_json())
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": made.ask}]
        for command in ("ls", made.command):
            function = {"name": "bash", "arguments": {"command": command}}
            answer = await bash.execute(name, function["arguments"])  # type: ignore[arg-type]
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
                {"role": "tool", "content": answer.text},
            ]
        messages.append({"role": "assistant", "content": "It is done."})
        found.append(messages)
        await bash.release(name)
    await bash.aclose()
    return found


def make_model(folder: Path, tasks: Sequence[Made], bash: TaskBash, system: str, steps: int = 200) -> None:
    """Train the model, and write it with its tokenizer.

    Args:
        folder: Folder for the files.
        tasks: The tasks.
        bash: The tool.
        system: The system prompt.
        steps: Number of optimizer steps.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with more threads, so small a model is slower on a busy machine
    rng = random.Random(0)
    said, tools = asyncio.run(conversations(tasks, bash, system)), [bash.tool_schema.as_dict()]
    template = (COMMON / "model" / "chat_template.jinja").read_text(encoding="utf-8")
    render = renderer(template)
    tokenizer = make_tokenizer([render(messages=messages, tools=tools) for messages in said], template, 1024)
    model = Qwen2ForCausalLM(tiny_config(tokenizer, 64, 2, 2048, 0.12))
    examples = [encode(tokenizer, messages, tools) for messages in said]
    learner = Learner(model, lr=4e-3, steps=steps, warmup=16, floor=0.02, weight_decay=0.0)
    for _ in range(steps):
        loss = learner.learn(rng.sample(examples, 4))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lengths = [len(ids) for ids, _ in examples]
    print(json.dumps({"tasks": len(said), "tokens": lengths, "steps": steps, "loss": round(loss.item(), 4)}))
