"""Zygote: the process that all sandboxes are forked from. Python runs in it, with the modules of `preimport` loaded.

The zygote runs trusted code only and never reads a conversation's data: code and output go through descriptors that
the zygote passes on and closes. So a fork of it holds nothing of another conversation.

Packets from the parent:
- `spawn N`, with a control socket, a pipe for the output and, if there is a control group, the group's descriptors;
- `kill N`.

Packets to the parent:
- `ready`, or `failed REASON`;
- `gone N`, once no process of sandbox N remains (without namespaces: no process of its process group).

Runs inside the sandbox. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

from . import cell, memory_maps, removal, seccomp, supervisor, syscalls


def main(channel_fd: int, spec_json: str) -> None:
    """Be the zygote until the parent closes the channel.

    Args:
        channel_fd: Descriptor of a SOCK_SEQPACKET socket to the parent.
        spec_json: The mapping of `launch.guest_spec`, as JSON.
    """
    spec = json.loads(spec_json)
    channel = socket.socket(fileno=channel_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.extend(spec["path"])
    for name in spec["preimport"]:
        try:
            importlib.import_module(name)
        except Exception as error:  # a package may raise anything at import
            channel.send(f"failed preimport of {name!r}: {type(error).__name__}: {error}".encode())
            return
    with open("/proc/self/statm", encoding="utf-8") as statm:
        spec["zygote_memory"] = int(statm.read().split()[0]) * resource.getpagesize()
    with open("/proc/self/oom_score_adj", "w", encoding="utf-8") as score:
        score.write("1000")  # when memory runs out, the kernel ends sandboxes first
    memory_maps.install()
    cell.warm_up()
    _hide_the_runner()
    gc.collect()
    gc.freeze()  # the garbage collector then leaves these objects alone, so the forks keep sharing their pages
    zygote = _Zygote(channel, spec)
    try:
        zygote.serve()
    finally:
        zygote.end()
        os._exit(0)


def _hide_the_runner() -> None:
    """Remove our modules from `sys.modules`, so that untrusted code cannot import them."""
    own = __name__.rpartition(".")[0]
    for name in [name for name in sys.modules if name == own or name.startswith(f"{own}.")]:
        del sys.modules[name]


class _Zygote:
    def __init__(self, channel: socket.socket, spec: dict[str, Any]) -> None:
        self._channel = channel
        self._spec = spec
        self._filters = seccomp.program(os.uname().machine)
        self._supervisors: dict[int, tuple[int, int]] = {}
        """Number and first process id of each sandbox, by the pidfd of that process."""
        self._poll = select.poll()
        if not spec["namespaces"]:  # orphans of a sandbox become our children, so that we can wait for their end
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def serve(self) -> None:
        self._poll.register(self._channel, select.POLLIN)
        self._channel.send(b"ready")
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._channel.fileno():
                    self._gone(fd)
                    continue
                packet, fds, _, _ = socket.recv_fds(self._channel, 64, 5)
                if not packet:
                    return
                verb, number = packet.split()
                if verb == b"spawn":
                    self._spawn(int(number), *fds)
                else:
                    self._kill(int(number))

    def end(self) -> None:
        """End all sandboxes. With namespaces there is nothing to do: the kernel ends them with the zygote, pid 1."""
        if not self._spec["namespaces"]:
            for number, _ in self._supervisors.values():
                self._kill(number)
            for _, process in self._supervisors.values():
                self._wait(process)
            removal.remove_tree(self._spec["home"])

    def _spawn(self, number: int, control_fd: int, output_fd: int, *group_fds: int) -> None:
        control = socket.socket(fileno=control_fd)
        try:
            if self._spec["namespaces"]:
                # Come back to our own namespace first: the new one shall lie below ours, not below the last sandbox's.
                syscalls.setns(self._own_pid_namespace, syscalls.CLONE_NEWPID)
                syscalls.unshare(syscalls.CLONE_NEWPID)
            process = os.fork()
            if process == 0:
                ours = [self._channel.detach(), self._own_pid_namespace, *self._supervisors]
                supervisor.run(control, output_fd, self._spec, self._filters, number, ours, group_fds)
            try:
                fd = os.pidfd_open(process)
            except OSError:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                raise
        except OSError as error:
            control.send(f"end setup {error}".encode())
            self._channel.send(f"gone {number}".encode())
        else:
            self._supervisors[fd] = (number, process)
            self._poll.register(fd, select.POLLIN)
        finally:
            control.close()
            for fd in (output_fd, *group_fds):
                os.close(fd)

    def _kill(self, number: int) -> None:
        for fd, (candidate, process) in self._supervisors.items():
            if candidate == number:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                self._kill_group(process)

    def _gone(self, fd: int) -> None:
        number, process = self._supervisors.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        self._kill_group(process)
        self._wait(process)
        if not self._spec["namespaces"]:
            self._reap_orphans()
            removal.remove_tree(f"{self._spec['home']}/{number}")
        self._channel.send(f"gone {number}".encode())

    def _kill_group(self, leader: int) -> None:
        """Kill the process group of a sandbox; without a pid namespace it outlives its supervisor."""
        if not self._spec["namespaces"]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)

    def _wait(self, leader: int) -> None:
        """Wait until no process of a killed group remains."""
        os.waitpid(leader, 0)
        if not self._spec["namespaces"]:  # with namespaces the kernel ended the others before the leader
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-leader, 0)

    def _reap_orphans(self) -> None:
        """Wait for processes that had quit their sandbox's group and have ended since."""
        ours = {process for _, process in self._supervisors.values()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in ours:
                os.waitpid(ended.si_pid, 0)
