"""Tools out of verl's own older wheels, loaded from a YAML entry and called through our runtime.

    pip download --no-deps --dest WHEELS verl==0.4.1
    python -m benchmarks.verl_tools WHEELS

Each wheel is unpacked and imported in a process of its own, in place of the installed verl. One server of ours takes
the place of all services that the tools call. A tool that a wheel does not have, or that needs a package that is not
installed, is counted apart. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ANSWER = {
    "result": [[{"document": {"contents": "Tea is a drink."}, "score": 1.0}]],
    "status": "Success",
    "run_result": {"status": "Finished", "stdout": "2\n", "stderr": "", "execution_time": 0.1, "return_code": 0},
    "compile_result": None,
}
QUERY = {"query_list": {"type": "array", "items": {"type": "string"}, "description": "Queries."}}
CODE = {"code": {"type": "string", "description": "Python."}}
SAID = {"answer": {"type": "string", "description": "The answer."}}
TOOLS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "gsm8k": ("verl.tools.gsm8k_tool.Gsm8kTool", SAID, {"answer": "#### 42"}, "reward"),
    "search": ("verl.tools.search_tool.SearchTool", QUERY, {"query_list": ["tea"]}, "Tea is a drink."),
    "sandbox": ("verl.tools.sandbox_fusion_tools.SandboxFusionTool", CODE, {"code": "print(1+1)"}, "2"),
}


class Services(BaseHTTPRequestHandler):
    """A server that answers every request with all that any of the tools looks for."""

    def do_POST(self) -> None:
        """Read the request and answer it."""
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


async def converse(name: str, url: str) -> str:
    """Run one conversation with a tool.

    Args:
        name: Key of `TOOLS`.
        url: Address of the server in the place of the services.

    Returns:
        The error, empty if there is none. "not loaded: …" means that the wheel lacks the tool or a package is missing.
    """
    from verl_multiturn.calls.slots import Gates
    from verl_multiturn.chat.parsing.turns import ToolCall
    from verl_multiturn.errors import MultiTurnError
    from verl_multiturn.tools.loading.registry import build_tools
    from verl_multiturn.tools.running.gate import Gate
    from verl_multiturn.tools.running.session import ToolSession

    class_name, properties, arguments, expected = TOOLS[name]
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": "A tool of verl.", "parameters": parameters}
    config = {"type": "native", "retrieval_service_url": url, "sandbox_fusion_url": url, "num_workers": 2}
    entry = {"class_name": class_name, "config": config, "tool_schema": {"type": "function", "function": function}}
    try:
        (tool,) = build_tools(entry, "benchmark")
    except MultiTurnError as error:
        return f"not loaded: {error}"[:300] if "No module named" in str(error) else f"{error}"[:300]
    row = {name: {"create_kwargs": {"ground_truth": "42"}}}
    try:
        async with ToolSession("r1", {name: tool}, row, Gates(Gate, 60.0), 1) as session:
            (result,) = await session.execute([ToolCall(name, json.dumps(arguments), "c1")])
            await session.calc_rewards()
    except MultiTurnError as error:
        return f"raised {error}"[:300]
    return "" if result.status == "ok" and expected in result.text else f"{result.status}: {result.text}"[:300]


def one(folder: str) -> None:
    """Try the tools of one unpacked wheel, and print the error of each as one JSON object."""
    sys.path.insert(0, folder)
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": folder}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Services)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    print(json.dumps({name: asyncio.run(converse(name, url)) for name in TOOLS}), flush=True)
    ray.shutdown()


def main() -> None:
    """Try the tools of all wheels in a folder, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--one", action="store_true", help="WHEELS is one unpacked wheel")
    arguments = parser.parse_args()
    if arguments.one:
        one(str(arguments.wheels.resolve()))
        return
    counts: Counter[str] = Counter()
    wheels = sorted(arguments.wheels.glob("verl-*.whl"))
    for wheel in wheels:
        with tempfile.TemporaryDirectory() as folder:
            zipfile.ZipFile(wheel).extractall(folder)
            command = [sys.executable, "-m", "benchmarks.verl_tools", folder, "--one"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{wheel.name}: {done.stderr[-2000:]}")
        for name, wrong in json.loads(done.stdout.splitlines()[-1]).items():
            kind = "not_loaded" if wrong.startswith("not loaded") else "failed" if wrong else "worked"
            counts[kind] += 1
            print(f"{wheel.name.split('-')[1]} {name}: {wrong or 'works'}")
    print(json.dumps({"wheels": len(wheels), **{kind: counts[kind] for kind in ("worked", "not_loaded", "failed")}}))


if __name__ == "__main__":
    main()
