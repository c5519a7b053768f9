"""`Gateway`: the endpoint for many sessions on one port, and the routes `/rl/*`, `/health`, `/ready` and `/metrics`."""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import math
from collections.abc import Awaitable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import orjson
from aiohttp import web

from verl_multiturn.describe import describe, show
from verl_multiturn.gateway.deploy import Deployer, DeployRefusedError
from verl_multiturn.gateway.files import GatewaySettings
from verl_multiturn.gateway.known_sessions import digest_of
from verl_multiturn.gateway.sessions import SessionStore
from verl_multiturn.proxy.http.bodies import read_body
from verl_multiturn.proxy.http.clients import ClientConnection
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.protocols.requests import RefusedError
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.records.read.sessions import DROPPED, LiveSession

logger = logging.getLogger(__name__)

_MOST_BYTES = 1_000_000
"""The longest body of a request to `/rl/*`."""
_LONGEST_NAME = 500
"""Characters of a task, a user and the id of a reward."""
_START = ("task_id", "user", "row")
_REWARD = ("reward", "interaction_id", "id", "session_id")
_END = ("session_id",)
_DEPLOY = ("path", "hash", "mode", "drain_s")
"""Fields of the bodies."""
_RETRY_S = "5"
_LOOK_S = 2.0
"""How often the engine is looked at."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Models(Protocol):
    """The engine of a gateway, as far as its weights go: `DeployedEngine`, or a scripted one of tests."""

    models: list[str]

    async def look(self) -> str:
        """Return why the engine cannot serve; "" while it can."""


class Gateway:
    """A gateway. It is used on one event loop.

    Args:
        run: State that all sessions share.
        engine: Names the weights that serve.
        folder: Folder of the records.
        settings: Limits.
        admin_key: Opens the routes of the admin.
        host: Where to listen.
        port: The port; 0: one that is free.
        deployer: Swaps the weights; None: nobody can.
        about: What is known of the model, for the run's file: `versions`, `settings`, `tools`, `schemas`, `tokenizer`
            and `template`, as `records.schema.RunFile` has them.
        sampling: Sampling parameters of all generations, as the engine takes them, the stop ids among them.

    Raises:
        ConfigError: A rule or the host is not usable.
        HeldError: The folder is being changed by another process.
        OSError: A file cannot be created.
    """

    def __init__(
        self,
        run: ProxyRun,
        engine: Models,
        folder: Path,
        settings: GatewaySettings,
        admin_key: str,
        host: str = "127.0.0.1",
        port: int = 0,
        deployer: Deployer | None = None,
        about: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._server = ProxyServer(host, port=port, beside=self._route, unknown=self._unknown)
        self.store = SessionStore(
            run, folder, settings, self._server, lambda: engine.models, about or {}, sampling or {}
        )
        self._engine, self._admin, self._deployer = engine, digest_of(admin_key), deployer
        self._watch: asyncio.Task[None] | None = None
        self._routes = {
            ("POST", "/rl/start_session"): self._start,
            ("POST", "/rl/set_reward"): self._reward,
            ("POST", "/rl/end_session"): self._end,
            ("GET", "/rl/stats"): self._stats,
            ("POST", "/rl/deploy"): self._deploy,
            ("GET", "/rl/deploy"): self._deployment,
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._metrics,
        }

    @property
    def address(self) -> str:
        """Return the address, such as `http://127.0.0.1:8000`."""
        return self._server.address

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: It cannot.
        """
        await self._server.start()
        self.store.is_listening()
        self._watch = asyncio.get_running_loop().create_task(self._look())

    async def aclose(self) -> None:
        """End all sessions with their records, and stop."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        await self.store.aclose()
        if self._deployer is not None:
            await self._deployer.aclose()

    async def _look(self) -> None:
        """Look at the engine from time to time, so that one that was away serves again."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._engine.look()
            except Exception as error:  # a mistake of ours must not end the looks for good
                logger.error("the gateway cannot look at its engine: %s", describe(error))

    def _unknown(self, key: str) -> RefusedError | None:
        return self.store.refusal(key)

    def _route(self, request: web.BaseRequest) -> Awaitable[web.Response] | None:
        path = request.path.rstrip("/")
        if all(path != served for _, served in self._routes):
            return None
        return self._answer(request, path)

    async def _answer(self, request: web.BaseRequest, path: str) -> web.Response:
        call = self._routes.get((request.method, path))
        try:
            if call is None:
                expected = [method for method, served in self._routes if served == path]
                raise RefusedError(405, "method_not_allowed", f"expected {' or '.join(expected)} for {path}; use that")
            return await call(request)
        except RefusedError as refused:
            answer = _error(refused.status, refused.code, refused.message)
        except DeployRefusedError as refused:
            answer = _error(refused.status, "deploy_refused", str(refused))
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            logger.error("a session's line or record cannot be written: %s", describe(error))
            status = 507 if error.errno in _FULL else 503
            answer = _error(status, "not_written", "the disk does not take it, and nothing counts; try again later")
        if not request.content.at_eof():
            answer.force_close()
        return answer

    async def _start(self, request: web.BaseRequest) -> web.Response:
        self._check_admin(request)
        body = await _body(request, _START)
        row = body.get("row")
        if row is not None and not isinstance(row, dict):
            raise RefusedError(400, "invalid_request", f"row is {show(row, 60)}, expected an object; send the data row")
        task = _name(body, "task_id")
        if task is None:
            raise RefusedError(400, "invalid_request", "task_id is missing; send a text that names the task")
        address = await self.store.start(task, _name(body, "user"), row or {})
        return web.json_response(
            {
                "session_id": address.id,
                "api_key": address.api_key,
                "base_url": address.base_url,
                "anthropic_base_url": address.anthropic_base_url,
            },
            status=201,
        )

    async def _reward(self, request: web.BaseRequest) -> web.Response:
        opened = self._opened(request)
        body = await _body(request, _REWARD)
        session = self._session(opened, body)
        value = body.get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RefusedError(
                400, "invalid_reward", f"reward is {show(value, 60)}, expected a finite number; send one"
            )
        target, id_ = _name(body, "interaction_id"), _name(body, "id")
        counted = await self.store.reward(session, float(value), target, id_, whole=opened is None)
        return web.json_response({"session_id": session.session_id, "counted": counted})

    async def _end(self, request: web.BaseRequest) -> web.Response:
        opened = self._opened(request)
        session = self._session(opened, await _body(request, _END))
        ended = await self.store.end(session)
        count = sum(bool(each) for each in ended.completions)
        answer = {"session_id": ended.session_id, "completions": count, "reward": ended.reward}
        if ended.is_dropped:  # a client that looks for its record later should not wonder
            answer["no_record"] = ended.why.removeprefix(DROPPED)
        return web.json_response(answer)

    async def _stats(self, request: web.BaseRequest) -> web.Response:
        self._check_admin(request)
        return web.json_response(self._figures())

    async def _deploy(self, request: web.BaseRequest) -> web.Response:
        self._check_admin(request)
        return web.json_response(self._deploys().begin(await _body(request, _DEPLOY)), status=202)

    async def _deployment(self, request: web.BaseRequest) -> web.Response:
        self._check_admin(request)
        return web.json_response(self._deploys().state())

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        fault = await self._engine.look()
        return _error(503, "not_ready", fault) if fault else web.json_response({"status": "ready"})

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        lines = []
        for name, value in self._figures().items():
            if isinstance(value, int):
                kind = "gauge" if name == "running" else "counter"
                own = f"verl_multiturn_gateway_{name}{'' if kind == 'gauge' else '_total'}"
                lines += [f"# TYPE {own} {kind}", f"{own} {value}"]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    def _figures(self) -> dict[str, Any]:
        counts = {name: self.store.counts[name] for name in ("sessions", "ends", "rewards", "repeats", "dropped")}
        return {"running": self.store.running, **counts, "models": list(self._engine.models)}

    def _deploys(self) -> Deployer:
        if self._deployer is None:
            raise RefusedError(409, "no_deployer", "this gateway cannot swap weights; start it with a model's folder")
        return self._deployer

    def _opened(self, request: web.BaseRequest) -> LiveSession | None:
        """Return the session that a request's key opens; None: it is the admin's, and opens all.

        Raises:
            RefusedError: It opens none.
        """
        key = self._key(request)
        session = None if self._is_admin(key) else self.store.known.find(key, None)
        _authenticate(request)
        return session

    def _session(self, opened: LiveSession | None, body: Mapping[str, Any]) -> LiveSession:
        """Return the session that a request is about."""
        name = _name(body, "session_id")
        if opened is None:
            if name is None:
                raise RefusedError(400, "invalid_request", "the admin key opens all sessions; send session_id, too")
            return self.store.known.find(None, name)
        if name not in (None, opened.session_id):
            raise RefusedError(403, "foreign_session", "this key is another session's; leave session_id out")
        return opened

    def _key(self, request: web.BaseRequest) -> str:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not key:
            raise RefusedError(401, "invalid_api_key", "the request has no key; send `Authorization: Bearer KEY`")
        return key

    def _is_admin(self, key: str) -> bool:
        return hmac.compare_digest(digest_of(key), self._admin)

    def _check_admin(self, request: web.BaseRequest) -> None:
        if not self._is_admin(self._key(request)):
            raise RefusedError(401, "invalid_api_key", "this needs the admin key; send that of --admin-key-env")
        _authenticate(request)


