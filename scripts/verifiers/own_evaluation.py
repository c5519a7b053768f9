"""verifiers' own evaluation of an environment, without the bridge: an agent in verifiers' Python.

Its row has `extra_info.evaluation`: `env`, the environment's configuration, `paths`, `count`, `out`, the file for the
rewards, and `programs`: whether each segment is a program of its own, as verifiers has it. This interpreter takes the
place of the one that `uv sync` makes at the first start of such a program.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from verl_multiturn.harnesses.verifiers.imports import config_of, import_verifiers


async def run(data: dict[str, Any], base_url: str = "", api_key: str = "") -> float:
    """Evaluate an environment at the session's endpoint, and write the rewards of its tasks."""
    asked = data["extra_info"]["evaluation"]
    vf = import_verifiers(asked["folder"], asked["paths"])
    from verifiers.v1.runtimes import SubprocessRuntime
    from verifiers.v1.utils.loaders import load_environment

    from verl_multiturn.harnesses.verifiers import chat_program, remains

    remains.install()
    if asked["programs"]:
        SubprocessRuntime.prepare_uv_script = _by_this_interpreter
    else:
        chat_program.install()
    os.environ["EVALUATION_KEY"] = api_key
    env = load_environment(config_of("own", asked["env"], "evaluation", with_roles=asked["with_roles"]))
    context = vf.ModelContext(
        model="agent", client=vf.EvalClientConfig(base_url=base_url, api_key_var="EVALUATION_KEY")
    )
    tasks = list(env.taskset.take(asked["count"]))
    at_once = asyncio.Semaphore(4)
    async with env.serving():
        episodes = await asyncio.gather(*(env.run_slot(env.slots(task)[0], context, at_once) for task in tasks))
    rewards = {
        str(task.data.name): {trace.agent.name: trace.reward for trace in episode.traces if trace.agent.trainable}
        for task, episode in zip(tasks, episodes, strict=True)
    }
    errors = [str(error) for episode in episodes for error in episode.errors]
    errors += [str(error) for episode in episodes for trace in episode.traces for error in trace.errors]
    _write(asked["out"], {"rewards": rewards, "errors": errors})
    return 0.0


def _write(path: str, found: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(found), encoding="utf-8")


async def _by_this_interpreter(self: Any, script: Any, env: Any = None, *, activate: bool = True) -> list[str]:
    path = Path(os.environ["TMPDIR"]) / "program.py"
    if not path.exists():
        path.write_bytes(script.encode() if isinstance(script, str) else script)
    return [sys.executable, str(path)]
