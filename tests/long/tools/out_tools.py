"""Tools that a server offers to other programs, for `tools_out.py` and the tests of `verl-multiturn mcp`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from verl_multiturn import BaseTool, ToolResponse, ToolSchema


class Till(BaseTool):
    """A till with a balance, which writes a line into a file for each `create` and `release`."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.balances: dict[str, list[int]] = {}

    def get_schema(self) -> dict[str, Any]:
        """Return the schema."""
        amount = {"type": "integer", "description": "Cents."}
        parameters = {"type": "object", "properties": {"amount": amount, "wait_s": {"type": "number"}}}
        function = {"name": "till", "description": "Put money into the till.", "parameters": parameters}
        return {"type": "function", "function": {**function, "parameters": {**parameters, "required": ["amount"]}}}

    def log(self, *words: str) -> None:
        """Append a line; many processes do so at once."""
        with open(self.config["log"], "ab", buffering=0) as file:
            file.write((" ".join([*words, str(os.getpid())]) + "\n").encode())

    async def create(self, instance_id: str, budget: int = 0) -> None:  # type: ignore[override]
        """Begin with the budget."""
        self.balances[instance_id] = [budget]
        self.log("create", instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any]) -> Any:  # type: ignore[override]
        """Return the balance."""
        amounts = self.balances[instance_id]
        if wait_s := parameters.get("wait_s"):
            self.log("waits", instance_id)
            await asyncio.sleep(wait_s)
        amounts.append(parameters["amount"])
        said = f"{len(amounts) - 1} payments, {sum(amounts)} cents"
        await asyncio.sleep(0)
        return ToolResponse(said), 0.25, {"payments": len(amounts) - 1}

    async def calc_reward(self, instance_id: str) -> float:  # type: ignore[override]
        """Return the balance."""
        return float(sum(self.balances[instance_id]))

    async def release(self, instance_id: str) -> None:  # type: ignore[override]
        """End, which must happen once."""
        self.log("release", instance_id)
        del self.balances[instance_id]


class Listed(BaseTool):
    """A tool with a schema from a file."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Return the arguments as they came."""
        return json.dumps(parameters, ensure_ascii=False)


def listed(path: str) -> list[Listed]:
    """Return a tool for each schema in a file, one in a line."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [Listed({}, ToolSchema.read(json.loads(line), f"line {number}")) for number, line in enumerate(lines)]


def read_lot() -> str:
    """Read the lot number."""
    return Path("lot.txt").read_text(encoding="utf-8")


def chatter(depth: int) -> str:
    """Print in each way that there is.

    Args:
        depth: A number.
    """
    print("printed")
    sys.__stdout__.write("written\n")  # type: ignore[union-attr]
    os.write(1, b'{"jsonrpc": "2.0", "id": 1, "result": {}}\n')
    subprocess.run(["sh", "-c", "echo from a program; cat"], check=True)  # `cat` ends: it has no standard input
    return f"said {depth}"


def picture(width: int) -> ToolResponse:
    """Draw a red picture.

    Args:
        width: Its width.
    """
    from PIL import Image

    return ToolResponse("red", [Image.new("RGB", (width, 2), (255, 0, 0))])


def hang() -> str:
    """Never return."""
    while True:
        time.sleep(1)


class Broken(BaseTool):
    """A tool that returns what no tool may."""

    def get_schema(self) -> dict[str, Any]:
        """Return the schema."""
        return {"type": "function", "function": {"name": "broken"}}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Return a set."""
        return {1, 2}


print("a module that prints when it is imported")
