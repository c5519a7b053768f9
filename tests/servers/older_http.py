"""An MCP server of an older protocol over HTTP, without the SDK; it knows sessions and can forget them."""

import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOL = {"name": "session", "inputSchema": {"type": "object", "properties": {}}}


class OlderHttpServer:
    """A server in threads of this process; its tool `session` answers with the id of the caller's session."""

    def __init__(self) -> None:
        self.sessions: set[str] = set()
        self.refusal: tuple[int, dict[str, str]] | None = None
        """Status and headers by which it answers all messages; None: it takes them."""
        self.asked = 0
        """Number of messages that it refused."""
        self.broken: tuple[int, dict[str, str], bytes] | None = None
        """Status, headers and begin of its next answer to a call, of which it sends no more."""
        self.held = 0
        """Number of calls whose answers wait for `release`."""
        self.endless: str | None = None
        """Method of the messages whose answers wait for `release` within their bodies; `DELETE`: of HTTP."""
        self.begun = 0
        """Number of such answers that it began."""
        self.release = threading.Event()
        self.release.set()
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if served.refusal is not None:
                    served.asked += 1
                    self.answer(served.refusal[0], {"detail": "no"}, served.refusal[1])
                    return
                if request["method"] == served.endless:
                    self.begin(200, {"content-type": "application/json"}, b"{")
                    served.begun += 1
                    served.release.wait()
                    return
                if request["method"] == "tools/call":
                    if served.broken is not None:
                        broken, served.broken = served.broken, None
                        self.begin(*broken)
                        return
                    served.held += not served.release.is_set()
                    served.release.wait()
                self.answer(*served.answer(request, self.headers.get("mcp-session-id")))

            def do_GET(self) -> None:
                self.answer(405, None, {})

            def do_DELETE(self) -> None:
                if served.endless == "DELETE":
                    served.release.wait()
                served.sessions.discard(self.headers.get("mcp-session-id", ""))
                self.answer(200, None, {})

            def answer(self, status: int, content: Any, headers: dict[str, str]) -> None:
                body = b"" if content is None else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {**headers, "content-type": "application/json"}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def begin(self, status: int, headers: dict[str, str], begin: bytes) -> None:
                self.send_response(status)
                for name, value in {"content-length": "100", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(begin)
                self.wfile.flush()

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/mcp"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def answer(self, request: dict[str, Any], session: str | None) -> tuple[int, Any, dict[str, str]]:
        """Return status, content and headers of the response to a request."""

        def result(content: Any) -> dict[str, Any]:
            return {"jsonrpc": "2.0", "id": request["id"], "result": content}

        if request["method"] == "initialize":
            session = uuid.uuid4().hex
            self.sessions.add(session)
            info = {"name": "older", "version": "1"}
            version = request["params"]["protocolVersion"]
            content = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
            return 200, result(content), {"mcp-session-id": session}
        if session not in self.sessions:
            error = {"code": -32600, "message": "Session not found"}
            return (404 if session else 400), {"jsonrpc": "2.0", "id": None, "error": error}, {}
        if request["method"] == "tools/list":
            return 200, result({"tools": [TOOL]}), {}
        if request["method"] == "tools/call":
            return 200, result({"content": [{"type": "text", "text": session}]}), {}
        return 202, None, {}

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
