"""Stand-ins of generation servers in a real Ray, which die and hang as their tests ask for."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

DEADLY, ENDLESS = "deadly", "endless"


class Server:
    """A server that samples its script: tokens, stop reason, version and pause of each attempt, in order.

    It counts on from the last id that it is given. In a `DEADLY` attempt it dies; an `ENDLESS` one never ends.
    """

    def __init__(self, script: Any = (), **_: Any) -> None:
        self.script = list(script)
        self.asked: list[list[int]] = []
        self.changed = asyncio.Event()
        self.is_awaited = asyncio.Event()
        self.calls: list[str] = []

    async def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> Any:
        self.asked.append(prompt_ids)
        self.changed.set()
        attempt = self.script.pop(0)
        if attempt == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == ENDLESS:
            await asyncio.sleep(1e6)
        count, reason, version, paused = attempt
        return SimpleNamespace(
            token_ids=[prompt_ids[-1] + i + 1 for i in range(count)],
            log_probs=[-1.0] * count,
            routed_experts=None,
            num_preempted=None,
            stop_reason=reason,
            extra_fields={"global_steps": version, "paused": paused},
        )

    async def resumed(self, patience_s: float) -> bool:
        self.is_awaited.set()
        await asyncio.sleep(1e6)
        return True

    async def abort_request(self, request_id: str) -> None:
        return

    async def reached(self, attempts: int) -> list[list[int]]:
        """Wait for so many attempts, and return their prompts."""
        while len(self.asked) < attempts:
            self.changed.clear()
            await self.changed.wait()
        return self.asked

    async def awaited(self) -> None:
        """Wait until a client waits for the end of the pause."""
        await self.is_awaited.wait()

    async def pid(self) -> int:
        return os.getpid()

    # Requests of a replica to its server.

    async def launch_server(self, **_: Any) -> None:
        return

    async def get_server_address(self) -> tuple[str, int]:
        return "10.0.0.1", os.getpid()

    async def abort_all_requests(self, reject_request: bool) -> None:
        self.calls.append("abort")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def called(self) -> list[str]:
        return self.calls


class Worker:
    """The worker beside a server, which keeps an adapter of it."""

    def __init__(self) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        self.server_adapter = SimpleNamespace(_engine="of the dead server")


def start(*script: Any) -> Any:
    import ray

    return ray.remote(num_cpus=0)(Server).remote(script)


def balancer_of(**servers: Any) -> Any:
    import ray
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    return ray.remote(num_cpus=0)(GlobalRequestLoadBalancer).remote(servers)


def listed(balancer: Any) -> list[str]:
    import ray

    return list(ray.get(balancer.get_all_servers.remote()))


def kill(server: Any, how: int = signal.SIGKILL) -> None:
    import ray

    os.kill(ray.get(server.pid.remote()), how)


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 500
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)
