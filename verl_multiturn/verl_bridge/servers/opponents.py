"""`OpponentServers`: a Ray actor with the servers of a run's opponents (`proxy.opponents`), and its client.

    a session draws one ─▶ the actor of its machine ─▶ checkpoint ─export─▶ folder ─▶ SGLang in a child ─▶ address

The first session that needs it creates the actor of its machine. A server starts when its model is drawn for the first
time, and stays. One that has died is started again when it is asked for again; until then its calls are an outage.

Invariants:
- a model has one server on a machine, which serves the checkpoint that is there, and none of an earlier start;
- the servers end with the actor, whatever ends it, and the actor ends with the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.config import ProxySettings
from verl_multiturn.describe import describe
from verl_multiturn.errors import MultiTurnError, OutageError
from verl_multiturn.models.checkpoints import POSITION, checkpoint_folder, is_complete
from verl_multiturn.models.evaluation_model import EvaluatedModel, evaluated
from verl_multiturn.models.hash import model_hash
from verl_multiturn.models.location import find_model
from verl_multiturn.proxy.opponents.addresses import OPENAI, SETTING, model_at
from verl_multiturn.proxy.opponents.draw import OpponentName, Opponents, is_address, shown
from verl_multiturn.proxy.opponents.remote_model import RemoteModel
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.rollout.engines.http_engine import GenerateEngine
from verl_multiturn.rollout.life import stopped
from verl_multiturn.verl_bridge.servers.sglang_child import READY_S, SglangChild, free_port, server_arguments

logger = logging.getLogger(__name__)

_ACTOR = "verl_multiturn_opponents"
_FOLDER = "opponents"
"""Folder of the run in which checkpoints are exported and the servers' logs lie."""
_SGLANG = (*OPENAI, "top_k", "min_p", "repetition_penalty")


