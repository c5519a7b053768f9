"""Sessions with trials behind the real endpoint, on a scripted engine, and the account of each."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.harbor.policies import Say
from verl_multiturn.certificate.receipts import ReceiptingEngine
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.chat.template import Template
from verl_multiturn.config import HarborSettings
from verl_multiturn.harnesses.harbor.trials.runner import HarborRunner
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd
from verl_multiturn.proxy.agents.runner import AgentRunner
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.rendering import PromptRenderer
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.proxy.sessions.turn_reading import TurnReader
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.limits import Limits

PYTHON = str(Path(".venv-harbor/bin/python").absolute())
Session = Callable[[int, Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Runs a session, by its number and the `extra_info` of its row."""
_HEADER = "<|im_start|>assistant\n"
_LIMITS = Limits(prompt_length=65_536, response_length=65_536)


async def play(
    template: Template, settings: HarborSettings, rows: Sequence[tuple[Path, Say]], wall_clock_s: float = 1_800.0
) -> list[dict[str, Any]]:
    """Run a session for each task, all at once, and return their outcomes.

    Args:
        template: The model's template.
        settings: The bridge's settings.
        rows: The task of each session, and the model's turns in it.
        wall_clock_s: Seconds of a session.
    """
    made = [({"harbor": str(task)}, say) for task, say in rows]
    async with sessions_of(template, HarborRunner(settings, PYTHON), [say for _, say in made], wall_clock_s) as one:
        ended = await asyncio.gather(*(one(index, extra) for index, (extra, _) in enumerate(made)))
    return [{key: value for key, value in each.items() if key != "record"} for each in ended]


@contextlib.asynccontextmanager
async def sessions_of(
    template: Template,
    runner: AgentRunner,
    said: Sequence[Say],
    wall_clock_s: float = 1_800.0,
    roles: Roles | None = None,
) -> AsyncIterator[Session]:
    """Open the endpoint for a runner, and yield the function that runs a session and returns its outcome.

    Args:
        template: The model's template.
        runner: Runs the agents. It is closed with the endpoint.
        said: The model's turns, by the number of the session.
        wall_clock_s: Seconds of a session.
        roles: The roles.
    """
    tokenizer = template.tokenizer

    def generate(lane: str, ids: Sequence[int], turn: int) -> list[int]:
        prompt = tokenizer.decode(list(ids))
        text = said[int(lane.partition(".")[0])](prompt, prompt.count(_HEADER) - 1)
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    engine = ReceiptingEngine(StopTexts(ScriptedEngine(generate), tokenizer))
    renderer = PromptRenderer(template.codec, template.end_ids)
    run = ProxyRun(
        engine,
        renderer,
        TurnReader(template.parser, tokenizer, template.end_ids, [THINK]),
        _LIMITS,
        fill_id=tokenizer.eos_token_id,
        roles=roles,
    )
    endpoint = Endpoint(run, runner, ProxyServer(), wall_clock_s)

    async def one(index: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        row = {"raw_prompt": [{"role": "user", "content": "task"}], "extra_info": dict(extra)}
        outcome, receipts = await endpoint.run(str(index), row, {})
        life = Life(outcome.request_id, "u", outcome=outcome, generations=receipts)
        record = json.loads(line_of(record_of(life)))
        session = outcome.session
        assert session is not None
        return {
            "stop": outcome.stop_reason.value,
            "valid": outcome.valid,
            "reward": session.reward,
            "completions": len(receipts),
            "accounted": len(outcome.places),
            "roots": session.roots,
            "violations": [str(each) for each in verify_record(record).violations],
            "problem": session.problem[:1_500],
            "record": record,
        }

    try:
        yield one
    finally:
        await endpoint.aclose()


async def judge(runner: HarborRunner, task: Path) -> AgentEnd:
    """Run a trial whose harness asks no model, such as `oracle`, and return its end."""
    address = SessionAddress("http://127.0.0.1:9/v1", "no-key", "http://127.0.0.1:9", "judge")
    return await runner.run({"extra_info": {"harbor": str(task)}}, address, asyncio.Event())
