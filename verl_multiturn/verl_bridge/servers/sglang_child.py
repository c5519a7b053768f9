"""`SglangChild`: SGLang in a child process that serves one model to an evaluation.

Invariants:
- it gets the arguments that verl would give to a server of the run, without those that only a trainer needs;
- all of it ends with this process, however this one ends: a guard beside it sees to that.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.processes import guard
from verl_multiturn.processes.system import kill_group
from verl_multiturn.rollout.engines.http_engine import HttpEngine
from verl_multiturn.verl_bridge.model.processors import plain_dict

_PROGRAM = Path(__file__).with_name("serve_sglang.py")
_LOOK_S = 0.25
READY_S = 1800.0
"""Most seconds until SGLang has loaded a model."""
_TAIL = 15
_CLOSE_S = 10.0
_ATTENTION = "flashinfer"
"""Attention that verl 0.9.1 chooses for SGLang 0.5.12 where a recipe names none."""
_TRAINERS = ("enable_memory_saver", "enable_weights_cpu_backup", "custom_weight_loader")
"""Arguments that are of use only where weights come from a trainer."""


def server_arguments(config: DictConfig, model: str, weights: str, port: int) -> dict[str, Any]:
    """Return the fields of SGLang's `ServerArgs`, as verl's server has them.

    Args:
        config: verl's whole configuration, prepared.
        model: Folder of the model.
        weights: Hash of its weights, which each generation then has.
        port: Port that it listens on, on this machine alone.
    """
    rollout = config.actor_rollout_ref.rollout
    own = plain_dict((rollout.get("engine_kwargs") or {}).get("sglang"))
    if rollout.get("quantization"):
        raise ConfigError(
            f"rollout.quantization={rollout.quantization!r}: eval does not quantize; leave it out, or name a server "
            "that does with --engine URL"
        )
    arguments = {
        "dtype": rollout.dtype,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "disable_cuda_graph": rollout.enforce_eager,
        "tp_size": rollout.tensor_model_parallel_size,
        "dp_size": rollout.data_parallel_size,
        "ep_size": rollout.expert_parallel_size,
        "trust_remote_code": bool(config.actor_rollout_ref.model.get("trust_remote_code")),
        "max_running_requests": rollout.get("max_num_seqs"),
        "attention_backend": _ATTENTION,
        "skip_tokenizer_init": bool(rollout.get("skip_tokenizer_init")),
        "log_level": "error",
        **own,
        "model_path": model,
        "tokenizer_path": str(config.actor_rollout_ref.model.get("tokenizer_path") or model),
        "load_format": "auto",  # verl loads random weights, which the trainer replaces
        "skip_server_warmup": True,
        "weight_version": weights,
        "host": "127.0.0.1",
        "port": port,
    }
    return {name: value for name, value in arguments.items() if name not in _TRAINERS and value is not None}


class SglangChild:
    """SGLang in a child process.

    Args:
        arguments: Fields of `ServerArgs`.
        log: File for its output.
    """

    def __init__(self, arguments: Mapping[str, Any], log: Path) -> None:
        self.url = f"http://{arguments['host']}:{arguments['port']}"
        self._log = log
        self._began = time.monotonic()
        command = [sys.executable, "-P", str(_PROGRAM), json.dumps(arguments)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *guard.ARGUMENTS, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._descriptor: int | None = None

    @property
    def pid(self) -> int:
        """Return the id of the process, which leads the group of all that it starts."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    async def ready(self, engine: HttpEngine) -> float:
        """Wait until it serves the model, and return the seconds since its start; give `engine` up when it ends later.

        Raises:
            EngineError: It has ended, or is not ready in time; the end of its log is in the text.
        """
        while not await engine.answered():
            if self._process.poll() is not None:
                raise EngineError(f"SGLang {self._end()} before it was ready; {self._told()}")
            if time.monotonic() - self._began > READY_S:
                raise EngineError(f"SGLang was not ready after {READY_S:.0f} s; {self._told()}")
            await asyncio.sleep(_LOOK_S)
        self._descriptor = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._ended, engine)  # readable when it has ended
        return time.monotonic() - self._began

    def _ended(self, engine: HttpEngine) -> None:
        self._forget()
        self._process.wait()
        engine.give_up(f"SGLang {self._end()}; its log is {self._log}")

    def _forget(self) -> None:
        if self._descriptor is not None:
            with suppress(RuntimeError):  # the loop is closed
                asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        """End it, and all that it started."""
        self._forget()
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        kill_group(self._process.pid)
        self._process.wait()

    def _end(self) -> str:
        status = self._process.returncode
        return f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"

    def _told(self) -> str:
        with suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
            return f"the end of {self._log}:\n" + "\n".join(lines)
        return f"its log is {self._log}"


def free_port() -> int:
    """Return a port of this machine that nothing listens on, and of which SGLang's others are ports, too.

    SGLang 0.5.12 refuses one beyond 55535, since it may listen 10,000 above.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 50_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