class OpponentServers:
    """The code of the actor, which itself does not use Ray.

    Args:
        config: verl's whole configuration, prepared.
        devices: GPUs of the servers, as in CUDA_VISIBLE_DEVICES; "": none.
    """

    def __init__(self, config: Any, devices: str = "") -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices  # the servers inherit it
        self._config = config
        self._checkpoints = Path(str(config.trainer.default_local_dir))
        self._out = self._checkpoints.parent / _FOLDER
        self._locks: defaultdict[OpponentName, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._served: dict[OpponentName, tuple[SglangChild, GenerateEngine]] = {}

    async def has(self, name: OpponentName, step: int) -> bool:
        """Return whether a model is there for a session that a step has begun.

        Args:
            name: Step of a checkpoint, or folder of a model.
            step: The step. A checkpoint of the same or a later one is of another run in the same folder.
        """
        if not isinstance(name, int) or name == 0:
            return True
        folder = checkpoint_folder(self._checkpoints, name)
        return name < step and (self._exported(name).is_dir() or await asyncio.to_thread(is_complete, folder))

    async def address(self, name: OpponentName) -> str:
        """Return the address of a model's server, which is started if none serves it.

        Raises:
            OutageError: It cannot be started.
        """
        async with self._locks[name]:
            served = self._served.get(name)
            if served is not None and served[1].lost:
                logger.warning("the server of the opponent %s is started again: %s", shown(name), served[1].lost)
                await self._end(name)
                served = None
            if served is None:
                try:
                    served = await self._start(name)
                except (MultiTurnError, OSError) as error:
                    raise OutageError(f"the opponent {shown(name)} cannot be served: {describe(error)}") from None
                self._served[name] = served
            return f"{served[0].url}/v1"

    async def processes(self) -> dict[OpponentName, int]:
        """Return the process of each server, by the model's name."""
        return {name: child.pid for name, (child, _) in self._served.items()}

    async def aclose(self) -> None:
        """End all servers."""
        for name in list(self._served):
            await self._end(name)

    async def _start(self, name: OpponentName) -> tuple[SglangChild, GenerateEngine]:
        self._out.mkdir(parents=True, exist_ok=True)
        model = await asyncio.to_thread(self._model, name)
        arguments = server_arguments(self._config, str(model.folder), model.weights, free_port())
        arguments["skip_tokenizer_init"] = False  # it is asked in words
        logger.warning("the server of the opponent %s starts: a minute or more; its sessions wait", shown(name))
        child = SglangChild(arguments, self._out / f"{self._exported(name).parent.name}.log")
        engine = GenerateEngine(child.url, model.weights)
        try:
            seconds = await child.ready(engine)
        except BaseException:  # cancelled, too: the server is in no list yet that would end it
            child.close()
            await engine.aclose()
            raise
        logger.info("the opponent %s is served at %s after %.0f s", shown(name), child.url, seconds)
        return child, engine

    def _exported(self, name: OpponentName) -> Path:
        if isinstance(name, int):
            return self._out / f"step_{name}" / "model"
        path = Path(name).resolve()  # checkpoints of two runs may have one name
        return self._out / f"{path.name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}" / "model"

    def _model(self, name: OpponentName) -> EvaluatedModel:
        """Return the weights of a model; a checkpoint is exported, once."""
        if name == 0:
            folder = Path(str(self._config.actor_rollout_ref.model.path)).resolve()
            return EvaluatedModel(str(folder), folder, model_hash(folder), {})
        path = checkpoint_folder(self._checkpoints, name) if isinstance(name, int) else Path(name)
        out = self._exported(name).parent
        if isinstance(name, int) and _modified(path / POSITION) > _modified(out / "model.json"):
            shutil.rmtree(out, ignore_errors=True)  # of a checkpoint that another run, or an earlier start, has made
        tell = partial(logger.info, "the opponent %s: %s", shown(name))
        return evaluated(str(path), find_model(path), out, tell, self._runs_code())

    def _runs_code(self) -> bool:
        return bool(self._config.actor_rollout_ref.model.get("trust_remote_code"))

    async def _end(self, name: OpponentName) -> None:
        child, engine = self._served.pop(name)
        await asyncio.to_thread(child.close)
        await engine.aclose()


def _modified(file: Path) -> float:
    return file.stat().st_mtime if file.is_file() else 0.0


class RayModels:
    """`ServedModels` for a worker: the actor of its machine.

    Args:
        config: verl's whole configuration, prepared.
        devices: As in `OpponentServers`.
    """

    def __init__(self, config: Any, devices: str = "") -> None:
        self._config, self._devices = config, devices
        self._actor: Any = None

    async def has(self, name: OpponentName, step: int) -> bool:
        """Return whether a model is there for a session that a step has begun, with the clock of the session stopped.

        Raises:
            OutageError: It cannot be found out.
        """
        return bool(await self._ask("has", name, step))

    async def address(self, name: OpponentName) -> str:
        """Return the address of a model's server, with the clock of the session stopped.

        Raises:
            OutageError: It cannot be started.
        """
        return str(await self._ask("address", name))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        for _ in range(2):  # an actor that has died is made anew, once
            try:
                if self._actor is None:
                    self._actor = self._made()
                with stopped():
                    return await getattr(self._actor, method).remote(*arguments)
            except OutageError as error:  # Ray's own kind of it, with a trace of the other process
                raise OutageError(str(getattr(error, "cause", error))) from None
            except RayError as error:
                self._actor = None
                problem = describe(error)
        raise OutageError(f"the opponents' servers cannot be reached: {problem}")

    def _made(self) -> Any:
        node = ray.get_runtime_context().get_node_id()
        remote = ray.remote(num_cpus=0, max_concurrency=1_000)(OpponentServers)
        options = {
            "name": f"{_ACTOR}_{node}",
            "get_if_exists": True,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        return remote.options(**options).remote(self._config, self._devices)


def build_opponents(config: Any, proxy: ProxySettings, outages: Any, timeout_s: float) -> Opponents | None:
    """Build the opponents of all sessions of a process; None without any.

    Args:
        config: verl's whole configuration, prepared.
        proxy: The settings of the endpoint.
        outages: The process's state of outages.
        timeout_s: Seconds for one answer.
    """
    roles = Roles.of(proxy)
    if roles is None or not proxy.opponents:
        return None
    models = RayModels(config, proxy.opponent_devices or "")

    def make(name: OpponentName) -> RemoteModel:
        if is_address(name):
            return model_at(str(name), outages, timeout_s, proxy.max_completions)
        return RemoteModel(
            shown(name),
            partial(models.address, name),
            sampled=_SGLANG,
            timeout_s=timeout_s,
            connections=proxy.max_completions,
            watch=outages.of(f"opponent {shown(name)}", OutageLimits(timeouts="outage"), timeout_s + READY_S),
            setting=SETTING,
        )

    watch = outages.of("opponent checkpoints", OutageLimits(timeouts="outage"), timeout_s)
    return Opponents(proxy.opponents, int(config.data.get("seed") or 0), models, make, roles.trained, watch)
