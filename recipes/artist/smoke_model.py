"""Make the tiny Qwen2 that `--smoke` trains: it knows the right calls of a few of BFCL's dialogues by heart."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from dialogue_rows import SYSTEM_PROMPT, needed
from transformers import Qwen2ForCausalLM

from verl_multiturn.task_sets.bfcl.episode import DialogueEpisode
from verl_multiturn.task_sets.bfcl.package import Dialogue
from verl_multiturn.task_sets.bfcl.tools import bfcl_tools

COMMON = Path(__file__).resolve().parents[1] / "common"
sys.path.insert(0, str(COMMON))
from sft import Learner, encode  # noqa: E402
from tiny_model import tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer, renderer  # noqa: E402


def conversation(dialogue: Dialogue) -> list[dict[str, Any]]:
    """Return a dialogue whose calls are the gold ones; its worlds answer them."""
    episode = DialogueEpisode(dialogue)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for request, calls in zip(dialogue.turns, dialogue.gold, strict=True):
        messages.append({"role": "user", "content": request})
        for call in calls:
            function = {"name": call.name, "arguments": dict(call.arguments)}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
                {"role": "tool", "content": episode.call(call.name, call.arguments)},
            ]
        messages.append({"role": "assistant", "content": "That is done."})
        assert episode.end_turn().right, dialogue.id
    return messages


def make_model(folder: Path, dialogues: Sequence[Dialogue], steps: int = 160) -> None:
    """Train the model, and write it with its tokenizer.

    Args:
        folder: Folder for the files.
        dialogues: The dialogues.
        steps: Number of optimizer steps.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with more threads, so small a model is slower on a busy machine
    rng = random.Random(0)
    schemas = {tool.name: tool.tool_schema.as_dict() for tool in bfcl_tools()}
    said = [(conversation(dialogue), needed(dialogue)) for dialogue in dialogues]
    template = (COMMON / "model" / "chat_template.jinja").read_text(encoding="utf-8")
    render = renderer(template)
    # YAML's order of the tools is that of the prompt.
    with_tools = [(messages, [schema for name, schema in schemas.items() if name in names]) for messages, names in said]
    tokenizer = make_tokenizer(
        [render(messages=messages, tools=tools) for messages, tools in with_tools], template, 1024
    )
    model = Qwen2ForCausalLM(tiny_config(tokenizer, 96, 3, 4096, 0.1))
    examples = sorted((encode(tokenizer, *each) for each in with_tools), key=lambda example: len(example[0]))
    learner = Learner(model, lr=3e-3, steps=steps, warmup=16, floor=0.02, weight_decay=0.0)
    for _ in range(steps):
        at = rng.randrange(len(examples) - 2)
        loss = learner.learn(examples[at : at + 3])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lengths = [len(ids) for ids, _ in examples]
    print(json.dumps({"dialogues": len(said), "tokens": lengths, "steps": steps, "loss": round(loss.item(), 4)}))
