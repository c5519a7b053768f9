"""Proxy variables, and statuses of services whose address is configured."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from typing import Any

from tests.long.inputs.input_cases import Case, Right, Seen, accept, models, outage, refuse, run_command
from tests.long.inputs.input_files import in_folder, variables
from tests.servers.forward_proxy import forwarding
from tests.serving import conversation
from tests.support.http_clients import CLIENTS, service
from tests.support.served import answering, served
from verl_multiturn.calls.outages.causes import cause_of, next_try_s
from verl_multiturn.interactions.llm_user import LlmUser
from verl_multiturn.rewards import aclose
from verl_multiturn.rewards.router import compute_score
from verl_multiturn.tools.browse_service import BrowseServiceTool
from verl_multiturn.tools.code_service import CodeServiceTool
from verl_multiturn.tools.retrieval import RetrievalTool

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
UNSET: dict[str, str | None] = dict.fromkeys([*NAMES, *(name.lower() for name in NAMES)])
TOOLS: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any], str]] = {
    "retrieval": (RetrievalTool, {}, {"query": "a"}, "retrieve"),
    "browse": (BrowseServiceTool, {}, {"page": "a"}, "browse"),
    "sandbox_fusion": (CodeServiceTool, {"service": "sandbox_fusion"}, {"code": "a"}, "run_code"),
    "e2b": (CodeServiceTool, {"service": "e2b"}, {"code": "a"}, "execute_batch"),
    "morph": (CodeServiceTool, {"service": "morph"}, {"code": "a"}, "execute_batch"),
}
Door = Callable[[], Awaitable[Seen]]


def validate(kind: str, address: str, changes: Mapping[str, str]) -> Door:
    """Return the door of `validate` with a client of an address, under variables of the network.

    Args:
        kind: `tool`, `user` or `environment`.
        address: The address.
        changes: The variables.
    """
    entries: dict[str, tuple[str, dict[str, Any]]] = {
        "tool": (
            "tools.yaml",
            {"class_name": "verl_multiturn.tools.retrieval.RetrievalTool", "config": {"url": address}},
        ),
        "user": (
            "users.yaml",
            {
                "name": "u",
                "class_name": "verl_multiturn.interactions.llm_user.LlmUser",
                "config": {"base_url": address, "model": "m"},
            },
        ),
        "environment": (
            "users.yaml",
            {
                "name": "u",
                "class_name": "verl_multiturn.interactions.openenv_client.OpenEnvClient",
                "config": {"base_url": address, "action_field": "message"},
            },
        ),
    }
    name, entry = entries[kind]
    text = json.dumps({"tools" if kind == "tool" else "interaction": [entry]})
    words = ["validate", name] if kind == "tool" else ["validate", "--interactions", name]

    return in_folder(lambda _: run_command(*words), {name: text}, {**UNSET, **changes})


def request(name: str, address: str, changes: Mapping[str, str], mode: str = "") -> Door:
    """Return the door of one request of a client, with a proxy beside the service: the value is how it went.

    Args:
        name: One of `CLIENTS`.
        address: The service's address, with `PORT` in it.
        changes: Variables, with `PROXY` for the proxy's address.
        mode: A status with which the proxy answers everything, or "".
    """

    async def door() -> Seen:
        ask, answer = CLIENTS[name]
        async with service(name, None) as port, forwarding(status=int(mode) if mode else None) as proxy:  # type: ignore[arg-type]
            with variables({**UNSET, **{key: value.replace("PROXY", proxy.address) for key, value in changes.items()}}):
                said = await ask(address.replace("PORT", str(port)))
            return Seen("accepted", "through" if proxy.asked else "past", "") if said == answer else Seen("model", said)

    return door


def call_tool(name: str, *answers: Any) -> Door:
    """Return the door of a call whose service gives an answer: the value is when it accepts the next request."""

    async def door() -> Seen:
        tool_class, config, arguments, path = TOOLS[name]
        async with (
            served(**{path: answering(*answers)}) as address,
            conversation(tool_class({"url": address, **config})) as call,
        ):
            try:
                await call(**arguments)
            except Exception as error:  # the test is whose error it is
                said = f"{error}; next try {next_try_s(error)}"
                return Seen("outage" if cause_of(error, "model") == "outage" else "model", sentence=said)
        return Seen("accepted")

    return door


def judge(status: int, key: str = "") -> Door:
    """Return the door of a reward by a judge that answers with a status."""

    async def door() -> Seen:
        async with served(v1__chat__completions=answering(status)) as address:
            options: dict[str, Any] = {"url": f"{address}/v1", "model": "m", "timeout_s": 20.0, "attempts": 1}
            with variables({"INPUTS_KEY": "k" * 20}):
                found = await compute_score(
                    "deepeyes/a",
                    "<answer>blue</answer>",
                    "red",
                    {"question": "What colour?"},
                    judge={**options, "api_key_env": "INPUTS_KEY"},
                    routes={"deepeyes/*": "judge"},
                )
                await aclose()
        return Seen(
            "outage" if found["outage"] else "model" if found["failed"] else "accepted", found["score"], str(found)
        )

    return door


def ask_user(status: int) -> Door:
    """Return the door of a simulated user whose endpoint answers with a status."""

    async def door() -> Seen:
        async with served(v1__chat__completions=answering(status)) as address:
            user = LlmUser({"base_url": f"{address}/v1", "model": "m", "attempts": 1})
            await user.start("a", persona="You want tea.")
            try:
                await user.write([{"role": "user", "content": "a"}])
            except Exception as error:  # the test is whose error it is
                return Seen("outage" if cause_of(error, "model") == "outage" else "model", sentence=str(error))
            finally:
                await user.close("a")
        return Seen("accepted")

    return door


def _proxies() -> list[Case]:
    there, here = "http://search.corp:8000", "http://127.0.0.1:8000"
    socks = accept() if importlib.util.find_spec("socksio") else refuse("ALL_PROXY", "socksio", "NO_PROXY")
    inputs: list[tuple[str, str, dict[str, str], Right]] = [
        (
            "tool",
            there,
            {"ALL_PROXY": "socks://127.0.0.1:1080"},
            refuse("ALL_PROXY", "socks", "search.corp", "NO_PROXY"),
        ),
        ("tool", there, {"all_proxy": "socks://127.0.0.1:1080"}, refuse("all_proxy", "socks", "NO_PROXY")),
        ("tool", there, {"ALL_PROXY": "socks5://127.0.0.1:1080"}, socks),
        ("tool", there, {"HTTP_PROXY": "socks4://127.0.0.1:1080"}, refuse("HTTP_PROXY", "socks4")),
        ("tool", there, {"HTTP_PROXY": "ftp://u:secret@proxy:21"}, refuse("HTTP_PROXY", "ftp")),
        ("tool", there, {"HTTP_PROXY": "http://proxy:port"}, refuse("HTTP_PROXY")),
        ("tool", there, {"HTTP_PROXY": "http://u:secret@:99999"}, refuse("HTTP_PROXY")),
        ("tool", there, {"HTTP_PROXY": "http://proxy.corp:3128"}, accept()),
        ("tool", there, {"HTTP_PROXY": "proxy.corp:3128"}, accept()),
        ("tool", there, {"HTTPS_PROXY": "socks://x:1"}, accept()),
        ("tool", "https://search.corp", {"HTTPS_PROXY": "socks://x:1"}, refuse("HTTPS_PROXY", "socks")),
        ("tool", "https://search.corp", {"HTTP_PROXY": "socks://x:1"}, accept()),
        ("tool", there, {"ALL_PROXY": "socks://x:1", "HTTP_PROXY": "http://proxy:3128"}, accept()),
        ("tool", there, {"ALL_PROXY": "socks://x:1", "NO_PROXY": "search.corp"}, accept()),
        ("tool", there, {"ALL_PROXY": "socks://x:1", "NO_PROXY": ".corp"}, accept()),
        ("tool", there, {"ALL_PROXY": "socks://x:1", "no_proxy": "a.example, corp"}, accept()),
        ("tool", there, {"ALL_PROXY": "socks://x:1", "NO_PROXY": "*"}, accept()),
        ("tool", there, {"ALL_PROXY": "socks://x:1", "NO_PROXY": "search.corp:9000"}, refuse("ALL_PROXY")),
        ("tool", there, {"ALL_PROXY": "socks://x:1", "NO_PROXY": "research.corp,corp.example"}, refuse("ALL_PROXY")),
        ("tool", "http://10.1.2.3:80", {"ALL_PROXY": "socks://x:1", "NO_PROXY": "10.0.0.0/8"}, accept()),
        ("tool", "http://10.1.2.3:80", {"ALL_PROXY": "socks://x:1", "NO_PROXY": "10.1.2.4"}, refuse("10.1.2.3")),
        ("tool", "http://[fd00::1]:80", {"ALL_PROXY": "socks://x:1", "NO_PROXY": "fd00::/8"}, accept()),
        ("user", f"{there}/v1", {"ALL_PROXY": "socks://x:1"}, refuse("ALL_PROXY", "base_url")),
        ("user", f"{here}/v1", {"ALL_PROXY": "socks5://x:1"}, accept()),
        ("environment", there, {"HTTP_PROXY": "socks5://x:1"}, refuse("HTTP_PROXY", "base_url")),
        ("environment", "ws://search.corp", {}, refuse("base_url")),
        ("environment", here, {"HTTP_PROXY": "socks://x:1", "ALL_PROXY": "http://"}, accept()),
    ]
    inputs += [
        ("tool", f"http://{host}:8000", {"ALL_PROXY": proxy, "HTTP_PROXY": proxy}, accept())
        for host, proxy in (
            ("127.0.0.1", "socks://x:1"),
            ("localhost", "socks5://x:1"),
            ("127.9.9.9", "http://"),
            ("[::1]", "socks4://x"),
            ("LOCALHOST", "ftp://x"),
            ("judge.localhost", "socks://x:1"),
            ("0.0.0.0", "nonsense://x"),
        )
    ]
    asked: list[tuple[str, dict[str, str], str, Right]] = [
        ("http://127.0.0.1:PORT", {"HTTP_PROXY": "http://PROXY"}, "", accept("past")),
        ("http://127.0.0.1:PORT", {"ALL_PROXY": "socks5://127.0.0.1:9"}, "", accept("past")),
        ("http://localhost:PORT", {"HTTP_PROXY": "http://127.0.0.1:9"}, "", accept("past")),
        ("http://service.example:PORT", {"HTTP_PROXY": "http://PROXY"}, "", accept("through")),
        ("http://service.example:PORT", {"all_proxy": "PROXY", "NO_PROXY": "example.org"}, "", accept("through")),
        ("http://10.0.0.7:8000", {"HTTP_PROXY": "http://u:secret@127.0.0.1:9"}, "", outage("HTTP_PROXY", "NO_PROXY")),
        ("http://10.0.0.7:8000", {"HTTP_PROXY": "http://PROXY"}, "407", outage("407", "HTTP_PROXY")),
        ("http://10.0.0.7:8000", {"HTTP_PROXY": "http://PROXY"}, "403", outage("403", "10.0.0.7", "NO_PROXY")),
        (
            "http://service.example:8000",
            {"ALL_PROXY": "socks://u:secret@x:1"},
            "",
            refuse("ALL_PROXY", "service.example"),
        ),
    ]
    return [
        *(
            Case("proxies", f"{kind} at {address} with {changes}", validate(kind, address, changes), right)
            for kind, address, changes, right in inputs
        ),
        *(
            Case(
                "proxies",
                f"a request of the {name} to {address} with {changes} {mode}",
                request(name, address, changes, mode),
                refuse(*right.words) if name == "engine" and right.kind == "outage" else right,
                is_slow=True,
            )
            for name in ("tool", "endpoint", "engine", "openenv")
            for address, changes, mode, right in asked
        ),
    ]


def _statuses() -> list[Case]:
    found: list[Case] = []
    for name in TOOLS:
        statuses = [401, 403, 404, 302, 503, 422]
        if name == "retrieval":
            statuses += [402, 405, 407, 410, 421, 301, 303, 304, 307, 308, 429, 502, 400, 409, 413, 415, 451]
        for status in statuses:
            if status in (400, 409, 413, 422, 451) or (status == 404 and name == "browse"):
                right = models(str(status))
            elif status in (429, 502, 503):
                right = outage(str(status))
            elif status == 407:
                right = outage("407", "proxy")
            else:
                right = outage(str(status), "config.url")
            found.append(Case("statuses", f"{name} answers {status}", call_tool(name, status), right))
    tries: list[tuple[str, str]] = [
        ("1", "1.0"),
        ("7.5", "7.5"),
        ("999", "60.0"),
        ("soon", "None"),
        ("-5", "None"),
        ("", "None"),
        (formatdate(time.time() + 7200, usegmt=True), "60.0"),
        (formatdate(time.time() - 60, usegmt=True), "0"),
    ]
    for header, seconds in tries:
        found.append(
            Case(
                "statuses",
                f"Retry-After: {header}",
                call_tool("retrieval", (503, header)),
                outage(f"next try {seconds}"),
            )
        )
    found.append(Case("statuses", "a 401 with Retry-After", call_tool("e2b", (401, "9")), outage("401", "next try 9")))
    for status, right in {
        401: outage(),
        403: outage(),
        404: outage(),
        308: outage(),
        503: outage(),
        429: outage(),
    }.items():
        found.append(Case("statuses", f"a judge answers {status}", judge(status), right, is_slow=True))
        found.append(
            Case(
                "statuses",
                f"a simulated user's endpoint answers {status}",
                ask_user(status),
                outage(str(status)),
                is_slow=True,
            )
        )
    return found


def cases() -> list[Case]:
    """Return the inputs of this file."""
    return [*_proxies(), *_statuses()]
