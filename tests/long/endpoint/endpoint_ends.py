"""The ends of agents of `benchmarks.endpoint_attacks`: what an agent does, and how its session has to end.

An agent's source is the body of a function with `ask`, which asks the model once and gives the answer's JSON, and
`session`, the address. `play` runs it in a thread of the worker or in a process.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CONTRACT = "AgentContractError"
_HANG = "time.sleep(1e6)"
_STREAM = """\
import socket
host, port = session.anthropic_base_url.removeprefix("http://").split(":")
body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "x"}]}'
head = f"POST /v1/chat/completions HTTP/1.1\\r\\nhost: h\\r\\nauthorization: Bearer {session.api_key}\\r\\n"
client = socket.create_connection((host, int(port)))
client.sendall(head.encode() + b"content-length: %d\\r\\n\\r\\n" % len(body) + body)
"""


@dataclass(frozen=True)
class HostileEnd:
    """An agent, and the end of its session."""

    name: str
    source: str
    ends: str
    """Stop reason and kind of the agent's end; or the class of the error that its author gets."""
    only: str | None = None
    """The one runner that it is for; None: each."""
    wall_clock_s: float = 600.0


_RETURNS = {
    "nothing": ("None", "finished returned"),
    "a number": ("0.5", "finished returned"),
    "zero": ("0", "finished returned"),
    "true": ("True", "finished returned"),
    "NaN": ("float('nan')", _CONTRACT),
    "infinity": ("float('inf')", _CONTRACT),
    "minus infinity": ("-float('inf')", _CONTRACT),
    "a number beyond sums": ("1e308", _CONTRACT),
    "a whole number beyond floats": ("10**400", _CONTRACT),
    "a complex number": ("1j", _CONTRACT),
    "a text": ("'1.0'", _CONTRACT),
    "bytes": ("b'1'", _CONTRACT),
    "a list": ("[1.0]", _CONTRACT),
    "an object": ("object()", _CONTRACT),
    "an unknown entry": ("{'score': 1.0}", _CONTRACT),
    "a reward that is a text": ("{'reward': 'x'}", _CONTRACT),
    "a reward of a completion that is not there": ("{'reward': 1.0, 'completions': {'chatcmpl-x': 1.0}}", _CONTRACT),
    "a completion that is a number": ("{'reward': 1.0, 'completions': {5: 1.0}}", _CONTRACT),
    "completions that are a list": ("{'completions': [1.0]}", _CONTRACT),
    "roles where there are none": ("{'roles': {'white': 1.0}}", _CONTRACT),
    "empty roles": ("{'roles': {}}", _CONTRACT),
}
_RAISES = {
    "an error": ("ValueError('x')", "agent_error raised"),
    "an error without a text": ("ValueError", "agent_error raised"),
    "half a surrogate pair": ("ValueError('\\ud800')", "agent_error raised"),
    "an error that holds its key": ("ValueError(session.api_key)", "agent_error raised"),
    "an error that cannot be shown": (
        "type('E', (Exception,), {'__str__': lambda self: 1 / 0})()",
        "agent_error raised",
    ),
    "MemoryError": ("MemoryError", "agent_error raised"),
    "RecursionError": ("RecursionError", "agent_error raised"),
    "BaseException": ("BaseException('x')", "agent_error raised"),
    "KeyboardInterrupt": ("KeyboardInterrupt", "agent_error raised"),
    "CancelledError": ("asyncio.CancelledError", "agent_error raised"),
    "StopIteration": ("StopIteration", "agent_error raised"),
    "SystemExit of 0": ("SystemExit(0)", "finished returned"),
    "SystemExit of 3": ("SystemExit(3)", "agent_error raised"),
    "an outage": ("OutageError('gone')", "outage outage"),
    "what cannot be judged": ("UnjudgedError('torn')", "unjudged unjudged"),
    "a wrong setting after an answer": ("ConfigError('x; y')", "agent_error raised"),
}
_OTHERS = [
    HostileEnd("never asks", "return 1.0", "agent_failed returned"),
    HostileEnd("raises before it asks", "raise ValueError('x')", "agent_failed raised"),
    HostileEnd("names a wrong setting before it asks", "raise ConfigError('x; y')", "ConfigError"),
    HostileEnd("asks with a foreign key", "ask(key='foreign')", "agent_failed raised"),
    HostileEnd("asks with a foreign key and its own", "status(key='foreign'); ask(); return 1.0", "finished returned"),
    HostileEnd("asks in a thread that stays", "ask(); threading.Thread(target=later, daemon=True).start(); return 1.0",
               "finished returned"),
    HostileEnd("leaves a stream in its middle", f"{_STREAM}client.recv(1); client.close(); ask(); return 1.0",
               "finished returned"),
    HostileEnd("leaves a request open", f"{_STREAM}ask(); return 1.0", "finished returned"),
    HostileEnd("hangs before it asks", _HANG, "agent_failed timed_out", "process", 3.0),
    HostileEnd("exits with 0", "ask(); os._exit(0)", "agent_error exited", "process"),
    HostileEnd("exits with 1", "ask(); os._exit(1)", "agent_error exited", "process"),
    HostileEnd("exits before it asks", "os._exit(1)", "agent_failed exited", "process"),
    HostileEnd("ends by SIGKILL", "ask(); os.kill(os.getpid(), 9)", "agent_error exited", "process"),
    HostileEnd("ends by SIGTERM", "ask(); os.kill(os.getpid(), 15)", "agent_error exited", "process"),
    HostileEnd("ends by SIGSEGV", "ask(); os.kill(os.getpid(), 11)", "agent_error exited", "process"),
    HostileEnd("leaves a child", f"ask()\nif not os.fork():\n    {_HANG}\nreturn 1.0", "finished returned", "process"),
    HostileEnd("leaves a child of its own session",
               f"ask()\nif not os.fork():\n    os.setsid()\n    {_HANG}\nreturn 1.0", "finished returned", "process"),
    HostileEnd("closes its output", "ask(); os.close(1); os.close(2); return 1.0", "finished returned", "process"),
    HostileEnd("is killed within a stream", f"ask()\n{_STREAM}client.recv(1); os.kill(os.getpid(), 9)",
               "agent_error exited", "process"),
]  # fmt: skip
ENDS: Sequence[HostileEnd] = [
    *(HostileEnd(f"returns {name}", f"ask(); return {value}", ends) for name, (value, ends) in _RETURNS.items()),
    *(HostileEnd(f"raises {name}", f"ask(); raise {value}", ends) for name, (value, ends) in _RAISES.items()),
    *_OTHERS,
]


def play(row: Mapping[str, Any], session: Any) -> Any:
    """Do what the row's source says; the agent of all ends."""
    import asyncio
    import contextlib
    import os
    import threading
    import time

    import httpx

    from verl_multiturn import ConfigError, OutageError, UnjudgedError

    def answered(key: str | None = None) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        headers = {"authorization": f"Bearer {key or session.api_key}"}
        return httpx.post(f"{session.base_url}/chat/completions", json=body, headers=headers, timeout=600.0)

    def ask(key: str | None = None) -> Any:
        return answered(key).raise_for_status().json()

    def status(key: str | None = None) -> int:
        return answered(key).status_code

    def later() -> None:
        time.sleep(0.2)
        with contextlib.suppress(httpx.HTTPError):  # the server may be gone by then
            status()

    known: dict[str, Any] = {"asyncio": asyncio, "os": os, "threading": threading, "time": time}
    known |= {"ConfigError": ConfigError, "OutageError": OutageError, "UnjudgedError": UnjudgedError}
    known |= {"ask": ask, "status": status, "later": later, "session": session}
    source = f"def played():\n{textwrap.indent(row['extra_info']['source'], '    ')}\n"
    exec(compile(source, "an end", "exec"), known)
    return known["played"]()
