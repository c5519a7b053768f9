"""The quickstart's calculator behind HTTP, and its service, which can be taken down: for `benchmarks.outage`.

`HttpCalculator` is for our agent loop, `VerlCalculator` for verl's ToolAgentLoop. Both give the model the same texts.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import httpx
from pydantic import BaseModel

from verl_multiturn.config import read_model
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.calculator import evaluate
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.services.http_client import HttpSettings, HttpTool

SERVICE = "calculator service"
FAILURE = f"the {SERVICE} "
"""Part of the model's text about a failure of the service, but not about a wrong expression."""
GARBAGE = "Expecting value: "
"""Part of the model's text where a client cannot read an answer."""
Way = Literal["refuses", "hangs", "raises", "fails", "garbage"]
"""How the service is down: it refuses connections; it does not answer; it answers each call with a mistake of the
model's; it answers that it has failed; it answers with a page of a gateway, status 200."""


class _Value(BaseModel):
    value: str | None = None
    mistake: str | None = None


class HttpCalculator(HttpTool):
    """A calculator that asks the service at `url`."""

    service, path = SERVICE, "/evaluate"

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(read_model(HttpSettings, config, "config"), config, tool_schema)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Return the value of the expression as text.

        Raises:
            ValueError: The expression has no value.
            UnavailableError: The service is not there.
        """
        answer = await self._ask({"expression": parameters["expression"]}, _Value)
        if answer.value is None:
            raise ValueError(answer.mistake)
        return ToolResponse(text=answer.value)


class ForeignCalculator(BaseTool):
    """A calculator that asks the service as a user's own tool does, with a client of its own."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._url = f"{config['url']}/evaluate"

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        """Return the value of the expression as text, or raise the client's error."""
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            answer = (await client.post(self._url, json={"expression": parameters["expression"]})).json()
        if answer.get("value") is None:
            raise ValueError(answer["mistake"])
        return str(answer["value"])


@dataclass
class Down:
    """A time in which the service was down (`time.time`), and when it answered a call again."""

    begin: float
    end: float | None = None
    accepted: float | None = None


class Service:
    """The service, in threads of this process.

    Attributes:
        down: The times in which it was down.
        answered: Number of calls that it has answered.
        first_refused: When it first answered that it has failed (`time.time`); None: never.
        killed: Whether something of the run was killed meanwhile.

    Args:
        failures: Share of single calls that fail while it is up.
        seed: Seed of these.
    """

    def __init__(self, failures: float = 0.0, seed: int = 0) -> None:
        self.down: list[Down] = []
        self.answered = 0
        self.first_refused: float | None = None
        self.killed = False
        self._failures = failures
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._way: Way | None = None
        self._up = threading.Event()
        self._up.set()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self._listen()

    @property
    def url(self) -> str:
        """Address of the service."""
        return f"http://127.0.0.1:{self._port}"

    def take_down(self, way: Way = "refuses") -> None:
        """Take it down."""
        self.down.append(Down(time.time()))
        self._way = way
        self._up.clear()
        if way == "refuses":
            self._close()

    def bring_up(self) -> None:
        """Bring it up again."""
        was, self._way = self._way, None
        if was == "refuses":
            self._listen()
        self.down[-1].end = time.time()
        self._up.set()

    def close(self) -> None:
        """End it."""
        self._up.set()
        self._close()

    def answer(self, expression: Any) -> tuple[int, dict[str, str] | str] | None:
        """Return the status and the body of an answer; None: there is none."""
        way = self._way
        if way == "hangs":
            self._up.wait()
        elif way == "raises":
            return 200, {"mistake": f"{expression!r} is not what this calculator takes"}
        elif way == "garbage":
            return 200, "<html>502 Bad Gateway</html>"
        elif way is not None:
            self.first_refused = self.first_refused or time.time()
            return None if way == "refuses" else (503, {})
        with self._lock:
            if self._random.random() < self._failures:
                return 503, {}
            self.answered += 1
            if self.down and self.down[-1].accepted is None:
                self.down[-1].accepted = time.time()
        try:
            return 200, {"value": str(evaluate(str(expression)))}
        except ValueError as error:
            return 200, {"mistake": str(error)}

    def _listen(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                answer = service.answer(asked["expression"])
                if answer is None:
                    self.close_connection = True
                    return
                body = (answer[1] if isinstance(answer[1], str) else json.dumps(answer[1])).encode()
                self.send_response(answer[0])
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                """Print nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 256

            def handle_error(self, *arguments: Any) -> None:
                """Print nothing about a client that has gone."""

        self._server = Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def _close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@contextmanager
def serving(failures: float = 0.0, seed: int = 0) -> Iterator[Service]:
    """Run the service while the context lasts."""
    service = Service(failures, seed)
    try:
        yield service
    finally:
        service.close()
