"""SGLang's own processes, which are forked from the run's forkserver in place of importing everything anew."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import spawn
from multiprocessing.context import SpawnProcess
from typing import Any

from verl_multiturn.cpu_processes.forkserver import ADDRESS
from verl_multiturn.cpu_processes.handle import executable_of


class ForkedProcess(SpawnProcess):
    """A process that `multiprocessing` spawns, and that begins as a fork of the forkserver."""

    def __reduce__(self) -> Any:
        # In the new process it is the base class: to import this room would be to import verl.
        return SpawnProcess, (), self.__dict__

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        before, ours = spawn.get_executable(), executable_of(os.environ[ADDRESS])
        # SGLang sets another for its NUMA nodes. Without the file the server has ended.
        if os.fsdecode(before) != sys.executable or not ours.exists():
            return SpawnProcess._Popen(process_obj)
        spawn.set_executable(str(ours))
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            spawn.set_executable(before)


class _Multiprocessing:
    """In the place of the module `multiprocessing`: all that it has, but for `Process`."""

    Process = ForkedProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


def fork_engines() -> None:
    """Let SGLang's engine fork its processes, in a process that is such a fork itself.

    Where the server has ended, or cannot fork, they are started in the usual way.
    """
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if ADDRESS in os.environ and engine is not None:
        engine.mp = _Multiprocessing()  # type: ignore[attr-defined]
