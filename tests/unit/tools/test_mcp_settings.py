"""The settings of an MCP server, in messages and before anything is sent; standard errors that nobody reads."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_multiturn import ConfigError
from verl_multiturn.tool_servers import mcp_server
from verl_multiturn.tool_servers.mcp_server import PatientErrors
from verl_multiturn.tools.services.mcp_settings import McpSettings, check_settings
from verl_multiturn.tools.services.mcp_transport import LastWords


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("https://me:secret@host:8000/mcp?key=secret", "'https://host:8000/mcp'"),
        ("https://${KEY}@host/a@b", "'https://host/a@b'"),
        ("https://host/mcp", "'https://host/mcp'"),
    ],
)
def test_messages_name_no_user_and_no_password(url: str, label: str) -> None:
    assert McpSettings(url=url).label == label


@pytest.mark.parametrize("value", ["secret\n", "se\ncret", " secret", "sécret", "secret\x7f"])
def test_what_no_header_can_hold_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MCP_KEY", value)
    with pytest.raises(ConfigError) as caught:
        check_settings(McpSettings(url="http://127.0.0.1:9/mcp", headers={"x-key": "${MCP_KEY}"}), "tools.yaml: mcp")
    said = str(caught.value)
    assert said.startswith("tools.yaml: mcp.headers.x-key: it holds something that no header can hold")
    assert "cret" not in said


def test_a_header_may_hold_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_KEY", "a-key.1/2+3==")
    check_settings(
        McpSettings(url="http://127.0.0.1:9/mcp", headers={"authorization": "Bearer ${MCP_KEY}"}), "tools.yaml: mcp"
    )


async def test_a_program_that_writes_for_ever_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def endless(descriptor: int, size: int) -> bytes:
        reads.append(descriptor)
        assert len(reads) < 1000
        return b"word\n" * 100

    words = LastWords()
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", endless)
        assert words.read().splitlines() == ["word"] * 10
    words.close()


@pytest.mark.parametrize("end", [os._exit, lambda _: os.kill(os.getpid(), signal.SIGKILL)], ids=["exit", "kill"])
def test_a_text_on_standard_error_is_with_the_client_when_the_server_crashes(end: Callable[[int], None]) -> None:
    theirs, errors = os.pipe()
    for _ in range(20):
        if (server := os.fork()) == 0:
            try:
                PatientErrors(errors)
                os.write(errors, b"words" * 10_000)
                end(3)
            finally:
                os._exit(4)
        os.waitpid(server, 0)
        os.set_blocking(theirs, False)
        assert os.read(theirs, 1 << 20) == b"words" * 10_000
    os.close(errors)
    os.close(theirs)


async def test_a_client_that_reads_late_has_all_but_a_text_that_had_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server, "_UNREAD_LOOK_S", 0.001)
    monkeypatch.setattr(mcp_server, "_LAST_S", 0.05)
    theirs, errors = os.pipe()
    kept = PatientErrors(errors)
    await asyncio.to_thread(os.write, errors, b"x" * 200_000)  # until the pipe was emptied
    os.set_blocking(theirs, False)
    with contextlib.suppress(BlockingIOError):
        while os.read(theirs, 1 << 20):
            pass
    while not kept._is_read:  # until a look has seen that a reader takes something
        os.write(errors, b"more")
        await asyncio.sleep(0.02)
        with contextlib.suppress(BlockingIOError):  # the pipe may just have been emptied
            os.read(theirs, 100)
    os.write(errors, b"later")
    assert os.read(theirs, 100) == b"later"
    kept.close()
    os.write(errors, b"last")
    assert os.read(theirs, 100) == b"last"
    for each in (errors, theirs, kept._file):
        os.close(each)


def _sockets() -> tuple[int, int]:
    theirs, errors = socket.socketpair()
    return theirs.detach(), errors.detach()


@pytest.mark.parametrize("make", [os.pipe, _sockets], ids=["pipe", "socket"])
@pytest.mark.parametrize("is_read", [True, False])
def test_a_client_that_reads_no_standard_error_keeps_no_writer_waiting(
    make: Callable[[], tuple[int, int]], is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_read:
        monkeypatch.setattr(mcp_server, "_LAST_S", 0.05)
    theirs, errors = make()
    taken: list[bytes] = []

    def take() -> None:
        while piece := os.read(theirs, 1 << 16):
            taken.append(piece)

    reader = threading.Thread(target=take, daemon=True)
    if is_read:
        reader.start()
    kept = PatientErrors(errors)
    rest = memoryview(b"x" * 1_000_000)
    writer = threading.Thread(target=lambda: [os.write(errors, rest[at : at + 1000]) for at in range(0, 10**6, 1000)])
    writer.daemon = True
    writer.start()
    writer.join(60)
    assert not writer.is_alive()
    kept.close()
    os.close(kept._file)
    os.close(errors)
    if is_read:
        reader.join(60)
        assert sum(map(len, taken)) == 1_000_000
    os.close(theirs)


def test_standard_error_that_is_no_pipe_is_left_as_it_is(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("wb") as file:
        PatientErrors(file.fileno()).close()
        os.write(file.fileno(), b"word")
    assert (tmp_path / "errors").read_bytes() == b"word"
