"""The trainer's process of a run: its display, the request to stop, one more try where Ray did not start, its end.

Invariants:
- the trainer is started a second time only where Ray was not there in time, so that no step was begun; once, and after
  every process of the first try has ended;
- a failure prints one sentence. The last lines of the log come before it where they hold the cause.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.cpu_processes.handle import ForkServer
from verl_multiturn.models.checkpoints import checkpoints_of
from verl_multiturn.runs.processes import run_watched
from verl_multiturn.runs.progress import Display, RunConsole, say
from verl_multiturn.runs.ray_start import cause_in, is_late, joins_cluster, load_text, temp_folder
from verl_multiturn.runs.run_folder import RunFolder
from verl_multiturn.runs.start_up import StartUp
from verl_multiturn.runs.stop_request import StopAnswer, StopRequest

_OWN_ERROR = "verl_multiturn.errors."
"""Begin of the last line of a traceback whose error is one of ours."""
_ERROR_LINE = re.compile(r"[\w.]+(?:Error|Exception|Interrupt|Exit)\b")
"""Begin of the last line of any traceback."""
_TAIL = 40
"""Number of the log's last lines that are shown when a run failed."""
_TAIL_BYTES = 65_536
_RAY_INIT = "ray.init("
"""Text in the traceback of a start that ended in Ray."""


@dataclass(frozen=True)
class TrainingEnd:
    """The end of a training.

    Attributes:
        status: Exit status of the run as far as the training goes.
        seconds: Duration in seconds of each phase of the start-up.
        stopped: The trainer's answer, where it ended at a request.
        was_asked: Whether the run got a request to stop, though it may have ended by itself.
    """

    status: int
    seconds: Mapping[str, float]
    stopped: StopAnswer | None = None
    was_asked: bool = False


class Training:
    """The training of one run.

    Args:
        command: The trainer's command.
        config: The composed configuration.
        folder: Folder of the run.
        metrics: File of verl's file logger.
        records: Folder of the conversations' records; None: the run writes none.
        is_ppo: Whether this is verl's PPO trainer, which has conversations, uses Ray, and can stop at a request.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: Mapping[str, Any],
        folder: RunFolder,
        metrics: Path,
        records: Path | None,
        is_ppo: bool,
    ) -> None:
        self._command = command
        self._ray_init: Mapping[str, Any] = (config.get("ray_kwargs") or {}).get("ray_init") or {}
        self._steps = config["trainer"]["total_training_steps"]
        self._log, self._metrics, self._records = folder.log, metrics, records
        self._request = StopRequest(checkpoints_of(config["trainer"], folder.path)) if is_ppo else None
        self._console = RunConsole()

    def run(
        self, environment: Mapping[str, str], started: float, lock: int, server: ForkServer | None = None
    ) -> TrainingEnd:
        """Train, and report the cause of a failure.

        Args:
            environment: Environment variables of the trainer.
            started: Time when the run was started, in seconds since the epoch.
            lock: Descriptor of the folder's lock, which the trainer inherits.
            server: Server that the trainer is forked from, as long as it runs; None: there is none.
        """
        if self._request is not None:
            self._request.take()  # one of an earlier start
        self._console.print(f"log: {self._log}", soft_wrap=True, highlight=False, markup=False)
        end, why = self._try(environment, started, lock, server)
        if why is not None and not end.was_asked:
            say(f"Ray was not there in time: {why}; the trainer is started once more")
            end, why = self._try(environment, time.time(), lock, server)
        if why is not None:
            say(
                f"Ray was not there in time: {why}; start the same command again, on a busy machine when its load is "
                f"lower; whole log: {self._log}"
            )
        return end

    def _try(
        self, environment: Mapping[str, str], started: float, lock: int, server: ForkServer | None
    ) -> tuple[TrainingEnd, str | None]:
        """Start the trainer once; return its end, and why Ray did not start where that was for want of time."""
        if server is not None and not server.is_alive():
            say("the forkserver has ended: each process of the run imports everything itself")
            server = None
        begun, begun_at = time.time(), self._log.stat().st_size if self._log.exists() else 0
        start_up = None if self._request is None else StartUp(started)
        display = Display(self._log, self._metrics, self._records, self._steps, self._console, start_up)
        pids: list[int] = []
        try:
            status = run_watched(
                self._command,
                environment,
                self._log,
                lambda is_running: display.show_while(self._says_request(is_running)),
                lock,
                stop=None if self._request is None else self._request.make,
                begun=pids.append,
                server=server,
            )
        except BaseException:  # ended at once: the next training here must not get the request to stop
            if self._request is not None:
                self._request.take()
            raise
        was_asked = self._request is not None and self._request.path.exists()
        stopped = None if self._request is None else self._request.take()
        if status == 0:
            return TrainingEnd(0, {} if start_up is None else start_up.seconds, stopped, was_asked), None
        end = TrainingEnd(max(status, 1), {}, None, was_asked)
        written = self._written(begun_at)
        if server is not None:
            pids = [server.fork_of(pid) for pid in pids]
        if start_up is not None and (why := self._why_no_ray(written, environment, begun, pids)):
            return end, why
        self._console.print("\n".join(written[-_TAIL:]), markup=False, highlight=False, soft_wrap=True)
        doing = "training" if start_up is None else start_up.doing
        how = f"ended with exit status {status}" if status > 0 else f"was killed by signal {-status}"
        memory = "; the machine may have run out of memory" if status == -signal.SIGKILL else ""
        say(f"the trainer {how} while {doing}{memory}; whole log: {self._log}")
        if status > 0 and (cause := _own_error(written)):
            say(cause)
        return end, None

    def _says_request(self, is_running: Callable[[], bool]) -> Callable[[], bool]:
        """Print once that the run got a request to stop; a signal's handler cannot print."""
        said = False

        def running() -> bool:
            nonlocal said
            if not said and self._request is not None and self._request.is_made():
                said = True
                text = (
                    "asked to stop: a checkpoint when the step that runs has ended; SIGUSR1 again, or Ctrl-C: at once"
                )
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return is_running()

        return running

    def _written(self, begun_at: int) -> list[str]:
        """Return the last lines that this start of the run wrote to the log."""
        with self._log.open("rb") as file:
            file.seek(max(begun_at, self._log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()

    def _why_no_ray(
        self, written: Sequence[str], environment: Mapping[str, str], begun: float, pids: Sequence[int]
    ) -> str | None:
        """Return why Ray was not there in time; None: the start ended elsewhere, or for another cause."""
        text = "\n".join(written)
        if joins_cluster(self._ray_init, environment) or _RAY_INIT not in text or not is_late(text):
            return None
        folder, _ = temp_folder(self._ray_init, environment)
        cause = cause_in(folder, begun, pids[0] if pids else None)
        load, is_busy = load_text()
        return f"{cause or written[-1].strip()}; {f'this machine is busy ({load})' if is_busy else load}"


def _own_error(written: Sequence[str]) -> str:
    """Return the message of the last error of ours among lines of a log, which ended the trainer; "" without one."""
    last = next((line for line in reversed(written) if _ERROR_LINE.match(line)), "")  # a later one is the cause
    return last.removeprefix(_OWN_ERROR) if last.startswith(_OWN_ERROR) else ""


def stop_line(stopped: StopAnswer, out: Path) -> str:
    """Return the last line of a run that ended at a request, one JSON object."""
    return json.dumps({"recipe": out.name, "stopped": stopped.step, "out": os.fspath(out)})