def _authenticate(request: web.BaseRequest) -> None:
    """Note that a connection has shown a key, so that it may stay as long as those of the sessions."""
    assert isinstance(request.protocol, ClientConnection)
    request.protocol.authenticated()


async def _body(request: web.BaseRequest, fields: Collection[str]) -> dict[str, Any]:
    """Return the JSON object of a request; no body is an empty one.

    Raises:
        RefusedError: It is something else, is too long, or has another field than these.
    """
    data = await read_body(request)
    if len(data) > _MOST_BYTES:
        raise RefusedError(413, "too_long", f"the body has more than {_MOST_BYTES} bytes; send a shorter row")
    try:
        body = orjson.loads(data) if data.strip() else {}
    except ValueError:
        raise RefusedError(400, "invalid_request", "the body is not JSON; send an object") from None
    if not isinstance(body, dict):
        raise RefusedError(400, "invalid_request", f"the body is {show(body, 60)}, expected an object; send one")
    if unknown := sorted(name for name, value in body.items() if value is not None and name not in fields):
        raise RefusedError(
            400,
            "invalid_request",
            f"the field {show(unknown[0], 60)} is unknown, expected {', '.join(fields)}; omit it",
        )
    return body


def _name(body: Mapping[str, Any], field: str) -> str | None:
    """Return a text of a body; None where it is absent or null.

    Raises:
        RefusedError: It is something else, empty or too long.
    """
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
        raise RefusedError(
            400,
            "invalid_request",
            f"{field} is {show(value, 60)}, expected a text of 1 to {_LONGEST_NAME} characters; change it",
        )
    return value


def _error(status: int, code: str, message: str) -> web.Response:
    headers = {"Retry-After": _RETRY_S} if status in (429, 503) else None
    return web.json_response({"error": {"code": code, "message": message}}, status=status, headers=headers)
