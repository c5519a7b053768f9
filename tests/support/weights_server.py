"""A stand-in of SGLang's server whose weights can be swapped: a model is a folder, and says one token for ever."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.served import served


class WeightsServer:
    """The server's state.

    Args:
        token: Token that the first weights say.
        version: Hash of the first weights.
        token_of: Returns the token that the weights in a folder say; raises ValueError where they cannot be loaded.
        step_s: Seconds for a token.
    """

    def __init__(self, token: int, version: str, token_of: Callable[[Path], int], step_s: float = 0.0) -> None:
        self.token, self.version, self.token_of, self.step_s = token, version, token_of, step_s
        self.loaded: list[str] = []
        self.aborted: set[str] = set()
        self.underway = 0
        self.is_loading = False
        self.loads = asyncio.Event()
        """Set when the first load begins."""
        self.logprob = -0.25
        self.nan_tokens: set[int] = set()
        """Tokens of weights whose log-probabilities are no numbers."""
        self.hanging_tokens: set[int] = set()
        """Tokens of weights that never answer."""
        self.keeps_tokens = True
        """Whether a generation that is aborted returns the tokens so far."""
        self.deaf = 0
        """Orders to stop a generation that it ignores before it takes one."""
        self.abort_status = 200
        """Status of the answer of a generation that is aborted."""
        self.place = "first"
        """Folder of the weights, as it reports it."""
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Serve on a port, 0: a free one; yields the address."""
        async with served(
            port,
            generate=self._generate,
            update_weights_from_disk=self._update,
            abort_request=self._abort,
            get_model_info=self._about,
            health_generate=self._about,
        ) as url:
            yield url

    async def _about(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version, "model_path": self.place})

    async def _abort(self, request: web.Request) -> web.Response:
        if self.deaf:
            self.deaf -= 1
            return web.Response()
        self.aborted.add((await request.json())["rid"])
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self._lock:
            return await self._load(body)

    async def _load(self, body: dict[str, Any]) -> web.Response:
        assert not self.underway, "weights are loaded while a generation is under way"
        self.is_loading = True
        self.loads.set()
        await asyncio.sleep(self.step_s)
        self.is_loading = False
        try:
            token = self.token_of(Path(body["model_path"]))
        except ValueError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        self.token, self.version, self.place = token, body["weight_version"], body["model_path"]
        self.loaded.append(body["model_path"])
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert not self.is_loading, "a generation begins while weights are loaded"
        ids: list[int] = []
        if self.token in self.hanging_tokens:
            await asyncio.Event().wait()
        self.underway += 1
        try:
            for _ in range(body["sampling_params"]["max_new_tokens"]):
                await asyncio.sleep(self.step_s)
                if body["rid"] in self.aborted:
                    if self.abort_status != 200:
                        return web.json_response({"error": "aborted"}, status=self.abort_status)
                    return self._answer(ids if self.keeps_tokens else [], {"type": "abort", "message": ""})
                ids.append(self.token)
            return self._answer(ids, {"type": "length", "length": len(ids)})
        finally:
            self.underway -= 1

    def _answer(self, ids: list[int], finish: dict[str, Any]) -> web.Response:
        logprob = math.nan if self.token in self.nan_tokens else self.logprob
        return web.json_response({
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "finish_reason": finish,
                "output_token_logprobs": [[logprob, each, None] for each in ids],
                "weight_version": self.version,
                "cached_tokens": 0,
            },
        })  # fmt: skip
