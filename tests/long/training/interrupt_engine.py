"""The real server of `rollout.name=sglang_async` in this process, and a journal of SGLang's outputs.

    client → Handle (Ray's `.remote`) → server → Journal around `tokenizer_manager.generate_request` → SGLang

The journal knows the weights that are loaded, since `Engine.load` alone loads them. It never requests a version from
the server. It distinguishes conversations by a context variable, which follows a conversation's tasks into the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from tests.long.training.interrupt_stand_ins import Balancer, Handle

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = ROOT / "recipes" / "quickstart" / "model"
ROLLOUT = "actor_rollout_ref.rollout"
RESPONSE_LENGTH = 512
SETTINGS = {
    f"{ROLLOUT}.name": "sglang_async",
    f"{ROLLOUT}.dtype": "float32",
    f"{ROLLOUT}.load_format": "auto",
    f"{ROLLOUT}.gpu_memory_utilization": "0.8",  # share of the memory that is free at the start
    f"{ROLLOUT}.prompt_length": "320",
    f"{ROLLOUT}.response_length": str(RESPONSE_LENGTH),
    f"{ROLLOUT}.multi_turn.enable": "True",
    f"{ROLLOUT}.multi_turn.format": "hermes",
    f"{ROLLOUT}.multi_turn.max_parallel_calls": "2",
    f"{ROLLOUT}.agent.default_agent_loop": "multiturn_agent",
    # The model's output is not text, and its turns are given calls that it did not write.
    f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode": "disable",
}
STOPS = 12
"""Tokens at which a turn ends, out of 576. Turns then have some 45 tokens."""
SCALES = (1.0, 1.1, 0.9)
"""Factors of the model's last layer norm, that is, of the logits, by version."""

conversation: ContextVar[str] = ContextVar("conversation", default="")
"""Name of the conversation that a task works for."""


@dataclass
class Attempt:
    """A request to SGLang and its answer. Times are those of `time.perf_counter`, in seconds."""

    conversation: str
    prompt: list[int]
    version: int
    """Weights that were loaded when it began."""
    began: float
    sent: float | None = None
    """When SGLang's scheduler was sent the request."""
    ended: float | None = None
    last_version: int | None = None
    """Weights that were loaded when it ended."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """For each token, how far the log-probabilities of the two best tokens are apart; empty unless requested."""
    reason: str | None = None


class Journal:
    """Writes down every attempt of a `tokenizer_manager`.

    Args:
        manager: SGLang's manager, whose `generate_request` is replaced by one that records.
        loaded: Returns the version that is loaded.
    """

    def __init__(self, manager: Any, loaded: Callable[[], int]) -> None:
        self.attempts: list[Attempt] = []
        self.want_gaps = False
        self.cut_after: int | None = None
        """Tokens after which each attempt is cut; None: none is cut."""
        self.on_cut: Callable[[], Awaitable[None]] | None = None
        """Called when an attempt was cut, before the server learns of it."""
        self._loaded = loaded
        manager = vars(manager).get("_manager", manager)  # SGLang's own, behind our server's wrapper
        self._generate = manager.generate_request
        self._send = manager._send_one_request
        self._by_id: dict[str, Attempt] = {}
        manager.generate_request = self._recorded
        manager._send_one_request = self._sent

    def of(self, name: str) -> list[Attempt]:
        """Return the attempts of a conversation, in order."""
        return [attempt for attempt in self.attempts if attempt.conversation == name]

    def follow(self, loaded: Callable[[], int]) -> None:
        """Take the loaded version from somewhere else from now on."""
        self._loaded = loaded

    @property
    def in_flight(self) -> int:
        """How many attempts SGLang works on."""
        return sum(attempt.sent is not None for attempt in self._by_id.values())

    def _sent(self, request: Any) -> Any:
        self._by_id[request.rid].sent = time.perf_counter()
        return self._send(request)

    async def _recorded(self, asked: Any, request: Any = None) -> AsyncIterator[Any]:
        attempt = Attempt(conversation.get(), list(asked.input_ids), self._loaded(), time.perf_counter())
        self.attempts.append(attempt)
        self._by_id[asked.rid] = attempt
        most, cut = asked.sampling_params["max_new_tokens"], self.cut_after
        if cut is not None and cut < most:
            asked.sampling_params = {**asked.sampling_params, "max_new_tokens": cut}
        if self.want_gaps:
            asked.top_logprobs_num = 2
        try:
            # As verl does it: one answer, and the garbage collector frees the generator.
            output = await self._generate(asked, request).__anext__()
        finally:
            del self._by_id[asked.rid]
            attempt.ended = time.perf_counter()
            attempt.last_version = self._loaded()
        about = output["meta_info"]
        if cut is not None and cut < most and about["finish_reason"]["type"] == "length":
            about["finish_reason"] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            if self.on_cut is not None:
                await self.on_cut()
        attempt.reason = about["finish_reason"]["type"]
        attempt.ids = list(output["output_ids"])
        logprobs = about.get("output_token_logprobs") or []
        attempt.logprobs = [float(logprob) for logprob, _, _ in logprobs]
        for best in about.get("output_top_logprobs") or []:
            attempt.gaps.append(float(best[0][0]) - float(best[1][0]))
        yield output


def save_model(path: Path) -> Any:
    """Save a random model, whose greedy text does not repeat itself; return it."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM

    config: Any = AutoConfig.from_pretrained(TOKENIZER)
    config.initializer_range, config.tie_word_embeddings = 0.16, False
    torch.manual_seed(0)
    make: Any = Qwen2ForCausalLM
    model = make(config).float().eval()
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(path)
    return model


