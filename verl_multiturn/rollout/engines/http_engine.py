"""Engines in another process: `Engine` over HTTP, for a model with fixed weights.

    GenerateEngine      SGLang's `/generate`      ids in, ids out, log-probs, the weights' hash
    CompletionsEngine   OpenAI's `/v1/completions` ids in, text out: its ids are encoded anew, without a proof
    ChatEngine          OpenAI's chat completions  messages in, text and calls out (`chat_engine.py`)

Invariants:
- an answer is a whole generation of the weights that were named, or `EngineError`. Whatever a server does (an error, no
  answer, half of one, one without end, other weights) shows nothing about the model, so that the conversation becomes
  invalid;
- the key is in no error and no record, even where a server repeats it;
- a server that stops answering is found: after a silence of `SILENT_S`, a request checks whether it lives.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import aiohttp

from verl_multiturn.calls.outages.causes import retry_after_s
from verl_multiturn.calls.tasks import keep
from verl_multiturn.clients.chat_endpoint import spellings
from verl_multiturn.clients.http_connections import Route, open_session, route_to
from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.rollout.engines.protocol import Ask, Finish, Generation
from verl_multiturn.rollout.trajectory import NO_VERSION

WEIGHTS = 0
"""Version of the weights in a generation, which are the only ones."""
SILENT_S = 30.0
"""Seconds without any answer, while answers are waited for, after which a request checks whether the server lives."""
ALIVE_S = 90.0
"""Seconds in which it has to answer this request. SGLang itself takes up to 20 s to find out that it is dead."""
_BUSY = (429, 503)
"""Statuses of an overloaded server: the request is repeated."""
_PAUSES_S = (1.0, 4.0, 16.0)
_SHOWN = 200
_MOST_BYTES = 256 << 20
"""Most bytes of an answer, unpacked. A generation has some 50 a token."""
_MOST_TOKENS = 1 << 31
_FINISH: Mapping[Any, Finish] = {"stop": "stop", "length": "length"}


class HttpEngine:
    """The common base of the engines: the connections, and the watch over a server that may have died or hang.

    Args:
        url: Address of the server, as in `http://127.0.0.1:30000`.
        alive: Path that answers while the server can generate.
        key: API key; None: none is sent.
        silent_s: As `SILENT_S`.
        alive_s: As `ALIVE_S`.
    """

    level: str
    """Name of the engine's level of detail, for tables and records."""
    alive_below = 400
    """Statuses of the path `alive` below this mean that the server lives."""

    def __init__(
        self, url: str, alive: str, key: str | None = None, silent_s: float = SILENT_S, alive_s: float = ALIVE_S
    ) -> None:
        self.url = url.rstrip("/")
        self._alive = alive
        self._key = spellings(key) if key else None
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._silent_s, self._alive_s = silent_s, alive_s
        self._session: aiohttp.ClientSession | None = None
        self._asked: set[asyncio.Task[Any]] = set()
        self._heard = 0.0
        self._watch: asyncio.Task[None] | None = None
        self.lost: str = ""
        """Why the server is given up; "" while it is not."""

    async def aclose(self) -> None:
        """Close the connections."""
        if self._watch is not None:
            self._watch.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def give_up(self, why: str) -> None:
        """End all questions with an `EngineError`, and refuse those that come: the server has died, or hangs."""
        self.lost = self.lost or why
        for task in self._asked:
            task.cancel()

    def revive(self) -> None:
        """Take requests again after `give_up`: the server answers again, or was started anew."""
        self.lost, self._watch = "", None

    async def check(self) -> None:
        """Refuse a server that does not serve the model, before the first request.

        Raises:
            ConfigError: It does not.
        """
        raise NotImplementedError

    async def generate(self, ask: Ask) -> Generation:
        """Sample, as `Engine.generate` describes."""
        raise NotImplementedError

    async def answered(self) -> bool:
        """Return whether the server reports that it can generate."""
        try:
            limit = aiohttp.ClientTimeout(total=self._alive_s)
            async with self._client().get(self.url + self._alive, headers=self._headers, timeout=limit) as response:
                return response.status < self.alive_below
        except aiohttp.ClientResponseError as error:  # a redirect, which is an answer, too
            return error.status < self.alive_below
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a question, a JSON object.

        Raises:
            EngineError: There is none.
        """
        self._require()
        asking = asyncio.ensure_future(self._ask_again(path, body))
        self._asked.add(asking)
        if self._watch is None:
            self._heard = time.monotonic()
            self._watch = asyncio.ensure_future(self._watches())
        try:
            return await asking
        except asyncio.CancelledError:
            if not _is_cancelled():
                self._require()
            asking.cancel()
            raise
        finally:
            self._asked.discard(asking)
            self._heard = time.monotonic()

    def _require(self) -> None:
        if self.lost:
            raise EngineError(self.lost)

    async def _ask_again(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        for pause_s in (*_PAUSES_S, None):
            async with self._answer(path, body) as response:
                if response.status in _BUSY and pause_s is not None:
                    told_s = retry_after_s(response.headers.get("Retry-After"))
                    pause_s = pause_s if told_s is None else told_s
                else:
                    return await self._read(response)
            self._heard = time.monotonic()
            await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    @asynccontextmanager
    async def _answer(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._client().post(self.url + path, json=body, headers=self._headers) as response:
                yield response
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectionError) and not await self.answered():
                self.give_up(f"{self.url} does not answer{self._route().words}: {describe(error)}")
            raise EngineError(f"{self.url}{path}{self._route().words}: {describe(error)}") from error

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            limit = aiohttp.ClientTimeout(total=self._alive_s)
            async with self._client().get(self.url + path, headers=self._headers, timeout=limit) as response:
                return await self._read(response)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{self.url}{path}{self._route().words}: {describe(error)}") from error

    async def _read(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        where, held = str(response.url), bytearray()
        async for piece in response.content.iter_any():
            held += piece
            if len(held) > _MOST_BYTES:
                raise EngineError(f"{where} answered with more than {_MOST_BYTES >> 20} MiB")
        text = held.decode(errors="replace")  # JSON is UTF-8, whatever the header has
        text = self._key.sub("[key]", text) if self._key else text
        if response.status >= 400:
            raise EngineError(f"{where} answered {response.status}{self._route().words}: {show(text[:_SHOWN])}")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise EngineError(f"{where} answered no JSON object: {show(text[:_SHOWN])}")
        return found

    async def _watches(self) -> None:
        """Give the server up when it answers neither a request nor the check of its life."""
        while not self.lost:
            silent_s = time.monotonic() - self._heard if self._asked else 0.0
            if silent_s < self._silent_s:
                await asyncio.sleep(self._silent_s - silent_s)
            elif await self.answered():
                self._heard = time.monotonic()
            else:
                self.give_up(f"{self.url} has not answered for {time.monotonic() - self._heard:.0f} s")

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A conversation has a time limit of its own; the caller bounds the number of requests at once.
            unbounded = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
            # SGLang's server closes a connection that is idle for 5 s: one that it is about to close is not used.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
            self._session = open_session(self._route(), connector=connector, timeout=unbounded)
        return self._session

    def _route(self) -> Route:
        return route_to(self.url, "the engine", takes_socks=False)


class GenerateEngine(HttpEngine):
    """SGLang's `/generate`, which loses nothing.

    Args:
        url: Address of the server.
        weights: Hash of the weights, with which the server was started (`--weight-version`).
        options: As `HttpEngine` has them.
    """

    level = "ids"

    def __init__(self, url: str, weights: str, **options: Any) -> None:
        super().__init__(url, "/health_generate", **options)
        self._weights = weights

    async def check(self) -> None:
        """Refuse a server that has other weights.

        Raises:
            ConfigError: It has, or it does not report them.
        """
        try:
            found = (await self._get("/get_model_info")).get("weight_version")
        except EngineError as error:
            told = f"{self.url}: SGLang does not answer ({describe(error)}); start it, or name another"
            raise ConfigError(told) from None
        if found != self._weights:
            raise ConfigError(
                f"{self.url} serves the weights {found!r}, and the model's are {self._weights!r}; start SGLang with "
                f"--weight-version {self._weights} and this model"
            )

    async def generate(self, ask: Ask) -> Generation:
        """Sample with SGLang, as `Engine.generate` describes.

        Raises:
            EngineError: There is no answer, or one that is not a generation of the named weights.
        """
        return await self._sample(ask, uuid4().hex)

    async def _sample(self, ask: Ask, rid: str) -> Generation:
        """Sample under a name of the server's, with which it can be stopped (`_stop`)."""
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": list(ask.ids),
            "sampling_params": {**ask.sampling, "max_new_tokens": ask.max_new_tokens},
            "return_logprob": True,
        }
        if ask.images:
            body["image_data"] = [_as_uri(image) for image in ask.images]
        try:
            answer = await self._post("/generate", body)
        except asyncio.CancelledError:
            keep(asyncio.ensure_future(self._stop(rid)))
            raise
        try:
            return self._generation(answer)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise EngineError(f"{self.url}/generate answered what is no generation: {describe(error)}") from error

    def _generation(self, answer: Mapping[str, Any]) -> Generation:
        about = answer["meta_info"]
        version = self._version(about.get("weight_version"))
        ids = list(answer["output_ids"])
        if wrong := [token for token in ids if type(token) is not int]:
            raise TypeError(f"{show(wrong[0])} is no token id")
        sampled = about["output_token_logprobs"]
        if [int(token) for _, token, *_ in sampled] != ids:
            raise EngineError(f"{len(ids)} ids came with the log-probabilities of {len(sampled)} others")
        finish = about["finish_reason"]["type"]
        return Generation(
            ids,
            [float(logprob) for logprob, *_ in sampled],
            [version] * len(ids),
            _FINISH.get(finish, "abort"),
            cached=_count(about.get("cached_tokens")),
        )

    def _version(self, weights: Any) -> int:
        """Return the version of the weights that an answer names.

        Raises:
            EngineError: They are others than the model's.
        """
        if weights != self._weights:
            raise EngineError(f"the weights {weights!r} sampled it, and the model's are {self._weights!r}")
        return WEIGHTS

    async def _stop(self, rid: str) -> None:
        """Let the server stop a generation whose caller is gone."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            told: dict[str, Any] = {"json": {"rid": rid}, "headers": self._headers}
            limit = aiohttp.ClientTimeout(total=5.0)
            async with self._client().post(f"{self.url}/abort_request", **told, timeout=limit):
                pass


class CompletionsEngine(HttpEngine):
    """OpenAI's `/v1/completions`, given ids and answering with text, whose ids are encoded anew.

    The ids need not be those that were sampled, and their log-probabilities are unknown (0.0). So nothing of such a
    conversation may be trained; its text, its calls and its reward are the model's.

    Args:
        url: Address that ends before `/completions`, as in `http://127.0.0.1:8000/v1`.
        encode: Returns the ids of a text, without tokens around it.
        end_id: Token that ends a turn. The endpoint cuts it off.
        options: As `HttpEngine` has them.
    """

    level = "completions"

    def __init__(self, url: str, encode: Callable[[str], Sequence[int]], end_id: int, **options: Any) -> None:
        super().__init__(url, "/models", **options)
        self._encode, self._end_id = encode, end_id
        self._model = ""

    async def check(self) -> None:
        """Ask for the name of the model, the first that the endpoint lists.

        Raises:
            ConfigError: It does not answer, or lists none.
        """
        try:
            self._model = str((await self._get("/models"))["data"][0]["id"])
        except (EngineError, KeyError, IndexError, TypeError) as error:
            told = f"{self.url}/models lists no model ({describe(error)}); name an endpoint that does"
            raise ConfigError(told) from None

    async def generate(self, ask: Ask) -> Generation:
        """Sample with the endpoint, as `Engine.generate` describes.

        Raises:
            EngineError: There is no answer, or one that is not a completion.
        """
        if ask.images:
            raise EngineError(f"{self.url}/completions takes no images")
        # Fields beside OpenAI's that SGLang and vLLM know: stops that are tokens, and control tokens as text.
        sampling = {key: value for key, value in ask.sampling.items() if key != "stop_regex"}
        body = {
            "model": self._model,
            "prompt": list(ask.ids),
            "max_tokens": ask.max_new_tokens,
            **sampling,
            "skip_special_tokens": False,
        }
        answer = await self._post("/completions", body)
        try:
            choice = answer["choices"][0]
            text, finish = choice["text"], _FINISH.get(choice["finish_reason"], "abort")
            if not isinstance(text, str):
                raise TypeError(f"{show(text)} is no text")
            text.encode()  # half of a surrogate pair has no ids
            cached = _count(((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens"))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise EngineError(f"{self.url}/completions answered what is no completion: {describe(error)}") from error
        ids = list(self._encode(text))
        if finish == "stop" and (not ids or ids[-1] not in {*ask.sampling.get("stop_token_ids", ()), self._end_id}):
            ids.append(self._end_id)
        ids = ids[: ask.max_new_tokens]
        return Generation(ids, [0.0] * len(ids), [NO_VERSION] * len(ids), finish, cached=cached)


def _count(found: Any) -> int | None:
    """Return a number of tokens that a server reports; None without one that a record can hold."""
    return found if type(found) is int and 0 <= found < _MOST_TOKENS else None


def _as_uri(image: Any) -> str:
    """Return a PIL image as the address that holds it, without loss."""
    held = io.BytesIO()
    image.save(held, "PNG")
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"


def _is_cancelled() -> bool:
    """Return whether the running task itself was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
