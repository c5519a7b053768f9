"""A small MCP server with a state, without the SDK, which starts fast: `python notes.py OPTION=VALUE …` over stdio.

The options:
- `log=FILE`: it writes its process id there when it starts.
- `file=FILE`: it keeps its notes there, and reads them from there.
- `dies=FILE`: it ends at its start where this file is there.
- `slow=FILE`: it starts after a second where this file is there.
- `other=FILE`: it lists other tools where this file is there: its contents are `missing`, `changed` or `more`.
- `stays=1`: it ignores the end of its input and SIGTERM.
- `chatty=1`: it writes lines that are no messages, and one that answers a call of somebody else.
- `tty=1`: it ends where it has no terminal.
- `mood=coin` or `mood=clock`: its tool `mood` answers at random, or with the time.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

OPTIONS = dict(option.split("=", 1) for option in sys.argv[1:])
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NOTHING = {"type": "object", "properties": {}}
TOOLS = {"add": TEXT, "read": NOTHING, "count": NOTHING, "pid": NOTHING, "die": NOTHING, "where": NOTHING, "echo": TEXT}
notes: list[str] = []
calls = 0


def there(option: str) -> bool:
    return option in OPTIONS and Path(OPTIONS[option]).exists()


def send(**message: object) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def listed() -> list[dict[str, object]]:
    tools = TOOLS | ({"mood": NOTHING} if "mood" in OPTIONS else {})
    how = Path(OPTIONS["other"]).read_text() if there("other") else ""
    if how == "missing":
        del tools["read"]
    if how == "more":
        tools["extra"] = NOTHING
    said = "Read otherwise." if how == "changed" else "Read."
    return [{"name": name, "description": said, "inputSchema": schema} for name, schema in tools.items()]


def call(name: str, arguments: dict[str, str]) -> str:
    global calls
    if name == "add":
        notes.append(arguments["text"])
        if "file" in OPTIONS:
            Path(OPTIONS["file"]).write_text("\n".join(notes))
        return "added"
    if name == "read":
        return "\n".join(notes)
    if name == "count":
        calls += 1
        return str(calls)
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "where":
        return json.dumps([os.getcwd(), *sys.argv[1:]])
    if name == "mood":
        return random.choice(["good", "bad"]) if OPTIONS["mood"] == "coin" else str(time.monotonic_ns())
    return str(os.getpid()) if name == "pid" else arguments["text"]


def answer(method: str, params: dict[str, object]) -> object:
    if method == "initialize":
        info = {"name": "notes", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": listed()}
    if method == "tools/call":
        arguments = params.get("arguments") or {}
        assert isinstance(arguments, dict)
        return {"content": [{"type": "text", "text": call(str(params["name"]), arguments)}]}
    return None


def main() -> None:
    if "log" in OPTIONS:
        with open(OPTIONS["log"], "a") as log:
            print(os.getpid(), file=log)
    if there("dies"):
        sys.exit("no licence key, giving up")
    if "tty" in OPTIONS and not sys.stdin.isatty():
        sys.exit("I need a terminal")
    if there("slow"):
        time.sleep(1)
    if there("file"):
        notes.extend(Path(OPTIONS["file"]).read_text().splitlines())
    if "stays" in OPTIONS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request or "method" not in request:
            continue
        if "chatty" in OPTIONS:
            print("Processing request of a customer…", flush=True)
            send(id=request["id"] + 1_000_000 if isinstance(request["id"], int) else "x", result={"content": []})
        result = answer(request["method"], request.get("params", {}))
        if result is None:
            send(id=request["id"], error={"code": -32601, "message": "Method not found"})
        else:
            send(id=request["id"], result=result)
    while "stays" in OPTIONS:
        time.sleep(3600)


if __name__ == "__main__":
    main()
