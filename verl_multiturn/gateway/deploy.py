"""`Deployer`: puts another model's weights into the server behind a gateway, and takes them back if they fail.

    begin ─▶ checking ─▶ draining ─▶ loading ─▶ trial ─▶ done
                 │                       └────────┴────▶ the former weights are loaded, and tried ─▶ failed
                 └─▶ failed: nothing was touched

Invariants:
- before the server is touched, the model can take the place of the one that serves (`deployment_check.py`), and the
  weights that serve can be loaded again;
- no token is delivered of weights that did not pass their trial, or whose files changed since their hash was computed;
- after a failure the former weights serve again; if they cannot be loaded either, the engine has a `fault`, until
  weights serve that passed their trial.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl_multiturn.describe import describe, show
from verl_multiturn.errors import EngineError, MultiTurnError
from verl_multiturn.gateway.deployment_check import Files, changed, check_candidate
from verl_multiturn.gateway.engine import DeployedEngine
from verl_multiturn.rollout.engines.protocol import Ask, Generation

logger = logging.getLogger(__name__)

DRAIN_S = 60.0
"""Seconds in which running generations may end, where a deployment names no other time."""
_MOST_DRAIN_S = 3600.0
_HASH = re.compile(r"[0-9a-f]{16}")
_TRIAL_TOKENS = 8
_TRIAL_S = 300.0
"""Seconds in which the trial has to end."""
_FIELDS = ("path", "hash", "mode", "drain_s")

State = Literal["idle", "checking", "draining", "loading", "trial", "done", "failed"]


class DeployRefusedError(MultiTurnError):
    """A request for a deployment that is not begun.

    Attributes:
        status: Its status of HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Deployment:
    """A deployment, and how far it is."""

    state: State = "idle"
    model: str | None = None
    """Hash of the model that is deployed."""
    path: str | None = None
    """Its folder, as the server reads it."""
    former: str | None = None
    """Hash of the weights that served before."""
    error: str = ""
    """Why it failed."""
    interrupted: int = 0
    """Generations that it interrupted, and that went on after it."""
    began: float | None = None
    ended: float | None = None
    """Times (`time.time`); null: not yet."""


@dataclass(frozen=True)
class _Order:
    path: Path
    weights: str
    drain_s: float


@dataclass
class _Served:
    """The model that serves."""

    path: Path
    weights: str
    ids: Sequence[int] = field(repr=False)
    """The trial's prompt."""
    files: Files | None = None
    """Its files when its hash was computed; None: at its start, by whoever started the server."""


