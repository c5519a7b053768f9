"""The settings of an MCP server, in messages and before anything is sent; standard errors that nobody reads."""

import os
import threading
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


@pytest.mark.parametrize("is_read", [True, False])
def test_a_client_that_reads_no_standard_error_keeps_no_writer_waiting(
    is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_read:
        monkeypatch.setattr(mcp_server, "_LAST_S", 0.05)
    theirs, errors = os.pipe()
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
