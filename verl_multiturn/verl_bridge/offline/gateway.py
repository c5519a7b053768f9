"""`serve_model`: the work of `verl-multiturn gateway`, from a recipe's settings to an endpoint in front of SGLang.

    settings ─▶ SGLang in a child, or at an address ─▶ DeployedEngine ─▶ ProxyRun ─▶ Gateway

Invariants:
- requests are rendered, sampled and read as in a training of the recipe; its tools and users have no part in it;
- Ray is never started, and SGLang ends with this process, whatever ends it;
- SGLang is started again where it ends, with the weights that serve.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.clients.chat_endpoint import key_of
from verl_multiturn.config import PATH
from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.gateway.app import Gateway
from verl_multiturn.gateway.deploy import Deployer
from verl_multiturn.gateway.deployment_check import changed
from verl_multiturn.gateway.engine import DeployedEngine
from verl_multiturn.gateway.files import GatewaySettings
from verl_multiturn.models.evaluation_model import EvaluatedModel
from verl_multiturn.runs.compose import compose_run
from verl_multiturn.runs.plan import RunPlan
from verl_multiturn.verl_bridge.loops.proxy_loop import build_run
from verl_multiturn.verl_bridge.loops.runner import build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel, load_model
from verl_multiturn.verl_bridge.servers.sglang_child import SglangChild, free_port, server_arguments
from verl_multiturn.verl_bridge.settings import ADAPTER_RANKS
from verl_multiturn.verl_bridge.startup.configuration import check_run
from verl_multiturn.verl_bridge.trainer.run_notes import run_file

_REMEDY = "name a folder with tokenizer and config.json"
_MODEL_CODE = "actor_rollout_ref.model.trust_remote_code"
_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
"""Seconds before SGLang is started again, at first and at most."""
_TRIAL = [{"role": "user", "content": "1+1="}]
"""The prompt that new weights are tried with."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class GatewayJob:
    """The options of a gateway."""

    plan: RunPlan
    """The recipe; its `out` is the folder for SGLang's log."""
    model: EvaluatedModel
    records: Path
    host: str
    port: int
    admin_key: str
    settings: GatewaySettings
    engine: str = "sglang"
    """`sglang`, or the address of a server."""
    key_env: str | None = None
    """Environment variable with the key of a server at an address; None: it has none."""
    has_lengths: bool = True
    """Whether the recipe's lengths count; False: those of the model's context."""
    runs_code: bool | None = None
    """Whether the model's own Python files run; None: as in the recipe."""


def serve_model(job: GatewayJob, say: Say) -> None:
    """Serve a model until a signal ends it; the command calls it.

    Args:
        job: The options.
        say: Prints a line.

    Raises:
        ConfigError: The gateway cannot work.
        EngineError: SGLang was never ready.
        HeldError: Users are being forgotten in the folder.
        OSError: The folder cannot be written.
    """
    asyncio.run(_serve(job, config_of(job), say))