class Deployer:
    """Deploys models at one engine, one at a time.

    Args:
        engine: The engine.
        served: Folder of the model that it serves now, as the server reads it. Later changes of links to it do not
            count.
        trial: Token ids of the prompt that new weights are tried with.
    """

    def __init__(self, engine: DeployedEngine, served: Path, trial: Sequence[int]) -> None:
        self._engine = engine
        self._served = _Served(served.resolve(), engine.model, list(trial))
        self._now = Deployment()
        self._task: asyncio.Task[None] | None = None

    def state(self) -> dict[str, Any]:
        """Return the last deployment (`Deployment`), and what serves now.

        That is its hash (`serves`) and its folder (`serves_path`); `models` has the hashes of all that were deployed.
        """
        serves = {"serves": self._served.weights, "serves_path": str(self._served.path)}
        return {**asdict(self._now), **serves, "models": list(self._engine.models)}

    def begin(self, body: Any) -> dict[str, Any]:
        """Begin a deployment, and return its state.

        Args:
            body: `path` of the model's folder, `hash` of its weights, `mode` (`drain` or `cut`; default `drain`) and
                `drain_s`.

        Raises:
            DeployRefusedError: The request is wrong (400), or another deployment is under way (409).
        """
        order = _order(body)
        if self._task is not None and not self._task.done():
            raise DeployRefusedError(
                409, f"the deployment of {self._now.path!r} is under way ({self._now.state}); wait for its end"
            )
        self._now = Deployment("checking", order.weights, str(order.path), self._engine.model, began=time.time())
        self._task = asyncio.get_running_loop().create_task(self._deploy(order, self._now))
        return self.state()

    async def wait(self) -> Deployment:
        """Return the last deployment, when it is over."""
        if self._task is not None:
            await asyncio.wait({self._task})
        return self._now

    async def aclose(self) -> None:
        """End the running deployment; where its weights were touched, the server loads the former ones before."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _deploy(self, order: _Order, now: Deployment) -> None:
        try:
            served = self._served
            files, served.files = await asyncio.to_thread(
                check_candidate, order.path, order.weights, served.path, served.weights
            )
            new = _Served(order.path, order.weights, served.ids, files)
            now.state = "draining"
            async with self._engine.paused(order.drain_s) as now.interrupted:
                await self._swap(new, now)
                self._served = new  # before generations begin, and a report of what serves
            now.state = "done"
        except asyncio.CancelledError:
            now.state, now.error = "failed", "the gateway was closed"
            raise
        except MultiTurnError as error:
            now.state, now.error = "failed", str(error)
        except Exception as error:  # a mistake of ours must not look like a deployment without an end
            logger.error("the deployment of %s failed", order.path, exc_info=error)
            now.state, now.error = "failed", describe(error)
        finally:
            now.ended = time.time()

    async def _swap(self, new: _Served, now: Deployment) -> None:
        """Load the weights and try them; on a failure load the former ones.

        Raises:
            EngineError: They do not serve.
        """
        engine, former, known = self._engine, self._served, list(self._engine.models)
        # The drain took minutes. SGLang 0.5.12 ends where a file breaks while it is loaded.
        await _require_same(new)
        try:
            await self._serve(new, now)
        except BaseException as error:  # whatever it is, weights that were not tried must not serve
            engine.models[:] = known
            engine.expect(former.weights)
            await self._take_back(former, error)
            raise

    async def _serve(self, model: _Served, now: Deployment | None = None) -> None:
        engine = self._engine
        if now is not None:
            now.state = "loading"
        engine.expect(model.weights)
        await engine.load(str(model.path), model.weights)
        if now is not None:
            now.state = "trial"
        try:
            async with asyncio.timeout(_TRIAL_S):
                made = await engine.sample_alone(Ask("trial", model.ids, {"temperature": 0.0}, _TRIAL_TOKENS))
        except TimeoutError:
            raise EngineError(f"the weights {model.weights} did not end their trial in {_TRIAL_S:g} s") from None
        except EngineError as error:  # SGLang has null for a log-probability that is no number
            raise EngineError(f"the weights {model.weights} failed their trial: {error}") from error
        if problem := trial_fault(made, engine.models.index(model.weights)):
            raise EngineError(f"the weights {model.weights} failed their trial: {problem}")
        await _require_same(model)
        engine.fault = ""

    async def _take_back(self, former: _Served, why: BaseException) -> None:
        try:
            await _require_same(former)
            await self._serve(former)
        except Exception as error:  # whatever it is, the server's weights are not known
            self._engine.fault = (
                f"the weights before, {former.weights}, could not be loaded again from {str(former.path)!r} "
                f"({describe(error)}), after a deployment had failed ({describe(why)}); restart the gateway"
            )


async def _require_same(model: _Served) -> None:
    """Refuse a model whose files may be others than those with its hash.

    Raises:
        EngineError: They may.
    """
    if problem := await asyncio.to_thread(changed, model.path, model.weights, model.files):
        raise EngineError(problem)


def trial_fault(made: Generation, version: int) -> str:
    """Return why a greedy generation shows that weights cannot serve; "": they can.

    Args:
        made: The generation.
        version: Version that its tokens should have.
    """
    if not made.ids:
        return "no token was sampled"
    if odd := [each for each in made.logprobs if not math.isfinite(each)]:
        return f"a log-probability is {odd[0]}"
    if wrong := {each for each in made.versions if each != version}:
        return f"other weights sampled it (version {wrong.pop()}, expected {version})"
    return ""


def _order(body: Any) -> _Order:
    """Return the request for a deployment.

    Raises:
        DeployRefusedError: It is none.
    """
    if not isinstance(body, Mapping):
        raise DeployRefusedError(400, f"expected a JSON object with {', '.join(_FIELDS)}, got {show(body, 100)}")
    if unknown := sorted(set(map(str, body)) - set(_FIELDS)):
        raise DeployRefusedError(400, f"unknown field {unknown[0]!r}; known are {', '.join(_FIELDS)}")
    path, weights, mode = body.get("path"), body.get("hash"), body.get("mode", "drain")
    drain_s = body.get("drain_s", DRAIN_S)
    if not isinstance(path, str) or "\0" in path or not Path(path).is_absolute():
        raise DeployRefusedError(400, f"path={show(path, 200)}: expected the absolute path of a model's folder")
    if not isinstance(weights, str) or not _HASH.fullmatch(weights):
        raise DeployRefusedError(400, f"hash={show(weights, 100)}: expected 16 hexadecimal digits, the weights' hash")
    if mode not in ("drain", "cut"):
        raise DeployRefusedError(400, f"mode={show(mode, 100)}: expected 'drain' or 'cut'")
    is_number = isinstance(drain_s, int | float) and not isinstance(drain_s, bool)
    if not is_number or not 0 <= drain_s <= _MOST_DRAIN_S:
        raise DeployRefusedError(400, f"drain_s={show(drain_s, 100)}: expected seconds from 0 to {_MOST_DRAIN_S:.0f}")
    return _Order(Path(os.path.realpath(path)), weights, 0.0 if mode == "cut" else float(drain_s))
