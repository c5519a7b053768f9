"""`deploy_model`: lets a gateway serve another model, and waits for its end. `deployment_at`: asks how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from verl_multiturn.clients.chat_endpoint import check_address
from verl_multiturn.clients.http_connections import open_client, route_to
from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.models.hash import model_hash
from verl_multiturn.models.location import find_model

_PATH = "/rl/deploy"
_LOOK_S = 0.5
_ANSWER_S = 30.0
_SILENT_S = 300.0
"""Seconds without an answer of the gateway after which it is given up."""
_ENDS = ("done", "failed")


def deployment_at(url: str, key: str) -> Mapping[str, Any]:
    """Return a gateway's report of its last deployment (`gateway.deploy.Deployer.state`).

    Args:
        url: Address of the gateway.
        key: Its admin key.

    Raises:
        ConfigError: The gateway refuses the request.
        EngineError: It does not answer.
    """
    with _client(url.rstrip("/"), key) as client:
        return _answer(client, "GET", url.rstrip("/") + _PATH, None)


def deploy_model(
    folder: Path, url: str, key: str, mode: str, drain_s: float | None, report: Callable[[str], None]
) -> Mapping[str, Any]:
    """Let a gateway serve a model, and return its report (`gateway.deploy.Deployer.state`) when that is over.

    Args:
        folder: Folder of the model in the form of Hugging Face; the gateway reads the same path.
        url: Address of the gateway.
        key: Its admin key.
        mode: `drain` or `cut`.
        drain_s: Seconds in which running generations may end; None: the gateway's own.
        report: Gets a line for each state.

    Raises:
        ConfigError: The model is none that can be deployed, or the gateway refuses the request.
        EngineError: The gateway does not answer, or refuses to tell how far it is.
    """
    model = find_model(folder)
    if model.ranks:
        raise ConfigError(
            f"{str(folder)!r} is a checkpoint of {model.ranks} ranks; export it first (verl-multiturn export "
            f"{folder} --to DIR), and deploy that folder"
        )
    path, weights = model.folder.resolve(), model_hash(model.folder)
    report(f"{path} has the weights {weights}")
    address = url.rstrip("/")
    check_address(address, "--to", takes_socks=True)
    body: dict[str, Any] = {"path": str(path), "hash": weights, "mode": mode}
    if drain_s is not None:
        body["drain_s"] = drain_s
    with _client(address, key) as client:
        now = _answer(client, "POST", address + _PATH, body)
        shown, heard = "", time.monotonic()
        while True:
            if now.get("model") != weights:
                raise EngineError(f"{address} deploys {show(now.get('model'))} by now: it was started anew, or another")
            if now.get("state") != shown:
                shown = str(now.get("state"))
                report(shown)
            if shown in _ENDS:
                return now
            time.sleep(_LOOK_S)
            try:
                now, heard = _answer(client, "GET", address + _PATH, None), time.monotonic()
            except ConfigError as error:  # it has begun, so that it is no refusal
                raise EngineError(str(error)) from None
            except EngineError:
                if time.monotonic() - heard > _SILENT_S:
                    raise


def _client(address: str, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return open_client(httpx.Client, route_to(address, "--to"), headers=headers, timeout=_ANSWER_S)


def _answer(client: httpx.Client, method: str, address: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a gateway's answer.

    Raises:
        ConfigError: It refuses the request.
        EngineError: There is no answer, or none of a gateway.
    """
    try:
        response = client.request(method, address, json=body)
        found = response.json()
    except (httpx.HTTPError, ValueError, RecursionError) as error:
        raise EngineError(f"{address}: no answer of a gateway ({describe(error)}); check --to") from None
    if response.status_code >= 500:
        raise EngineError(f"{address} answered {response.status_code}: {show(found, 300)}")
    if response.status_code >= 400 or not isinstance(found, dict):
        problem = found.get("error") if isinstance(found, dict) else found
        text = problem.get("message") if isinstance(problem, dict) else problem
        raise ConfigError(
            f"{address} answered {response.status_code}: {text if isinstance(text, str) else show(found)}"
        )
    return found
