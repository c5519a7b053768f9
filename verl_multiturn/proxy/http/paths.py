"""The paths of the endpoint: the secret in one, its target, and the routes served there."""

from __future__ import annotations

from aiohttp import web

from verl_multiturn.proxy.protocols import PROTOCOLS, Protocol
from verl_multiturn.proxy.protocols.requests import RefusedError

COUNT_TOKENS = "messages/count_tokens"
_SERVED = f"use one of {[*PROTOCOLS, f'/v1/{COUNT_TOKENS}', '/v1/models']}"


def route_of(request: web.BaseRequest) -> tuple[str | None, str, Protocol]:
    """Return the parts of a request's path.

    Args:
        request: The request.

    Returns:
        The secret in it, if there is one; the rest after `/v1/`, however often that is there; and the protocol whose
        errors the client reads.
    """
    parts = [part for part in request.path.split("/") if part]
    secret = None
    if parts[:1] == ["s"] and len(parts) > 1:
        secret, parts = parts[1], parts[2:]
    while parts[:1] == ["v1"]:
        del parts[0]
    route = "/".join(parts)
    if f"/v1/{route}" in PROTOCOLS:
        return secret, route, PROTOCOLS[f"/v1/{route}"]
    anthropic = route.startswith("messages") or "anthropic-version" in request.headers
    return secret, route, PROTOCOLS["/v1/messages" if anthropic else "/v1/chat/completions"]


def is_models(route: str) -> bool:
    """Return whether a route is that of the models, or of one of them."""
    return route == "models" or route.startswith("models/")


def check_served(route: str, method: str) -> None:
    """Refuse an unknown route. This needs no key: it only repeats the documentation.

    Args:
        route: The part after `/v1/`; "" for the base.
        method: The method of the request.

    Raises:
        RefusedError: Nothing is served there, or by another method.
    """
    reads = ("GET", "HEAD")
    if route == "" and method in reads:
        return
    if not (is_models(route) or route == COUNT_TOKENS or f"/v1/{route}" in PROTOCOLS):
        raise RefusedError(404, "not_found", f"nothing is served at this path; {_SERVED}")
    allowed = reads if is_models(route) else ("POST",)
    if method not in allowed:
        raise RefusedError(405, "method_not_allowed", f"expected {allowed[0]} for /v1/{route}; use that")
