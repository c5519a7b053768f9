"""`Deployer`: puts another model's weights into the server behind a gateway, and takes them back if they fail.

    begin ─▶ checking ─▶ draining ─▶ loading ─▶ trial ─▶ done
                 │                       └────────┴────▶ the former weights are loaded, and tried ─▶ failed
                 └─▶ failed: nothing was touched

Invariants:
- before the server is touched, the folder is whole, its weights have the named hash, and its vocabulary, template,
  architecture and tensors are those of the model that serves; and the weights that serve can be loaded again;
- no token is delivered of weights that did not pass their trial;
- after a failure the former weights serve again; if they cannot be loaded either, the engine has a `fault`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError, EngineError, MultiTurnError
from verl_multiturn.gateway.engine import DeployedEngine
from verl_multiturn.models.hash import model_hash, tensor_shapes
from verl_multiturn.models.location import find_model
from verl_multiturn.records.write.run_file import digest_of_vocabulary
from verl_multiturn.rollout.engines.protocol import Ask, Generation

logger = logging.getLogger(__name__)

DRAIN_S = 60.0
"""Seconds in which running generations may end, where a deployment names no other time."""
_MOST_DRAIN_S = 3600.0
_HASH = re.compile(r"[0-9a-f]{16}")
_TRIAL_TOKENS = 8
_CONFIG = ("architectures", "model_type", "vocab_size", "tie_word_embeddings", "max_position_embeddings")
"""Entries of `config.json` that both models need alike, beside their tensors."""
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


class Deployer:
    """Deploys models at one engine, one at a time.

    Args:
        engine: The engine.
        served: Folder of the model that it serves now, as the server reads it.
        trial: Token ids of the prompt that new weights are tried with.
    """

    def __init__(self, engine: DeployedEngine, served: Path, trial: Sequence[int]) -> None:
        self._engine = engine
        self._served = _Served(served, engine.model, list(trial))
        self._now = Deployment()
        self._task: asyncio.Task[None] | None = None

    def state(self) -> dict[str, Any]:
        """Return the last deployment (`Deployment`), and the hashes of all that were deployed (`models`)."""
        return {**asdict(self._now), "serves": self._engine.model, "models": list(self._engine.models)}

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
        """End the running deployment; the server keeps the weights that it has."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _deploy(self, order: _Order, now: Deployment) -> None:
        try:
            await asyncio.to_thread(_check, order, self._served)
            now.state = "draining"
            async with self._engine.paused(order.drain_s) as now.interrupted:
                await self._swap(order, now)
            self._served = _Served(order.path, order.weights, self._served.ids)
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

    async def _swap(self, order: _Order, now: Deployment) -> None:
        """Load the weights and try them; on a failure load the former ones.

        Raises:
            EngineError: They do not serve.
        """
        engine, former, known = self._engine, self._served, list(self._engine.models)
        try:
            await self._serve(order.path, order.weights, now)
        except (EngineError, asyncio.CancelledError) as error:
            engine.models[:] = known
            engine.expect(former.weights)
            await self._take_back(former, error)
            raise

    async def _serve(self, path: Path, weights: str, now: Deployment | None = None) -> None:
        engine = self._engine
        if now is not None:
            now.state = "loading"
        engine.expect(weights)
        await engine.load(str(path), weights)
        if now is not None:
            now.state = "trial"
        ask = Ask("trial", self._served.ids, {"temperature": 0.0}, _TRIAL_TOKENS)
        made = await engine.sample_alone(ask)
        if problem := trial_fault(made, engine.models.index(weights)):
            raise EngineError(f"the weights {weights} failed their trial: {problem}")

    async def _take_back(self, former: _Served, why: BaseException) -> None:
        try:
            await self._serve(former.path, former.weights)
        except EngineError as error:
            self._engine.fault = (
                f"the weights before, {former.weights}, could not be loaded again from {str(former.path)!r} ({error}), "
                f"after a deployment had failed ({describe(why)}); restart the gateway"
            )


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
    return _Order(Path(path), weights, 0.0 if mode == "cut" else float(drain_s))


def _check(order: _Order, served: _Served) -> None:
    """Refuse a model that cannot take the place of the one that serves, before anything is touched.

    Raises:
        ConfigError: It cannot.
    """
    where = f"{str(order.path)!r}, as the server reads it"
    model = find_model(order.path)
    if model.ranks:
        raise ConfigError(
            f"{where}, is a checkpoint of {model.ranks} ranks; export it first (verl-multiturn export MODEL --to DIR)"
        )
    if (found := model_hash(order.path)) != order.weights:
        raise ConfigError(
            f"{where}, has the weights {found}, and {order.weights} were to be deployed; name the folder that both see"
        )
    for name, mine, its in _differences(order.path, served.path):
        raise ConfigError(
            f"{where}, has another {name} than the model that serves: {show(mine, 120)} in the place of "
            f"{show(its, 120)}; deploy a model that was trained from it, or start a gateway with this one"
        )
    if (found := model_hash(served.path)) != served.weights:
        raise ConfigError(
            f"the folder of the model that serves, {str(served.path)!r}, has the weights {found} by now, and no more "
            f"{served.weights}, so that a deployment that fails could not be taken back; restart the gateway with the "
            "new model"
        )


def _differences(new: Path, served: Path) -> list[tuple[str, Any, Any]]:
    """Return the parts in which two models differ beside the values of their weights: name, new, served."""
    found: list[tuple[str, Any, Any]] = []
    configs = [_config(each) for each in (new, served)]
    found += [(f"{name} in config.json", *(each.get(name) for each in configs)) for name in _CONFIG]
    shapes = [tensor_shapes(each) for each in (new, served)]
    names = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
    found += [(f"tensor {name}", shapes[0].get(name), shapes[1].get(name)) for name in names[:1]]
    tokenizers = [_tokenizer(each) for each in (new, served)]
    vocabularies = [each.get_vocab() for each in tokenizers]
    found.append(("number of tokens", *map(len, vocabularies)))
    found.append(("vocabulary", *map(digest_of_vocabulary, vocabularies)))
    found.append(("chat template", *(each.chat_template for each in tokenizers)))
    return [each for each in found if each[1] != each[2]]


def _config(folder: Path) -> Mapping[str, Any]:
    """Return a model's `config.json`.

    Raises:
        ConfigError: It cannot be read.
    """
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds {show(found, 100)}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({describe(error)}); write the folder again") from None
    return found


def _tokenizer(folder: Path) -> Any:
    """Return a model's tokenizer, without its own code.

    Raises:
        ConfigError: It cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, for damaged files
        raise ConfigError(f"{str(folder)!r} has no tokenizer that can be loaded ({describe(error)})") from error
