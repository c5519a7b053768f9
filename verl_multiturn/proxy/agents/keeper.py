"""The program of a fork for a session whose agent has a process of its own: it keeps that process.

    worker ⇄ keeper ─forks→ agent, a function or a command, in a session and process group of its own

The keeper reads what the agent writes, so that a flood reaches neither a disk, nor memory, nor the worker's event loop.
It is the parent of all orphans below it. So it finds processes outside the agent's group, too.

The worker sends one line of JSON, the request. `stop` asks the agent to end (SIGTERM to its group). When the worker
shuts the socket down, or has gone, everything is killed.

As soon as the agent has returned, raised or ended, the keeper sends a space. The worker then closes the session and
sends `noted`; until then a function's process waits, so that nothing that it does after its return reaches the model.

The keeper sends one line of JSON at the end:
- `output`: the agent's output, its middle omitted where that is long;
- `status`: the agent's exit status, negative for a signal;
- `report`: the report of the agent's process on itself: `result` (as `AgentResult` has it), `wrong_type`, `raised`,
  `outage`, `unjudged`, `missing` (there is no such command) or `failed`; null without a report.

A command's row is in a file, and it may write its result, as JSON, to another file. Both are in a folder of the
session's own (`folder.py`), which is removed at the end. `{row}` and `{result}` in its arguments become their paths,
and so do the environment variables `VERL_MULTITURN_ROW` and `VERL_MULTITURN_RESULT`. Nothing is read from its output:
an agent that answers "42" has not earned 42.

The keeper runs in the interpreter that the setting `proxy.python` names, if it names one. So this module imports the
standard library and modules of this package that do the same.

Limits: a process that another service starts for the agent (a container, a unit of systemd) belongs to that service and
is not found. Processes that fork faster than they are killed, each in a session of its own, are not all ended. An agent
is code of the user: it runs as the worker's own user, and nothing confines it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from verl_multiturn.calls.outages.causes import agents_cause
from verl_multiturn.errors import AgentContractError, ConfigError
from verl_multiturn.processes.system import end_children, end_with_parent
from verl_multiturn.processes.zygote import WATCH, problem_of, seed_process
from verl_multiturn.proxy.agents.agent import Agent, SessionAddress, load_agent
from verl_multiturn.proxy.agents.end import read_result
from verl_multiturn.proxy.agents.folder import read_result_file, remove_folder
from verl_multiturn.sandbox.output import BoundedOutput

ENDED, NOTED = b" ", b"noted\n"
"""The keeper's word that the agent has returned or ended, and the worker's that the session is closed."""
ROW, RESULT = "VERL_MULTITURN_ROW", "VERL_MULTITURN_RESULT"
"""Environment variables of a command: the paths of the files of its row and of its result."""
_OUTPUT_CHARACTERS = 3_000
_FLOOD_BYTES = 2**20
_REPORT_BYTES = 2**22
_LEAVING_S = 2.0
"""Seconds for the process of an agent that has returned to end its remaining tasks."""


def load(spec: Mapping[str, Any]) -> Agent | None:
    """Import the agent, if it is a function.

    Args:
        spec: `agent`, its name; None for a command.

    Raises:
        ConfigError: It cannot be imported, or its module starts threads.
    """
    if spec["agent"] is None:
        return None
    agent = load_agent(spec["agent"], spec["where"])
    others = [each.name for each in threading.enumerate() if each.name not in (WATCH, threading.main_thread().name)]
    if others:
        raise ConfigError(
            f"{spec['where']}: importing {spec['agent']!r} starts threads ({', '.join(others)[:200]}), which a forked "
            "process does not have; start them in the function"
        )
    return agent


def serve(served: socket.socket, agent: Agent | None) -> None:
    """Keep one agent until it has ended, and send how it ended.

    Args:
        served: The socket to the worker.
        agent: The agent; None: the request names a command.
    """
    with served.makefile("rb") as stream:
        served.sendall(json.dumps({"process": os.getpid()}).encode() + b"\n")
        if not (line := stream.readline()):
            return
    request = json.loads(line)
    folder = None if agent is not None else Path(request["folder"])
    try:
        if folder is not None:
            (folder / "row.json").write_text(json.dumps(request["row"]), encoding="ascii")
            _name_files(request, folder)
        answer = _AgentProcess(served, request, agent).watch()
        if folder is not None and answer["status"] == 0 and answer["report"] is None:
            answer["report"] = read_result_file(folder / "result.json")
    except OSError as error:
        answer = {"output": "", "status": 0, "report": {"failed": str(error)}}
    finally:
        end_children()
        if folder is not None:
            remove_folder(str(folder))
    served.sendall(ENDED + json.dumps(answer).encode() + b"\n")


def _name_files(request: dict[str, Any], folder: Path) -> None:
    row, result = str(folder / "row.json"), str(folder / "result.json")
    request["command"] = [word.replace("{row}", row).replace("{result}", result) for word in request["command"]]
    request["environment"].update({ROW: row, RESULT: result})


class _AgentProcess:
    """The process of an agent, and its reports so far."""

    def __init__(self, served: socket.socket, request: Mapping[str, Any], agent: Agent | None) -> None:
        self._served = served
        self._output = BoundedOutput(_OUTPUT_CHARACTERS)
        self._report = bytearray()
        self._leaves_at: float | None = None
        self._output_fd, output_end = os.pipe()
        # Unlike a pipe, a socket cannot be opened through /proc by a program that the agent starts.
        self._report_fd, report_end = (each.detach() for each in socket.socketpair())
        self._has_told = False
        keeper = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            if end_with_parent(keeper):
                for fd in (served.fileno(), self._output_fd, self._report_fd):
                    os.close(fd)
                _be_agent(request, agent, output_end, report_end)
            os._exit(1)
        os.close(output_end)
        os.close(report_end)
        for fd in (self._output_fd, self._report_fd):
            os.set_blocking(fd, False)

    def watch(self) -> dict[str, Any]:
        """Read the agent's reports until it has ended or must end; return the answer to the worker."""
        agent_fd = os.pidfd_open(self._process)
        poll = select.poll()
        for fd in (self._served.fileno(), self._output_fd, self._report_fd, agent_fd):
            poll.register(fd, select.POLLIN)
        must_end = False
        while not must_end:
            left_s = None if self._leaves_at is None else max(0.0, self._leaves_at - time.monotonic())
            ready = [fd for fd, _ in poll.poll(None if left_s is None else left_s * 1_000)]
            for fd in ready:
                if fd == self._served.fileno():
                    must_end |= not self._obey()
                elif fd != agent_fd and not self._read(fd):
                    poll.unregister(fd)
            must_end |= agent_fd in ready or not ready
            if must_end or self._leaves_at is not None:
                self._tell()
        # Before the wait, as long as no other process can have this number. An agent that has just begun has no group
        # yet.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self._process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        end_children()
        for fd in (self._output_fd, self._report_fd):
            while self._read(fd):
                pass
        report = json.loads(self._report) if self._report.endswith(b"\n") else None
        return {"output": self._output.take().strip(), "status": status, "report": report}

    def _tell(self) -> None:
        """Report to the worker, once, that the agent has returned or ended."""
        if not self._has_told:
            self._has_told = True
            with contextlib.suppress(OSError):
                self._served.send(ENDED)

    def _obey(self) -> bool:
        """Follow the worker's orders; return False when everything has to end at once."""
        said = self._served.recv(64)
        if NOTED in said:
            with contextlib.suppress(OSError):
                os.write(self._report_fd, NOTED)
        if b"stop" in said:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process, signal.SIGTERM)
        return bool(said)

    def _read(self, fd: int) -> bool:
        """Read the available bytes, and return whether there may be more."""
        try:
            chunk = os.read(fd, 2**16)
        except (BlockingIOError, ConnectionResetError):  # reset: it did not read that its return was noted
            return False
        if fd == self._output_fd:
            self._output.add(chunk)
            if self._output.total > _FLOOD_BYTES:
                time.sleep(0.001)  # let a flood wait, so that it does not use up a processor
        else:
            self._report += chunk
            if chunk.endswith(b"\n") or len(self._report) > _REPORT_BYTES:
                self._leaves_at = time.monotonic() + _LEAVING_S
        return bool(chunk)