@dataclass(frozen=True)
class Pause:
    """A pause, with its times in seconds."""

    version: int
    """The version that was loaded in it."""
    stop_s: float
    """From the call of `abort_all_requests` to its return."""
    resumed: float
    """When `resume_generation` was called."""
    in_flight: int
    tools: int
    """Tools that ran when it began."""

    def extra_ms(self, journal: Journal) -> float:
        """Return the milliseconds that the pause cost beside the update itself, by the first attempt after it."""
        sent = min(at.sent for at in journal.attempts if at.sent is not None and at.sent > self.resumed)
        return (self.stop_s + sent - self.resumed) * 1e3


class Engine:
    """A server and its client in this process, and the weights that are loaded.

    Args:
        config: verl's whole configuration.
        server: The server; it runs.
        journal: The journal of the server's manager; None: a new one.
        client_class: The client.
    """

    def __init__(self, config: Any, server: Any, client_class: type, journal: Journal | None = None) -> None:
        self.config = config
        self.server = server
        self.handle = Handle(server)
        self.client = client_class(config, Handle(Balancer(self.handle)))
        self.loaded = 0
        self.journal = journal or Journal(server.tokenizer_manager, lambda: self.loaded)
        self.unflushed = 0
        """Updates after which SGLang could not empty its cache."""
        self._norm = _last_norm(server.model_config.local_path)

    async def load(self, version: int, scale: float) -> None:
        """Load the weights of a version, as verl's workers do it on a CPU: tensors, cache, version."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.model_executor.model_runner import LocalSerializedTensor
        from sglang.srt.utils import MultiprocessingSerializer

        from verl_multiturn.cpu.rollout import _by_value

        tensor = LocalSerializedTensor(values=[_by_value(self._norm * scale)])
        payload = MultiprocessingSerializer.serialize([("model.norm.weight", tensor)])
        manager = self.server.tokenizer_manager
        ok, message = await manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(serialized_named_tensors=[payload], flush_cache=False)
        )
        if not ok:
            raise RuntimeError(message)
        self.unflushed += not (await manager.flush_cache()).success
        self.loaded = version
        await self.handle.set_global_steps.remote(version)

    async def pause(self, *, tools: int = 0, long_s: float = 0.0, scale: float | None = None) -> Pause:
        """Pause as verl does at an update of the weights: stop, load the next version, go on.

        Args:
            tools: Tools that run, for the record.
            long_s: Seconds that the update takes besides.
            scale: Factor of the logits of the new version; None: that of `SCALES`.
        """
        in_flight, called = self.journal.in_flight, time.perf_counter()
        await self.handle.abort_all_requests.remote()
        stop_s = time.perf_counter() - called
        version = self.loaded + 1
        await self.load(version, SCALES[version % len(SCALES)] if scale is None else scale)
        await asyncio.sleep(long_s)
        resumed = time.perf_counter()
        await self.handle.resume_generation.remote()
        return Pause(version, stop_s, resumed, in_flight, tools)


def _last_norm(path: str) -> Any:
    from safetensors.torch import load_file

    return load_file(Path(path) / "model.safetensors")["model.norm.weight"]


async def start(path: Path) -> Engine:
    """Start our server over the model in a folder, with our client."""
    import verl  # noqa: F401  # its plugin prepares the import of SGLang
    from verl.workers.rollout.replica import RolloutMode

    from verl_multiturn.cpu.defaults import fill_in
    from verl_multiturn.verl_bridge.servers.client import RolloutClient
    from verl_multiturn.verl_bridge.servers.server import AsyncSGLangServer

    settings = {**SETTINGS, "actor_rollout_ref.model.path": str(path)}
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"{key}={value}" for key, value in settings.items()])
    fill_in(config, 16)
    OmegaConf.set_struct(config, False)  # conversations add settings of ours
    ours = config.actor_rollout_ref
    server = AsyncSGLangServer(ours.rollout, ours.model, RolloutMode.STANDALONE, [], 0, 0, 1, "", 0)
    await server.launch_server()
    # uvicorn, whose settings are made by now, reports that the loop ends before its server does.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    await server.set_global_steps(0)
    return Engine(config, server, RolloutClient)


def of_verl(engine: Engine) -> Engine:
    """Return verl's own server class and client over the SGLang of a running engine, and its journal."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    server = object.__new__(SGLangHttpServer)
    server.__dict__.update(engine.server.__dict__)
    verls = Engine(engine.config, server, FullyAsyncLLMServerClient, engine.journal)
    verls.loaded = engine.loaded
    engine.journal.follow(lambda: verls.loaded)
    return verls


def stop() -> None:
    """End SGLang's processes."""
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
