"""The background writer: nothing that goes wrong below it holds anybody up, ends the thread, or goes unreported."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import until
from verl_multiturn.records.write import background
from verl_multiturn.records.write.background import BackgroundWriter, Losses

WAIT_S = 60.0


class Place:
    """A place that texts are written to, as slowly as a test wants."""

    def __init__(self, **settings: object) -> None:
        self.batches: list[list[str]] = []
        self.begun, self.free = threading.Event(), threading.Event()
        self.free.set()
        self.error: BaseException | None = None
        self.is_closed = False
        self.losses = Losses("texts", "there")
        self.writer: BackgroundWriter[str] = BackgroundWriter(
            "texts", self.write, self.losses, **{"most": 3, "last": self.close, **settings}
        )

    @property
    def texts(self) -> list[str]:
        return [text for batch in self.batches for text in batch]

    def hold(self) -> None:
        """Let the writer begin with a text that takes until `free` is set."""
        self.free.clear()
        self.writer.put("slow")
        assert self.begun.wait(WAIT_S)

    def write(self, texts: Sequence[str]) -> None:
        self.begun.set()
        assert self.free.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.batches.append(list(texts))

    def close(self) -> None:
        self.is_closed = True


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_what_is_put_is_written_in_order_before_it_is_closed() -> None:
    place = Place(most=100)
    for number in range(100):
        assert place.writer.put(str(number), large=number % 3 == 0) == ""
    place.writer.close()
    assert place.texts == [str(number) for number in range(100)]
    assert (place.writer.waiting, place.is_closed, place.losses.count) == (0, True, 0)


def test_large_ones_come_by_so_many_and_small_ones_with_those_before() -> None:
    place = Place(most=100, enough=2, gather_s=WAIT_S)
    place.writer.put("A")
    assert not place.begun.wait(0.1), "the first one waits for another"
    for text in "bBccCDd":
        place.writer.put(text, large=text.isupper())
    place.writer.close()
    assert place.batches == [list("AbBcc"), list("CDd")]


async def test_few_wait_no_longer_than_they_are_gathered() -> None:
    place = Place(enough=2, gather_s=0.01)
    place.writer.put("A")
    await until(lambda: place.texts == ["A"])
    place.writer.close()


def test_a_full_queue_refuses_large_ones_counts_them_and_reports_once(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    place.hold()
    refused = [place.writer.put(text) for text in "ABCDE"]
    assert refused == ["", "", "", *["3 wait already, since writing is too slow"] * 2]
    assert place.writer.put("small", large=False) == ""
    assert (place.losses.count, place.writer.waiting) == (2, 5)
    place.free.set()
    place.writer.close()
    assert place.texts == ["slow", "A", "B", "C", "small"]
    place.losses.end()
    place.losses.end()
    assert said(caplog) == [
        "texts are lost: there: 3 wait already, since writing is too slow; the run goes on (said once)",
        "texts are written again; 2 were lost so far: there",
    ]


def test_also_small_ones_are_not_kept_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_MOST_SMALL", 2)
    place = Place()
    place.hold()
    assert [bool(place.writer.put("x", large=False)) for _ in range(4)] == [False, False, True, True]
    place.free.set()
    place.writer.close()
    assert (place.losses.count, len(said(caplog))) == (0, 1), "it is reported, and no large one is lost"


class PanicException(BaseException):
    """An exception of a library in Rust, such as that of tokenizers."""


@pytest.mark.parametrize(
    "error", [ValueError("wrong"), OSError(28, "No space left on device"), SystemExit(1), PanicException("index")]
)
async def test_a_writer_that_raises_goes_on(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    place.error = error
    place.writer.put("A")
    await until(lambda: bool(caplog.records) and not place.writer.waiting)
    place.error = None
    place.writer.put("B")
    place.writer.close()
    assert place.texts == ["B"]
    (text,) = said(caplog)
    assert text.startswith(f"texts are lost: there: writing failed: {type(error).__name__}")
    assert caplog.records[0].exc_info is not None
    assert place.losses.count == 1


def test_what_comes_late_is_refused_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    place.writer.put("A")
    place.writer.close()
    place.writer.close()
    assert place.writer.put("B") == "the writer is closed"
    assert (place.texts, place.losses.count) == (["A"], 1)
    assert said(caplog) == ["texts are lost: there: the writer is closed; the run goes on (said once)"]


def test_a_writer_without_an_item_has_no_thread() -> None:
    before, place = set(threading.enumerate()), Place()
    assert set(threading.enumerate()) <= before
    place.writer.close()
    assert place.writer.put("A") == "the writer is closed"
    assert not place.is_closed


def test_close_waits_for_a_busy_writer_but_not_forever(caplog: pytest.LogCaptureFixture) -> None:
    place = Place(close_s=0.05)
    place.hold()
    place.writer.put("A")
    place.writer.close()
    assert said(caplog) == ["the last texts may be lost: some 2 were not written in time: there"]
    place.free.set()
    place.writer.close()
    assert (place.texts, len(said(caplog))) == (["slow", "A"], 1)


async def test_aclose_leaves_the_loop_free_and_can_be_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    place.hold()
    closings = [asyncio.ensure_future(place.writer.aclose()) for _ in range(2)]
    await asyncio.sleep(0)
    closings[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await closings[0]
    assert said(caplog) == ["the last texts may be lost: some 1 were not written in time: there"]
    place.free.set()
    await closings[1]
    await place.writer.aclose()
    assert (place.texts, place.is_closed) == (["slow"], True)


def test_a_machine_without_another_thread_loses_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    place = Place()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        assert place.writer.put("A") == "RuntimeError: can't start new thread"
    assert (place.writer.put("B"), place.losses.count, len(said(caplog))) == ("", 1, 1)
    place.writer.close()
    assert place.texts == ["B"]


def test_a_fork_takes_nothing_and_waits_for_nothing() -> None:
    place = Place()
    place.hold()
    with place.writer._changed:  # no fork ever gets this lock
        child = os.fork()
        if child == 0:
            place.writer.put("A")
            place.writer.put("b", large=False)
            place.writer.close()
            asyncio.run(place.writer.aclose())
            os._exit(place.losses.count)
    _, status = os.waitpid(child, 0)
    place.free.set()
    place.writer.close()
    assert (os.waitstatus_to_exitcode(status), place.texts) == (1, ["slow"])


EXITS = """
import sys, time
from verl_multiturn.records.write.background import BackgroundWriter, Losses

def write(texts):
    time.sleep({seconds})
    print(*texts, flush=True)

writer = BackgroundWriter("texts", write, Losses("texts", "there"), most=3, close_s={close_s},
                          last=lambda: print("last", flush=True))
writer.put("A")
writer.put("B")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "close_s", "shown", "lost"), [(0.1, WAIT_S, "A\nB\nlast\n", False), (WAIT_S, 0.1, "", True)]
)
def test_at_exit_it_is_closed(seconds: float, close_s: float, shown: str, lost: bool) -> None:
    program = EXITS.format(seconds=seconds, close_s=close_s)
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert (found.stdout, "the last texts may be lost: some 2" in found.stderr) == (shown, lost)


def test_losses_are_counted_from_several_threads() -> None:
    losses = Losses("texts", "there")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(background.logger, "disabled", True)
        threads = [threading.Thread(target=lambda: [losses.add("x") for _ in range(5_000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert losses.count == 20_000