def _be_agent(request: Mapping[str, Any], agent: Agent | None, output_fd: int, report_fd: int) -> NoReturn:
    """Be the agent's process; never returns."""
    agents = os.getpid()

    def report(**said: Any) -> None:
        if os.getpid() != agents:  # a process that the agent has forked, and that comes to its own end here
            return
        line = json.dumps(said).encode() + b"\n"
        while line:
            line = line[os.write(report_fd, line) :]
        os.read(report_fd, len(NOTED))  # all that this process does from now on is after the session's end

    status = 1
    try:
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_DFL)
        devnull = os.open(os.devnull, os.O_RDONLY)
        for theirs, standard in ((devnull, 0), (output_fd, 1), (output_fd, 2)):
            os.dup2(theirs, standard)
        os.close(output_fd)
        with contextlib.suppress(OSError, ValueError):  # the limit was lowered
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (request["open_files"], most))
        if agent is None:
            _become_command(request["command"], request["environment"])
        os.environ.clear()
        os.environ.update(request["environment"])
        seed_process(None)
        sys.stdout, sys.stderr = _text(1), _text(2)

        def returned(value: Any) -> None:
            result = read_result(value, agent.is_areals)
            report(result=dataclasses.asdict(result))

        agent.call(request["row"], SessionAddress(**request["address"]), returned)
        status = 0
    except AgentContractError as error:
        report(wrong_type=str(error))
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        report(**{"missing" if agent is None else "raised": problem_of(error)})
    except BaseException as error:  # an agent may raise anything, SystemExit too
        if isinstance(error, SystemExit) and os.getpid() != agents:  # whom the agent may wait for
            status = error.code & 255 if isinstance(error.code, int) else int(error.code is not None)
        raised = agents_cause(error) or "raised"
        report(**{"failed" if agent is None else raised: problem_of(error)})
    finally:
        with contextlib.suppress(BaseException):  # an agent may have replaced or closed them
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _text(fd: int) -> TextIO:
    """Return a descriptor as a stream of text: the process's last words are written by then, odd texts too."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _become_command(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    os.execvpe(command[0], list(command), dict(environment))
