"""An MCP server of an older protocol, without the SDK: `python plain.py MODE` over stdio.

The modes:
- `exits` and `silent` do so before they answer anything.
- `bad_schema` lists a good tool beside one whose schema is not a schema.
- `bad_list` lists a tool that the protocol does not allow.
- `mixed` lists good tools and tools that the protocol or the client refuses, on two pages.
- `twice` lists two tools of one name.
- `twins` lists two tools whose names differ only in punctuation.
- `asks` has one tool that asks the client for a sampling and for an elicitation, and answers with the responses.
- `endless` lists its tools page by page without end.
"""

import json
import sys
import time

OBJECT = {"type": "object", "properties": {}}
NO_SCHEMA = {"type": "object", "properties": {"a": {"type": "objekt"}}}
TUPLE = {"type": "object", "properties": {"p": {"type": "array", "items": [{"type": "number"}]}}}
DRAFT = "http://json-schema.org/draft-07/schema#"
MIXED = [
    {"name": "good", "description": None, "inputSchema": {"$schema": DRAFT, **OBJECT}},
    {"name": "no_type", "inputSchema": {"properties": {}}},
    {"name": "null_type", "inputSchema": {"type": None}},
    {"name": "no_schema"},
    {"name": "tuple", "inputSchema": {"$schema": DRAFT, **TUPLE}},
    {"inputSchema": OBJECT},
    "no tool",
]
MORE = [
    {"name": "wrong_output", "inputSchema": OBJECT, "outputSchema": {"type": "string"}},
    {"name": "bad_output", "inputSchema": OBJECT, "outputSchema": NO_SCHEMA},
    {"name": "last", "inputSchema": OBJECT},
    {"name": "get[1]"},
    {"name": "unknown_draft", "inputSchema": {"$schema": "http://127.0.0.1:9/x", **OBJECT}},
]
TOOLS = {
    "mixed": MIXED,
    "twice": [{"name": "a", "inputSchema": OBJECT}, {"name": "a", "inputSchema": NO_SCHEMA}, MORE[2]],
    "asks": [{"name": "ask", "inputSchema": OBJECT}],
    "bad_schema": [{"name": "bad", "inputSchema": NO_SCHEMA}, {"name": "good", "inputSchema": OBJECT}],
    "bad_list": [{"name": "bad", "inputSchema": {"type": "array"}}],
    "twins": [{"name": "a b", "inputSchema": OBJECT}, {"name": "a/b", "inputSchema": OBJECT}],
    "endless": [{"name": "one", "inputSchema": OBJECT}],
}


def send(**message: object) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def ask(method: str, params: dict[str, object]) -> str:
    send(id=method, method=method, params=params)
    for line in sys.stdin:
        answer = json.loads(line)
        if answer.get("id") == method:
            return f"{method}: {answer.get('error', {}).get('message', 'answered')}"
    return "the client has gone"


def answer(mode: str, method: str, params: dict[str, object]) -> object:
    if method == "initialize":
        info = {"name": "plain", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list" and mode == "mixed":
        return {"tools": MORE} if params.get("cursor") else {"tools": MIXED, "nextCursor": "more"}
    if method == "tools/list":
        return {"tools": TOOLS[mode]} | ({"nextCursor": "more"} if mode == "endless" else {})
    if method == "tools/call":
        message = {"role": "user", "content": {"type": "text", "text": "hello"}}
        schema = {"type": "object", "properties": {"name": {"type": "string"}}}
        answers = [
            ask("sampling/createMessage", {"messages": [message], "maxTokens": 5}),
            ask("elicitation/create", {"message": "who?", "requestedSchema": schema}),
        ]
        return {"content": [{"type": "text", "text": "; ".join(answers)}]}
    return None


def main(mode: str) -> None:
    if mode == "exits":
        print("no licence key, giving up", file=sys.stderr)
        sys.exit(3)
    if mode == "silent":
        time.sleep(3600)
    print("Welcome! This line is no JSON.", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request or "method" not in request:
            continue
        result = answer(mode, request["method"], request.get("params", {}))
        if result is None:
            send(id=request["id"], error={"code": -32601, "message": "Method not found"})
        else:
            send(id=request["id"], result=result)


if __name__ == "__main__":
    main(sys.argv[1])