def config_of(job: GatewayJob) -> DictConfig:
    """Return verl's whole configuration for a gateway, checked and completed as for a training.

    Raises:
        ConfigError: The recipe cannot work here.
    """
    config: DictConfig = compose_run(job.plan)
    values: dict[str, Any] = {
        "actor_rollout_ref.model.path": str(job.model.folder),
        f"{PATH}.record_dir": None,  # the gateway has a writer of its own
        f"{PATH}.interaction_config_path": None,
        f"{_MULTI_TURN}.tool_config_path": None,
        f"{_MULTI_TURN}.function_tool_path": None,
    }
    # An exported model holds its adapter.
    values |= {key: 0 for key in ADAPTER_RANKS if OmegaConf.select(config, key)}
    if job.runs_code is not None:
        values[_MODEL_CODE] = job.runs_code
    if not job.has_lengths and (context := _context(job.model.folder) - 1) > 1:
        values |= {"data.max_prompt_length": context // 2, "data.max_response_length": context - context // 2}
    with open_dict(config):
        for key, value in values.items():
            OmegaConf.update(config, key, value, force_add=True)
    check_run(config, is_training=False, has_rows=False)
    return config


def _context(folder: Path) -> int:
    """Return the most tokens of a model's context; 0 where its configuration does not name them."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = found.get("text_config") or {}
    return int(found.get("max_position_embeddings") or text.get("max_position_embeddings") or 0)


async def _serve(job: GatewayJob, config: DictConfig, say: Say) -> None:
    stop = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    server = None if job.engine != "sglang" else _Server(job, config, say)
    try:
        model = load_model(config.actor_rollout_ref.model, _REMEDY, config.data)
        url = job.engine if server is None else server.child.url
        engine = DeployedEngine(url, job.model.weights, key=key_of(job.key_env, "--engine-key-env"))
        try:
            await _until_stopped(job, config, model, engine, server, stop, say)
        finally:
            await engine.aclose()
    finally:
        if server is not None:
            server.child.close()


async def _until_stopped(
    job: GatewayJob,
    config: DictConfig,
    model: LoadedModel,
    engine: DeployedEngine,
    server: _Server | None,
    stop: asyncio.Event,
    say: Say,
) -> None:
    waits, stops = asyncio.ensure_future(_until_ready(job, server, engine)), asyncio.ensure_future(stop.wait())
    await asyncio.wait({waits, stops}, return_when=asyncio.FIRST_COMPLETED)
    if not waits.done():
        waits.cancel()
        return
    await waits
    gateway, deployer = await _gateway(job, config, model, engine)
    await gateway.start()
    say(f"gateway {gateway.address}")
    care = None if server is None else asyncio.ensure_future(server.keep(engine, deployer))
    try:
        await asyncio.wait({stops, *([care] if care is not None else [])}, return_when=asyncio.FIRST_COMPLETED)
        if care is not None and care.done():
            await care
    finally:
        say("the gateway ends its sessions")
        if care is not None:
            care.cancel()
        await gateway.aclose()


class _Server:
    """SGLang in a child process, which is started again where it ends."""

    def __init__(self, job: GatewayJob, config: DictConfig, say: Say) -> None:
        self._config, self._say, self._port = config, say, free_port()
        self._log = job.plan.out / f"sglang-{os.getpid()}.log"
        self.child = self._start(str(job.model.folder), job.model.weights)
        say(f"SGLang starts, in half a minute or more; it prints into {self._log}")

    def _start(self, folder: str, weights: str) -> SglangChild:
        return SglangChild(server_arguments(self._config, folder, weights, self._port), self._log)

    async def keep(self, engine: DeployedEngine, deployer: Deployer) -> None:
        """Start it again each time it ends, with the weights that serve, for as long as the gateway runs."""
        pause_s = _PAUSE_S
        while True:
            await asyncio.sleep(_PAUSE_S)
            if not self.child.has_ended:
                continue
            await deployer.wait()  # a deployment that was under way fails by it
            now = deployer.state()
            folder, served = Path(now["serves_path"]), str(now["serves"])
            try:
                self.child.close()
                engine.fault = "SGLang has ended, and starts again"  # until the weights are known to be the same
                await _require_weights(folder, served)
                self._say(f"SGLang has ended; it starts again with {folder}, and prints into {self._log}")
                self.child = self._start(str(folder), served)
                await self.child.ready(engine)
                await _require_weights(folder, served)
                engine.restart()
                pause_s = _PAUSE_S
                self._say("SGLang serves again")
            except (ConfigError, EngineError, OSError) as error:
                self._say(f"SGLang does not start: {describe(error)}")
                self.child.close()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _until_ready(job: GatewayJob, server: _Server | None, engine: DeployedEngine) -> None:
    if server is not None:
        await server.child.ready(engine)
    await engine.check()
    await _require_weights(job.model.folder, job.model.weights)


async def _require_weights(folder: Path, weights: str) -> None:
    """Refuse a folder that was written while SGLang loaded it: each token would have a wrong hash.

    Raises:
        EngineError: It was.
    """
    if problem := await asyncio.to_thread(changed, folder, weights, None):
        raise EngineError(problem)


async def _gateway(
    job: GatewayJob, config: DictConfig, model: LoadedModel, engine: DeployedEngine
) -> tuple[Gateway, Deployer]:
    runner = build_runner(config, model, engine)
    rollout = config.actor_rollout_ref.rollout
    sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    whole = run_file(SimpleNamespace(config=config, tokenizer=model.tokenizer), "", 0.0, None)
    about = {name: whole[name] for name in ("versions", "settings", "tools", "schemas", "tokenizer", "template")}
    run = build_run(runner)
    deployer = Deployer(engine, job.model.folder, (await run.renderer.prompt(_TRIAL, [], "")).ids)
    gateway = Gateway(
        run,
        engine,
        job.records,
        job.settings,
        job.admin_key,
        job.host,
        job.port,
        deployer,
        about,
        runner.sampling({**sampling, "repetition_penalty": 1.0}),
    )
    return gateway, deployer
