"""The requests of AReaL's client for sessions over HTTP, as areal 1.0.4 (`OpenAIProxyClient`) sent them to a listener.

They were recorded once, of a session with a reward of the last completion, one of a named completion, and an end. Only
the keys, the ids and the numbers are filled in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

_HEADERS = {
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate, br",
    "User-Agent": "Python/3.11 aiohttp/3.14.5",
    "Content-Type": "application/json",
}
_START = '{"task_id": %s, "api_key": null}'
_REWARD = '{"interaction_id": %s, "reward": %s}'
_END = "{}"


@dataclass(frozen=True)
class Answered:
    """The answer to a request."""

    status: int
    body: Any


class ArealSession:
    """A session as AReaL's client holds it: the admin key starts it, the key of the answer does the rest.

    Args:
        client: Sends the requests.
        url: Address of the gateway, without a path.
        admin_key: Key that starts sessions.
    """

    def __init__(self, client: aiohttp.ClientSession, url: str, admin_key: str) -> None:
        self._client, self._url, self._key = client, url.rstrip("/"), admin_key
        self.session_id = ""
        self.api_key = ""

    async def start(self, task: str) -> Answered:
        """Start the session; the client reads `session_id` and `api_key` of the answer."""
        answer = await self._post("/rl/start_session", _START % json.dumps(task), self._key)
        if answer.status < 400 and isinstance(answer.body, Mapping):
            self.session_id, self.api_key = answer.body["session_id"], answer.body["api_key"]
        return answer

    async def reward_last(self, reward: float) -> Answered:
        """Reward the last completion."""
        return await self._post("/rl/set_reward", _REWARD % ("null", json.dumps(reward)), self.api_key)

    async def reward(self, interaction_id: str, reward: float) -> Answered:
        """Reward a completion by its id."""
        return await self._post(
            "/rl/set_reward", _REWARD % (json.dumps(interaction_id), json.dumps(reward)), self.api_key
        )

    async def end(self) -> Answered:
        """End the session."""
        return await self._post("/rl/end_session", _END, self.api_key)

    async def _post(self, path: str, body: str, key: str) -> Answered:
        headers = {**_HEADERS, "Authorization": f"Bearer {key}"}
        async with self._client.post(self._url + path, data=body.encode(), headers=headers) as response:
            return Answered(response.status, await response.json())
