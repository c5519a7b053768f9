"""The watch over an event loop."""

import asyncio
import threading
from types import FrameType

import pytest

from verl_multiturn.calls.loop_blocks import LoopWatch


class Noted(LoopWatch):
    """A watch that notes the lines where the loop was blocked."""

    def __init__(self) -> None:
        super().__init__(0.05, 0.01)
        self.lines: list[str] = []
        self.has_looked = threading.Event()

    def blocked(self, task: asyncio.Task[object] | None, frame: FrameType) -> None:
        self.lines.append(frame.f_code.co_name)
        self.has_looked.set()


async def test_the_start_of_the_watch_itself_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowThread(threading.Thread):
        def start(self) -> None:
            super().start()
            watch.has_looked.wait(0.5)  # as on a busy machine
            begun.extend(watch.lines)

    watch = Noted()
    begun: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", SlowThread)
        watch.start()
    assert begun == []
    watch.has_looked.wait(60)
    watch.stop()
    assert len(watch.lines) == 1
